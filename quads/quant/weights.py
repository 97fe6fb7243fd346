"""The weight quantizers where they run: the Triton kernels on a CUDA device, plain torch elsewhere. The same bits.

A learner quantizes all its weights after every update and decodes them in every forward, so this is where QAT costs
time: the kernels read and write each byte once. What runs inside a layer's forward is an operator of its own, which
`torch.compile` calls and does not look into.
"""

import importlib
from typing import Any

import torch
from torch import Tensor

from quads.quant import fp8, nvfp4
from quads.quant.nvfp4 import GlobalScaleMode


def _quantizer(device: torch.device) -> Any:
    """The module whose `quantize`, `qdq` and `dequantize` serve this device."""
    return importlib.import_module("quads.quant.triton.pack") if device.type == "cuda" else nvfp4


def weight_amax(w: Tensor, cast: bool = False) -> Tensor:
    """Finite amax of what shares a global scale when nothing else does: [] for [N, K], [E, 1, 1] for [E, N, K].

    cast: of bf16(w), here and in `quantize`. A kernel casts what it reads; no copy of the master is made.
    """
    if w.dim() not in (2, 3):
        raise ValueError(f"a weight is [N, K] or [E, N, K], got {list(w.shape)}")
    if w.device.type == "cuda" and w.numel():
        return _quantizer(w.device).weight_amax(w, cast).reshape((-1, 1, 1) if w.dim() == 3 else ())
    return nvfp4.finite_amax(w.bfloat16() if cast else w, dim=(-2, -1) if w.dim() == 3 else None)


def quantize(
    w: Tensor, g: Tensor, mode: GlobalScaleMode, gs: Tensor | None, cast: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """w [N, K] with g [], or [E, N, K] with g [E, 1, 1] -> packed, block scales, g: see `nvfp4.quantize`."""
    if w.device.type != "cuda" or w.numel() == 0:
        return nvfp4.quantize(w.bfloat16() if cast else w, g, mode, gs=gs)
    packed, block_scale, _ = _quantizer(w.device).quantize(w, g, mode, gs=gs, cast=cast)
    return packed, block_scale, g


@torch.library.custom_op("quads::qdq_nvfp4", mutates_args=())
def qdq(w: Tensor, g: Tensor, mode: str, gs: Tensor | None, dtype: torch.dtype) -> Tensor:
    """`dequantize(*quantize(w, ...))` in `dtype`."""
    return _quantizer(w.device).qdq(w, g, mode, gs=gs, dtype=dtype).contiguous()


@qdq.register_fake
def _(w: Tensor, g: Tensor, mode: str, gs: Tensor | None, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(w, dtype=dtype, memory_format=torch.contiguous_format)


@torch.library.custom_op("quads::dequantize_nvfp4", mutates_args=())
def dequantize(packed: Tensor, block_scale: Tensor, g: Tensor, dtype: torch.dtype, num_columns: int) -> Tensor:
    """The values [..., N, num_columns] in `dtype`: see `nvfp4.dequantize`."""
    value = _quantizer(packed.device).dequantize(packed, block_scale, g, dtype, num_columns)
    return value.contiguous()  # K that is no multiple of 16 comes as a view


@dequantize.register_fake
def _(packed: Tensor, block_scale: Tensor, g: Tensor, dtype: torch.dtype, num_columns: int) -> Tensor:
    return packed.new_empty(*packed.shape[:-1], num_columns, dtype=dtype)


def quantize_rows_into(rows: Tensor, w: Tensor, g: Tensor, mode: GlobalScaleMode, gs: Tensor | None) -> None:
    """`quantize` of bf16(w) into rows, uint8 [..., N, 9 B]: the 8 B code bytes of each row, then its B scale bytes."""
    if w.device.type == "cuda" and w.numel() and w.shape[-1] % nvfp4.BLOCK == 0:
        _quantizer(w.device).quantize_rows_into(w, g, mode, gs, rows, cast=True)
        return
    packed, block_scale, _ = quantize(w, g, mode, gs, cast=True)
    torch.cat([packed, block_scale.view(torch.uint8)], dim=-1, out=rows)


def split_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """(packed uint8 [..., N, 8 B], block scales float8_e4m3fn [..., N, B]) of such rows, contiguous copies."""
    num_code_bytes = rows.shape[-1] // 9 * 8
    packed, block_scale = rows[..., :num_code_bytes], rows[..., num_code_bytes:]
    return packed.contiguous(), block_scale.contiguous().view(torch.float8_e4m3fn)


def dequantize_rows_into(out: Tensor, rows: Tensor, g: Tensor) -> None:
    """The values [..., N, K] of such rows into `out` (contiguous)."""
    if out.device.type == "cuda" and out.numel() and out.shape[-1] % nvfp4.BLOCK == 0:
        _quantizer(out.device).dequantize_rows_into(rows, g, out)
        return
    out.copy_(dequantize(*split_rows(rows), g, out.dtype, out.shape[-1]))


def fp8_quantizer(x: Tensor, dtype: torch.dtype) -> Any:
    """The module whose `quantize_weight`, `dequantize_weight`, `qdq_weight` and `qdq_rows` (see fp8.py) serve x with
    results in `dtype`."""
    fused = x.device.type == "cuda" and torch.float64 not in (x.dtype, dtype)
    return importlib.import_module("quads.quant.triton.fp8") if fused else fp8


def quantize_fp8(w: Tensor, mode: GlobalScaleMode) -> tuple[Tensor, Tensor]:
    """`fp8.quantize_weight`."""
    return fp8_quantizer(w, w.dtype).quantize_weight(w, mode)


@torch.library.custom_op("quads::qdq_weight_fp8", mutates_args=())
def qdq_fp8(w: Tensor, mode: str, dtype: torch.dtype) -> Tensor:
    """`fp8.qdq_weight`."""
    return fp8_quantizer(w, dtype).qdq_weight(w, mode, dtype)


@torch.library.custom_op("quads::dequantize_fp8", mutates_args=())
def dequantize_fp8(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """`fp8.dequantize_weight`."""
    return fp8_quantizer(codes, dtype).dequantize_weight(codes, scales, dtype)


@qdq_fp8.register_fake
def _(w: Tensor, mode: str, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(w, dtype=dtype, memory_format=torch.contiguous_format)


@dequantize_fp8.register_fake
def _(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(codes, dtype=dtype, memory_format=torch.contiguous_format)
