"""Quantizers where they run: Triton kernels on a CUDA device, plain torch elsewhere; equal bits. Those of NVFP4 and FP8
quantize weights, those of the other formats activations.

A learner quantizes all its weights after every update and decodes them in every forward, so this is where QAT costs
time: the kernels read and write each byte once. The signatures are those that formats.py states.
"""

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from quads.quant import four_over_six, fp8, hif4, mxfp4, nvfp4

Scales = tuple[Tensor, Tensor]


def weight_amax(w: Tensor, cast: bool = False) -> Tensor:
    """Finite amax of what shares a global scale when nothing else does: [] for [N, K], [E, 1, 1] for [E, N, K].

    cast: of bf16(w), here and in `pack`. A kernel casts what it reads; no copy of the master is made.
    """
    if w.dim() not in (2, 3):
        raise ValueError(f"a weight is [N, K] or [E, N, K], got {list(w.shape)}")
    if w.is_cuda and w.numel():
        from quads.quant.triton import pack

        return pack.weight_amax(w, cast).reshape((-1, 1, 1) if w.dim() == 3 else ())
    return nvfp4.finite_amax(w.bfloat16() if cast else w, dim=(-2, -1) if w.dim() == 3 else None)


def _nvfp4(x: Tensor) -> Any:
    """The module whose `quantize`, `qdq` and `dequantize` serve the device of x."""
    if not x.is_cuda:
        return nvfp4
    from quads.quant.triton import pack

    return pack


def global_scale_nvfp4(amax: Tensor, rule: str) -> Scales:
    return nvfp4.global_scale(amax, rule)  # pyright: ignore[reportArgumentType]


def pack_nvfp4(w: Tensor, rule: str, scales: Scales | None, cast: bool) -> tuple[Tensor, Tensor]:
    assert scales is not None
    g, gs = scales
    if not w.is_cuda or w.numel() == 0:
        return nvfp4.quantize(w.bfloat16() if cast else w, g, rule, gs=gs)[:2]  # pyright: ignore[reportArgumentType]
    return _nvfp4(w).quantize(w, g, rule, gs=gs, cast=cast)[:2]


def unpack_nvfp4(packed: Tensor, block_scale: Tensor, g: Tensor | None, dtype: torch.dtype, num_columns: int) -> Tensor:
    return _nvfp4(packed).dequantize(packed, block_scale, g, dtype, num_columns)


def qdq_nvfp4(w: Tensor, rule: str, scales: Scales | None, dtype: torch.dtype) -> Tensor:
    assert scales is not None
    return _nvfp4(w).qdq(w, scales[0], rule, gs=scales[1], dtype=dtype)


def qdq_rows_nvfp4(x: Tensor, rule: str, dtype: torch.dtype) -> Tensor:
    """One power-of-two scale for each row, whatever the rule of the weights."""
    return nvfp4.qdq_rows(x, dtype)


def pack_rows_nvfp4(rows: Tensor, w: Tensor, rule: str, scales: Scales) -> bool:
    if not w.is_cuda or w.numel() == 0 or w.shape[-1] % nvfp4.BLOCK:
        return False
    _nvfp4(w).quantize_rows_into(w, scales[0], rule, scales[1], rows, cast=True)
    return True


def unpack_rows_nvfp4(out: Tensor, rows: Tensor, g: Tensor) -> bool:
    if not out.is_cuda or out.numel() == 0 or out.shape[-1] % nvfp4.BLOCK:
        return False
    _nvfp4(out).dequantize_rows_into(rows, g, out)
    return True


def _fp8(x: Tensor, dtype: torch.dtype) -> ModuleType:
    """The module whose functions (see fp8.py) serve x with results in `dtype`."""
    if not x.is_cuda or torch.float64 in (x.dtype, dtype):
        return fp8
    from quads.quant.triton import fp8 as kernels

    return kernels


def pack_fp8(w: Tensor, rule: str, scales: Scales | None, cast: bool) -> tuple[Tensor, Tensor]:
    return _fp8(w, w.dtype).quantize_weight(w.bfloat16() if cast else w, rule)


def unpack_fp8(codes: Tensor, block_scale: Tensor, g: Tensor | None, dtype: torch.dtype, num_columns: int) -> Tensor:
    return _fp8(codes, dtype).dequantize_weight(codes, block_scale, dtype)


def qdq_fp8(w: Tensor, rule: str, scales: Scales | None, dtype: torch.dtype) -> Tensor:
    return _fp8(w, dtype).qdq_weight(w, rule, dtype)


def qdq_rows_fp8(x: Tensor, rule: str, dtype: torch.dtype) -> Tensor:
    return _fp8(x, dtype).qdq_rows(x, rule, dtype)


def _blocks(x: Tensor, dtype: torch.dtype) -> Any:
    """The kernels for activations x with results in `dtype`, None where plain torch serves."""
    if not x.is_cuda or torch.float64 in (x.dtype, dtype):
        return None
    from quads.quant.triton import blocks

    return blocks


def qdq_rows_mxfp4(x: Tensor, rule: str, dtype: torch.dtype) -> Tensor:
    blocks = _blocks(x, dtype)
    if blocks is None or rule not in blocks.MXFP4_RULES:
        return mxfp4.qdq_rows(x, rule, dtype)
    return blocks.mxfp4_rows(x, rule, dtype)


def qdq_rows_hif4(x: Tensor, rule: str, dtype: torch.dtype) -> Tensor:
    blocks = _blocks(x, dtype)
    return hif4.qdq_rows(x, rule, dtype) if blocks is None else blocks.hif4_rows(x, dtype)


def qdq_rows_four_over_six(x: Tensor, rule: str, dtype: torch.dtype) -> Tensor:
    blocks = _blocks(x, dtype)
    if blocks is None:
        return four_over_six.qdq_rows(x, rule, dtype)
    return blocks.four_over_six_rows(x, rule.partition("+")[2], dtype)
