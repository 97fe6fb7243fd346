"""Noise on the norms of the rollout's policy, as exploration (QeRL, arXiv 2510.11696).

    sigma(stage) = s0 * (s1 / s0) ** ((stage - 1) / (K - 2))      stage = 1 .. K - 1; stage 0 is silent
    stage        = version * K // steps                           K stages over the run

Each sync sends the norms before attention and experts with fresh noise added, so it never accumulates: the learner's
weights have none. It is a pure function of the run's seed, the policy version and the name, so a resumed run and every
process draw the same.
"""

import torch
from torch import Tensor

from quads.distributed import derive_seed
from quads.quant.recipes import QuantSpec


def norm_noise_sigma(spec: QuantSpec, version: int, steps: int) -> float:
    """The standard deviation at a policy version of a run of so many steps; 0 where the recipe has no noise."""
    stage = min(version * spec.norm_noise_stages // max(steps, 1), spec.norm_noise_stages - 1)
    if spec.norm_noise == 0.0 or stage == 0:
        return 0.0
    share = (stage - 1) / max(spec.norm_noise_stages - 2, 1)
    return spec.norm_noise * (spec.norm_noise_end / spec.norm_noise) ** share


def with_noise(name: str, tensor: Tensor, sigma: float, seed: int, version: int) -> Tensor:
    """The tensor that is shipped under this name: norms of layers get noise, in fp32, and keep their dtype."""
    if sigma == 0.0 or not name.endswith("layernorm.weight"):
        return tensor
    generator = torch.Generator().manual_seed(derive_seed(seed, f"norm noise/{name}", version))
    noise = sigma * torch.randn(tensor.shape, generator=generator)
    return (tensor.float() + noise.to(tensor.device)).to(tensor.dtype)
