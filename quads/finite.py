"""Whether numbers are numbers: one reduction a tensor finds NaN and Inf, without a copy of it.

A weight that is not finite spreads to every token within a few layers, and a quantizer hides it (its block becomes NaN,
its neighbours keep their scale). So it is refused at every door, by the name of its tensor.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from quads.distributed import lowest
from quads.errors import UserError


def is_finite(tensor: Tensor) -> bool:
    """No element of a floating-point tensor is NaN or infinite. Waits for the device."""
    return bool(largest([tensor])[0].isfinite())


def require_finite(name: str, tensor: Tensor, where: object) -> None:
    """Raises UserError that names the tensor and where it was found."""
    if not is_finite(tensor):
        bad = int((~tensor.isfinite()).sum())
        raise UserError(
            f"{where}: tensor {name} has {bad} values of {tensor.numel()} that are not finite (NaN or infinity); "
            "use an earlier or undamaged copy of the weights"
        )


@torch.no_grad()
def first_not_finite(named: Iterable[tuple[str, Tensor]]) -> str | None:
    """The first name whose tensor has NaN or infinity once it is cast to bf16, which is what is quantized and shipped.
    Collective: a process looks at its own shards, all get the same answer. Reads each tensor once, waits once."""
    names, tensors = zip(*named, strict=True)
    amaxes_P = torch.stack([amax.float() for amax in largest(getattr(t, "_local_tensor", t) for t in tensors)])
    bad_P = ~amaxes_P.bfloat16().isfinite()
    first = lowest(int(torch.where(bad_P.any(), bad_P.int().argmax(), len(names))))
    return names[first] if first < len(names) else None


@torch.no_grad()
def largest(tensors: Iterable[Tensor]) -> list[Tensor]:
    """max |x| of each tensor, 0-dim on its device; NaN where one of its elements is NaN, 0 for an empty one.

    Example: `[float(v) for v in largest([torch.tensor([1.0, -3.0])])]` is `[3.0]`
    """
    tensors = [t.detach() for t in tensors]
    filled = [t for t in tensors if t.numel()]
    if all(t.is_cuda for t in filled):
        found = iter(torch._foreach_norm(filled, torch.inf) if filled else [])  # one launch for many  # pyright: ignore
    else:  # on a CPU the norm is eight times slower than this
        found = iter([torch.stack(torch.aminmax(t)).abs().amax() for t in filled])
    return [next(found) if t.numel() else t.new_zeros(()) for t in tensors]
