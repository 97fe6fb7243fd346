"""MXFP4's kernels: NB blocks of 32 a program, each by itself. Bit for bit quads/quant/mxfp4.py."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quads.quant.triton.blocks import (
    casts,
    e2m1_code,
    e2m1_value,
    launch_blocks,
    launch_values,
    load_as,
    load_codes,
    nibbles,
    room,
    store_as,
    whole,
)
from quads.quant.triton.math import INF_BITS, abs_bits, e2m1_round, with_sign

RULES = {"floor": 0, "even": 1, "ceil": 2}


@triton.jit
def power_of_two(byte):
    """E8M0 byte (int32) -> fp32 2**(byte - 127); 2**-127 is subnormal."""
    return tl.where(byte == 0, 0x400000, byte << 23).to(tl.float32, bitcast=True)


@triton.jit
def mxfp4_kernel(
    x_ptr,
    out_ptr,
    byte_ptr,
    blocks,
    NB: tl.constexpr,
    RULE: tl.constexpr,
    PACK: tl.constexpr,
    CAST: tl.constexpr,
    ASM: tl.constexpr,
):
    """NB blocks of 32 a program: values, or (PACK) 16 bytes of codes and a scale byte. RULE: see RULES."""
    block = tl.program_id(0) * NB + tl.arange(0, NB)
    at = block.to(tl.int64)[:, None] * 32 + tl.arange(0, 32)[None, :]
    inside = (block < blocks)[:, None]
    x = load_as(x_ptr + at, inside, CAST, ASM)
    bits = tl.max(abs_bits(x), axis=1)
    bad = bits >= INF_BITS
    bits = tl.where(bad, 0, bits)
    if RULE == 2:
        sixth = tl.div_rn(bits.to(tl.float32, bitcast=True), tl.full(bits.shape, 6.0, tl.float32))
        bits = sixth.to(tl.int32, bitcast=True)
        fraction = bits & 0x7FFFFF
        up = tl.where(bits >> 23 > 0, fraction > 0, fraction > 0x400000)  # of a subnormal, 2**-127 is 0x400000
        byte = (bits >> 23) + up.to(tl.int32)
    else:
        byte = ((bits + 0x200000 * RULE) >> 23) - 2
    byte = tl.minimum(tl.maximum(byte, 0), 254)
    x = tl.where(bad[:, None], 0.0, x)
    value = with_sign(e2m1_round(tl.abs(x) * power_of_two(254 - byte)[:, None]), x)
    if PACK:
        pairs = block.to(tl.int64)[:, None] * 16 + tl.arange(0, 16)[None, :]
        tl.store(out_ptr + pairs, nibbles(e2m1_code(value), NB, 32), mask=inside)
        tl.store(byte_ptr + block, tl.where(bad, 0xFF, byte).to(tl.uint8), mask=block < blocks)
    else:
        scale = tl.where(bad, float("nan"), power_of_two(byte))
        store_as(out_ptr + at, value * scale[:, None] + 0.0, inside, ASM)


@triton.jit
def mxfp4_values_kernel(codes_ptr, byte_ptr, out_ptr, blocks, NB: tl.constexpr, ASM: tl.constexpr):
    """NB blocks of 32 a program, back to values."""
    block = tl.program_id(0) * NB + tl.arange(0, NB)
    inside = (block < blocks)[:, None]
    byte = tl.load(byte_ptr + block, mask=block < blocks, other=0).to(tl.int32)
    scale = tl.where(byte == 0xFF, float("nan"), power_of_two(byte))
    value = e2m1_value(load_codes(codes_ptr, block, inside, 32)) * scale[:, None] + 0.0
    store_as(out_ptr + block.to(tl.int64)[:, None] * 32 + tl.arange(0, 32)[None, :], value, inside, ASM)


def qdq_rows(x: Tensor, rule: str, dtype: torch.dtype) -> Tensor:
    """`mxfp4.qdq_rows` for bf16 or fp32 on the GPU; dtype: one of these."""
    padded = whole(x, 32)
    out = torch.empty(padded.shape, dtype=dtype, device=x.device)
    launch_blocks(mxfp4_kernel, padded, 32, out, out, 2, RULE=RULES[rule], PACK=False, CAST=False)
    return out[..., : x.shape[-1]]


def pack(w: Tensor, rule: str, cast: bool) -> tuple[Tensor, Tensor]:
    """`mxfp4.pack` for bf16 or fp32 on the GPU."""
    padded = whole(w, 32)
    codes, byte = room(padded, 16, 32), room(padded, 1, 32)
    launch_blocks(mxfp4_kernel, padded, 32, codes, byte, 2, RULE=RULES[rule], PACK=True, CAST=casts(w, cast))
    return codes, byte


def unpack(codes: Tensor, byte: Tensor, dtype: torch.dtype, num_columns: int) -> Tensor:
    """`mxfp4.unpack` in bf16 or fp32 on the GPU."""
    out = torch.empty(*byte.shape[:-1], byte.shape[-1] * 32, dtype=dtype, device=byte.device)
    launch_values(mxfp4_values_kernel, codes, byte, out, 32)
    return out[..., :num_columns]
