"""Grading beside the rollout: order does not matter, nothing waits before the end, a hung grader stalls nothing."""

import threading
import time
from concurrent.futures import Future
from typing import Literal

import pytest
import torch

from quads.config.sections import RewardSettings, SourceSettings
from quads.errors import UserError
from quads.rl.grading import Grading, strip_stop
from quads.rl.rewards.pool import RewardPool
from quads.types import Completion, Example, Verdict

HANGS = r"\int_0^1 \sqrt{\sin(x^{17}+\cos(x^x))+\tan(x^3+x+1)^{\ln(x+2)}}\,dx"  # no computer algebra finishes it


def completion(*token_ids: int, reason: Literal["stop", "length"] = "stop") -> Completion:
    return Completion(list(token_ids), [0.0] * len(token_ids), reason, 1)


def examples(count: int) -> list[Example]:
    return [Example(str(i), "s", "p", [1], str(i)) for i in range(count)]


def graded(example: Example, text: str) -> "Future[Verdict]":
    future: Future[Verdict] = Future()
    future.set_result(Verdict(float(example.answer == text), 0.0))
    return future


def decode(batch: list[list[int]]) -> list[str]:
    return ["".join(map(str, ids)) for ids in batch]


def test_groups_may_come_in_any_order() -> None:
    grading = Grading(graded, decode, (9,), examples(3), truncated=False)
    grading.add(2, [completion(2, 9), completion(1, 9)])
    grading.add(0, [completion(1, 9), completion(2, 9)])
    grading.add(1, [completion(1, 9), completion(1, 9)])
    result = grading.finish()
    rewards_PG, ungraded_PG = result.rewards_PG, result.ungraded_PG
    assert rewards_PG.tolist() == [[0, 0], [1, 1], [1, 0]] and rewards_PG.dtype == torch.float32
    assert ungraded_PG.dtype == torch.bool and not ungraded_PG.any()


def test_a_response_that_was_cut_is_graded_only_where_asked() -> None:
    for truncated in (False, True):
        grading = Grading(graded, decode, (9,), examples(1), truncated)
        grading.add(0, [completion(0, reason="length"), completion(0, 9)])
        assert grading.finish().rewards_PG.tolist() == [[float(truncated), 1.0]]


def test_adding_does_not_wait_for_a_verdict() -> None:
    release = threading.Event()

    def slow(example: Example, text: str) -> "Future[Verdict]":
        future: Future[Verdict] = Future()
        threading.Thread(target=lambda: (release.wait(10), future.set_result(Verdict(1.0, 0.0)))).start()
        return future

    grading = Grading(slow, decode, (9,), examples(2), truncated=False)
    grading.add(0, [completion(0, 9)])
    grading.add(1, [completion(1, 9)])  # here with both graders still at work
    release.set()
    assert grading.finish().rewards_PG.tolist() == [[1.0], [1.0]]


def test_what_goes_wrong_in_the_thread_is_raised_at_the_end() -> None:
    def broken(example: Example, text: str) -> "Future[Verdict]":
        raise UserError("no isolation here")

    grading = Grading(broken, decode, (9,), examples(1), truncated=False)
    grading.add(0, [completion(0, 9)])
    with pytest.raises(UserError, match="no isolation here"):
        grading.finish()


def test_a_hung_grader_scores_0_is_counted_and_stalls_nobody() -> None:
    """One of 16 answers hangs its judge. The others are judged meanwhile, and the batch waits for its limit once."""
    source = SourceSettings(kind="jsonl", reward="math")
    pool = RewardPool(RewardSettings(workers=2, judge_time_s=2.0), {"s": source})
    try:
        warm = Example("w", "s", "p", [1], "1")
        started_judges = [pool.submit(warm, r"\boxed{+1}") for _ in range(2)]
        assert [future.result().reward for future in started_judges] == [1.0] * 2
        problems = [Example(str(i), "s", "p", [1], "1") for i in range(4)]
        texts = {1: HANGS, 2: "+1", 3: "+2"}  # plain numbers need no judge
        write = lambda batch: [rf"\boxed{{{texts[ids[0]]}}}" for ids in batch]  # noqa: E731
        grading = Grading(pool.submit, write, (9,), problems, truncated=False)
        started = time.monotonic()
        for prompt in range(4):
            grading.add(prompt, [completion(1 if prompt == 0 else 2, 9), *[completion(2, 9)] * 2, completion(3, 9)])
        result = grading.finish()
        rewards_PG, ungraded_PG = result.rewards_PG, result.ungraded_PG
        seconds = time.monotonic() - started
    finally:
        pool.close()
    assert rewards_PG.tolist() == [[0, 1, 1, 0], *[[1, 1, 1, 0]] * 3]
    assert ungraded_PG.nonzero().tolist() == [[0, 0]]
    assert seconds < 2.0 + 3.0  # the limit, and a busy machine


def test_strip_stop_only_cuts_what_ended_the_response() -> None:
    assert strip_stop(completion(1, 9), (9,)) == [1]
    assert strip_stop(completion(1, 9, reason="length"), (9,)) == [1, 9]
    assert strip_stop(completion(reason="length"), (9,)) == []
