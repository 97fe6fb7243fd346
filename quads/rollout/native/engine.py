"""The native engine: the learner's own model code with a KV cache, continuous batching and rollout-precision layers.

One call of `generate` is generation.py; decoding, with CUDA graphs on a GPU, is decode.py.

It runs anywhere and is the reference for numerics. On a CPU, fp32 rollouts are independent of the batch: activations
are float64 (weights keep the values of their storage dtype), so that the order in which a matmul adds up shows at
1e-16, far below the fp32 rounding where quantizers look and the 1e-5 that is promised for log-probs. With "batch" or
"block" selection of residual channels the batch enters by definition. In bf16 the engine computes in bf16, as the
learner does.

Left out: paging of the KV cache and chunked prefill of single prompts.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from quads.config.sections import RolloutSettings
from quads.errors import UserError, listed
from quads.model.config import ModelConfig
from quads.model.model import MoEDecoder
from quads.quant.backend import choose_kernel
from quads.quant.convert import convert_rollout
from quads.quant.matmul import SiteSpec, product_dtype
from quads.quant.recipes import QuantSpec
from quads.quant.rollout import load_weight, named_weights, weight_storage
from quads.quant.sites import SITES
from quads.rollout.engine import OnGroup, check_request, ignore
from quads.rollout.native.decode import Decoder, Size
from quads.rollout.native.generation import Run
from quads.rollout.native.kv_cache import allocate, describe, is_kept
from quads.rollout.native.scheduler import Groups
from quads.rollout.sync import checksum
from quads.types import Completion, Sampling


class NativeEngine:
    """An engine as `engine.Engine` describes it."""

    def __init__(
        self,
        model_config: ModelConfig,
        spec: QuantSpec,
        rollout: RolloutSettings,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        report: Callable[[str], Any] = print,
    ) -> None:
        """
        Args:
            spec: `spec.rollout` is the precision of the targeted layers.
            rollout: max_batch slots of max_prompt_tokens + max_new_tokens tokens each; kernel; cuda_graphs.
            dtype: bf16 or fp32, the storage of everything that is not quantized.
            report: takes the lines that say how much memory the KV cache needs, before it is allocated, and how
                decoding runs.

        Raises:
            UserError: too little memory, or a kernel that cannot be had.
        """
        self.device = torch.device(device)
        self.policy_version = -1
        self._complete = False  # a whole set of weights has arrived
        self._config = model_config
        self._rollout = rollout
        self._max_len = rollout.max_prompt_tokens + rollout.max_new_tokens
        self.dtype = torch.float64 if self.device.type == "cpu" and dtype == torch.float32 else dtype
        self.model = build_rollout_model(model_config, spec, rollout.kernel, dtype, self.dtype, self.device)
        report(describe(model_config, rollout.max_batch, self._max_len, self.dtype))
        self._graphs, why = choose_graphs(rollout.cuda_graphs, self.device, self.dtype, spec, rollout.kernel)
        report(f"decoding: {why}")
        self._warm: set[Size] = set()
        self._addresses = addresses(self.model)
        self._decoder: Decoder | None = None
        self._awake = False
        self.wake()

    @property
    def decoder(self) -> Decoder:
        """The KV cache and the step that decodes it. RuntimeError while the engine sleeps."""
        if self._decoder is None or not self._awake:
            raise RuntimeError("the engine sleeps; call wake() first")
        return self._decoder

    @torch.no_grad()
    def generate(
        self,
        prompts: list[list[int]],
        n: int,
        sampling: Sampling,
        seeds: list[int],
        routed_experts: bool = False,
        on_group: OnGroup = ignore,
    ) -> list[list[Completion]]:
        """`n` responses to each prompt; see `engine.Engine`."""
        self._check(prompts, n, sampling, seeds)
        if not prompts:
            return []
        run = Run(self.decoder, prompts, n, sampling, seeds, routed_experts)
        groups, completions = Groups(len(prompts), n), {}
        while len(completions) < len(prompts):
            for prompt in groups.completed_by(run.advance()):
                completions[prompt] = run.log.take(prompt, n, sampling, self.policy_version)
                on_group(prompt, completions[prompt])
        return [completions[prompt] for prompt in range(len(prompts))]

    def _check(self, prompts: list[list[int]], n: int, sampling: Sampling, seeds: list[int]) -> None:
        if not self._complete:
            raise RuntimeError("generate() before a complete update_weights()")
        check_request(prompts, n, sampling, seeds, self._max_len, self._config.vocab_size)

    @torch.no_grad()
    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Overwrite all weights in place; see `engine.Engine`."""
        self._complete = False
        expected = [
            name for name, _ in weight_storage(self.model)
        ]  # not the values: a kernel would have to unpack them
        load_all(expected, weights, lambda name, tensor: load_weight(self.model, name, tensor))
        if addresses(self.model) != self._addresses:
            raise RuntimeError("a weight has moved: captured CUDA graphs would read the old one; report this")
        if self._decoder is not None:
            # No prefix outlives a call of generate; this clears what a non-finite policy left.
            self._decoder.cache.k.zero_()
            self._decoder.cache.v.zero_()
        self._complete = True
        self.policy_version = version

    def checksums(self) -> dict[str, int]:
        """See `engine.Engine`."""
        return {name: checksum(tensor) for name, tensor in named_weights(self.model)}

    def sleep(self) -> None:
        """Free the KV cache and the graphs that point into it, unless it is small and has been captured: capturing
        again would take as long as drawing some dozens of tokens. Weights stay, at their addresses."""
        self._awake = False
        decoder = self._decoder
        if decoder is not None and not (decoder.graphs and is_kept(decoder.cache, self.device)):
            self._decoder = None

    def wake(self) -> None:
        """Allocate the KV cache again, if it was freed. UserError, before allocating, if it does not fit."""
        self._awake = True
        if self._decoder is None:
            cache = allocate(self._config, self._rollout.max_batch, self._max_len, self.dtype, self.device)
            self._decoder = Decoder(self.model, cache, self._graphs, self._warm)

    def close(self) -> None:
        """Free the KV cache; generating is refused from now on."""
        self.sleep()
        self._decoder = None
        self._complete = False


def load_all(
    expected: Iterable[str], weights: Iterable[tuple[str, Tensor]], load: Callable[[str, Tensor], None]
) -> None:
    """`load(name, tensor)` for every weight, each expected name exactly once.

    `load` raises KeyError for a name it does not know and ValueError for a tensor that does not fit.

    Raises:
        UserError: a tensor is missing, unknown, misshaped or there twice.
    """
    missing = dict.fromkeys(expected)
    done = set()
    for name, tensor in weights:
        if name in done:
            raise UserError(f"weight sync: {name} came twice; ship every tensor once")
        if name not in missing:
            raise UserError(
                f"weight sync: the rollout has no weight {name}; learner and rollout are of different models"
            )
        try:
            load(name, tensor)
        except (KeyError, ValueError, RuntimeError) as error:
            raise UserError(f"weight sync: {name} does not fit: {error}; are both sides of the same config?") from error
        done.add(name)
        del missing[name]
    if missing:
        raise UserError(
            f"weight sync: {len(missing)} tensors did not come: {listed(list(missing))}; ship the whole model"
        )


def build_rollout_model(
    config: ModelConfig, spec: QuantSpec, kernel: str, storage: torch.dtype, compute: torch.dtype, device: torch.device
) -> MoEDecoder:
    """The decoder with rollout layers, without values. Memory never holds more than one layer unquantized.

    Args:
        storage: dtype of what is not quantized. compute: dtype of the activations.
    """
    with torch.device("meta"):
        model = MoEDecoder(config, compute)
    model.to(storage).requires_grad_(False).eval()
    chosen = choose_kernel(kernel, device, spec.rollout, spec.format, spec.residual_scale)
    plain = spec.unquantized_layers(model)
    for number, layer in enumerate(model.model.layers):
        layer.to_empty(device=device)
        if number not in plain:
            convert_rollout(layer, replace(spec, bf16_layers="none"), chosen)
    for module in (model.model.embed_tokens, model.model.norm, model.lm_head):
        if module is not None:
            module.to_empty(device=device)
    return model


def addresses(model: MoEDecoder) -> list[int]:
    """Where the weights lie, in model order."""
    return [part.data_ptr() for _, parts in weight_storage(model) for part in parts]


def choose_graphs(
    asked: bool, device: torch.device, dtype: torch.dtype, spec: QuantSpec, kernel: str
) -> tuple[bool, str]:
    """(capture decoding in CUDA graphs, a few words why or why not)."""
    if device.type != "cuda":
        return False, "eager (no CUDA device)"
    if not asked:
        return False, "eager (rollout.cuda_graphs = false)"
    if dtype != torch.bfloat16:
        return False, "eager (CUDA graphs need model.dtype = bfloat16: torch groups experts in fp32 on the host)"
    if (
        spec.rollout != "bf16"
        and choose_kernel(kernel, device, spec.rollout, spec.format, spec.residual_scale) == "reference"
    ):
        sites = {SiteSpec.of(spec, site) for site in SITES}
        if any(product_dtype(site, dtype, device) != torch.bfloat16 for site in sites):
            why = f"the reference kernel of {spec.rollout} multiplies in fp32, where torch groups experts on the host"
            return False, f"eager ({why})"
    return True, "CUDA graphs, captured at the second step of each size"
