"""AdamW over fp32 master weights, its learning-rate schedule, and the global gradient norm."""

import math
from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from quads.distributed import Distributed
from quads.model.parallelize import local_tensor
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
    # One kernel over all tensors, without the temporary copies (as large as the weights) of the default on a GPU.
    fused = True if any(p.is_cuda for p in matrices) else None
    return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps, fused=fused)


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of all parameter groups, for the next step."""
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


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float, world: Distributed | None = None) -> Tensor:
    """Global L2 norm of all gradients (0-dim fp32), which are scaled down to `max_norm` if it is positive and exceeded.

    With several processes every gradient is sharded over all those of a replica; each adds up its own shards, whatever
    mesh they are on, and one all-reduce makes the norm global. A non-finite norm leaves the gradients as they are: the
    caller skips that update.
    """
    grads = [local_tensor(p.grad) for p in parameters if p.grad is not None]
    norm = get_total_norm(grads)
    if world is not None and world.meshes is not None:
        replicas = world.meshes.world.size(0)
        norm = (world.all_reduce(norm.square()) / replicas).sqrt()
    if max_norm > 0:
        factor = max_norm / (norm + 1e-6)  # torch's 1e-6; 0 or NaN if the norm is not finite
        if 0.0 < float(factor) < 1.0:  # an update that clips nothing is spared a pass over all gradients
            # One call for all: a product with a scalar in GPU memory is slow tensor by tensor.
            torch._foreach_mul_(grads, factor)  # pyright: ignore[reportPrivateImportUsage]
    return norm
