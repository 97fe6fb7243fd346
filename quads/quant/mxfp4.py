"""MXFP4 (OCP MX) in plain torch: the specification, and all the code that there is; a GPU runs it eagerly.

A row is cut into blocks of 32 consecutive elements. An element is an E2M1 code as in NVFP4, a block has one E8M0 byte
b that stands for the power of two 2 ** (b - 127); nothing is shared beyond the block: 4.25 bits a number.

    amax   = max |x| in the block
    floor  : e = floor(log2(amax)) - 2                   amax / 2**e in [4, 8): what is above 6 saturates
    even   : the same of amax rounded half up to one bit of mantissa           in [3.5, 7)
    ceil   : the smallest e with amax / 6 <= 2**e (the quotient in fp32)       in (3, 6]: nothing saturates
    byte   = e + 127, e clamped to [-127, 127]; 0 for a block of zeros
    code   = E2M1(x / 2**e)                              the quotient is exact; ties to the even code
    value  = e2m1 * 2**e, a zero as +0                   exact in bf16; Inf where 4 * 2**126 is meant

-0.0 gets code 0; any other negative x keeps its sign, also where it rounds to zero (code 8, whose value is +0 here,
where NVFP4 has -0). A block with NaN or Inf: byte 0xFF, every code 0; it reads back as NaN and leaves its neighbours
alone. Exponents are read from the bits of fp32 numbers: a logarithm errs next to powers of two.

Shape suffixes: K elements, B = ceil(K / 32) blocks. "..." is any number of leading dimensions.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from quads.quant.nvfp4 import decode_e2m1, encode_e2m1, pack_codes, round_e2m1, unpack_codes

BLOCK = 32
NAN = 0xFF


def scale_bytes(amax: Tensor, rule: str) -> Tensor:
    """The E8M0 byte (int32) of blocks with this amax, fp32 and finite, >= 0."""
    bits = amax.view(torch.int32)
    if rule == "ceil":
        bits = (amax / torch.full_like(amax, 6.0)).view(torch.int32)  # a tensor divisor: one rounding
        exponent, fraction = bits >> 23, bits & 0x7FFFFF
        # Of a subnormal quotient, 2**-127 is the fraction 0x400000.
        byte = torch.where(exponent > 0, exponent + (fraction > 0), (fraction > 0x400000).int())
    elif rule in ("floor", "even"):
        byte = (bits + (0x200000 if rule == "even" else 0) >> 23) - 2
    else:
        raise ValueError(f"a scale rule of MXFP4 is floor, even or ceil, not {rule!r}")
    return byte.clamp(0, 254)


def scale_values(byte: Tensor) -> Tensor:
    """fp32 2 ** (byte - 127), NaN for 0xFF."""
    byte = byte.to(torch.int32)
    bits = torch.where(byte == 0, 0x400000, byte << 23)  # 2**-127 is subnormal
    return torch.where(byte == NAN, torch.nan, bits.view(torch.float32))


def _round(x: Tensor, rule: str) -> tuple[Tensor, Tensor]:
    """[..., K] -> (E2M1 values fp32 [..., B, 32], bytes int32 [..., B])."""
    x = x.float()
    x_B32 = F.pad(x, (0, -x.shape[-1] % BLOCK)).unflatten(-1, (-1, BLOCK))
    amax_B = x_B32.abs().amax(-1)
    finite_B = amax_B < torch.inf
    byte_B = scale_bytes(torch.where(finite_B, amax_B, 0.0), rule)
    inverse_B = scale_values(254 - byte_B)  # 2 ** -e: a power of two, the product is exact
    x_B32 = torch.where(finite_B.unsqueeze(-1), x_B32, 0.0) + 0.0  # -0.0 + 0.0 == +0.0
    values_B32 = torch.copysign(round_e2m1(x_B32 * inverse_B.unsqueeze(-1)), x_B32)
    return values_B32, torch.where(finite_B, byte_B, NAN)


def pack(w: Tensor, rule: str, scales: object, cast: bool) -> tuple[Tensor, Tensor]:
    """w [..., K], fp32 or bf16 -> codes uint8 [..., 16 B], scale bytes uint8 [..., B]. See `formats.Format`."""
    values_B32, byte_B = _round(w.bfloat16() if cast else w, rule)
    signs = values_B32.signbit().to(torch.uint8) << 3  # encoding would lose the sign of -0.0
    codes = encode_e2m1(values_B32.abs()) | signs
    return pack_codes(codes.flatten(-2)), byte_B.to(torch.uint8)


def unpack(packed: Tensor, byte: Tensor, g: object, dtype: torch.dtype, num_columns: int) -> Tensor:
    """The values [..., K] in `dtype`."""
    values_B32 = decode_e2m1(unpack_codes(packed)).unflatten(-1, (-1, BLOCK))
    return _apply(values_B32, byte)[..., :num_columns].to(dtype)


def _apply(values_B32: Tensor, byte_B: Tensor) -> Tensor:
    """Codes' values times scales, fp32 [..., 32 B]."""
    return (values_B32 * scale_values(byte_B).unsqueeze(-1)).flatten(-2) + 0.0  # -0.0 + 0.0 == +0.0


def qdq_rows(x: Tensor, rule: str, dtype: torch.dtype) -> Tensor:
    """The values of x [..., K] as activations: `unpack(*pack(x, ...))` without the bytes."""
    values_B32, byte_B = _round(x, rule)
    return _apply(values_B32, byte_B)[..., : x.shape[-1]].to(dtype)
