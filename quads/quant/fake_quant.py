"""Fake quantization with a straight-through estimator: forward uses the quantized value, backward passes the gradient
on unchanged, as if quantization were the identity. Scales are constants; nothing is clipped out of the gradient: a
block scale reaches the largest element of its block, or saturates it where the rule of the format says so.

The quantizers that run inside a layer's forward are operators, `torch.ops.quads.*`, with the format by its name:
`torch.compile` calls them and does not look into them, so compiled code has the bits of eager code.
"""

from typing import Any

import torch
from torch import Tensor

from quads.quant import formats
from quads.quant.formats import FORMATS


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, value: Tensor) -> Tensor:
        ctx.dtype = x.dtype
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0].to(ctx.dtype), None


def straight_through(x: Tensor, value: Tensor) -> Tensor:
    """`value` in the forward, bit for bit; its gradient goes to x, in x's dtype. Same shapes, any two dtypes.

    (`x + (value - x).detach()` would round the sum and not be `value`.)
    """
    return _StraightThrough.apply(x, value.detach())  # pyright: ignore[reportReturnType]


@torch.library.custom_op("quads::qdq", mutates_args=())
def qdq(w: Tensor, g: Tensor | None, gs: Tensor | None, format: str, rule: str, dtype: torch.dtype) -> Tensor:
    """The values of a weight in a format: `formats.qdq`."""
    scales = None if g is None or gs is None else (g, gs)
    return formats.qdq(FORMATS[format], w, rule, scales, dtype).contiguous()


@qdq.register_fake
def _(w: Tensor, g: Tensor | None, gs: Tensor | None, format: str, rule: str, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(w, dtype=dtype, memory_format=torch.contiguous_format)


@torch.library.custom_op("quads::unpack", mutates_args=())
def unpack(
    packed: Tensor, block_scale: Tensor, g: Tensor | None, format: str, dtype: torch.dtype, num_columns: int
) -> Tensor:
    """The values [..., N, K] of packed bytes: `Format.unpack`."""
    value = FORMATS[format].unpack(packed, block_scale, g, dtype, num_columns)
    return value.contiguous()  # K that is no multiple of the block comes as a view


@unpack.register_fake
def _(
    packed: Tensor, block_scale: Tensor, g: Tensor | None, format: str, dtype: torch.dtype, num_columns: int
) -> Tensor:
    return packed.new_empty(*packed.shape[:-1], num_columns, dtype=dtype)


@torch.library.custom_op("quads::qdq_rows", mutates_args=())
def qdq_rows(x: Tensor, format: str, rule: str) -> Tensor:
    """The values of activations, each row by itself, in the dtype of x: `Format.qdq_rows`."""
    return FORMATS[format].qdq_rows(x, rule, x.dtype).contiguous()


@qdq_rows.register_fake
def _(x: Tensor, format: str, rule: str) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def fake_quantize_rows(x: Tensor, format: str, rule: str) -> Tensor:
    """Activations [..., K] in a format, in the dtype of x; straight through."""
    return straight_through(x, qdq_rows(x.detach(), format, rule))
