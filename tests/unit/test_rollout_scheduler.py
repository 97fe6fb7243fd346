"""Who starts when, which slot each takes, and how drawn tokens become responses."""

import torch

from quads.rollout.native.scheduler import Batch, Groups, SampleLog, Waiting
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
    batch = Batch(6)
    assert batch.reserve([0, 1, 2, 3], [5, 6, 7, 8], 9) == [0, 1, 2, 3]
    batch.release([2, 0])
    assert (batch.num_free, batch.num_busy, batch.longest()) == (4, 2, 9)
    assert batch.reserve([4, 5, 6], [5, 5, 20], 9) == [2, 0, 4]
    assert batch.size == 5 and batch.holes == [] and batch.longest() == 21
    assert batch.request.tolist() == [5, 1, 4, 3, 6, -1]


def test_a_full_response_leaves_its_slot_and_leaves_it_once() -> None:
    batch = Batch(3)
    batch.reserve([7, 8], [4, 2], 2)
    batch.drew([7, 8])
    batch.fed()
    assert batch.num_busy == 2 and batch.longest() == 6
    batch.drew([7])
    assert batch.holes == [0] and batch.request.tolist() == [-1, 8, -1]
    batch.release([7])  # the device says so too, later
    assert batch.holes == [0] and batch.longest() == 4  # the free slot does not count


def test_compaction_moves_the_last_slots_into_holes() -> None:
    batch = Batch(6)
    batch.reserve(list(range(10, 16)), list(range(20, 26)), 9)
    batch.release([11, 15, 12])
    sources, targets = batch.compact()
    assert sorted(zip(targets, sources, strict=True)) == [(1, 3), (2, 4)]
    assert batch.size == 3 and batch.holes == []
    assert batch.request.tolist() == [10, 13, 14, -1, -1, -1] and batch.position[:3].tolist() == [20, 23, 24]
    batch.release([14])
    assert batch.holes == [2]


def test_compaction_of_finished_tail_moves_nothing() -> None:
    batch = Batch(4)
    batch.reserve([0, 1, 2, 3], [1, 1, 1, 1], 9)
    batch.release([3, 2])
    assert batch.compact() == ([], []) and batch.size == 2


def test_log_gives_complete_groups_away_sorted_by_request() -> None:
    log, sampling = SampleLog(4, 3, (9,)), Sampling(3, stop_token_ids=(9,))
    finished = log.add(torch.tensor([0, 2, 1, 3]), torch.tensor([[5, 6, 7, 9], [-0.5, -0.6, -0.7, -0.9]]))
    assert finished == [3]
    # Request 3 was computed once more before the host knew; -1 is a free slot.
    finished = log.add(
        torch.tensor([3, 2, -1, 1, 0]), torch.tensor([[9.0, 9, 9, 9, 3], [-0.2, -0.8, -0.3, -0.1, -0.4]])
    )
    assert finished == [2, 1]
    third, fourth = log.take(1, 2, sampling, policy_version=4)  # the second prompt's group is complete first
    assert log.add(torch.tensor([0, 1]), torch.tensor([[4.0, 9.0], [-0.2, -0.1]])) == [0]  # as many as it may draw
    first, second = log.take(0, 2, sampling, policy_version=4)
    assert [c.token_ids for c in (first, second, third, fourth)] == [[5, 3, 4], [7, 9], [6, 9], [9]]
    assert [c.finish_reason for c in (first, second, third, fourth)] == ["length", "stop", "stop", "stop"]
    assert [round(x, 6) for x in first.logprobs] == [-0.5, -0.4, -0.2]
    assert first.policy_version == 4 and first.routed_experts is None
    assert sum(entry.numel() for entry in log.tokens) == 0


def test_a_group_is_complete_with_its_last_response() -> None:
    groups = Groups(num_prompts=3, n=2)
    assert groups.completed_by([0, 3]) == []
    assert groups.completed_by([2, 4]) == [1]
    assert groups.completed_by([5, 1]) == [2, 0]
