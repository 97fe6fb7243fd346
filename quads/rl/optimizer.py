"""AdamW over fp32 master weights, its learning-rate schedule, and the global gradient norm."""

import math
from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from quads.rl.streamed_adamw import StreamedAdamW


def build_adamw(
    model: nn.Module,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    moments: Literal["float32", "cpu", "8bit"] = "float32",
) -> torch.optim.Optimizer:
    """AdamW with decoupled decay on matrices only: norms and other vectors are not pulled towards zero.

    moments: "float32" beside the weights; "cpu" in CPU memory (see streamed_adamw.py); "8bit" block-quantized
    (torchao; arXiv 2110.02861), whose update is compiled at the first step.
    """
    matrices = [p for p in model.parameters() if p.requires_grad and p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.requires_grad and p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    if moments == "cpu":
        return StreamedAdamW(groups, lr, betas, eps)
    if moments == "8bit":
        from torchao.optim import AdamW8bit  # slow to import, and only wanted here

        return AdamW8bit(groups, lr=lr, betas=betas, eps=eps)
    return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps)


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(lr)  # torchao compiles its update with the rate as an input
        else:
            group["lr"] = lr


def learning_rate(
    update: int,
    peak: float,
    warmup: int,
    total: int,
    schedule: Literal["constant", "linear", "cosine"],
) -> float:
    """Learning rate of optimizer update number `update` (0-based): linear warm-up, then the schedule, 0 at `total`.

    A pure function of the update number: resuming needs no scheduler state.
    """
    if update < warmup:
        return peak * (update + 1) / warmup
    if schedule == "constant":
        return peak
    progress = min((update - warmup) / max(total - warmup, 1), 1.0)
    return peak * (1.0 - progress if schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress)))


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """Global L2 norm of all gradients (0-dim fp32), which are scaled down to `max_norm` if it is positive and exceeded.

    A non-finite norm leaves the gradients as they are: the caller skips that update.
    """
    by_mesh: dict[Any, list[nn.Parameter]] = {}  # sharded gradients that live on different meshes cannot be added up
    for parameter in parameters:
        if parameter.grad is not None:
            by_mesh.setdefault(getattr(parameter.grad, "device_mesh", None), []).append(parameter)
    norms = [_whole(get_total_norm([p.grad for p in group if p.grad is not None])) for group in by_mesh.values()]
    norm = norms[0] if len(norms) == 1 else torch.stack(norms).square().sum().sqrt()
    if max_norm > 0 and bool(torch.isfinite(norm)):
        for group in by_mesh.values():
            clip_grads_with_norm_(group, max_norm, norm)
    return norm


def _whole(norm: Tensor) -> Tensor:
    """The norm over all processes that share the gradients."""
    full_tensor = getattr(norm, "full_tensor", None)
    return norm if full_tensor is None else full_tensor()
