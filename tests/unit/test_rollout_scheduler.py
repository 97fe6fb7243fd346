"""Who starts when, which slot each takes, and how drawn tokens become responses."""

import torch

from quads.rollout.scheduler import Batch, Groups, SampleLog, Waiting
from quads.types import Sampling


def test_groups_start_together() -> None:
    waiting = Waiting(num_prompts=3, n=4)
    assert waiting.take(7, all_slots=8) == [0, 1, 2, 3]  # a second group does not fit
    assert waiting.take(3, all_slots=8) == []
    assert waiting.take(8, all_slots=8) == [4, 5, 6, 7, 8, 9, 10, 11]
    assert len(waiting) == 0


def test_a_group_larger_than_all_slots_is_split() -> None:
    waiting = Waiting(num_prompts=2, n=5)
    assert waiting.take(3, all_slots=3) == [0, 1, 2] and waiting.split_group() == 2
    assert waiting.take(3, all_slots=3) == [3, 4] and waiting.split_group() == 0
    assert waiting.take(1, all_slots=3) == [5] and waiting.split_group() == 4


def test_holes_are_reused_before_new_slots() -> None:
    batch = Batch(6, torch.device("cpu"))
    assert batch.reserve(4) == [0, 1, 2, 3]
    batch.holes = [2, 0]
    assert batch.num_free == 4
    assert batch.reserve(3) == [2, 0, 4]
    assert batch.size == 5 and batch.holes == []


def test_compaction_moves_the_last_slots_into_holes() -> None:
    batch = Batch(6, torch.device("cpu"))
    batch.reserve(6)
    batch.request[:] = torch.arange(10, 16)
    batch.position[:] = torch.arange(20, 26)
    batch.holes = [1, 5, 2]
    sources, targets = batch.compact()
    assert sorted(zip(targets, sources, strict=True)) == [(1, 3), (2, 4)]
    assert batch.size == 3 and batch.holes == []
    assert batch.request[:3].tolist() == [10, 13, 14] and batch.position[:3].tolist() == [20, 23, 24]


def test_compaction_of_finished_tail_moves_nothing() -> None:
    batch = Batch(4, torch.device("cpu"))
    batch.reserve(4)
    batch.holes = [3, 2]
    assert batch.compact() == ([], []) and batch.size == 2


def test_log_gives_complete_groups_away_sorted_by_request() -> None:
    log, sampling = SampleLog(), Sampling(2, stop_token_ids=(9,))
    log.add(torch.tensor([0, 2, 1, 3]), torch.tensor([5, 6, 7, 9]), torch.tensor([-0.5, -0.6, -0.7, -0.9]))
    log.add(torch.tensor([2, 1]), torch.tensor([8, 9]), torch.tensor([-0.8, -0.1]))
    third, fourth = log.take(1, 2, sampling, policy_version=4)  # the second prompt's group is complete first
    log.add(torch.tensor([1]), torch.tensor([4]), torch.tensor([-0.2]))
    first, second = log.take(0, 2, sampling, policy_version=4)
    assert [c.token_ids for c in (first, second, third, fourth)] == [[5], [7, 9, 4], [6, 8], [9]]
    assert [c.finish_reason for c in (first, second, third, fourth)] == ["length", "length", "length", "stop"]
    assert [round(x, 6) for x in second.logprobs] == [-0.7, -0.1, -0.2]
    assert first.policy_version == 4 and first.routed_experts is None
    assert sum(entry.numel() for entry in log.tokens) == 0


def test_a_group_is_complete_with_its_last_response() -> None:
    groups = Groups(num_prompts=3, n=2)
    assert groups.completed_by([0, 3]) == []
    assert groups.completed_by([2, 4]) == [1]
    assert groups.completed_by([5, 1]) == [2, 0]


def test_finished_requests_are_told_once() -> None:
    batch = Batch(4, torch.device("cpu"))
    batch.reserve(3)
    batch.request[:3] = torch.tensor([7, 8, 9])
    batch.finish([2, 0])
    assert batch.holes == [2, 0] and batch.take_finished() == [9, 7] and batch.take_finished() == []
