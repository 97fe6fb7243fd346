"""4-bit weights in the layout of layout.py -> 16-bit numbers in registers, for the MMA that follows: exact.

To bfloat16 for operands in bfloat16, to fp16 for those in fp16 (a folded residual, residual.py). A code times its block
scale (e2m1 * e4m3) has at most 6 significant bits and lies in 2**-10 .. 2688, so both types hold it; each decoder gives
it times a power of two, which the GEMM takes off again.

Legend: BN weight rows of a tile, CW = 32 * KSTEP words of four codes a step.
"""

import triton
import triton.language as tl

_DECODE = tl.constexpr(
    """
{
.reg .b32 a, b, c, d, t, z;
and.b32 a, $4, 0x81C081C0;
shl.b32 b, $4, 3;
and.b32 b, b, 0x81C081C0;
and.b32 c, $4, 0x40074007;
mul.lo.u32 c, c, 66;
and.b32 c, c, 0x81C081C0;
shl.b32 d, $4, 2;
shr.u32 t, $4, 3;
and.b32 d, d, 0x80008000;
and.b32 t, t, 0x01C001C0;
or.b32 d, d, t;
mov.b32 z, 0x80008000;
fma.rn.bf16x2 $0, a, $5, z;
fma.rn.bf16x2 $1, b, $5, z;
fma.rn.bf16x2 $2, c, $5, z;
fma.rn.bf16x2 $3, d, $5, z;
}
"""
)
"""Four bfloat16 pairs out of two words and their two scales; the addend -0 keeps the sign of a zero code. Times 66 is a
shift by 1 (the sign) plus a shift by 6 (the magnitude): no two bits meet."""

_DECODE_SCALES = tl.constexpr(
    """
{
.reg .b32 t, f, z;
prmt.b32 t, $1, 0, 0x4140;
shl.b32 t, t, 4;
mov.b32 f, 0x7B007B00;
mov.b32 z, 0x80008000;
fma.rn.bf16x2 t, t, f, z;
fma.rn.bf16x2 $0, t, f, z;
}
"""
)
"""The two E4M3 bytes of a pair, which comes twice -> bfloat16 s * 2**118 of each: shifted by 4 they read as
s * 2**-120, then times 2**119 twice."""


@triton.jit
def _code_value(words, SIGN: tl.constexpr, HIGH: tl.constexpr):
    """Code with its sign at bit SIGN and magnitude from bit HIGH down, as e2m1 * 2**-126 in fp32 (plain Triton)."""
    bits = (((words >> SIGN) & 1) << 31) | (((words >> (HIGH - 2)) & 7) << 22)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def decode_asm(words, scale_pairs, BN: tl.constexpr, KSTEP: tl.constexpr):
    """words int16 [BN, CW], scale_pairs int16 [BN, 4 KSTEP] of two bytes -> four bfloat16 [BN, CW]: e2m1 * e4m3 / 256.
    Where single bytes are loaded, Triton takes the weights for 8-bit ones and each thread holds its scales twice."""
    # Each pair stands for two columns, which are neighbours in a thread's registers (tests/numerics: the layout).
    pairs = tl.broadcast_to(scale_pairs.reshape(BN, 4 * KSTEP, 1), (BN, 4 * KSTEP, 2)).reshape(BN, 8 * KSTEP)
    scale = tl.inline_asm_elementwise(_DECODE_SCALES, "=r,r", [pairs], tl.bfloat16, is_pure=True, pack=2)
    scale = tl.broadcast_to(scale.reshape(BN, KSTEP, 1, 8), (BN, KSTEP, 4, 8)).reshape(BN, 32 * KSTEP)
    return tl.inline_asm_elementwise(
        _DECODE,
        "=r,=r,=r,=r,r,r",
        [words, scale],
        dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=2,
    )


_DECODE_HALF = tl.constexpr(
    """
{
.reg .b32 a, b, c, d, t;
shl.b32 t, $4, 3;
and.b32 a, $4, 0x80008000;
and.b32 t, t, 0x0E000E00;
or.b32 a, a, t;
and.b32 b, $4, 0x10381038;
mul.lo.u32 b, b, 72;
and.b32 b, b, 0x8E008E00;
and.b32 c, $4, 0x40074007;
mul.lo.u32 c, c, 514;
and.b32 c, c, 0x8E008E00;
shl.b32 t, $4, 2;
and.b32 d, $4, 0x0E000E00;
and.b32 t, t, 0x80008000;
or.b32 d, d, t;
mul.rn.f16x2 $0, a, $5;
mul.rn.f16x2 $1, b, $5;
mul.rn.f16x2 $2, c, $5;
mul.rn.f16x2 $3, d, $5;
}
"""
)
"""The same in fp16, whose two low exponent bits and first mantissa bit are bits 11..9. Times 72 is a shift by 3 (the
sign) plus one by 6 (the magnitude), times 514 one by 1 plus one by 9: what runs over into the other half of the word
meets nothing there and is masked."""

_DECODE_SCALES_HALF = tl.constexpr(
    """
{
.reg .b32 t, f;
prmt.b32 t, $1, 0, 0x4140;
shl.b32 t, t, 7;
mov.b32 f, 0x78007800;
mul.rn.f16x2 $0, t, f;
}
"""
)
"""The two E4M3 bytes of a pair -> fp16 s * 2**7 of each: shifted by 7 they read as s * 2**-8, subnormals included, then
times 2**15. The NaN byte 0xFF reads as a NaN."""


@triton.jit
def decode_half_asm(words, scale_pairs, BN: tl.constexpr, KSTEP: tl.constexpr):
    """As `decode_asm`, in fp16: e2m1 * e4m3 / 128. fp16 holds the smallest products as subnormals."""
    pairs = tl.broadcast_to(scale_pairs.reshape(BN, 4 * KSTEP, 1), (BN, 4 * KSTEP, 2)).reshape(BN, 8 * KSTEP)
    scale = tl.inline_asm_elementwise(_DECODE_SCALES_HALF, "=r,r", [pairs], tl.float16, is_pure=True, pack=2)
    scale = tl.broadcast_to(scale.reshape(BN, KSTEP, 1, 8), (BN, KSTEP, 4, 8)).reshape(BN, 32 * KSTEP)
    return tl.inline_asm_elementwise(
        _DECODE_HALF,
        "=r,=r,=r,=r,r,r",
        [words, scale],
        dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
        is_pure=True,
        pack=2,
    )


@triton.jit
def decode_plain(words, scale_pairs, BN: tl.constexpr, KSTEP: tl.constexpr):
    """The same values in fp32 (each is exact in bfloat16), for the interpreter, which has no bfloat16 arithmetic."""
    scale_bytes = tl.join(scale_pairs & 0xFF, (scale_pairs >> 8) & 0xFF).reshape(BN, 8 * KSTEP)
    scale = ((scale_bytes.to(tl.int32) << 20).to(tl.float32, bitcast=True) * 6.64613997892458e35) * 6.64613997892458e35
    scale = tl.broadcast_to(scale.reshape(BN, KSTEP, 1, 8), (BN, KSTEP, 4, 8)).reshape(BN, 32 * KSTEP)
    words = words.to(tl.int32) & 0xFFFF
    w0 = _code_value(words, 15, 8) * scale
    w1 = _code_value(words, 12, 5) * scale
    w2 = _code_value(words, 14, 2) * scale
    w3 = _code_value(words, 13, 11) * scale
    return w0, w1, w2, w3
