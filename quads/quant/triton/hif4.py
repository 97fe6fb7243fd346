"""HiF4's kernels: NB blocks of 64 a program, each by itself. Bit for bit quads/quant/hif4.py."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quads.quant.triton.blocks import (
    casts,
    launch_blocks,
    launch_values,
    load_as,
    load_codes,
    nibbles,
    room,
    store_as,
    whole,
)
from quads.quant.triton.math import INF_BITS, abs_bits, to_bf16, with_sign


@triton.jit
def hif4_kernel(
    x_ptr,
    out_ptr,
    levels_ptr,
    blocks,
    NB: tl.constexpr,
    PACK: tl.constexpr,
    CAST: tl.constexpr,
    ASM: tl.constexpr,
):
    """NB blocks of 64 a program: values into out, or (PACK) 32 bytes of codes and 4 of levels."""
    block = tl.program_id(0) * NB + tl.arange(0, NB)
    at = block.to(tl.int64)[:, None] * 64 + tl.arange(0, 64)[None, :]
    inside = (block < blocks)[:, None]
    x = load_as(x_ptr + at, inside, CAST, ASM)
    bad = tl.max(abs_bits(x), axis=1) >= INF_BITS
    x = tl.where(bad[:, None], 0.0, x)
    magnitude = tl.reshape(tl.abs(x), (NB, 8, 2, 4))
    max4 = tl.max(magnitude, axis=3)
    max8 = tl.max(max4, axis=2)
    s = to_bf16(tl.max(max8, axis=1) * 0.142578125, ASM).to(tl.float32)  # times bf16(1/7)
    s = tl.minimum(tl.maximum(s, 3.552713678800501e-15), 49152.0)  # 2**-48
    bits = s.to(tl.int32, bitcast=True)
    top = (bits + 0xFFFFF + ((bits >> 21) & 1)) >> 21
    level1 = (top << 21).to(tl.float32, bitcast=True)
    rec = to_bf16(tl.div_rn(tl.full(s.shape, 1.0, tl.float32), level1), ASM).to(tl.float32)
    double8 = max8 * rec[:, None] >= 4
    half8 = tl.where(double8, 0.5, 1.0)[:, :, None]
    double4 = max4 * rec[:, None, None] * half8 >= 2
    unit = tl.where(double4, 0.5, 0.25) * tl.where(double8, 2.0, 1.0)[:, :, None]  # one step of the codes
    steps = tl.where(double4, 2.0, 4.0) * half8
    q = magnitude * rec[:, None, None, None] * steps[:, :, :, None] + 0.5
    q = tl.minimum(tl.floor(q), 7.0)
    if PACK:
        sign = (x.to(tl.int32, bitcast=True) >> 28) & 8
        pairs = block.to(tl.int64)[:, None] * 32 + tl.arange(0, 32)[None, :]
        tl.store(out_ptr + pairs, nibbles(tl.reshape(q, (NB, 64)).to(tl.int32) | sign, NB, 64), mask=inside)
        place = tl.arange(0, 8)
        two = tl.sum(double8.to(tl.int32) << place[None, :], axis=1)
        three = tl.sum(tl.reshape(double4, (NB, 2, 8)).to(tl.int32) << place[None, None, :], axis=2)
        low, high = tl.split(three)
        at = levels_ptr + block.to(tl.int64) * 4
        tl.store(at, tl.where(bad, 0xFF, top - 316).to(tl.uint8), mask=block < blocks)  # 316 = (127 - 48) << 2
        tl.store(at + 1, two.to(tl.uint8), mask=block < blocks)
        tl.store(at + 2, low.to(tl.uint8), mask=block < blocks)
        tl.store(at + 3, high.to(tl.uint8), mask=block < blocks)
    else:
        value = with_sign(tl.reshape(q * unit[:, :, :, None], (NB, 64)), x)
        store_as(out_ptr + at, value * tl.where(bad, float("nan"), level1)[:, None], inside, ASM)


@triton.jit
def hif4_values_kernel(codes_ptr, levels_ptr, out_ptr, blocks, NB: tl.constexpr, ASM: tl.constexpr):
    """NB blocks of 64 a program, back to values."""
    block = tl.program_id(0) * NB + tl.arange(0, NB)
    inside = (block < blocks)[:, None]
    column = tl.arange(0, 64)[None, :]
    at = levels_ptr + block.to(tl.int64) * 4
    byte = tl.load(at, mask=block < blocks, other=0).to(tl.int32)
    level1 = tl.where(byte == 0xFF, float("nan"), ((byte + 316) << 21).to(tl.float32, bitcast=True))
    two = tl.load(at + 1, mask=block < blocks, other=0).to(tl.int32)
    three = tl.load(at + 2, mask=block < blocks, other=0).to(tl.int32)
    three |= tl.load(at + 3, mask=block < blocks, other=0).to(tl.int32) << 8
    shift = ((two[:, None] >> (column // 8)) & 1) + ((three[:, None] >> (column // 4)) & 1)
    code = load_codes(codes_ptr, block, inside, 64)
    q = (code & 7).to(tl.float32) * ((shift + 125) << 23).to(tl.float32, bitcast=True)  # times 2**(shift - 2)
    value = tl.where(code & 8 != 0, -q, q) * level1[:, None]
    store_as(out_ptr + block.to(tl.int64)[:, None] * 64 + column, value, inside, ASM)


def qdq_rows(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`hif4.qdq_rows` for bf16 or fp32 on the GPU."""
    padded = whole(x, 64)
    out = torch.empty(padded.shape, dtype=dtype, device=x.device)
    launch_blocks(hif4_kernel, padded, 64, out, out, 4, PACK=False, CAST=False)
    return out[..., : x.shape[-1]]


def pack(w: Tensor, cast: bool) -> tuple[Tensor, Tensor]:
    """`hif4.pack` for bf16 or fp32 on the GPU."""
    padded = whole(w, 64)
    codes, levels = room(padded, 32, 64), room(padded, 4, 64)
    launch_blocks(hif4_kernel, padded, 64, codes, levels, 4, PACK=True, CAST=casts(w, cast))
    return codes, levels


def unpack(codes: Tensor, levels: Tensor, dtype: torch.dtype, num_columns: int) -> Tensor:
    """`hif4.unpack` in bf16 or fp32 on the GPU."""
    out = torch.empty(*levels.shape[:-1], levels.shape[-1] * 16, dtype=dtype, device=levels.device)
    launch_values(hif4_values_kernel, codes, levels, out, 64)
    return out[..., :num_columns]
