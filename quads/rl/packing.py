"""Responses become micro-batches: whole sequences laid end to end, without padding, under a token budget.

Shape suffixes: T = tokens of the micro-batch (prompts and responses), N = its response tokens (what the loss sees),
S = its sequences. Every per-token tensor of the loss is [N]: the learner computes logits at those positions only.

    sequence   p0 p1 p2 r0 r1      position t predicts token t+1, so the response tokens r0, r1 are predicted
    predict_N        ^  ^          at the positions of p2 and r0
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal

import torch
from torch import Tensor

from quads.types import Completion


@dataclass(frozen=True)
class Sample:
    """A prompt with one response and its advantage: what the learner trains on.

    Three states: trained and counted; counted alone, in a group whose rewards are all equal, which says that there is
    nothing to learn and so dilutes the sample average; neither, for a response that is left out (truncated under
    rl.truncated = "mask", or without a verdict).

    Example: `Sample([5, 9], Completion([17, 2], [-0.1, -0.7], "stop", 3), advantage=0.5)`
    """

    prompt_ids: list[int]
    completion: Completion
    advantage: float
    trained: bool = True  # False: takes part in the log-prob gap, not in the loss
    counted: bool = True  # False: not in the loss's denominator either, as if it had not been drawn

    @property
    def num_tokens(self) -> int:
        """Prompt and response."""
        return len(self.prompt_ids) + len(self.completion.token_ids)


@dataclass(frozen=True)
class Microbatch:
    """Several whole sequences, packed. See the module's legend for the suffixes."""

    tokens_T: Tensor  # int64
    lengths: tuple[int, ...]  # [S], sums to T
    predict_N: Tensor  # int64, index into T of the position that predicts each response token
    targets_N: Tensor  # int64, the response tokens
    sequence_N: Tensor  # int64, index into S
    rollout_logprobs_N: Tensor  # fp32, from the engine; non-finite ones are replaced by 0 and have weight 0
    advantages_N: Tensor  # fp32
    weights_N: Tensor  # fp32: 1 (token average) or 1 / response length (sample average); 0 = not trained on
    finite_N: Tensor  # bool, the engine's log-prob was finite
    routed_experts_TLA: Tensor | None = None  # int64 [T, num_layers, top_k], the rollout's expert choices
    old_logprobs_N: Tensor | None = None  # fp32, the learner's before the update (rl.old_logprobs = "learner")
    ref_logprobs_N: Tensor | None = None  # fp32, the reference policy's (rl.kl_coef > 0)
    top_ids_Nk: Tensor | None = None  # int64, the k tokens that the rollout found most likely (rl.score_centering)
    top_logprobs_Nk: Tensor | None = None  # fp32, the engine's log-probs of them
    ais_share: Tensor | None = None  # fp32 [], of the whole mini-batch (rl.correction = "ais")

    def to(self, device: torch.device) -> "Microbatch":
        """A copy whose tensors are on the device."""
        moved = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(self, **{k: v.to(device) for k, v in moved.items() if isinstance(v, Tensor)})


def split_by_tokens(lengths: Sequence[int], budget: int, at_least: int = 1) -> list[list[int]]:
    """Indices of sequences, in order, grouped so that each group holds at most `budget` tokens (or one sequence).

    Sequences are never cut. Neighbouring lengths are put together (sorted, longest first) because attention
    on a CPU pads within a group; the sum of gradients does not depend on the grouping. `at_least` groups are made, by
    halving the fullest ones, if there are as many sequences.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    groups: list[list[int]] = []
    used = budget + 1
    for i in order:
        if used + lengths[i] > budget:
            groups.append([])
            used = 0
        groups[-1].append(i)
        used += lengths[i]
    while len(groups) < min(at_least, len(lengths)):
        fullest = max(range(len(groups)), key=lambda g: len(groups[g]))
        group = groups[fullest]
        groups[fullest : fullest + 1] = [group[: len(group) // 2], group[len(group) // 2 :]]
    return groups


def pack(
    samples: Sequence[Sample], microbatch_tokens: int, loss_average: Literal["sample", "token"], at_least: int = 1
) -> tuple[list[Microbatch], float]:
    """Micro-batches of one optimizer step, and the denominator of its loss.

    The denominator counts the whole mini-batch (samples, or trained response tokens), never one micro-batch, so that
    sum(loss) / denominator gives the same gradient for every split. Under the sample average a group without spread
    counts too: it dilutes the step, it does not amplify the others. What is left out of the sum for another reason (not
    `counted`, or no finite log-prob at all) is left out of the denominator: one mask for both.

    Args:
        samples: each with at least one prompt token and one response token.
        microbatch_tokens: budget of one forward, prompts included.
        at_least: micro-batches to make, if there are as many samples: sharded processes need equally many.

    Returns:
        micro-batches of at most `microbatch_tokens` tokens (a longer sequence stands alone), and the denominator: the
        number of samples that count ("sample"), or of tokens that are trained on ("token"); either may be 0.
    """
    groups = split_by_tokens([s.num_tokens for s in samples], microbatch_tokens, at_least)
    microbatches = [_pack_group([samples[i] for i in group], loss_average) for group in groups]
    if loss_average == "sample":
        finite = (any(map(math.isfinite, s.completion.logprobs)) for s in samples)
        return microbatches, float(sum(s.counted and any_finite for s, any_finite in zip(samples, finite, strict=True)))
    return microbatches, sum(float(mb.weights_N.sum()) for mb in microbatches)


def _pack_group(samples: Sequence[Sample], loss_average: Literal["sample", "token"]) -> Microbatch:
    tokens: list[int] = []
    predict, targets, sequence, logprobs, advantages = [], [], [], [], []
    for s, sample in enumerate(samples):
        first = len(tokens) + len(sample.prompt_ids) - 1
        response = sample.completion.token_ids
        tokens += sample.prompt_ids + response
        predict += range(first, first + len(response))
        targets += response
        sequence += [s] * len(response)
        logprobs += sample.completion.logprobs
        advantages += [sample.advantage] * len(response)
    sequence_N = torch.tensor(sequence, dtype=torch.int64)
    rollout_logprobs_N = torch.tensor(logprobs, dtype=torch.float32)
    finite_N = torch.isfinite(rollout_logprobs_N)
    trained_N = finite_N & torch.tensor([s.trained for s in samples], dtype=torch.bool)[sequence_N]
    weights_N = trained_N.float()
    if loss_average == "sample":
        # The response length that divides counts the same tokens as the sum does.
        length_S = torch.zeros(len(samples)).index_add_(0, sequence_N, weights_N)
        weights_N = weights_N / length_S.clamp(min=1.0)[sequence_N]
    return Microbatch(
        tokens_T=torch.tensor(tokens, dtype=torch.int64),
        lengths=tuple(s.num_tokens for s in samples),
        predict_N=torch.tensor(predict, dtype=torch.int64),
        targets_N=torch.tensor(targets, dtype=torch.int64),
        sequence_N=sequence_N,
        rollout_logprobs_N=torch.where(finite_N, rollout_logprobs_N, 0.0),
        advantages_N=torch.tensor(advantages, dtype=torch.float32),
        weights_N=weights_N,
        finite_N=finite_N,
        routed_experts_TLA=_pack_routes(samples),
        top_ids_Nk=_pack_top([s.completion.top_ids for s in samples], torch.int64),
        top_logprobs_Nk=_pack_top([s.completion.top_logprobs for s in samples], torch.float32),
    )


def _pack_top(of_samples: Sequence[Tensor | None], dtype: torch.dtype) -> Tensor | None:
    rows = [rows for rows in of_samples if rows is not None]
    return torch.cat(rows).to(dtype) if len(rows) == len(of_samples) else None


def _pack_routes(samples: Sequence[Sample]) -> Tensor | None:
    """Expert choices for all T positions. The last token of a sequence was never fed to the engine, so it has none: -1,
    the learner chooses for itself. It predicts nothing either."""
    routes = [s.completion.routed_experts for s in samples]
    if any(r is None for r in routes):
        return None
    rows = [torch.cat([r, r.new_full((1, *r.shape[1:]), -1)]).long() for r in routes if r is not None]
    return torch.cat(rows)
