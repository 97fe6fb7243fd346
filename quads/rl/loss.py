"""The GRPO loss (paper Eq. 1) as a pure function of log-probs, with the options of the paper's section 4.1.

    ratio_t  = exp(logprob_t - old_t)                              old = rollout's or learner's log-prob
    loss     = - sum_t w_t * v_t * min(ratio_t A_t, clip(ratio_t, 1 - low, 1 + high) A_t) / denominator
               + kl_coef * sum_t w_t * k3(ref_t - logprob_t) / denominator

`w_t` is 1 / response length (average per sample, then over samples) or 1 (over tokens); `denominator` counts the whole
mini-batch over all micro-batches and ranks. `v_t` corrects for a rollout that is not the learner's policy: a function
of exp(old_t - rollout_t) for old = learner, such as min(., cap), else 1. It and other surrogates are in corrections.py,
and so is score centering, which adds a term over the rollout's most likely tokens.
The paper's "cumulative clip range of 90" is read as: the tokens of a response are masked from the point where the
running product of its ratios leaves [1/90, 90].
"""

import math
from dataclasses import dataclass, fields
from typing import Any, Literal

import torch
from torch import Tensor

from quads.config.sections import RLSettings
from quads.rl.corrections import (
    MAX_LOG_WEIGHT,
    Correction,
    Level,
    acr_ceiling,
    centering_coefficients,
    dual_clip,
    importance_weights,
    log_weights,
    tbpo_surrogate,
)
from quads.rl.packing import Microbatch


@dataclass(frozen=True)
class LossConfig:
    """Options of the loss, named as in [rl]."""

    clip_low: float = 0.2
    clip_high: float = 0.27
    cumulative_ratio_clip: float = 0.0  # 0 = off
    old_logprobs: Literal["rollout", "learner"] = "rollout"
    surrogate: Literal["ppo", "acr", "tbpo"] = "ppo"
    dual_clip: float = 0.0  # 0 = off
    correction: Correction = "none"
    correction_level: Level = "token"
    correction_cap: float = 2.0
    score_centering: int = 0  # tokens that it sums over; 0 = off
    kl_coef: float = 0.0

    @classmethod
    def of(cls, rl: RLSettings) -> "LossConfig":
        """What [rl] asks for: without a word for the correction, TIS where there is something to correct."""
        named: dict[str, Any] = {f.name: getattr(rl, f.name) for f in fields(cls)}
        named["correction"] = rl.correction or ("tis" if rl.old_logprobs == "learner" else "none")
        return cls(**named)


def grpo_loss(
    logprobs_N: Tensor,
    batch: Microbatch,
    config: LossConfig,
    denominator: float,
    candidate_logprobs_Nk: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss of one micro-batch and sums for the metrics of the step.

    Args:
        logprobs_N: fp32, the learner's log-probs of `batch.targets_N`, with gradient.
        batch: with `old_logprobs_N` if config.old_logprobs is "learner", `ref_logprobs_N` if config.kl_coef > 0,
            `ais_share` if config.correction is "ais", `top_logprobs_Nk` if config.score_centering > 0.
        denominator: of the whole mini-batch, from `pack` (summed over data-parallel ranks).
        candidate_logprobs_Nk: fp32, the learner's log-probs of `batch.top_ids_Nk`, with gradient, for score centering.

    Returns:
        scalar loss (already divided by the denominator: micro-batch losses add up), and detached 0-dim sums: `tokens`
        (trained tokens), `kl`, and how many of these tokens each option touched: `clipped`, `cumulative_masked`,
        `weight_capped` and `weight_masked` by the correction, `tbpo_dropped`, `dual_clipped`.
    """
    old_N = batch.rollout_logprobs_N if config.old_logprobs == "rollout" else batch.old_logprobs_N
    assert old_N is not None, "old_logprobs='learner' needs the recomputed log-probs"
    trained_N = batch.weights_N > 0
    log_ratio_N = (logprobs_N - old_N).clamp(-MAX_LOG_WEIGHT, MAX_LOG_WEIGHT)
    # Where a token is not trained on its log-prob may be NaN (a non-finite engine value): keep it out of the sum.
    log_ratio_N = torch.where(trained_N, log_ratio_N, 0.0)

    weights_N = batch.weights_N
    masked_N = torch.zeros_like(trained_N)
    if config.cumulative_ratio_clip > 0:
        masked_N = cumulative_ratio_mask(log_ratio_N.detach(), batch.sequence_N, config.cumulative_ratio_clip)
        weights_N = weights_N.masked_fill(masked_N, 0.0)
    touched = {"cumulative_masked": masked_N}
    counted_N, importance_N = weights_N, torch.ones_like(weights_N)
    if config.correction != "none":
        level = config.correction_level
        log_weights_N = log_weights(old_N - batch.rollout_logprobs_N, batch.sequence_N, trained_N, level)
        importance_N = importance_weights(log_weights_N, config.correction, config.correction_cap, batch.ais_share)
        weights_N = weights_N * importance_N
        touched["weight_masked"] = importance_N == 0.0
        touched["weight_capped"] = (log_weights_N.exp() > config.correction_cap) & (importance_N > 0.0)
    surrogate_N, touched_by_surrogate = surrogate(log_ratio_N, importance_N, trained_N, batch, config)
    loss = -(weights_N * surrogate_N).sum() / denominator
    if config.score_centering > 0:
        assert candidate_logprobs_Nk is not None, "score centering needs the log-probs of the candidates"
        centered_N = centered_score(candidate_logprobs_Nk, trained_N, batch, config)
        loss = loss + (counted_N * batch.advantages_N * centered_N).sum() / denominator

    kl = logprobs_N.new_zeros(())
    if config.kl_coef > 0:
        assert batch.ref_logprobs_N is not None, "kl_coef > 0 needs the reference policy's log-probs"
        kl_N = torch.where(trained_N, k3(batch.ref_logprobs_N - logprobs_N), 0.0)
        loss = loss + config.kl_coef * (batch.weights_N * kl_N).sum() / denominator
        kl = kl_N.detach().sum()
    counts = {name: (where_N & trained_N).sum() for name, where_N in (touched | touched_by_surrogate).items()}
    return loss, counts | {"tokens": trained_N.sum(), "kl": kl}


def centered_score(candidate_logprobs_Nk: Tensor, trained_N: Tensor, batch: Microbatch, config: LossConfig) -> Tensor:
    """What score centering subtracts from a token's score, fp32 [N]: see `centering_coefficients`. They are of the
    policy as it is now, without gradient; in the first update of a step that is the one that the correction is of."""
    assert batch.top_logprobs_Nk is not None, "score centering needs the engine's top log-probs"

    def weight(ratio: Tensor) -> Tensor:
        return importance_weights(ratio.log(), config.correction, config.correction_cap, batch.ais_share)

    p_Nk, q_Nk = candidate_logprobs_Nk.detach().exp(), batch.top_logprobs_Nk.exp()
    coefficients_Nk = torch.where(trained_N[:, None], centering_coefficients(p_Nk, q_Nk, weight), 0.0)
    return torch.where(trained_N, (coefficients_Nk * candidate_logprobs_Nk).sum(-1), 0.0)


def surrogate(
    log_ratio_N: Tensor, importance_N: Tensor, trained_N: Tensor, batch: Microbatch, config: LossConfig
) -> tuple[Tensor, dict[str, Tensor]]:
    """The surrogate of each token before any weight, fp32 [N], and where its bounds were active, bool [N] by name.

    log_ratio_N: with gradient, 0 where not trained. importance_N: of the correction; ACR's upper clip depends on it.
    """
    advantages_N = batch.advantages_N
    if config.surrogate == "tbpo":
        band = config.clip_low, config.clip_high
        surrogate_N, dropped_N = tbpo_surrogate(log_ratio_N, advantages_N, batch.sequence_N, trained_N, *band)
        return surrogate_N, {"tbpo_dropped": dropped_N}
    ratio_N = log_ratio_N.exp()
    if config.surrogate == "acr":
        ceiling_N = acr_ceiling(importance_N, config.clip_high)
        clipped_ratio_N = ratio_N.clamp(min=1.0 - config.clip_low).clamp(max=ceiling_N)
    else:
        clipped_ratio_N = ratio_N.clamp(1.0 - config.clip_low, 1.0 + config.clip_high)
    unclipped_N = ratio_N * advantages_N
    surrogate_N = torch.minimum(unclipped_N, clipped_ratio_N * advantages_N)
    bounded_N = dual_clip(surrogate_N, advantages_N, config.dual_clip)
    return bounded_N, {"clipped": surrogate_N < unclipped_N, "dual_clipped": bounded_N > surrogate_N}


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
    bounded = log_ratio.clamp(-MAX_LOG_WEIGHT, MAX_LOG_WEIGHT)
    return torch.expm1(bounded) - bounded
