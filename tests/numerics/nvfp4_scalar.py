"""NVFP4 written a second time, one number at a time, in exact rational arithmetic that is rounded to fp32 after each
step.

Shares nothing with quads/quant/nvfp4.py but the specification. Tests compare the two bit for bit.
"""

import math
import struct
from fractions import Fraction

FLT_MAX = Fraction(2**24 - 1) * Fraction(2) ** 104
E2M1 = [Fraction(v) for v in ("0", "1/2", "1", "3/2", "2", "3", "4", "6")]


def round_to_grid(value: Fraction, precision: int, min_exponent: int) -> Fraction:
    """Nearest `precision`-bit binary number, ties to even, subnormal below 2**min_exponent; unbounded above."""
    if value == 0:
        return Fraction(0)
    magnitude = abs(value)
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    exponent -= magnitude < Fraction(2) ** exponent
    step = Fraction(2) ** (max(exponent, min_exponent) - precision + 1)
    return step * round(value / step)  # round(Fraction) is half to even


def fl(value: Fraction) -> Fraction | float:
    """fp32, round to nearest even. Overflow gives a float inf."""
    rounded = round_to_grid(value, 24, -126)
    return rounded if abs(rounded) <= FLT_MAX else math.copysign(math.inf, value)


def e4m3_byte(value: Fraction) -> int:
    """E4M3 byte of 0 <= value <= 448."""
    value = round_to_grid(value, 4, -6)
    if value < Fraction(1, 64):
        return int(value * 512)
    exponent = math.floor(math.log2(value))
    return (exponent + 7) * 8 + int((value / Fraction(2) ** exponent - 1) * 8)


def e4m3_value(byte: int) -> Fraction:
    exponent, mantissa = byte >> 3, byte & 7
    return Fraction(mantissa, 512) if exponent == 0 else (1 + Fraction(mantissa, 8)) * Fraction(2) ** (exponent - 7)


def e2m1_code(value: Fraction | float) -> int:
    """Code of a non-negative value: nearest, ties to the even code, saturating."""
    if value > 5:
        return 7
    return min(range(8), key=lambda code: (abs(E2M1[code] - value), code & 1))


def global_scale(amax: Fraction, mode: str) -> tuple[Fraction, Fraction]:
    """(g, gs)"""
    if amax == 0:
        return Fraction(1), Fraction(1)
    if mode == "pow2":
        exponent = -126
        while Fraction(2) ** exponent * 2688 < amax:
            exponent += 1
        return Fraction(2) ** exponent, Fraction(2) ** -exponent
    gs = min(fl(2688 / amax), FLT_MAX)
    g = fl(1 / Fraction(gs))
    assert isinstance(g, Fraction) and isinstance(gs, Fraction)
    return g, gs


def quantize(x: list[float], mode: str, scales: tuple[Fraction, Fraction] | None = None):
    """(codes, E4M3 bytes, g as a float, dequantized floats) of fp32 numbers; len(x) a multiple of 16."""
    finite = [abs(Fraction(v)) for v in x if math.isfinite(v)]
    g, gs = scales or global_scale(max(finite, default=Fraction(0)), mode)
    sixth = fl(Fraction(1, 6))
    codes, scale_bytes, values = [], [], []
    for start in range(0, len(x), 16):
        block = x[start : start + 16]
        if not all(map(math.isfinite, block)):
            codes += [0] * 16
            scale_bytes.append(0x7F)
            values += [math.nan] * 16
            continue
        vmax = max(abs(Fraction(v)) for v in block)
        scaled = fl(gs * sixth)
        scaled = fl(vmax * scaled) if vmax else Fraction(0)
        byte = e4m3_byte(Fraction(min(scaled, Fraction(448))))
        sf = e4m3_value(byte)
        scale_bytes.append(byte)
        inv = Fraction(min(fl(1 / fl(sf * g)), FLT_MAX)) if sf else Fraction(0)
        for v in block:
            code = e2m1_code(fl(abs(Fraction(v)) * inv)) if sf else 0
            negative = v < 0 and sf != 0
            codes.append(code | (8 if negative else 0))
            value = float(fl(E2M1[code] * sf * g))  # e2m1 * sf is exact in fp32, so one rounding
            values.append(-value if negative else value)
    return codes, scale_bytes, float(g), values


def bits(values: list[float]) -> list[int]:
    """fp32 bit patterns; every NaN becomes 0x7FC00000."""
    return [0x7FC00000 if math.isnan(v) else struct.unpack("<I", struct.pack("<f", v))[0] for v in values]
