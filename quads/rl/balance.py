"""Which process trains on which response.

Responses differ in length by orders of magnitude, and in every layer the processes wait for the slowest. The cost of a
sequence is linear in its tokens (weights) plus quadratic (attention): n * (1 + n / break_even), where `break_even` is
the length at which both parts are equal. Responses go round in rows, longest first: each process takes one of a row,
the least loaded one the most expensive. So loads are even and every process has equally many responses, hence can form
equally many micro-batches: sharded weights are gathered together, so all must run equally many forwards.

The sum of gradients does not depend on who computes what.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from quads.config.sections import RLSettings
from quads.distributed import Distributed
from quads.model.config import ModelConfig
from quads.rl.packing import Microbatch, Sample, pack, split_by_tokens


def attention_break_even(config: ModelConfig) -> float:
    """Sequence length at which causal attention costs as much as the weights do.

    For n tokens: 2 n P_active FLOPs in the weights, 4 n**2 / 2 * heads * head_dim in each layer's attention.
    """
    return config.num_parameters()[1] / (config.num_layers * config.num_heads * config.head_dim)


def sequence_cost(num_tokens: int, break_even: float) -> float:
    """What a sequence costs, in tokens of a short one: the weights, and attention that grows with the square."""
    return num_tokens * (1.0 + num_tokens / break_even)


def assign(costs: Sequence[float], num_owners: int) -> list[int]:
    """The owner of each sequence: equally many each (their number must divide), loads as even as greedy gets them."""
    assert len(costs) % num_owners == 0, (len(costs), num_owners)
    order = sorted(range(len(costs)), key=lambda i: (-costs[i], i))
    owners = [0] * len(costs)
    loads = [0.0] * num_owners
    for first in range(0, len(order), num_owners):
        lightest_first = sorted(range(num_owners), key=lambda owner: (loads[owner], owner))
        for i, owner in zip(order[first : first + num_owners], lightest_first, strict=True):
            owners[i] = owner
            loads[owner] += costs[i]
    return owners


def balance(samples: Sequence[Sample], world: Distributed, break_even: float) -> list[Sample]:
    """This process's share of all processes' samples. Collective; with one process they come back as they are."""
    if world.size == 1:
        return list(samples)
    costs = [sequence_cost(sample.num_tokens, break_even) for sample in samples]
    by_rank = world.gather_objects(costs)
    first = sum(len(c) for c in by_rank[: world.rank])
    owners = assign([cost for rank_costs in by_rank for cost in rank_costs], world.size)[first : first + len(samples)]
    outgoing: list[list[Sample]] = [[] for _ in range(world.size)]
    for sample, owner in zip(samples, owners, strict=True):
        outgoing[owner].append(sample)
    return [sample for incoming in world.exchange_objects(outgoing) for sample in incoming]


@dataclass(frozen=True)
class Packer:
    """`pack` for mini-batches that are spread over processes: equally many micro-batches on each, one denominator."""

    rl: RLSettings
    world: Distributed
    break_even: float  # of `attention_break_even`

    def pack(self, samples: Sequence[Sample]) -> tuple[list[Microbatch], float]:
        """Micro-batches for this process and the denominator of the whole mini-batch. Collective.

        Args:
            samples: of the prompts that this process rolled out. All processes together hold the mini-batch.
        """
        rl, world = self.rl, self.world
        mine = balance(samples, world, self.break_even)
        needed = len(split_by_tokens([sample.num_tokens for sample in mine], rl.microbatch_tokens))
        most = int(world.all_reduce(torch.tensor(needed, device=world.device), "max"))
        microbatches, denominator = pack(mine, rl.microbatch_tokens, rl.loss_average, at_least=most)
        assert len(microbatches) == most
        total = world.all_reduce(torch.tensor(denominator, dtype=torch.float64, device=world.device))
        return microbatches, float(total)
