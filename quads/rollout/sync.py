"""From the learner's weights to the engine's: what the learner quantized is shipped as it is and written in place.

    learner: bf16(master) -> packed bytes, once a step      (quant/masters.py; they also serve its own forward)
    sync:    the same bytes for quantized matrices, the compute dtype for everything else
             nothing at all if a weight is not finite
    engine:  copies into the storage it has, drops its caches, and takes the new version last

With `verify`, a checksum of every tensor on both sides is compared. It is exact: over the raw bytes, as 64-bit words
w_i, sum of w_i * (2 i + 1) modulo 2**64. Odd factors are invertible, so no change of a single word goes unseen, and
they differ from word to word, so neither does a swap of two different words that are not 2**63 apart.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from quads.errors import UserError, listed
from quads.model.finite_weights import require_finite_weights
from quads.quant.masters import quantized_weights
from quads.quant.recipes import QuantSpec
from quads.quant.tensor import QuantizedTensor
from quads.rollout.engine import Engine
from quads.rollout.noise import with_noise

WORDS_AT_ONCE = 2**24  # bounds the memory of a checksum to a few times 128 MiB


@torch.no_grad()
def checksum(tensor: Tensor) -> int:
    """64-bit checksum of the raw bytes of a tensor, or of all parts of a quantized one."""
    if isinstance(tensor, QuantizedTensor):
        return sum((2 * i + 1) * checksum(part) for i, part in enumerate(tensor.parts.values())) % 2**64
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    padding = -flat.numel() % 8
    words = (torch.cat([flat, flat.new_zeros(padding)]) if padding else flat).view(torch.int64)
    total = 0
    for start in range(0, words.numel(), WORDS_AT_ONCE):
        part = words[start : start + WORDS_AT_ONCE]
        factors = 2 * torch.arange(start, start + part.numel(), device=part.device) + 1
        total += int((part * factors).sum())  # int64 products and sums wrap: arithmetic modulo 2**64
    return total % 2**64


def sync(
    learner_model: nn.Module,
    engine: Engine,
    spec: QuantSpec,
    version: int,
    verify: bool = False,
    sigma: float = 0.0,
    seed: int = 0,
) -> None:
    """Ship all weights of the learner to the engine, as policy `version`. Collective: every process fills its own
    engine, and one whole tensor at a time is gathered. sigma: of the noise on norms (noise.py), drawn from the seed.

    Raises:
        UserError: a weight is not finite, and the engine keeps what it has; a tensor is missing, unknown, misshaped or
        there twice; with `verify`, one differs afterwards (named).
    """
    require_finite_weights(learner_model, f"weight sync of version {version}")
    shipped: dict[str, int] = {}

    def watched() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in quantized_weights(learner_model, spec):
            tensor = with_noise(name, tensor, sigma, seed, version)
            if verify:
                shipped[name] = checksum(tensor)
            yield name, tensor

    engine.update_weights(watched(), version)
    if verify:
        compare_checksums(shipped, engine.checksums())


def compare_checksums(shipped: dict[str, int], loaded: dict[str, int]) -> None:
    """Raises UserError that names every tensor whose bytes differ, or that only one side has."""
    names = sorted(shipped.keys() | loaded.keys())
    differ = [name for name in names if shipped.get(name) != loaded.get(name)]
    if differ:
        raise UserError(
            f"after the weight sync {len(differ)} of {len(names)} tensors differ between learner and rollout: "
            f"{listed(differ)}; the rollout does not run the learner's policy, stop and report this"
        )
