"""What optimizer updates add up to: sums over micro-batches and processes, and a step's metrics from its updates."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quads.distributed import Distributed
from quads.rl.mismatch import mismatch_metrics


@dataclass
class UpdateStats:
    """Sums of one optimizer update over all processes (log-probs: of this process alone); `merge_updates` turns several
    into a step's metrics."""

    loss: float
    grad_norm: float
    lr: float
    skipped: bool
    tokens: int  # response tokens trained on
    touched: dict[str, int]  # of these tokens, by each of TOUCHED; 0 where an option is off
    kl_sum: float | None  # over these tokens, to the reference policy; None without one
    entropy_sum: float
    entropy_tokens: int
    learner_logprobs_N: Tensor  # fp32, of all response tokens, at the weights before the update
    rollout_logprobs_N: Tensor  # fp32, the engine's; 0 where they were not finite
    finite_N: Tensor  # bool, the engine's were finite
    routes_repeated: int  # expert choices of the rollout that the learner's routers repeat
    routes: int  # and all of them; 0 where the engine did not return any


# What clips, masks or caps a token of the loss -> the metric with its share of the trained tokens.
TOUCHED = {
    "clipped": "policy/ratio_clip_frac",
    "cumulative_masked": "policy/cumulative_masked_frac",
    "weight_capped": "policy/weight_capped_frac",
    "weight_masked": "policy/weight_masked_frac",
    "tbpo_dropped": "policy/tbpo_dropped_frac",
    "dual_clipped": "policy/dual_clip_frac",
}
COUNTED = (
    *TOUCHED,
    "tokens",
    "kl",
    "loss",
    "entropy",
    "entropy_tokens",
    "finite",  # response tokens with a finite log-prob on both sides
    "routes_repeated",
    "routes",
)


class UpdateSums:
    """What the micro-batches of an update add up to, in float64 on the device, by the names in COUNTED."""

    def __init__(self, device: torch.device) -> None:
        self._sums = {name: torch.zeros((), dtype=torch.float64, device=device) for name in COUNTED}

    def add(self, **counts: Tensor | int) -> None:
        """Add 0-dim tensors on the device, or numbers; nothing waits for the device. KeyError for another name."""
        for name, count in counts.items():
            self._sums[name] += count

    def read(self, world: Distributed | None) -> dict[str, float]:
        """All sums by name, over all processes, read once: until here the host ran ahead of the GPU."""
        values = torch.stack(list(self._sums.values()))
        if world is not None:
            world.all_reduce(values)
        return dict(zip(self._sums, values.tolist(), strict=True))


def merge_updates(updates: Sequence[UpdateStats], world: Distributed | None = None) -> dict[str, float]:
    """Metrics of a step from its updates, at least one. The log-prob gap is that of the first alone: later ones see
    weights that the rollout never had. Collective: with `world`, log-probs of all processes are gathered."""
    first = updates[0]
    tokens = max(sum(u.tokens for u in updates), 1)
    logprobs = (first.learner_logprobs_N.cpu(), first.rollout_logprobs_N.cpu(), first.finite_N.cpu())
    by_rank = [logprobs] if world is None else world.gather_objects(logprobs)
    metrics = mismatch_metrics(*(torch.cat(parts) for parts in zip(*by_rank, strict=True)))
    if first.routes:
        metrics["mismatch/router_agreement"] = first.routes_repeated / first.routes
    for name, metric in TOUCHED.items():
        metrics[metric] = sum(u.touched[name] for u in updates) / tokens
    kl_sums = [u.kl_sum for u in updates if u.kl_sum is not None]
    if kl_sums:
        metrics["policy/kl"] = sum(kl_sums) / tokens
    metrics["policy/entropy"] = sum(u.entropy_sum for u in updates) / max(sum(u.entropy_tokens for u in updates), 1)
    metrics["train/loss"] = sum(u.loss for u in updates) / len(updates)
    metrics["train/grad_norm"] = sum(u.grad_norm for u in updates) / len(updates)
    metrics["train/lr"] = updates[-1].lr
    metrics["train/skipped_updates"] = sum(u.skipped for u in updates)
    return metrics
