"""FP8 with block scales in one pass over memory: the functions of fp8.py, under the same names, with the same bits.

A program holds a tile of up to 128 x 128 elements: one scale block of a weight, or 16 rows by 128 channels of
activations with one scale a row.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quads.quant.fp8 import BLOCK
from quads.quant.nvfp4 import GlobalScaleMode
from quads.quant.triton.math import INF_BITS, abs_bits, compiled, e4m3_decode, e4m3_encode, to_bf16

TILE_ROWS = 16  # of activations


@triton.jit
def fp8_scale(amax_bits, POW2: tl.constexpr):
    """Bits of a finite amax >= 0 -> the scale of fp8.py."""
    amax = amax_bits.to(tl.float32, bitcast=True)
    if POW2:  # 448 = 1.75 * 2**8: one binade more when the mantissa of amax exceeds 1.75
        bits = tl.maximum(amax_bits + (0x1FFFFF - (8 << 23)), 1 << 23) & 0x7F800000
        scale = bits.to(tl.float32, bitcast=True)
    else:
        scale = tl.maximum(tl.div_rn(amax, 448.0), 1.1754943508222875e-38)
    return tl.where(amax_bits == 0, 1.0, scale)


@triton.jit
def store(pointers, value, inside, ASM: tl.constexpr):
    """In the dtype of the pointers: bf16 or fp32."""
    if pointers.dtype.element_ty == tl.bfloat16:
        tl.store(pointers, to_bf16(value, ASM), mask=inside)
    else:
        tl.store(pointers, value, mask=inside)


@triton.jit
def fp8_value(byte, scale):
    """E4M3 byte with its sign (int32) times scale; 0x7F is NaN."""
    magnitude = tl.where((byte & 0x7F) == 0x7F, float("nan"), e4m3_decode(byte & 0x7F))
    # Compiled, -0.0 is 0 - 0.0: the sign of a zero needs its bit.
    bits = magnitude.to(tl.int32, bitcast=True) | ((byte & 0x80) << 24)
    return bits.to(tl.float32, bitcast=True) * scale


@triton.jit
def fp8_quantize_kernel(
    x_ptr,
    byte_ptr,
    scale_ptr,
    value_ptr,
    N,
    K,
    BN: tl.constexpr,
    BK: tl.constexpr,
    PER_ROW: tl.constexpr,
    POW2: tl.constexpr,
    CODES: tl.constexpr,
    ASM: tl.constexpr,
):
    """One tile of x [E, N, K]: its bytes and scale (CODES), or its values in value_ptr's dtype."""
    base = tl.program_id(2).to(tl.int64) * N * K
    row = tl.program_id(1) * BN + tl.arange(0, BN)
    column = tl.program_id(0) * BK + tl.arange(0, BK)
    inside = (row < N)[:, None] & (column < K)[None, :]
    offsets = base + row.to(tl.int64)[:, None] * K + column[None, :]
    x = tl.load(x_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    bits = abs_bits(x)
    finite = tl.where(bits >= INF_BITS, 0, bits)
    if PER_ROW:
        scale = tl.expand_dims(fp8_scale(tl.max(finite, axis=1), POW2), 1)
    else:
        scale = fp8_scale(tl.max(tl.ravel(finite)), POW2)
    byte = e4m3_encode(tl.minimum(tl.div_rn(finite.to(tl.float32, bitcast=True), scale), 448.0))
    byte = tl.where(bits >= INF_BITS, 0x7F, byte | ((x.to(tl.int32, bitcast=True) >> 24) & 0x80))
    if CODES:
        tl.store(byte_ptr + offsets, byte.to(tl.uint8), mask=inside)
        tiles = tl.num_programs(0) * tl.num_programs(1)
        tile = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        tl.store(scale_ptr + tl.program_id(2).to(tl.int64) * tiles + tile, scale)
    else:
        store(value_ptr + offsets, fp8_value(byte, scale), inside, ASM)


@triton.jit
def fp8_dequantize_kernel(byte_ptr, scale_ptr, value_ptr, N, K, BLOCK: tl.constexpr, ASM: tl.constexpr):
    """One scale block of [E, N, K]."""
    base = tl.program_id(2).to(tl.int64) * N * K
    row = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = (row < N)[:, None] & (column < K)[None, :]
    offsets = base + row.to(tl.int64)[:, None] * K + column[None, :]
    byte = tl.load(byte_ptr + offsets, mask=inside, other=0).to(tl.int32)
    tiles = tl.num_programs(0) * tl.num_programs(1)
    tile = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    scale = tl.load(scale_ptr + tl.program_id(2).to(tl.int64) * tiles + tile)
    store(value_ptr + offsets, fp8_value(byte, scale), inside, ASM)


def _launch(x: Tensor, rows: int, mode: GlobalScaleMode, dtype: torch.dtype | None) -> tuple[Tensor, Tensor, Tensor]:
    """(bytes, scales, values); dtype None: bytes and scales, else values. rows: of a tile; 128 shares its scale."""
    if mode not in ("pow2", "amax"):
        raise ValueError(f'scale mode is "pow2" or "amax", not {mode!r}')
    x = x.contiguous()
    num_rows, num_columns = x.shape[-2:]
    matrices = x.shape[:-2].numel()
    grid = (triton.cdiv(num_columns, BLOCK), triton.cdiv(num_rows, rows), matrices)
    codes = torch.empty(x.shape, dtype=torch.uint8, device=x.device) if dtype is None else x
    scales = torch.empty(*x.shape[:-2], grid[1], grid[0], device=x.device) if dtype is None else x
    values = x if dtype is None else torch.empty(x.shape, dtype=dtype, device=x.device)
    if x.numel():
        fp8_quantize_kernel[grid](
            x,
            codes,
            scales,
            values,
            num_rows,
            num_columns,
            BN=rows,
            BK=BLOCK,
            PER_ROW=rows != BLOCK,
            POW2=mode == "pow2",
            CODES=dtype is None,
            ASM=compiled(),
            num_warps=4 if rows != BLOCK else 8,
            enable_fp_fusion=False,
        )
    return codes, scales, values


def quantize_weight(w: Tensor, mode: GlobalScaleMode = "pow2") -> tuple[Tensor, Tensor]:
    """`fp8.quantize_weight` for bf16 or fp32 [..., N, K] on the GPU."""
    codes, scales, _ = _launch(w, BLOCK, mode, None)
    return codes.view(torch.float8_e4m3fn), scales


def dequantize_weight(codes: Tensor, scales: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """`fp8.dequantize_weight` in bf16 or fp32."""
    num_rows, num_columns = codes.shape[-2:]
    out = torch.empty(codes.shape, dtype=dtype, device=codes.device)
    grid = (triton.cdiv(num_columns, BLOCK), triton.cdiv(num_rows, BLOCK), codes.shape[:-2].numel())
    if codes.numel():
        fp8_dequantize_kernel[grid](
            codes.contiguous().view(torch.uint8),
            scales.contiguous(),
            out,
            num_rows,
            num_columns,
            BLOCK=BLOCK,
            ASM=compiled(),
            num_warps=8,
            enable_fp_fusion=False,
        )
    return out


def qdq_weight(w: Tensor, mode: GlobalScaleMode = "pow2", dtype: torch.dtype = torch.float32) -> Tensor:
    """`fp8.qdq_weight` in bf16 or fp32; the codes never reach memory."""
    return _launch(w, BLOCK, mode, dtype)[2]


def qdq_rows(x: Tensor, mode: GlobalScaleMode = "pow2", dtype: torch.dtype = torch.float32) -> Tensor:
    """`fp8.qdq_rows` in bf16 or fp32; the codes never reach memory."""
    rows = x.reshape(-1, x.shape[-1])
    return _launch(rows, TILE_ROWS, mode, dtype)[2].view(x.shape)
