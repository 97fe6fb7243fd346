"""Blocks of 16 bfloat16 values -> packed E2M1 codes, a whole block in the registers of one thread.

math.py rounds and packs any fp32 tile, at some 35 instructions an element, most of them repeated by the threads
that share a block. Here a block is two 16-byte loads of one thread, which finds its largest element two at a time,
computes the scale once, and packs eight codes into a word as it rounds:

    a = |x| * inv (fp32)       code = min(rn(2 a), 2 + rn(a), 4 + rn(a / 2), 7)

Each rn is one addition to 1.5 * 2**23, whose low bits then are the integer (ties to even); the three lines meet where
E2M1's spacing doubles. The bits are those of `nvfp4.quantize`.

The inline PTX takes the four words of a half block as they lie in one thread, so Triton must lay a [NB, 4] tile out
with the four columns in one thread. It does if addresses are known to be multiples of 16 bytes (they are formed as
multiples of a block) and there are as many blocks as threads: `whole_blocks` and `launch_shape`, and a test that reads
the layouts of the compiled kernels.

Legend: NB blocks, a word is two neighbouring values, the first in its low half.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quads.quant.triton.math import INF_BITS, block_factors, e2m1_round, pow2_scale, with_sign

_BLOCK_MAX = tl.constexpr(
    """
{
.reg .b32 a, b, m;
and.b32 m, $4, 0x7FFF7FFF;
and.b32 a, $5, 0x7FFF7FFF;
max.u16x2 m, m, a;
and.b32 a, $6, 0x7FFF7FFF;
and.b32 b, $7, 0x7FFF7FFF;
max.u16x2 a, a, b;
max.u16x2 m, m, a;
and.b32 a, $8, 0x7FFF7FFF;
and.b32 b, $9, 0x7FFF7FFF;
max.u16x2 a, a, b;
max.u16x2 m, m, a;
and.b32 a, $10, 0x7FFF7FFF;
and.b32 b, $11, 0x7FFF7FFF;
max.u16x2 a, a, b;
max.u16x2 m, m, a;
shl.b32 a, m, 16;
max.u32 m, m, a;
and.b32 m, m, 0xFFFF0000;
mov.b32 $0, m;
mov.b32 $1, m;
mov.b32 $2, m;
mov.b32 $3, m;
}
"""
)
"""Largest |x| of 8 words, as the bits of a float, four times."""


def _encode_words() -> str:
    """PTX: four words ($1..$4), inv ($5), mask of the result ($9) -> eight codes in $0."""
    lines = ["{", ".reg .b32 w<4>, t, acc, p, q, r, one, zero;", ".reg .f32 x, a, b, c;"]
    lines += ["mov.b32 one, 0x3F803F80;", "mov.b32 zero, 0;"]
    for i in range(4):
        lines.append(f"fma.rn.bf16x2 w{i}, ${i + 1}, one, zero;")  # -0.0 becomes +0.0
    for i in reversed(range(4)):
        for half in (1, 0):
            lines.append(f"and.b32 t, w{i}, 0xFFFF0000;" if half else f"shl.b32 t, w{i}, 16;")
            lines += [
                "mov.b32 x, t;",
                "abs.f32 x, x;",
                "mul.rn.f32 x, x, $5;",
                "fma.rn.f32 a, x, 0f40000000, 0f4B400000;",  # 2 a
                "add.rn.f32 b, x, 0f4B400002;",  # a, 2 more
                "fma.rn.f32 c, x, 0f3F000000, 0f4B400004;",  # a / 2, 4 more
                "min.f32 a, a, b;",
                "min.f32 c, c, 0f4B400007;",
                "min.f32 a, a, c;",
                "mov.b32 t, a;",
                "mov.b32 acc, t;" if (i, half) == (3, 1) else "mad.lo.u32 acc, acc, 16, t;",
            ]
    constant = sum(0x4B400000 << 4 * i for i in range(8)) % 2**32
    lines += [
        f"sub.u32 acc, acc, {constant};",
        "prmt.b32 p, w0, w1, 0x7351;",  # the high byte of each value holds its sign
        "prmt.b32 q, w2, w3, 0x7351;",
        "prmt.b32 r, p, q, 0x5410;",
        "prmt.b32 p, p, q, 0x7632;",
        "shr.u32 r, r, 4;",
        "lop3.b32 acc, acc, r, 0x08080808, 0xF8;",  # acc | (r & 0x08080808)
        "lop3.b32 acc, acc, p, 0x80808080, 0xF8;",
        "and.b32 $0, acc, $9;",
        "}",
    ]
    return "\n".join(lines)


_ENCODE = tl.constexpr(_encode_words())


@triton.jit
def halves(word):
    """The two values of a word as fp32."""
    return (word << 16).to(tl.float32, bitcast=True), (word & -65536).to(tl.float32, bitcast=True)


@triton.jit
def word_block_max(first, second, ASM: tl.constexpr):
    """int32 words [NB, 4] of the halves of NB blocks -> bits of the largest |x| of each block, int32 [NB]."""
    if ASM:
        m = tl.inline_asm_elementwise(
            _BLOCK_MAX, "=r,=r,=r,=r,r,r,r,r,r,r,r,r", [first, second], dtype=tl.int32, is_pure=True, pack=4
        )
    else:
        m = tl.maximum(
            tl.maximum((first << 16) & 0x7FFFFFFF, first & 0x7FFF0000),
            tl.maximum((second << 16) & 0x7FFFFFFF, second & 0x7FFF0000),
        )
    return tl.max(m, axis=1)


@triton.jit
def finite_max(words):
    """Bits of the larger finite |x| of each word, 0 if neither is finite."""
    low, high = (words << 16) & 0x7FFFFFFF, words & 0x7FFF0000
    return tl.maximum(tl.where(low >= INF_BITS, 0, low), tl.where(high >= INF_BITS, 0, high))


@triton.jit
def encode_words(words, inv, dead, ASM: tl.constexpr):
    """int32 words [NB, 4] -> uint8 [NB, 4], two codes a byte. inv: fp32 [NB], element factor; dead: int1 [NB], blocks
    that hold code 0 only (scale 0 or NaN)."""
    if ASM:
        inv = tl.broadcast_to(inv[:, None], words.shape)
        keep = tl.broadcast_to(tl.where(dead, 0, -1)[:, None], words.shape)
        codes = tl.inline_asm_elementwise(
            _ENCODE, "=r,r,r,r,r,r,r,r,r,r,r,r,r", [words, inv, keep], dtype=tl.uint8, is_pure=True, pack=4
        )
    else:
        low, high = halves(words)
        codes = encode_pairs(low + 0.0, high + 0.0, inv, dead)
    return codes


@triton.jit
def encode_pairs(low, high, inv, dead):
    """fp32 [NB, 4] even and odd elements (no -0.0) -> uint8 [NB, 4], two codes a byte; inv and dead: [NB]."""
    low_bits = with_sign(e2m1_round(tl.abs(low) * inv[:, None]) * 1.1754943508222875e-38, low)
    high_bits = with_sign(e2m1_round(tl.abs(high) * inv[:, None]) * 1.1754943508222875e-38, high)
    low_bits, high_bits = low_bits.to(tl.int32, bitcast=True), high_bits.to(tl.int32, bitcast=True)
    both = ((low_bits >> 22) & 0x207) | ((high_bits >> 18) & 0x2070)
    both = (both & 0x77) | ((both >> 6) & 0x88)
    return tl.where(dead[:, None], 0, both).to(tl.uint8)


@triton.jit
def row_factors(first, second, ASM: tl.constexpr):
    """Words of a row's blocks -> (scale byte, scale, element factor, all [NB]; g of the row)."""
    block_max = word_block_max(first, second, ASM)
    amax = tl.max(block_max)
    if amax >= INF_BITS:  # rare: leave the elements that are not finite out
        amax = tl.maximum(tl.max(tl.ravel(finite_max(first))), tl.max(tl.ravel(finite_max(second))))
    g, gs = pow2_scale(amax)
    byte, scale, inv = block_factors(block_max, g, gs)
    return byte, scale, inv, g


def whole_blocks(x_RK: Tensor, k: int) -> bool:
    """Whether the kernels that give a block to a thread can read the first k columns of these rows."""
    strides = all(stride % 16 == 0 for stride in x_RK.stride()[:-1])
    return x_RK.dtype == torch.bfloat16 and k % 16 == 0 and strides and x_RK.data_ptr() % 16 == 0


def launch_shape(blocks: int, per_thread: int, most: int = 2**20) -> tuple[int, int]:
    """(NB, num_warps) for this many blocks of a program, up to `most`: at least one block for each thread."""
    nb = min(max(triton.next_power_of_2(blocks), 32), most)
    return nb, min(max(nb // (32 * per_thread), 1), 8)
