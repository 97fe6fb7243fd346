"""The GRPO loss (paper Eq. 1) as a pure function of log-probs, with the options of the paper's section 4.1.

    ratio_t  = exp(logprob_t - old_t)                              old = rollout's or learner's log-prob
    loss     = - sum_t w_t * tis_t * min(ratio_t A_t, clip(ratio_t, 1 - low, 1 + high) A_t) / denominator
               + kl_coef * sum_t w_t * k3(ref_t - logprob_t) / denominator

`w_t` is 1 / response length (average per sample, then over samples) or 1 (over tokens); `denominator` counts the whole
mini-batch over all micro-batches and ranks. `tis_t = min(exp(old_t - rollout_t), tis_clip)` is the truncated importance
weight for old = learner. The paper's "cumulative clip range of 90" is read as: the tokens of a response are masked from
the point where the running product of its ratios leaves [1/90, 90].
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from quads.rl.packing import Microbatch

MAX_LOG_RATIO = 20.0  # exp(20) = 4.9e8: far beyond any clip range, far below overflow


@dataclass(frozen=True)
class LossConfig:
    """Options of the loss, from [rl]."""

    clip_low: float = 0.2
    clip_high: float = 0.27
    cumulative_ratio_clip: float = 0.0  # 0 = off
    old_logprobs: Literal["rollout", "learner"] = "rollout"
    tis_clip: float = 2.0
    kl_coef: float = 0.0


def grpo_loss(
    logprobs_N: Tensor, batch: Microbatch, config: LossConfig, denominator: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss of one micro-batch and sums for the metrics of the step.

    Args:
        logprobs_N: fp32, the learner's log-probs of `batch.targets_N`, with gradient.
        batch: with `old_logprobs_N` if config.old_logprobs is "learner", `ref_logprobs_N` if config.kl_coef > 0.
        denominator: of the whole mini-batch, from `pack` (summed over data-parallel ranks).

    Returns:
        scalar loss (already divided by the denominator: micro-batch losses add up), and detached 0-dim sums
        `clipped`, `cumulative_masked`, `tokens` (trained tokens) and `kl`.
    """
    old_N = batch.rollout_logprobs_N if config.old_logprobs == "rollout" else batch.old_logprobs_N
    assert old_N is not None, "old_logprobs='learner' needs the recomputed log-probs"
    trained_N = batch.weights_N > 0
    log_ratio_N = (logprobs_N - old_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    # Where a token is not trained on its log-prob may be NaN (a non-finite engine value): keep it out of the sum.
    log_ratio_N = torch.where(trained_N, log_ratio_N, 0.0)
    ratio_N = log_ratio_N.exp()
    clipped_ratio_N = ratio_N.clamp(1.0 - config.clip_low, 1.0 + config.clip_high)
    unclipped_N = ratio_N * batch.advantages_N
    surrogate_N = torch.minimum(unclipped_N, clipped_ratio_N * batch.advantages_N)
    is_clipped_N = (surrogate_N < unclipped_N) & trained_N

    weights_N = batch.weights_N
    masked_N = torch.zeros_like(trained_N)
    if config.cumulative_ratio_clip > 0:
        masked_N = cumulative_ratio_mask(log_ratio_N.detach(), batch.sequence_N, config.cumulative_ratio_clip)
        weights_N = weights_N.masked_fill(masked_N, 0.0)
    if config.old_logprobs == "learner":
        mismatch_N = (old_N - batch.rollout_logprobs_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        weights_N = weights_N * mismatch_N.exp().clamp(max=config.tis_clip)
    loss = -(weights_N * surrogate_N).sum() / denominator

    kl = logprobs_N.new_zeros(())
    if config.kl_coef > 0:
        assert batch.ref_logprobs_N is not None, "kl_coef > 0 needs the reference policy's log-probs"
        kl_N = torch.where(trained_N, k3(batch.ref_logprobs_N - logprobs_N), 0.0)
        loss = loss + config.kl_coef * (batch.weights_N * kl_N).sum() / denominator
        kl = kl_N.detach().sum()
    sums = {
        "clipped": is_clipped_N.sum(),
        "cumulative_masked": (masked_N & trained_N).sum(),
        "tokens": trained_N.sum(),
        "kl": kl,
    }
    return loss, sums


def cumulative_ratio_mask(log_ratio_N: Tensor, sequence_N: Tensor, limit: float) -> Tensor:
    """True from the first token at which the running product of a response's ratios leaves [1/limit, limit].

    Args:
        log_ratio_N: log of each token's ratio, sequences one after another.
        sequence_N: int64, non-decreasing sequence index.
        limit: > 1.
    """
    total_N = log_ratio_N.double().cumsum(0)
    starts_N = torch.ones_like(sequence_N, dtype=torch.bool)
    starts_N[1:] = sequence_N[1:] != sequence_N[:-1]
    start_index_N = torch.where(starts_N, torch.arange(len(sequence_N), device=sequence_N.device), 0).cummax(0).values
    before_N = (total_N - log_ratio_N.double())[start_index_N]
    outside_N = (total_N - before_N).abs() > math.log(limit)
    # A token is masked once any earlier token of its own response was outside: count outsiders since its start.
    count_N = outside_N.long().cumsum(0)
    count_before_N = (count_N - outside_N.long())[start_index_N]
    return count_N > count_before_N


def k3(log_ratio: Tensor) -> Tensor:
    """Unbiased, non-negative estimate of KL(p || q) from samples of p, given log(q/p): exp(x) - 1 - x (Schulman)."""
    bounded = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return torch.expm1(bounded) - bounded
