"""Activations of MXFP4, HiF4 and NVFP4 with four-over-six, quantized and read back by one kernel each: the values that
the reference matmul multiplies. The formats have no GEMM kernel of their own, and in plain torch a layer of a rollout
would launch hundreds of small kernels for them.

Blocks of MXFP4 and HiF4 stand alone: x is a flat run of them. Four-over-six has a scale for each row: a program holds
one row. Bits are those of mxfp4.py, hif4.py and four_over_six.py, in the interpreter and on a GPU.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from quads.quant.triton.math import (
    FLT_MAX,
    INF_BITS,
    abs_bits,
    compiled,
    e2m1_round,
    e4m3_decode,
    e4m3_encode,
    to_bf16,
    with_sign,
)

MXFP4_RULES = {"floor": 0, "even": 1, "ceil": 2}
BLOCKS = 16  # of a program


@triton.jit
def store_as(ptr, value, mask, ASM: tl.constexpr):
    """fp32 in the dtype of the tensor behind `ptr`, bfloat16 or fp32."""
    if ptr.dtype.element_ty == tl.bfloat16:
        tl.store(ptr, to_bf16(value, ASM), mask=mask)
    else:
        tl.store(ptr, value, mask=mask)


@triton.jit
def power_of_two(byte):
    """E8M0 byte (int32) -> fp32 2**(byte - 127); 2**-127 is subnormal."""
    return tl.where(byte == 0, 0x400000, byte << 23).to(tl.float32, bitcast=True)


@triton.jit
def mxfp4_kernel(x_ptr, out_ptr, blocks, NB: tl.constexpr, RULE: tl.constexpr, ASM: tl.constexpr):
    """NB blocks of 32 a program. RULE: as in MXFP4_RULES."""
    block = tl.program_id(0) * NB + tl.arange(0, NB)
    at = block.to(tl.int64)[:, None] * 32 + tl.arange(0, 32)[None, :]
    inside = (block < blocks)[:, None]
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
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
    x = tl.where(bad[:, None], 0.0, x) + 0.0  # -0.0 becomes +0.0
    code = with_sign(e2m1_round(tl.abs(x) * power_of_two(254 - byte)[:, None]), x)
    scale = tl.where(bad, float("nan"), power_of_two(byte))
    store_as(out_ptr + at, code * scale[:, None] + 0.0, inside, ASM)


@triton.jit
def hif4_kernel(x_ptr, out_ptr, blocks, NB: tl.constexpr, ASM: tl.constexpr):
    """NB blocks of 64 a program."""
    block = tl.program_id(0) * NB + tl.arange(0, NB)
    at = block.to(tl.int64)[:, None] * 64 + tl.arange(0, 64)[None, :]
    inside = (block < blocks)[:, None]
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    bad = tl.max(abs_bits(x), axis=1) >= INF_BITS
    x = tl.where(bad[:, None], 0.0, x) + 0.0
    magnitude = tl.reshape(tl.abs(x), (NB, 8, 2, 4))
    max4 = tl.max(magnitude, axis=3)
    max8 = tl.max(max4, axis=2)
    s = to_bf16(tl.max(max8, axis=1) * 0.142578125, ASM).to(tl.float32)  # times bf16(1/7)
    s = tl.minimum(tl.maximum(s, 3.552713678800501e-15), 49152.0)  # 2**-48
    bits = s.to(tl.int32, bitcast=True)
    level1 = (((bits + 0xFFFFF + ((bits >> 21) & 1)) >> 21) << 21).to(tl.float32, bitcast=True)
    rec = to_bf16(tl.div_rn(tl.full(s.shape, 1.0, tl.float32), level1), ASM).to(tl.float32)
    level1 = tl.where(bad, float("nan"), level1)
    double8 = max8 * rec[:, None] >= 4
    half8 = tl.where(double8, 0.5, 1.0)[:, :, None]
    double4 = max4 * rec[:, None, None] * half8 >= 2
    unit = tl.where(double4, 0.5, 0.25) * tl.where(double8, 2.0, 1.0)[:, :, None]  # one step of the codes
    steps = tl.where(double4, 2.0, 4.0) * half8
    q = magnitude * rec[:, None, None, None] * steps[:, :, :, None] + 0.5
    q = tl.minimum(tl.floor(q), 7.0) * unit[:, :, :, None]
    value = with_sign(tl.reshape(q, (NB, 64)), x) * level1[:, None]
    store_as(out_ptr + at, value, inside, ASM)


@triton.jit
def four_over_six_kernel(x_ptr, out_ptr, num_columns, KP: tl.constexpr, SQUARES: tl.constexpr, ASM: tl.constexpr):
    """A row a program, its blocks of 16 padded to KP columns; columns that are not there are zeros. SQUARES: "mse"."""
    row = tl.program_id(0).to(tl.int64) * num_columns
    first = tl.arange(0, KP // 16) * 16
    at = first[:, None] + tl.arange(0, 16)[None, :]
    x = tl.load(x_ptr + row + at, mask=at < num_columns, other=0.0).to(tl.float32)
    bits = abs_bits(x)
    amax = tl.max(tl.max(tl.where(bits >= INF_BITS, 0, bits), axis=1), axis=0)
    # 1536 = 1.5 * 2**10: one binade more where the mantissa of amax exceeds 1.5.
    exponent = (amax >> 23) - 137 + tl.where((amax & 0x7FFFFF) > 0x400000, 1, 0)
    exponent = tl.where(amax == 0, 0, tl.maximum(exponent, -126))
    g = ((exponent + 127) << 23).to(tl.float32, bitcast=True)
    gs = ((127 - exponent) << 23).to(tl.float32, bitcast=True)
    vmax = tl.max(bits, axis=1)
    bad = vmax >= INF_BITS
    vmax = tl.where(bad, 0, vmax).to(tl.float32, bitcast=True)
    base = tl.div_rn(vmax, tl.full(vmax.shape, 6.0, tl.float32)) * gs
    scale6, inv6 = factors(base, g)
    scale4, inv4 = factors(base * 1.5, g)
    error6 = tl.zeros(base.shape, tl.float32)
    error4 = tl.zeros(base.shape, tl.float32)
    for i in tl.static_range(16):  # in order: the choice between two near errors is a matter of rounding
        column = first + i
        xi = tl.load(x_ptr + row + column, mask=column < num_columns, other=0.0).to(tl.float32) + 0.0
        d6 = signed(xi, inv6) * scale6 * g - xi
        d4 = signed(xi, inv4) * scale4 * g - xi
        error6 += d6 * d6 if SQUARES else tl.abs(d6)
        error4 += d4 * d4 if SQUARES else tl.abs(d4)
    four = error4 < error6
    scale = tl.where(bad, float("nan"), tl.where(four, scale4, scale6))
    inv = tl.where(four, inv4, inv6)
    value = signed(x + 0.0, inv[:, None]) * scale[:, None] * g + 0.0
    store_as(out_ptr + row + at, value, at < num_columns, ASM)


@triton.jit
def factors(scaled, g):
    """A block scale before rounding -> (E4M3 scale as fp32, factor of the elements). Both 0 for a scale of 0."""
    byte = e4m3_encode(tl.minimum(scaled, 448.0))
    scale = e4m3_decode(byte)
    dead = byte == 0
    one = tl.full(scaled.shape, 1.0, tl.float32)
    inv = tl.minimum(tl.div_rn(one, tl.where(dead, 1.0, scale * g)), FLT_MAX)
    return scale, tl.where(dead, 0.0, inv)


@triton.jit
def signed(x, inv):
    """The E2M1 value of x * inv."""
    return with_sign(e2m1_round(tl.abs(x) * inv), x)


def _blocks(x: Tensor, block: int) -> Tensor:
    """x [..., K] with K padded to whole blocks, contiguous."""
    return F.pad(x, (0, -x.shape[-1] % block)).contiguous() if x.shape[-1] % block else x.contiguous()


def mxfp4_rows(x: Tensor, rule: str, dtype: torch.dtype) -> Tensor:
    """`mxfp4.qdq_rows` for bf16 or fp32 on the GPU; dtype: one of these."""
    padded = _blocks(x, 32)
    out = torch.empty(padded.shape, dtype=dtype, device=x.device)
    blocks = padded.numel() // 32
    if blocks:
        mxfp4_kernel[(triton.cdiv(blocks, BLOCKS),)](
            padded, out, blocks, NB=BLOCKS, RULE=MXFP4_RULES[rule], ASM=compiled(), num_warps=2, enable_fp_fusion=False
        )
    return out[..., : x.shape[-1]]


def hif4_rows(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`hif4.qdq_rows` for bf16 or fp32 on the GPU."""
    padded = _blocks(x, 64)
    out = torch.empty(padded.shape, dtype=dtype, device=x.device)
    blocks = padded.numel() // 64
    if blocks:
        hif4_kernel[(triton.cdiv(blocks, BLOCKS),)](
            padded, out, blocks, NB=BLOCKS, ASM=compiled(), num_warps=4, enable_fp_fusion=False
        )
    return out[..., : x.shape[-1]]


def four_over_six_rows(x: Tensor, choose: str, dtype: torch.dtype) -> Tensor:
    """`four_over_six.qdq_rows` for bf16 or fp32 on the GPU. choose: "mse" or "mae"."""
    x = x.contiguous()
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    num_columns = x.shape[-1]
    if x.numel():
        four_over_six_kernel[(x.numel() // num_columns,)](
            x,
            out,
            num_columns,
            KP=max(32, triton.next_power_of_2(num_columns)),
            SQUARES=choose == "mse",
            ASM=compiled(),
            num_warps=4,
            enable_fp_fusion=False,
        )
    return out
