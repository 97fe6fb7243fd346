"""Quantizers where they run: Triton kernels on a CUDA device, plain torch elsewhere; equal bits.

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


def _on_gpu(x: Tensor, dtype: torch.dtype) -> bool:
    """Whether a kernel serves x with results in `dtype`."""
    return x.is_cuda and x.numel() > 0 and torch.float64 not in (x.dtype, dtype)


def _mxfp4() -> ModuleType:
    from quads.quant.triton import mxfp4

    return mxfp4


def pack_mxfp4(w: Tensor, rule: str, scales: Scales | None, cast: bool) -> tuple[Tensor, Tensor]:
    if not _on_gpu(w, w.dtype) or rule not in _mxfp4().RULES:
        return mxfp4.pack(w, rule, scales, cast)
    return _mxfp4().pack(w, rule, cast)


def unpack_mxfp4(packed: Tensor, byte: Tensor, g: Tensor | None, dtype: torch.dtype, num_columns: int) -> Tensor:
    if not _on_gpu(packed, dtype) or packed.shape[-1] != 16 * byte.shape[-1]:
        return mxfp4.unpack(packed, byte, g, dtype, num_columns)
    return _mxfp4().unpack(packed, byte, dtype, num_columns)


def qdq_rows_mxfp4(x: Tensor, rule: str, dtype: torch.dtype) -> Tensor:
    if not _on_gpu(x, dtype) or rule not in _mxfp4().RULES:
        return mxfp4.qdq_rows(x, rule, dtype)
    return _mxfp4().qdq_rows(x, rule, dtype)


def _hif4() -> ModuleType:
    from quads.quant.triton import hif4

    return hif4


def pack_hif4(w: Tensor, rule: str, scales: Scales | None, cast: bool) -> tuple[Tensor, Tensor]:
    return _hif4().pack(w, cast) if _on_gpu(w, w.dtype) else hif4.pack(w, rule, scales, cast)


def unpack_hif4(packed: Tensor, levels: Tensor, g: Tensor | None, dtype: torch.dtype, num_columns: int) -> Tensor:
    if not _on_gpu(packed, dtype):
        return hif4.unpack(packed, levels, g, dtype, num_columns)
    return _hif4().unpack(packed, levels, dtype, num_columns)


def qdq_rows_hif4(x: Tensor, rule: str, dtype: torch.dtype) -> Tensor:
    return _hif4().qdq_rows(x, dtype) if _on_gpu(x, dtype) else hif4.qdq_rows(x, rule, dtype)


def _four_over_six() -> ModuleType:
    from quads.quant.triton import four_over_six

    return four_over_six


def pack_four_over_six(w: Tensor, rule: str, scales: Scales | None, cast: bool) -> tuple[Tensor, Tensor]:
    if not _on_gpu(w, w.dtype) or scales is None:
        return four_over_six.pack(w, rule, scales, cast)
    return _four_over_six().pack(w, rule.partition("+")[2], *scales, cast)


def unpack_four_over_six(
    packed: Tensor, block_scale: Tensor, g: Tensor | None, dtype: torch.dtype, num_columns: int
) -> Tensor:
    """NVFP4's values, but zeros as +0."""
    if not _on_gpu(packed, dtype):
        return four_over_six.unpack(packed, block_scale, g, dtype, num_columns)
    return _nvfp4(packed).dequantize(packed, block_scale, g, dtype, num_columns) + 0.0


def qdq_rows_four_over_six(x: Tensor, rule: str, dtype: torch.dtype) -> Tensor:
    if not _on_gpu(x, dtype):
        return four_over_six.qdq_rows(x, rule, dtype)
    return _four_over_six().qdq_rows(x, rule.partition("+")[2], dtype)
