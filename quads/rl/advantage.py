"""Group-relative advantages (GRPO): a response is judged against the other responses to its own prompt."""

from typing import Literal

import torch
from torch import Tensor


def group_advantages(
    rewards_PG: Tensor, kind: Literal["group_std", "group_mean"], counted_PG: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Rewards minus their group's mean, divided by the group's standard deviation for `group_std`.

    Args:
        rewards_PG: fp32 [num_prompts, group_size].
        kind: `group_std` is GRPO as published (population standard deviation); `group_mean` leaves the scale alone,
            so that easy and hard prompts weigh alike (the form known as Dr. GRPO).
        counted_PG: bool, the responses that take part (a masked truncated response does not); all when None.

    Returns:
        advantages_PG: fp32, 0 for responses that do not take part and for groups without spread.
        zero_spread_P: bool, the groups whose counted rewards are all equal: they have no signal.
    """
    rewards_PG = rewards_PG.float()
    counted_PG = torch.ones_like(rewards_PG, dtype=torch.bool) if counted_PG is None else counted_PG
    num_counted_P1 = counted_PG.sum(dim=1, keepdim=True).clamp(min=1)
    mean_P1 = (rewards_PG * counted_PG).sum(dim=1, keepdim=True) / num_counted_P1
    centred_PG = torch.where(counted_PG, rewards_PG - mean_P1, 0.0)
    lowest_P = rewards_PG.masked_fill(~counted_PG, torch.inf).amin(dim=1)
    highest_P = rewards_PG.masked_fill(~counted_PG, -torch.inf).amax(dim=1)
    # Compared exactly rather than through the rounded mean, so that 1/3 repeated 16 times counts as no spread.
    zero_spread_P = lowest_P >= highest_P
    if kind == "group_std":
        std_P1 = (centred_PG.square().sum(dim=1, keepdim=True) / num_counted_P1).sqrt()
        centred_PG = centred_PG / std_P1.clamp(min=1e-6)
    return centred_PG.masked_fill(zero_spread_P[:, None], 0.0), zero_spread_P
