"""AdamW whose two moments live in CPU memory and visit the device one parameter at a time.

The moments are twice the size of the master weights and are touched once an update, so that is where memory is cheapest
to save: 8 of the learner's 16 bytes a parameter, for two transfers of 8 bytes a parameter and update (at 50 GB/s 0.3 s
for a billion parameters each way). The master weights stay: every forward reads them.

    m <- m + (1 - beta1) (g - m)          v <- beta2 v + (1 - beta2) g^2
    w <- w (1 - lr * decay) - lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)

The arithmetic is that of torch.optim.AdamW, in its order.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from quads.model.parallelize import local_tensor

MOMENTS = {"exp_avg", "exp_avg_sq"}


class StreamedAdamW(torch.optim.Optimizer):
    """Takes plain or sharded parameters; `state` has the entries of torch.optim.AdamW, so checkpoints are the same."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float = 0.0,
    ) -> None:
        # All options of torch's, at their defaults: a checkpoint of either optimizer then resumes the other.
        like = torch.optim.AdamW([torch.empty(0)], lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        super().__init__(params, like.defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One update. `closure` is there for the base class's sake and must be None."""
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)
        return None

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As the base class, which would move all state to the parameters' device at once. Here moments that lie where
        they belong are taken as they are (a resume reads its checkpoint into this optimizer's own), others are copied
        one at a time.
        """
        rest = {n: {k: v for k, v in state.items() if k not in MOMENTS} for n, state in state_dict["state"].items()}
        super().load_state_dict({**state_dict, "state": rest})
        names = [name for group in state_dict["param_groups"] for name in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for parameter_name, parameter in zip(names, parameters, strict=True):
            loaded = state_dict["state"].get(parameter_name, {})
            for name in MOMENTS & loaded.keys():
                moment = loaded[name]
                if not _belongs(moment, parameter):
                    moment = _cpu_zeros_like(parameter)
                    local_tensor(moment).copy_(local_tensor(loaded[name]))
                self.state[parameter][name] = moment

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"], state["exp_avg_sq"] = _cpu_zeros_like(parameter), _cpu_zeros_like(parameter)
        state["step"] += 1
        step, (beta1, beta2), lr = float(state["step"]), group["betas"], group["lr"]
        assert parameter.grad is not None  # `step` passes the others over
        weight, grad = local_tensor(parameter), local_tensor(parameter.grad)
        stored_m, stored_v = local_tensor(state["exp_avg"]), local_tensor(state["exp_avg_sq"])
        m, v = (x.to(weight.device, non_blocking=True) for x in (stored_m, stored_v))
        m.lerp_(grad, 1 - beta1)
        v.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        weight.mul_(1 - lr * group["weight_decay"])
        denominator = (v.sqrt() / math.sqrt(1 - beta2**step)).add_(group["eps"])
        weight.addcdiv_(m, denominator, value=-lr / (1 - beta1**step))
        if weight.is_cuda:  # on a CPU m and v are the stored tensors themselves
            stored_m.copy_(m, non_blocking=True)
            stored_v.copy_(v, non_blocking=True)


def _belongs(moment: Any, parameter: Tensor) -> bool:
    """Whether `moment` lies in CPU memory of the kind that `_cpu_zeros_like` takes."""
    local, weight = local_tensor(moment), local_tensor(parameter)
    return local.device.type == "cpu" and local.dtype == weight.dtype and local.is_pinned() == weight.is_cuda


def _cpu_zeros_like(parameter: Tensor) -> Tensor:
    """Zeros in CPU memory (page-locked beside a GPU); sharded as the parameter is, so that checkpoints can reshard."""
    zeros = torch.zeros(local_tensor(parameter).shape, dtype=parameter.dtype, pin_memory=parameter.is_cuda)
    if local_tensor(parameter) is parameter:
        return zeros
    sharded = torch.empty_like(parameter)
    sharded._local_tensor = zeros  # type: ignore[attr-defined]
    return sharded
