import random

import torch

from quads.config.sections import RLSettings
from quads.distributed import Distributed
from quads.model.config import ARCHITECTURES
from quads.rl.balance import Packer, assign, attention_break_even, balance, sequence_cost
from quads.rl.packing import Sample, split_by_tokens
from quads.types import Completion

ALONE = Distributed(0, 1, torch.device("cpu"), 0)


def sample(length):
    return Sample([1], Completion([2] * (length - 1), [-1.0] * (length - 1), "stop", 0), 1.0)


def test_break_even_by_hand():
    # 25.5B-A2.9B: 2.93e9 active parameters / (40 layers * 32 heads * 128)
    break_even = attention_break_even(ARCHITECTURES["moe25b_a3b"])
    assert 17_000 < break_even < 18_500
    assert abs(sequence_cost(int(break_even), break_even) / (2 * break_even) - 1) < 1e-3
    assert sequence_cost(10, break_even) < 10.01


def test_assign_gives_equal_counts_and_even_loads():
    owners = assign([8.0, 1.0, 7.0, 2.0], 2)
    assert owners == [0, 0, 1, 1]  # rows (8, 7) and (2, 1): the lighter owner takes the 2
    lengths = [int(random.lognormvariate(6, 1.5)) + 1 for _ in range(256)]
    costs = [sequence_cost(n, 17_700) for n in lengths]
    owners = assign(costs, 8)
    loads = [sum(c for c, o in zip(costs, owners, strict=True) if o == rank) for rank in range(8)]
    assert [owners.count(rank) for rank in range(8)] == [32] * 8
    blocks = [sum(costs[rank * 32 : (rank + 1) * 32]) for rank in range(8)]
    largest = max(costs)
    assert max(loads) - min(loads) <= largest < max(blocks) - min(blocks) + largest
    assert max(loads) < max(blocks)


def test_one_process_keeps_its_samples():
    samples = [sample(3), sample(9), sample(2)]
    assert balance(samples, ALONE, 100.0) == samples
    microbatches, denominator = Packer(RLSettings(microbatch_tokens=12), ALONE, 100.0).pack(samples)
    assert [mb.lengths for mb in microbatches] == [(9, 3), (2,)] and denominator == 3.0


def test_split_makes_at_least_so_many_groups():
    lengths = [5, 4, 3, 2, 1]
    assert split_by_tokens(lengths, 100) == [[0, 1, 2, 3, 4]]
    for at_least in range(1, 6):
        groups = split_by_tokens(lengths, 100, at_least)
        assert len(groups) == at_least
        assert sorted(i for group in groups for i in group) == [0, 1, 2, 3, 4]
    assert len(split_by_tokens(lengths, 100, 9)) == 5  # never an empty one
