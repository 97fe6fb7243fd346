"""Drawing tokens so that a response depends on its seed and its distribution alone, not on the batch around it.

Token number t of a request with seed s uses one uniform number u(s, t), a hash of the two (counter based: no state to
carry, no order to keep). The token is the inverse of the cumulative distribution at u, in float64:

    p = softmax(logits / temperature)        token = first v with p_0 + ... + p_v > u * (sum of p)

A change of the logits in the last bits moves the boundaries between tokens by as little, so the same seed gives the
same token unless u falls into that sliver. Nothing is truncated (no top-k, top-p or min-p): the log-prob is that of
the distribution drawn from. Temperature 0 takes the most likely token, whose probability then is 1.

The hash is SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014): the
finalizer applied to seed-dependent starting points that advance by the golden ratio of 2**64 for each token.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

GOLDEN = 0x9E3779B97F4A7C15
FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


def _signed(value: int) -> int:
    """The int64 with the low 64 bits of `value`; torch has no full uint64 arithmetic, and products wrap the same."""
    return (value + 2**63) % 2**64 - 2**63


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift: int64 >> copies the sign bit."""
    return (x >> bits) & (2 ** (64 - bits) - 1)


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift(x, 30)) * _signed(FACTORS[0])
    x = (x ^ _shift(x, 27)) * _signed(FACTORS[1])
    return x ^ _shift(x, 31)


def seed_tensor(seeds: list[int], device: torch.device | str = "cpu") -> Tensor:
    """Any integers as int64; those that agree in the low 64 bits are the same seed."""
    return torch.tensor([_signed(seed) for seed in seeds], dtype=torch.int64, device=device)


def uniforms(seeds_B: Tensor, counters_B: Tensor) -> Tensor:
    """u(seed, counter), float64 in [0, 1), multiples of 2**-53. Both int64."""
    starts_B = _mix(seeds_B + _signed(GOLDEN))
    bits_B = _mix(starts_B + (counters_B + 1) * _signed(GOLDEN))
    return _shift(bits_B, 11).to(torch.float64) * 2.0**-53


def host_uniforms(seeds: list[int], counters: list[int]) -> Tensor:
    """`uniforms` for numbers that lie on the host, bit for bit: numpy needs a quarter of the time for a few hundred."""

    def mix(x_B: NDArray[np.uint64]) -> NDArray[np.uint64]:
        x_B = (x_B ^ (x_B >> np.uint64(30))) * np.uint64(FACTORS[0])
        x_B = (x_B ^ (x_B >> np.uint64(27))) * np.uint64(FACTORS[1])
        return x_B ^ (x_B >> np.uint64(31))

    golden = np.uint64(GOLDEN)
    starts_B = mix(np.array([seed % 2**64 for seed in seeds], dtype=np.uint64) + golden)
    bits_B = mix(starts_B + (np.array(counters, dtype=np.uint64) + np.uint64(1)) * golden)
    return torch.from_numpy((bits_B >> np.uint64(11)).astype(np.float64) * 2.0**-53)


def _distribution(logits_BV: Tensor, temperature: float | Tensor) -> Tensor:
    return (logits_BV.to(torch.float64) / temperature).log_softmax(-1)


def most_likely(logits_BV: Tensor, temperature: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """(ids int32 [B, k], log-probs fp32 [B, k]) of the k most likely tokens, best first, of the distribution that
    `draw` draws from. temperature: float64 [] above 0."""
    top = _distribution(logits_BV, temperature).topk(k)
    return top.indices.to(torch.int32), top.values.to(torch.float32)


def draw(logits_BV: Tensor, temperature: float | Tensor, uniforms_B: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (tokens int64 [B], their log-probs float64 [B]). A row with NaN gives its last token and log-prob NaN.

    temperature: a number, or a float64 tensor [] above 0 (a CUDA graph reads it when it is replayed).
    """
    if not isinstance(temperature, Tensor) and temperature == 0.0:
        tokens_B = logits_BV.argmax(-1)
        chosen_B = logits_BV.gather(-1, tokens_B[:, None]).squeeze(-1)
        return tokens_B, torch.where(chosen_B.isnan(), torch.nan, 0.0).to(torch.float64)
    logp_BV = _distribution(logits_BV, temperature)
    cumulative_BV = logp_BV.exp().cumsum(-1)
    target_B1 = uniforms_B[:, None] * cumulative_BV[:, -1:]
    tokens_B1 = torch.searchsorted(cumulative_BV, target_B1, right=True).clamp_(max=logits_BV.shape[-1] - 1)
    return tokens_B1.squeeze(-1), logp_BV.gather(-1, tokens_B1).squeeze(-1)
