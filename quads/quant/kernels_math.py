"""Device functions of the NVFP4 kernels: rounding, scales, packing, and choosing channels. Bit for bit the plain-torch spec.

Everything is IEEE fp32, round to nearest even: division is tl.div_rn, and launches turn floating-point fusion off
(`enable_fp_fusion=False`), so that `q * s - x` keeps both of its roundings. Rounding to E2M1 and E4M3 is done with
integer and magic-number arithmetic, the same on every GPU and in the interpreter.

A row tile holds one row of K columns, padded to KP, with scale blocks along axis 1: [KP/16, 16] in natural order, or
[KP/128, 16, 8] in the order that the 16-bit GEMM reads (kernels_layout.activation_order), where a scale block is one
column of the 16 x 8 tile.
"""

import triton
import triton.language as tl

from quads.quant.kernels_gemm import to_bf16


def compiled() -> bool:
    """False in Triton's CPU interpreter, which has no inline PTX and no bfloat16 arithmetic."""
    return not triton.knobs.runtime.interpret


FLT_MAX = tl.constexpr(3.4028234663852886e38)
INF_BITS = tl.constexpr(0x7F800000)


@triton.jit
def e2m1_round(a):
    """a >= 0 (fp32) -> nearest of {0, .5, 1, 1.5, 2, 3, 4, 6}, ties to the even code; above 5 gives 6."""
    a = tl.minimum(a, 6.0)
    # Adding 2**(e + 22), e = max(exponent of a, 0), leaves a spacing of 2**(e - 1), which is E2M1's; the sum rounds once.
    magic = tl.maximum(a.to(tl.int32, bitcast=True) & INF_BITS, 0x3F800000) + 0x0B000000
    magic = magic.to(tl.float32, bitcast=True)
    return (a + magic) - magic


@triton.jit
def e2m1_code(value, x):
    """A rounded magnitude and the number it came from -> 4-bit code (int32). A nonzero x keeps its sign, -0.0 has none."""
    # value * 2**-126 puts E2M1's subnormal at fp32's, so exponent and mantissa bits line up.
    bits = (value * 1.1754943508222875e-38).to(tl.int32, bitcast=True) >> 22
    return bits | tl.where(x < 0.0, 8, 0)


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
    """Bits of a finite amax >= 0 -> (g, 1/g), g = 2**ceil(log2(amax / 2688)), exponent at least -126; amax 0 gives 1."""
    # 2688 = 1.3125 * 2**11: one binade more when the mantissa of amax exceeds 1.3125.
    exponent = (amax_bits >> 23) - 138 + tl.where((amax_bits & 0x7FFFFF) > 0x280000, 1, 0)
    exponent = tl.where(amax_bits == 0, 0, tl.maximum(exponent, -126))
    g = ((exponent + 127) << 23).to(tl.float32, bitcast=True)
    gs = ((127 - exponent) << 23).to(tl.float32, bitcast=True)
    return g, gs


@triton.jit
def block_factors(vmax_bits, g, gs):
    """Block max (bits of |x|) and global scale -> (scale byte int32, scale fp32, element factor); NaN blocks: byte 0x7F."""
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

    Blocks whose scale is 0 or NaN have magnitude 0.
    """
    bits = abs_bits(x)
    block_max = tl.max(bits, axis=1)
    amax = tl.max(tl.ravel(block_max))
    if amax >= INF_BITS:  # rare: leave the elements that are not finite out
        amax = tl.max(tl.ravel(tl.where(bits >= INF_BITS, 0, bits)))
    g, gs = pow2_scale(amax)
    byte, scale, inv = block_factors(block_max, g, gs)
    finite = tl.where(tl.expand_dims(byte == 0x7F, 1), 0.0, x)
    magnitude = e2m1_round(tl.abs(finite) * tl.expand_dims(inv, 1))
    return magnitude, scale, byte, g


@triton.jit
def values(magnitude, scale, x):
    """Signed e2m1 * e4m3 (exact in bfloat16): the sign is that of x, and a -0.0 in x counts as +0."""
    return tl.where(x < 0.0, -magnitude, magnitude) * tl.expand_dims(scale, 1)


@triton.jit
def pack_tile(magnitude, byte, x, NB: tl.constexpr):
    """[NB, 16] magnitudes -> uint8 [NB, 8], low nibble = even column. Blocks with scale byte 0 hold code 0 only."""
    codes = tl.where(tl.expand_dims((byte == 0) | (byte == 0x7F), 1), 0, e2m1_code(magnitude, x))
    low, high = tl.split(tl.reshape(codes, (NB, 8, 2)))
    return (low | (high << 4)).to(tl.uint8)


@triton.jit
def keep_top(key, index, keep, TOP_BIT: tl.constexpr, INDEX_BITS: tl.constexpr):
    """True at the `keep` largest keys (int >= 0, below 2 << TOP_BIT), of equal ones at the lowest index."""
    threshold = tl.zeros((), dtype=key.dtype)
    one = threshold + 1
    for i in range(TOP_BIT + 1):  # the largest threshold that at least `keep` keys reach, bit by bit
        candidate = threshold | (one << (TOP_BIT - i))
        count = tl.sum(tl.ravel((key >= candidate).to(tl.int32)))
        threshold = tl.where(count >= keep, candidate, threshold)
    missing = keep - tl.sum(tl.ravel((key > threshold).to(tl.int32)))
    last = 0
    for i in range(INDEX_BITS):  # the largest index bound below which fewer than `missing` ties lie
        candidate = last | (1 << (INDEX_BITS - 1 - i))
        count = tl.sum(tl.ravel(((key == threshold) & (index < candidate)).to(tl.int32)))
        last = tl.where(count < missing, candidate, last)
    return (keep > 0) & ((key > threshold) | ((key == threshold) & (index <= last) & (missing > 0)))


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
    """A row of values in the GEMM's order, bfloat16 [width]."""
    if STORED:
        flat = tl.reshape(tile, (KP,))
    else:
        flat = tl.reshape(tl.permute(tl.reshape(tile, (KP // 128, 8, 4, 4)), (0, 3, 2, 1)), (KP,))
    position = tl.arange(0, KP)
    tl.store(ptr + position, to_bf16(flat, ASM), mask=position < width)
