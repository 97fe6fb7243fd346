"""What the field does about a rollout that is not quite the learner's policy: weights and surrogates of the loss.

    b = the rollout's log-prob of a token, o = the learner's before the update, p = the learner's now
    w = exp(o - b)          importance weight: what the rollout's policy would need to be the learner's
    R = exp(p - o)          ratio of the update

    TIS    min(w, C)                        truncated
    MIS    w where 1/C <= w <= C, else 0    masked
    AIS    (1 - l) + l * min(w, C)          l = clip(1 - ESS/N, 0, 1): corrects as it must (2605.13907, whose own
                                            formula for l could not be read: this one is ours)
    ACR    r = min(w, C); r min(R A, clip(R, 1 - low, (1 + high) / min(r, 1)) A)    (QuRL, 2602.13953)
    TBPO   the ratio is the geometric mean over a response, as in GSPO; A < 0 is clipped on both sides; a response
           whose mean leaves the band [1 - low, 1 + high] is dropped (QaRL, 2604.07853)
    dual clip          where A < 0, never below c A (1912.09729)
    score centering    subtracts how far the expected score under the rollout's policy is off zero, over the rollout's k
                       most probable tokens (2609.20807): `centering_coefficients`

A whole response has the product of its tokens' weights ("sequence"), or their geometric mean ("geometric").

Pure functions. Shape suffixes: N response tokens, S sequences, k candidates of a token. Log-probs are fp32.
"""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

Correction = Literal["none", "tis", "mis", "ais"]
Level = Literal["token", "sequence", "geometric"]

MAX_LOG_WEIGHT = 20.0  # exp(20) = 4.9e8: far beyond any cap, far below overflow


def response_sums(value_N: Tensor, sequence_N: Tensor) -> Tensor:
    """The sum over each token's own response, at every token of it: fp32 [N], summed in fp64."""
    num_sequences = int(sequence_N[-1]) + 1 if len(sequence_N) else 0
    sums_S = torch.zeros(num_sequences, dtype=torch.float64, device=value_N.device)
    return sums_S.index_add(0, sequence_N, value_N.double())[sequence_N].to(value_N.dtype)


def log_weights(mismatch_N: Tensor, sequence_N: Tensor, trained_N: Tensor, level: Level) -> Tensor:
    """log w of each token at this level, fp32 [N], within +-20.

    mismatch_N: o - b. Tokens with trained_N False take no part in what a response has, and have weight 1.
    """
    mismatch_N = torch.where(trained_N, mismatch_N, 0.0)
    if level != "token":
        total_N = response_sums(mismatch_N, sequence_N)
        if level == "geometric":
            total_N = total_N / response_sums(trained_N.float(), sequence_N).clamp(min=1.0)
        mismatch_N = torch.where(trained_N, total_N, 0.0)
    return mismatch_N.clamp(-MAX_LOG_WEIGHT, MAX_LOG_WEIGHT)


def importance_weights(log_weights_N: Tensor, correction: Correction, cap: float, share: Tensor | None) -> Tensor:
    """What each token's term of the loss is multiplied by, fp32 [N], without gradient.

    cap: C, at least 1. share: l of AIS, fp32 [], of the whole mini-batch (`ais_share`); the others need none.
    """
    weights_N = log_weights_N.exp()
    if correction == "none":
        return torch.ones_like(weights_N)
    if correction == "mis":
        inside_N = (weights_N <= cap) & (weights_N >= 1.0 / cap)
        return torch.where(inside_N, weights_N, 0.0)
    truncated_N = weights_N.clamp(max=cap)
    if correction == "tis":
        return truncated_N
    assert share is not None, "correction 'ais' needs the share of its mini-batch"
    return (1.0 - share) + share * truncated_N


def weight_moments(log_weights_N: Tensor, trained_N: Tensor) -> Tensor:
    """(number, sum of w, sum of w^2) of the trained tokens, fp64 [3]: those of parts of a mini-batch add up."""
    weights = log_weights_N[trained_N].double().exp()
    return torch.stack([trained_N.sum().double(), weights.sum(), weights.square().sum()])


def effective_share(moments: Tensor) -> Tensor:
    """ESS / N = (sum w)^2 / (N sum w^2), fp64 []: 1 where all weights are equal, 1/N where one outweighs the rest; 1 of
    no tokens. moments: fp64 [3], of `weight_moments`."""
    number, total, squares = moments
    return torch.where(number > 0, total.square() / (number * squares), 1.0)


def ais_share(moments: Tensor) -> Tensor:
    """l of AIS, fp32 []: how much of the truncated weight is applied, 0 where all weights are equal."""
    return (1.0 - effective_share(moments)).clamp(0.0, 1.0).float()


def second_moment(mismatch_N: Tensor, trained_N: Tensor) -> Tensor:
    """M2 = mean (o - b)^2 over the trained tokens, fp64 [] (M2PO): 0 where the two policies agree, and of no tokens."""
    mismatch = mismatch_N[trained_N].double()
    return mismatch.square().sum() / max(1, len(mismatch))


def acr_ceiling(weights_N: Tensor, high: float) -> Tensor:
    """QuRL's adaptive upper clip of the ratio, fp32 [N]: a token that the rollout found more probable than the learner
    does (r < 1) may rise further before it is clipped. With r = 1 it is PPO's 1 + high."""
    return (1.0 + high) / weights_N.clamp(max=1.0)


def tbpo_surrogate(
    log_ratio_N: Tensor, advantages_N: Tensor, sequence_N: Tensor, trained_N: Tensor, low: float, high: float
) -> tuple[Tensor, Tensor]:
    """(surrogate fp32 [N], dropped bool [N]). A token's gradient is its share of the response's mean, as in GSPO.

    log_ratio_N: p - o with gradient. Outside the band [1 - low, 1 + high] a response is dropped; inside it the clip of
    a negative advantage on both sides changes nothing, so what remains is the plain ratio times the advantage.
    """
    total_N = response_sums(torch.where(trained_N, log_ratio_N, 0.0), sequence_N)
    mean_N = total_N / response_sums(trained_N.float(), sequence_N).clamp(min=1.0)
    ratio_N = mean_N.clamp(-MAX_LOG_WEIGHT, MAX_LOG_WEIGHT).exp()
    dropped_N = (ratio_N < 1.0 - low) | (ratio_N > 1.0 + high)
    return torch.where(dropped_N, 0.0, ratio_N * advantages_N), dropped_N


def dual_clip(surrogate_N: Tensor, advantages_N: Tensor, limit: float) -> Tensor:
    """Where the advantage is negative a term never falls below limit * advantage. limit > 1; 0 switches it off."""
    if limit == 0.0:
        return surrogate_N
    return torch.where(advantages_N < 0, torch.maximum(surrogate_N, limit * advantages_N), surrogate_N)


def centering_coefficients(p_Nk: Tensor, q_Nk: Tensor, weight: Callable[[Tensor], Tensor]) -> Tensor:
    """What the log-prob of each candidate is multiplied by in the term that score centering subtracts, fp32 [N, k].

    The score of a policy has mean zero under the policy itself, and not under the rollout's. Over the rollout's k most
    probable tokens H, with the weight w that the sampled token gets, a function of the ratio of the two probabilities:

        coefficient = q w(p/q) - alpha p,   alpha = rho w(1/rho),   rho = (1 - sum_H q) / (1 - sum_H p)

    alpha lets the tokens outside H be off as a whole. p = q gives 0.

    Args:
        p_Nk, q_Nk: probabilities of the candidates under the learner and the rollout; each row sums to at most 1.
        weight: w, elementwise: 1 without a correction, min(., cap) for TIS.
    """
    p_Nk, q_Nk = p_Nk.double(), q_Nk.double()
    tiny = torch.finfo(torch.float64).tiny

    # A row that lists all tokens has no rest, and rounding may leave a rest below zero: then rho is 1.
    rest_p_N, rest_q_N = (1.0 - p_Nk.sum(-1)).clamp(min=0.0), (1.0 - q_Nk.sum(-1)).clamp(min=0.0)
    small_N = (rest_p_N < 1e-6) | (rest_q_N < 1e-6)
    rho_N = torch.where(small_N, 1.0, rest_q_N / rest_p_N.clamp(min=tiny))
    alpha_N = rho_N * weight(1.0 / rho_N)
    coefficients = q_Nk * weight(p_Nk / q_Nk.clamp(min=tiny)) - alpha_N.unsqueeze(-1) * p_Nk
    return coefficients.float()
