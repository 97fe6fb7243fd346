"""Rewards of one rollout, computed beside it.

    grading = Grading(pool.submit, tokenizer.decode_batch, tokenizer.eos_ids, examples, truncated=False)
    engine.generate(..., on_group=grading.add)      a group is sent to the graders as soon as it is complete
    graded = grading.finish()                       waits for what is left

Training is on policy: an update needs the rewards of all its responses. What overlaps is the grading of one group with
the drawing of the others of the same step, so that after the rollout only the last groups are left to wait for. Rewards
do not depend on when they were computed.
"""

import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from quads.types import Completion, Example, Verdict

Submit = Callable[[Example, str], "Future[Verdict]"]
Decode = Callable[[list[list[int]]], list[str]]


@dataclass
class Graded:
    """What became of the responses of one rollout; tensors are [prompts, group size]."""

    rewards_PG: Tensor  # fp32; 0 where there is no verdict, and for a response that was cut and is not graded
    ungraded_PG: Tensor  # bool, the grader hung or died: no verdict, and no part in means, groups and updates
    correctness_PG: Tensor  # fp32, of the first of a source's weighted rewards: what pass@1 asks. Else the reward
    parts: dict[str, list[float]]  # each weighted reward by name: its own values, of the responses that it graded

    def shown(self) -> Tensor:
        """The rewards for people, [prompts, group size]: NaN where there is no verdict."""
        return self.rewards_PG.masked_fill(self.ungraded_PG, math.nan)


class Grading:
    """The rewards of `examples`, whose responses come group by group, in any order.

    Args:
        submit: starts grading one response's text, and returns at once.
        decode: token ids of several responses to their texts. A thread calls both, so that the engine, which waits for
            `add`, does not wait for them.
        stop_ids: tokens that end a response; they are no part of its text.
        truncated: whether a response that was cut at its length limit is graded; if not, its reward is 0.
    """

    def __init__(
        self, submit: Submit, decode: Decode, stop_ids: Sequence[int], examples: Sequence[Example], truncated: bool
    ):
        self.examples = examples
        self._submit, self._decode, self._stop_ids, self._truncated = submit, decode, stop_ids, truncated
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grading")
        self._groups: dict[int, Future[list[Future[Verdict] | None]]] = {}

    def add(self, prompt: int, group: list[Completion]) -> None:
        """Start grading all responses to examples[prompt]."""
        self._groups[prompt] = self._thread.submit(self._start, self.examples[prompt], group)

    def finish(self) -> Graded:
        """Wait for all verdicts. What goes wrong while they are found is raised here."""
        verdicts_PG = [
            [future.result() if future else Verdict(0.0, 0.0) for future in self._groups[prompt].result()]
            for prompt in range(len(self.examples))
        ]
        self._thread.shutdown()
        parts: dict[str, list[float]] = {}
        for verdict in (verdict for verdicts in verdicts_PG for verdict in verdicts):
            for name, value in verdict.parts.items():
                parts.setdefault(name, []).append(value)
        return Graded(
            torch.tensor([[float(verdict.reward) for verdict in verdicts] for verdicts in verdicts_PG]),
            torch.tensor([[verdict.failed for verdict in verdicts] for verdicts in verdicts_PG]),
            torch.tensor([[float(verdict.correctness) for verdict in verdicts] for verdicts in verdicts_PG]),
            parts,
        )

    def _start(self, example: Example, group: list[Completion]) -> "list[Future[Verdict] | None]":
        """None stands for a response that is not graded."""
        graded = [self._truncated or completion.finish_reason == "stop" for completion in group]
        texts = iter(self._decode([strip_stop(c, self._stop_ids) for c, yes in zip(group, graded, strict=True) if yes]))
        return [self._submit(example, next(texts)) if yes else None for yes in graded]


def part_means(of_processes: Sequence[dict[str, list[float]]]) -> dict[str, float]:
    """`reward/NAME` of each weighted reward: its mean over the responses that it graded, in all processes."""
    values: dict[str, list[float]] = {}
    for parts in of_processes:
        for name, some in parts.items():
            values.setdefault(name, []).extend(some)
    return {f"reward/{name}": math.fsum(values[name]) / len(values[name]) for name in sorted(values)}


def strip_stop(completion: Completion, stop_ids: Sequence[int]) -> list[int]:
    """The response's tokens without the stop token that ended it: what is decoded and graded."""
    ids = completion.token_ids
    return ids[:-1] if ids and completion.finish_reason == "stop" and ids[-1] in stop_ids else ids
