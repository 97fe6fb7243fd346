"""HiF4 (HiFloat4, arXiv 2602.11287) in plain torch: 64 elements share three levels of scale and no tensor scale.

A tensor is cut into blocks of 64 consecutive elements along its last dimension K. An element is a sign and a uniform
magnitude q / 4, q = 0..7 (S1P2). A block has 32 bits beside its 256 bits of elements, 4.5 bits a number:

    level 1   one E6M2 byte b: 2 ** ((b >> 2) - 48) * (1 + (b & 3) / 4), from 2**-48 (0x00) to 49152 (0xFE); 0xFF is NaN
    level 2   8 bits, bit j doubles the elements 8j ... 8j + 7
    level 3   16 bits, bit j doubles the elements 4j ... 4j + 3
    value     +-q / 4 * 2 ** (level2 + level3) * level1

How a block is encoded. `bf16` and `fl` (fp32) mark the roundings, all to nearest even:

    s       = E6M2(clamp(bf16(fl(amax * bf16(1/7))), 2**-48, 49152))     amax = max |x| in the block
    rec     = bf16(1 / s)                                      rounded, so what follows is not the nearest grid point
    level2  = fl(max8 * rec) >= 4                                         max8: largest |x| of the eight
    level3  = fl(max4 * rec) / 2 ** level2 >= 2                           max4: largest |x| of the four
    q       = min(floor(fl(|x| * rec) * 2 ** (2 - level2 - level3) + 1/2), 7)

A half rounds away from zero, as in the published algorithm (rule "half_away"; the generator of a hardware vendor's
tests rounds to bf16 and ties to even there, and differs in about 1 % of the codes). As in the other formats here,
x == -0.0 gives code 0, any other negative x keeps its sign (bit 3 of the code) also where it rounds to zero, and a
block with NaN or Inf gets level 1 = 0xFF and codes 0, which dequantize to NaN.

Values are exact in bf16: at most 5 significant bits (3 of q, 3 of level 1). What quantizes a second time may give other
values (`qdq(qdq(x)) != qdq(x)` for about half of all Gaussian tensors): ship codes, never values.

Shape suffixes: K elements, B = ceil(K / 64) blocks. "..." is any number of leading dimensions.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from quads.quant.nvfp4 import pack_codes, unpack_codes

BLOCK = 64
SMALLEST, LARGEST = 2.0**-48, 49152.0  # of level 1
NAN_BYTE = 0xFF
ONE_SEVENTH = 0.142578125  # bf16(1/7)


def encode_e6m2(s: Tensor) -> Tensor:
    """Level 1 bytes (int32) of s, fp32 in [2**-48, 49152]: nearest, ties to even. Read from the bits of fp32: the two
    bits kept of the mantissa and the exponent above them are one integer, so a carry of the rounding moves on by
    itself."""
    bits = s.view(torch.int32)
    odd = (bits >> 21) & 1
    return ((bits + 0xFFFFF + odd) >> 21) - ((127 - 48) << 2)


def decode_e6m2(level1: Tensor) -> Tensor:
    """fp32 values of level 1 bytes (any integer dtype); 0xFF is NaN. Exact."""
    bits = level1.to(torch.int32)
    value = ((bits + ((127 - 48) << 2)) << 21).view(torch.float32)
    return torch.where(bits == NAN_BYTE, torch.nan, value)


def _round(x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """fp32 [..., K] -> codes int32 [..., B, 64], level 1 bytes int32 [..., B], level 2 bool [..., B, 8], level 3 bool
    [..., B, 16]."""
    x = F.pad(x, (0, -x.shape[-1] % BLOCK)).unflatten(-1, (-1, BLOCK))
    amax = x.abs().amax(-1)
    finite = amax < torch.inf  # False for NaN
    x = torch.where(finite.unsqueeze(-1), x, 0.0) + 0.0  # -0.0 + 0.0 == +0.0
    magnitude = x.abs()
    s = (amax * ONE_SEVENTH).bfloat16().float()
    level1 = encode_e6m2(torch.where(finite, s, SMALLEST).clamp(SMALLEST, LARGEST))
    rec = decode_e6m2(level1).reciprocal().bfloat16().float().unsqueeze(-1)
    level2 = magnitude.unflatten(-1, (8, 8)).amax(-1) * rec >= 4
    shift2 = level2.repeat_interleave(2, dim=-1).float()
    level3 = magnitude.unflatten(-1, (16, 4)).amax(-1) * rec * torch.exp2(-shift2) >= 2
    shift = (shift2 + level3.float()).repeat_interleave(4, dim=-1)
    # fp32 holds the scaled magnitude plus a half exactly up to 7.5, and what lies above saturates.
    q = torch.floor(magnitude * rec * torch.exp2(2 - shift) + 0.5).clamp(max=7).int()
    codes = q | (torch.signbit(x).int() << 3)
    return codes, torch.where(finite, level1, NAN_BYTE), level2, level3


def pack(w: Tensor, rule: str, scales: object, cast: bool) -> tuple[Tensor, Tensor]:
    """w [..., K], fp32 or bf16 -> codes uint8 [..., 32 B], element 2i in the low nibble; and uint8 [..., 4 B], of each
    block level 1, level 2, level 3 low byte first. See `formats.Format`."""
    codes, level1, level2, level3 = _round((w.bfloat16() if cast else w).float())
    weights = 2 ** torch.arange(8, device=w.device, dtype=torch.int32)
    two = (level2.int() * weights).sum(-1, keepdim=True)
    three = (level3.int().unflatten(-1, (2, 8)) * weights).sum(-1)
    levels = torch.cat([level1.unsqueeze(-1), two, three], dim=-1).to(torch.uint8)
    return pack_codes(codes.to(torch.uint8).flatten(-2)), levels.flatten(-2)


def unpack(packed: Tensor, levels: Tensor, g: object, dtype: torch.dtype, num_columns: int) -> Tensor:
    """The values [..., K] in `dtype`."""
    codes = unpack_codes(packed).int().unflatten(-1, (-1, BLOCK))
    levels = levels.unflatten(-1, (-1, 4))
    places = torch.arange(8, device=packed.device, dtype=torch.int32)
    bits = (levels[..., 1:].int().unsqueeze(-1) >> places) & 1  # [..., B, 3, 8]
    value = _values(codes, decode_e6m2(levels[..., 0]), bits[..., 0, :], bits[..., 1:, :].flatten(-2))
    return value[..., :num_columns].to(dtype)


def _values(codes: Tensor, level1: Tensor, level2: Tensor, level3: Tensor) -> Tensor:
    """fp32 [..., 64 B]."""
    shift = level2.repeat_interleave(8, dim=-1) + level3.repeat_interleave(4, dim=-1)
    q = (codes & 7).float() * torch.exp2(shift.float() - 2)
    return (torch.where(codes & 8 != 0, -q, q) * level1.unsqueeze(-1)).flatten(-2)


def qdq_rows(x: Tensor, rule: str, dtype: torch.dtype) -> Tensor:
    """The values of x [..., K] as activations: `unpack(*pack(x, ...))` without the bytes."""
    codes, level1, level2, level3 = _round(x.float())
    return _values(codes, decode_e6m2(level1), level2.int(), level3.int())[..., : x.shape[-1]].to(dtype)
