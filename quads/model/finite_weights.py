"""Whether every weight of a model is finite, asked before the weights go anywhere."""

from torch import nn

from quads.errors import UserError
from quads.finite import first_not_finite
from quads.model.parallelize import reshard


def first_broken_weight(model: nn.Module) -> str | None:
    """Name of the first parameter with NaN, infinity, or a value beyond bf16. Collective, see `first_not_finite`."""
    reshard(model)
    return first_not_finite(model.named_parameters())


def require_finite_weights(model: nn.Module, purpose: str) -> None:
    """Raises UserError that names the first parameter that is not finite. Collective. purpose: what was to be done with
    the weights."""
    name = first_broken_weight(model)
    if name is not None:
        raise UserError(
            f"{purpose}: weight {name} is not finite in bf16 (NaN, infinity, or beyond 3.39e38), so nothing was "
            "written; go on from an earlier checkpoint, for no learning rate mends it"
        )
