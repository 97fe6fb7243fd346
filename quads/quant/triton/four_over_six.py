"""Four-over-six's kernel: a row a program, with a scale of its own or of its matrix. Bit for bit
quads/quant/four_over_six.py; what it packs is NVFP4, which pack.py reads back."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quads.quant.triton.blocks import casts, e2m1_code, load_as, nibbles, room, store_as, whole
from quads.quant.triton.math import (
    FLT_MAX,
    INF_BITS,
    abs_bits,
    compiled,
    e2m1_round,
    e4m3_decode,
    e4m3_encode,
    with_sign,
)


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


@triton.jit
def four_over_six_kernel(
    x_ptr,
    g_ptr,
    gs_ptr,
    out_ptr,
    byte_ptr,
    num_columns,
    num_rows,
    KP: tl.constexpr,
    SQUARES: tl.constexpr,
    PACK: tl.constexpr,
    CAST: tl.constexpr,
    ASM: tl.constexpr,
):
    """A row a program, its blocks of 16 padded to KP columns; columns that are not there are zeros. SQUARES: "mse".

    Values into out, each row with a scale of its own; or (PACK) 8 bytes of codes and a scale byte a block, with the
    scales of the row's matrix of `num_rows`. Then columns are whole blocks.
    """
    row = tl.program_id(0).to(tl.int64) * num_columns
    first = tl.arange(0, KP // 16) * 16
    at = first[:, None] + tl.arange(0, 16)[None, :]
    x = load_as(x_ptr + row + at, at < num_columns, CAST, ASM)
    bits = abs_bits(x)
    if PACK:
        g = tl.load(g_ptr + tl.program_id(0) // num_rows)
        gs = tl.load(gs_ptr + tl.program_id(0) // num_rows)
    else:
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
        xi = load_as(x_ptr + row + column, column < num_columns, CAST, ASM)
        d6 = signed(xi, inv6) * scale6 * g - xi
        d4 = signed(xi, inv4) * scale4 * g - xi
        error6 += d6 * d6 if SQUARES else tl.abs(d6)
        error4 += d4 * d4 if SQUARES else tl.abs(d4)
    four = error4 < error6
    scale = tl.where(four, scale4, scale6)
    value = signed(x, tl.where(four, inv4, inv6)[:, None])
    if PACK:
        code = tl.where(((scale == 0) | bad)[:, None], 0, e2m1_code(value))
        pairs = (first // 2)[:, None] + tl.arange(0, 8)[None, :]
        tl.store(out_ptr + row // 2 + pairs, nibbles(code, KP // 16, 16), mask=pairs < num_columns // 2)
        byte = tl.where(bad, 0x7F, e4m3_encode(scale))
        tl.store(byte_ptr + row // 16 + first // 16, byte.to(tl.uint8), mask=first < num_columns)
    else:
        value = value * tl.where(bad, float("nan"), scale)[:, None] * g + 0.0
        store_as(out_ptr + row + at, value, at < num_columns, ASM)


def qdq_rows(x: Tensor, choose: str, dtype: torch.dtype) -> Tensor:
    """`four_over_six.qdq_rows` for bf16 or fp32 on the GPU. choose: "mse" or "mae"."""
    x = x.contiguous()
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    _rowwise(x, out, out, out, out, choose, PACK=False, CAST=False)
    return out


def pack(w: Tensor, choose: str, g: Tensor, gs: Tensor, cast: bool) -> tuple[Tensor, Tensor]:
    """`four_over_six.pack` for bf16 or fp32 [N, K] or [E, N, K] on the GPU. g, gs: one scale, or one an expert."""
    w = whole(w, 16)
    codes, byte = room(w, 8, 16), room(w, 1, 16)
    _rowwise(w, g.contiguous(), gs.contiguous(), codes, byte, choose, PACK=True, CAST=casts(w, cast))
    return codes, byte.view(torch.float8_e4m3fn)


def _rowwise(x: Tensor, g: Tensor, gs: Tensor, out: Tensor, byte: Tensor, choose: str, **flags: bool) -> None:
    num_columns = x.shape[-1]
    if x.numel():
        four_over_six_kernel[(x.numel() // num_columns,)](
            x,
            g,
            gs,
            out,
            byte,
            num_columns,
            x.shape[-2] if x.dim() > 1 and flags["PACK"] else 1,
            KP=max(32, triton.next_power_of_2(num_columns)),
            SQUARES=choose == "mse",
            ASM=compiled(),
            num_warps=4,
            enable_fp_fusion=False,
            **flags,
        )
