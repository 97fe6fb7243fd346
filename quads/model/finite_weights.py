"""Whether every weight of a model is finite, in one pass over the masters and one answer for all processes."""

import torch
from torch import nn

from quads.distributed import lowest
from quads.errors import UserError
from quads.finite import largest
from quads.model.parallelize import local_tensor, reshard


@torch.no_grad()
def first_not_finite(model: nn.Module) -> str | None:
    """Name of the first parameter whose cast to bf16, which is what gets quantized and shipped, has NaN or infinity.
    Collective: a process looks at its own shards, all get the same answer. Reads each master once, and waits once."""
    reshard(model)
    names, parameters = zip(*model.named_parameters(), strict=True)
    amaxes_P = torch.stack([amax.float() for amax in largest(map(local_tensor, parameters))])
    bad_P = ~amaxes_P.bfloat16().isfinite()
    first = lowest(int(torch.where(bad_P.any(), bad_P.int().argmax(), len(names))))
    return names[first] if first < len(names) else None


def require_finite_weights(model: nn.Module, purpose: str) -> None:
    """Raises UserError that names the first parameter that is not finite. Collective. purpose: what was to be done with
    the weights."""
    name = first_not_finite(model)
    if name is not None:
        raise UserError(
            f"{purpose}: weight {name} is not finite in bf16 (NaN, infinity, or beyond 3.39e38); nothing was written. "
            "Weights that are broken stay so at any learning rate: go on from an earlier checkpoint"
        )
