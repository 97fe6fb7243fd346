"""Fake quantization with a straight-through estimator: forward uses the quantized value, backward passes the gradient
on unchanged, as if quantization were the identity. Scales are constants; nothing is clipped out of the gradient,
because a block scale always reaches the largest element of its block.

Activations are quantized by an operator of their own, `torch.ops.quads.*`, which `torch.compile` calls and does not
look into: compiled code has the bits of eager code.
"""

from typing import Any

import torch
from torch import Tensor

from quads.quant import nvfp4
from quads.quant.weights import fp8_quantizer, qdq_fp8


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, value: Tensor) -> Tensor:
        ctx.dtype = x.dtype
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0].to(ctx.dtype), None


@torch.library.custom_op("quads::qdq_rows", mutates_args=())
def qdq_rows(x: Tensor) -> Tensor:
    """`nvfp4.qdq_rows` in the dtype of x, opaque to the compiler."""
    return nvfp4.qdq_rows(x, x.dtype)


@torch.library.custom_op("quads::qdq_rows_fp8", mutates_args=())
def qdq_rows_fp8(x: Tensor, mode: str) -> Tensor:
    """`fp8.qdq_rows` in the dtype of x, opaque to the compiler."""
    return fp8_quantizer(x, x.dtype).qdq_rows(x, mode, x.dtype)


@qdq_rows.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@qdq_rows_fp8.register_fake
def _(x: Tensor, mode: str) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def straight_through(x: Tensor, value: Tensor) -> Tensor:
    """`value` in the forward, bit for bit; its gradient goes to x, in x's dtype. Same shapes, any two dtypes.

    (`x + (value - x).detach()` would round the sum and not be `value`.)
    """
    return _StraightThrough.apply(x, value.detach())  # pyright: ignore[reportReturnType]


def fake_quantize_rows(x: Tensor) -> Tensor:
    """NVFP4 activations [..., K], one power-of-two scale a row, in the dtype of x."""
    return straight_through(x, qdq_rows(x.detach()))


def fake_quantize_weight_fp8(w: Tensor, dtype: torch.dtype, mode: nvfp4.GlobalScaleMode = "pow2") -> Tensor:
    """FP8 of bf16(w), 128 x 128 blocks of [..., N, K], in `dtype`."""
    return straight_through(w, qdq_fp8(w.detach().bfloat16(), mode, dtype))


def fake_quantize_rows_fp8(x: Tensor, mode: nvfp4.GlobalScaleMode = "pow2") -> Tensor:
    """FP8 activations [..., K], one scale for a row and 128 channels, in the dtype of x."""
    return straight_through(x, qdq_rows_fp8(x.detach(), mode))
