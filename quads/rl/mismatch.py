"""The rollout-learner log-prob gap of a step: the number that quads exists to keep small (paper Eqs. 2 and 3)."""

import torch
from torch import Tensor

from quads.rl.corrections import MAX_LOG_WEIGHT, effective_share, second_moment, weight_moments
from quads.rl.loss import k3


def mismatch_metrics(learner_logprobs_N: Tensor, rollout_logprobs_N: Tensor, finite_N: Tensor) -> dict[str, float]:
    """Gap statistics over response tokens, learner and rollout evaluated at the same weights version.

    Args:
        learner_logprobs_N, rollout_logprobs_N: fp32, log-probs of the sampled tokens.
        finite_N: bool, the engine's value was finite.

    Returns:
        metrics: logprob_abs_max / mean / p99 (nats), kl_k3 = estimate of KL(rollout || learner), ess = effective
        share of the tokens under their importance weights exp(gap), m2 = mean square of the gap, nonfinite_tokens.
        Non-finite tokens are counted and left out; without any finite token the rest is NaN.
    """
    usable_N = finite_N & torch.isfinite(learner_logprobs_N)
    nonfinite = int((~usable_N).sum())
    gap = (learner_logprobs_N - rollout_logprobs_N)[usable_N].double()
    every = torch.ones_like(gap, dtype=torch.bool)
    if gap.numel() == 0:
        nan = float("nan")
        return {
            "mismatch/logprob_abs_max": nan,
            "mismatch/logprob_abs_mean": nan,
            "mismatch/logprob_abs_p99": nan,
            "mismatch/kl_k3": nan,
            "mismatch/ess": nan,
            "mismatch/m2": nan,
            "mismatch/nonfinite_tokens": nonfinite,
        }
    return {
        "mismatch/logprob_abs_max": float(gap.abs().max()),
        "mismatch/logprob_abs_mean": float(gap.abs().mean()),
        "mismatch/logprob_abs_p99": percentile(gap.abs(), 0.99),
        "mismatch/kl_k3": float(k3(gap).mean()),
        "mismatch/ess": float(effective_share(weight_moments(gap.clamp(-MAX_LOG_WEIGHT, MAX_LOG_WEIGHT), every))),
        "mismatch/m2": float(second_moment(gap, every)),
        "mismatch/nonfinite_tokens": nonfinite,
    }


def routing_agreement(recorded: dict[int, Tensor], routed_experts_TLA: Tensor) -> tuple[Tensor, Tensor]:
    """How many of the rollout's expert choices the learner's routers repeat, and how many there are (0-dim int64).

    Args:
        recorded: layer -> the routers' own choice, int64 [T, A] (`PackedContext.recorded`).
        routed_experts_TLA: the rollout's; rows with negative ids were not recorded and do not count.
    """
    same = routed_experts_TLA.new_zeros((), dtype=torch.int64)
    total = torch.zeros_like(same)
    for layer, own_TA in recorded.items():
        theirs_TA = routed_experts_TLA[:, layer]
        repeated_TA = (theirs_TA[:, :, None] == own_TA[:, None, :]).any(-1)
        same += repeated_TA.sum()  # own ids are never negative
        total += (theirs_TA >= 0).sum()
    return same, total


def percentile(values: Tensor, fraction: float) -> float:
    """The smallest value with at least `fraction` of all values at or below it (torch.quantile stops at 2**24)."""
    rank = min(max(int(-(-fraction * values.numel() // 1)), 1), values.numel())
    return float(values.kthvalue(rank).values)
