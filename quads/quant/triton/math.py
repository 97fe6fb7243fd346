"""What all kernels stand on: rounding, scales, packing, choosing channels, and when a launch may start. Bit for bit the
torch specification.

Everything is IEEE fp32, round to nearest even: division is tl.div_rn, and launches turn floating-point fusion off
(`enable_fp_fusion=False`), so that `q * s - x` keeps both of its roundings. Rounding to E2M1 and E4M3 is done with
integer and magic-number arithmetic, the same on every GPU and in the interpreter.

A row tile holds one row of K columns, padded to KP, with scale blocks along axis 1: [KP/16, 16] in natural order, or
[KP/128, 16, 8] in the order that the 16-bit GEMM reads (layout.activation_order), where a scale block is one
column of the 16 x 8 tile.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


def compiled() -> bool:
    """False in Triton's CPU interpreter, which has no inline PTX and no bfloat16 arithmetic."""
    return not triton.knobs.runtime.interpret


FLT_MAX = tl.constexpr(3.4028234663852886e38)
INF_BITS = tl.constexpr(0x7F800000)
SIGN_BIT = tl.constexpr(-(2**31))


@triton.jit
def wait_for_previous(ASM: tl.constexpr):
    """Programmatic dependent launch: every kernel of a layer is launched while the one before it still runs, and waits
    here until that one has finished. As each waits, everything earlier has finished too. Elsewhere it does nothing."""
    if ASM:
        gdc_wait()


@triton.jit
def start_next(ASM: tl.constexpr):
    """Lets the next kernel's programs take the places that this one's no longer need; they wait for its end."""
    if ASM:
        gdc_launch_dependents()


@triton.jit
def to_bf16(x, ASM: tl.constexpr):
    """fp32 -> bfloat16, round to nearest even (the interpreter's own cast truncates)."""
    if ASM:
        y = x.to(tl.bfloat16)
    else:
        bits = x.to(tl.int32, bitcast=True)
        bits = tl.where(x != x, 0x7FC00000, bits + 0x7FFF + ((bits >> 16) & 1))
        y = (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return y


@triton.jit
def e2m1_round(a):
    """a >= 0 (fp32) -> nearest of {0, .5, 1, 1.5, 2, 3, 4, 6}, ties to the even code; above 5 gives 6."""
    a = tl.minimum(a, 6.0)
    # Adding 2**22 times the power of two at or below max(a, 1) leaves E2M1's spacing, half that power, as the unit in
    # the last place. The product is exact, so the fused sum rounds once, and taking it off again is exact.
    power = (tl.maximum(a.to(tl.int32, bitcast=True), 0x3F800000) & INF_BITS).to(tl.float32, bitcast=True)
    return tl.fma(power, -4194304.0, tl.fma(power, 4194304.0, a))


@triton.jit
def with_sign(magnitude, x):
    """magnitude >= 0 with the sign bit of x. Callers add +0.0 to x first, because -0.0 has no sign here."""
    bits = magnitude.to(tl.int32, bitcast=True) | (x.to(tl.int32, bitcast=True) & SIGN_BIT)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def e4m3_encode(s):
    """0 <= s <= 448 (fp32) -> E4M3 byte as int32, round to nearest even, subnormals kept."""
    bits = s.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 960
    subnormal = (s * 512.0 + 8388608.0).to(tl.int32, bitcast=True) & 0xF
    return tl.where(s < 0.015625, subnormal, normal)


@triton.jit
def e4m3_decode(byte):
    """E4M3 byte 0..0x7E (int32) -> fp32: the bits of s * 2**-120, then times 2**120 (exact)."""
    return (byte << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36


@triton.jit
def pow2_scale(amax_bits):
    """Bits of a finite amax >= 0 -> (g, 1/g), g = 2**ceil(log2(amax / 2688)), exponent >= -126; amax 0 gives 1."""
    # 2688 = 1.3125 * 2**11: one binade more when the mantissa of amax exceeds 1.3125.
    exponent = (amax_bits >> 23) - 138 + tl.where((amax_bits & 0x7FFFFF) > 0x280000, 1, 0)
    exponent = tl.where(amax_bits == 0, 0, tl.maximum(exponent, -126))
    g = ((exponent + 127) << 23).to(tl.float32, bitcast=True)
    gs = ((127 - exponent) << 23).to(tl.float32, bitcast=True)
    return g, gs


@triton.jit
def fold_operands(main, kept, g, g_kept):
    """(main * g - kept * g_kept) / g * 8, to be rounded to fp16: residual.fold, with main and kept without their
    scales g. All products are exact, so the subtraction is the only rounding here."""
    gs = ((254 << 23) - g.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)
    return (main * g - kept * g_kept) * gs * 8.0


@triton.jit
def block_factors(vmax_bits, g, gs):
    """Block max (bits of |x|), global scale -> (scale byte int32, scale fp32, element factor); NaN blocks: 0x7F."""
    bad = vmax_bits >= INF_BITS
    vmax = tl.where(bad, 0, vmax_bits).to(tl.float32, bitcast=True)
    byte = e4m3_encode(tl.minimum(vmax * (gs * 0.16666667163372040), 448.0))
    scale = e4m3_decode(byte)
    inv = tl.where(byte == 0, 0.0, tl.minimum(tl.div_rn(1.0, tl.where(byte == 0, 1.0, scale * g)), FLT_MAX))
    return tl.where(bad, 0x7F, byte), tl.where(bad, float("nan"), scale), tl.where(bad, 0.0, inv)


@triton.jit
def abs_bits(x):
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def quantize_tile(x):
    """fp32 row tile, scale blocks along axis 1 -> (|E2M1 value|, scale fp32 and scale byte without axis 1, g).

    Blocks whose scale is 0 have magnitude 0; in NaN blocks the magnitude means nothing.
    """
    bits = abs_bits(x)
    block_max = tl.max(bits, axis=1)
    amax = tl.max(tl.ravel(block_max))
    if amax >= INF_BITS:  # rare: leave the elements that are not finite out
        amax = tl.max(tl.ravel(tl.where(bits >= INF_BITS, 0, bits)))
    g, gs = pow2_scale(amax)
    byte, scale, inv = block_factors(block_max, g, gs)
    return e2m1_round(tl.abs(x) * tl.expand_dims(inv, 1)), scale, byte, g


@triton.jit
def values(magnitude, scale, x):
    """Signed e2m1 * e4m3 (exact in bfloat16); NaN where the scale is."""
    return with_sign(magnitude, x) * tl.expand_dims(scale, 1)


@triton.jit
def pack_tile(magnitude, byte, x, NB: tl.constexpr):
    """[NB, 16] magnitudes -> uint8 [NB, 8], low nibble = even column. Blocks with scale 0 or NaN hold code 0 only."""
    # magnitude * 2**-126 puts E2M1's subnormal at fp32's: the code's magnitude is bits 24..22, its sign bit 31.
    bits = with_sign(magnitude * 1.1754943508222875e-38, x)
    low, high = tl.split(tl.reshape(bits.to(tl.int32, bitcast=True), (NB, 8, 2)))
    both = ((low >> 22) & 0x207) | ((high >> 18) & 0x2070)
    packed = (both & 0x77) | ((both >> 6) & 0x88)
    return tl.where(((byte == 0) | (byte == 0x7F))[:, None], 0, packed).to(tl.uint8)


@triton.jit
def keep_top(key, index, keep, TOP_BIT: tl.constexpr, INDEX_BITS: tl.constexpr, STORED: tl.constexpr):
    """True at the `keep` largest keys (int >= 0, below 2 << TOP_BIT) of a row tile, of equal ones at the lowest index.

    index: as `tile_columns(KP, STORED)` gives it.
    """
    threshold = tl.zeros((), dtype=key.dtype)
    one = threshold + 1
    # The largest threshold that at least `keep` keys reach, bit by bit, down to the lowest bit that any key has set:
    # residuals of bfloat16 numbers leave about half of an fp32 mantissa empty.
    lowest = tl.min(tl.ravel(tl.where(key == 0, (one << TOP_BIT), key & -key)))
    bit = one << TOP_BIT
    while bit >= lowest:
        candidate = threshold | bit
        bit = bit >> 1
        count = tl.sum(tl.ravel((key >= candidate).to(tl.int32)))
        threshold = tl.where(count >= keep, candidate, threshold)
    missing = keep - tl.sum(tl.ravel((key > threshold).to(tl.int32)))
    tied = key == threshold
    if STORED:
        last = 0
        for i in range(INDEX_BITS):  # the largest index bound below which fewer than `missing` ties lie
            candidate = last | (1 << (INDEX_BITS - 1 - i))
            count = tl.sum(tl.ravel((tied & (index < candidate)).to(tl.int32)))
            last = tl.where(count < missing, candidate, last)
        chosen = tied & (index <= last) & (missing > 0)
    else:  # columns lie in order: count the ties before each
        ties = tied.to(tl.int32)
        in_block = tl.sum(ties, axis=1)
        before = tl.cumsum(ties, axis=1) - ties + (tl.cumsum(in_block, axis=0) - in_block)[:, None]
        chosen = tied & (before < missing)
    return (keep > 0) & ((key > threshold) | chosen)


@triton.jit
def two_of_four(key, KP: tl.constexpr, STORED: tl.constexpr):
    """True at the two largest keys (int >= 0) of each four neighbouring columns of a row tile, of equal ones at the
    lower column. The four lie along one axis: of [KP/16, 16] in natural order, of [KP/128, 16, 8] in the GEMM's, where
    the 16 are (column % 4, column // 4 % 4)."""
    OUTER: tl.constexpr = KP // 128 if STORED else KP // 4
    INNER: tl.constexpr = 32 if STORED else 1
    fours = tl.reshape(key, (OUTER, 4, INNER))
    mine = tl.expand_dims(fours, 2)
    theirs = tl.expand_dims(fours, 1)
    index = tl.arange(0, 4)
    before = (index[None, :] < index[:, None])[None, :, :, None]
    beaten = (theirs > mine) | ((theirs == mine) & before)
    rank = tl.sum(beaten.to(tl.int32), axis=2)
    return tl.reshape(rank < 2, key.shape)


@triton.jit
def stored_column(position):
    """The column at a position of a row in the GEMM's order (layout.activation_order)."""
    p = position % 128
    return position - p + (p % 8) * 16 + ((p // 8) % 4) * 4 + p // 32


@triton.jit
def tile_columns(KP: tl.constexpr, STORED: tl.constexpr):
    """(position in memory, column) of a row tile: natural [KP/16, 16], or the GEMM's order [KP/128, 16, 8]."""
    if STORED:
        chunk = tl.arange(0, KP // 128)[:, None, None] * 128
        p = tl.arange(0, 16)[None, :, None]
        g = tl.arange(0, 8)[None, None, :]
        position = chunk + p * 8 + g
        column = chunk + g * 16 + (p % 4) * 4 + p // 4
    else:
        position = tl.arange(0, KP // 16)[:, None] * 16 + tl.arange(0, 16)[None, :]
        column = position
    return position, column


@triton.jit
def store_values(ptr, tile, width, KP: tl.constexpr, STORED: tl.constexpr, ASM: tl.constexpr):
    """A row of values in the GEMM's order [width], rounded to the type behind ptr: bfloat16 or fp16."""
    if STORED:
        flat = tl.reshape(tile, (KP,))
    else:
        flat = tl.reshape(tl.permute(tl.reshape(tile, (KP // 128, 8, 4, 4)), (0, 3, 2, 1)), (KP,))
    position = tl.arange(0, KP)
    if ptr.dtype.element_ty == tl.float16:
        tl.store(ptr + position, flat.to(tl.float16), mask=position < width)
    else:
        tl.store(ptr + position, to_bf16(flat, ASM), mask=position < width)
