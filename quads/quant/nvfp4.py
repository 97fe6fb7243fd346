"""NVFP4 in plain torch: the specification that every kernel, the learner and both engines agree with, bit for bit.

A tensor is cut into blocks of 16 consecutive elements along its last dimension K (the input dimension of a weight,
the channels of an activation). An element is a 4-bit E2M1 code (a sign and 0, .5, 1, 1.5, 2, 3, 4 or 6), a block has
one E4M3 scale `sf`, a tensor (or a row, or an expert) has one fp32 scale `g`, and the value is `(e2m1 * sf) * g`. Every
step below is IEEE fp32 with round to nearest even:

    amax  = max |x| over what shares the global scale; non-finite elements do not count
    pow2  : g = 2 ** max(ceil(log2(amax / 2688)), -126), gs = 1 / g      both exact; 2688 = 6 * 448
    amax  : gs = min(2688 / amax, FLT_MAX), g = 1 / gs
    either: amax == 0 gives g = gs = 1
    sf    = E4M3(min(vmax * (gs * (1/6)), 448))                          vmax = max |x| in the block
    inv   = 0 where sf == 0, else min(1 / (sf * g), FLT_MAX)
    code  = E2M1(x * inv)                                                ties to the even code, |.| > 5 gives 6

    sf == 0: every code is 0.   x == -0.0: code 0.   Any other negative x keeps its sign, also where it rounds to zero.
    A block with NaN or Inf: sf byte 0x7F, every code 0; it dequantizes to NaN and leaves its neighbours alone.

The chain is the one of TransformerEngine and of FlashInfer's exact mode; the power-of-two global scale is ours. With
it the dequantized value is exact in bf16, so a bf16 GEMM of the learner and a 4-bit GEMM of the rollout multiply the
same numbers.

Eager torch rounds every step by itself, on CPU and CUDA. A compiler may fuse a product with a sum or divide less
exactly, so do not compile `quantize` and `qdq`; fake_quant.py has a form of `qdq_rows` that stays eager inside
compiled functions. `dequantize` only multiplies and compiles safely.

Shape suffixes here: K elements, B = ceil(K / 16) blocks. "..." is any number of leading dimensions.
"""

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

GlobalScaleMode = Literal["pow2", "amax"]

BLOCK = 16
E2M1_MAX = 6.0
E4M3_MAX = 448.0
RANGE = E2M1_MAX * E4M3_MAX  # 2688: the largest |value| when g == 1
FLT_MAX = torch.finfo(torch.float32).max


def finite_amax(x: Tensor, dim: int | tuple[int, ...] | None = None) -> Tensor:
    """max |x| over the finite elements, fp32; over everything (shape []) or over `dim`, which is kept with size 1. 0
    if none."""
    a = torch.nan_to_num(x.abs().float(), nan=0.0, posinf=0.0)
    if dim is not None:
        return a.amax(dim, keepdim=True)
    return a.amax() if a.numel() else a.new_zeros(())


def pow2_scale(amax: Tensor, limit: float) -> Tensor:
    """The smallest power of two s >= 2**-126 with s * limit >= amax, fp32; 1 where amax is 0.

    amax: fp32, finite, >= 0. Read from the bits: no logarithm, no rounding.
    """
    significand, exponent = math.frexp(limit)  # limit = significand * 2**exponent, 0.5 <= significand < 1
    fraction = int((2 * significand - 1) * 2**23)
    # Subtract the exponents. Adding 0x7FFFFF - fraction first carries into the exponent exactly where the fraction of
    # amax is larger than that of limit, which is the ceil of the logarithm. Then drop the fraction bits.
    bits = amax.view(torch.int32) + (0x7FFFFF - fraction - ((exponent - 1) << 23))
    scale = (bits.clamp(min=1 << 23) & 0x7F800000).view(torch.float32)
    return torch.where(amax == 0, 1.0, scale)


def global_scale(amax: Tensor, mode: GlobalScaleMode = "pow2") -> tuple[Tensor, Tensor]:
    """(g, gs), both fp32 and shaped like `amax`: the decode scale and the encode scale it comes from.

    amax: fp32, finite, >= 0. In mode "amax" only `g` is stored; keep `gs` to quantize another tensor with the same
    scale, because 1 / g does not always give it back. In mode "pow2" it does.
    """
    if mode == "pow2":
        g = pow2_scale(amax, RANGE)
        return g, g.reciprocal()
    if mode == "amax":
        # A tensor numerator: torch turns `number / tensor` into number * (1 / tensor), which rounds twice.
        gs = torch.where(amax == 0, 1.0, (torch.full_like(amax, RANGE) / amax).clamp(max=FLT_MAX))
        return gs.reciprocal(), gs
    raise ValueError(f'global scale mode is "pow2" or "amax", not {mode!r}')


def round_e2m1(y: Tensor) -> Tensor:
    """The nearest E2M1 value of each y (fp32, no NaN): ties to the even code, saturating at 6, zeros as +0.

    The step between codes is half the power of two below max(|y|, 1): 0.5 up to 2, 1 up to 4, then 2. Adding 1.5 *
    2**23 steps leaves no bits below the step, so the sum is rounded there by the addition itself, to nearest even.
    """
    y = y.clamp(-E2M1_MAX, E2M1_MAX)
    power = (y.abs().clamp(min=1.0).view(torch.int32) & 0x7F800000).view(torch.float32)
    magic = power * (1.5 * 2**22)
    return (y + magic) - magic


def encode_e2m1(y: Tensor) -> Tensor:
    """Nearest E2M1 codes (uint8, shape of y, low 4 bits): ties to the even code, saturating at 6.

    y: fp32, not NaN. A negative y keeps its sign where it rounds to zero (code 8); -0.0 gives code 0.
    """
    return _codes(torch.copysign(round_e2m1(y), y + 0.0))  # -0.0 + 0.0 == +0.0


def _codes(values: Tensor) -> Tensor:
    """uint8 codes of exact E2M1 values, -0.0 included: the inverse of `decode_e2m1`."""
    bits = (values * 2.0**-14).half().view(torch.int16)
    return ((bits >> 9) & 7 | (bits >> 12) & 8).to(torch.uint8)


def decode_e2m1(codes: Tensor) -> Tensor:
    """fp32 values of E2M1 codes (any integer dtype, 0..15), same shape.

    An E2M1 number is the sign, the low exponent bits and the top mantissa bit of an fp16 number 2**14 times smaller. No
    table, so that it compiles.
    """
    codes = codes.to(torch.int16)
    return ((codes & 7) << 9 | (codes & 8) << 12).view(torch.float16).float() * 2.0**14


def pack_codes(codes: Tensor) -> Tensor:
    """uint8 [..., K] codes -> uint8 [..., K/2]: element 2i in the low nibble, 2i + 1 in the high one. K must be
    even."""
    pairs = codes.unflatten(-1, (-1, 2))
    return pairs[..., 0] | (pairs[..., 1] << 4)


def unpack_codes(packed: Tensor) -> Tensor:
    """uint8 [..., K/2] -> uint8 [..., K]: the inverse of `pack_codes`."""
    return torch.stack([packed & 0xF, packed >> 4], dim=-1).flatten(-2)


def _round(x: Tensor, g: Tensor, gs: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 [..., K], scales that broadcast against it -> (E2M1 values fp32 [..., B, 16], E4M3 scales [..., B])."""
    num_elements = x.shape[-1]
    if num_elements % BLOCK:
        x = F.pad(x, (0, -num_elements % BLOCK))
    x_B16 = x.unflatten(-1, (-1, BLOCK))
    vmax_B = x_B16.abs().amax(-1)
    scaled_B = torch.clamp(vmax_B * (gs * (1 / 6)), max=E4M3_MAX)  # clamp before the cast: not every cast saturates
    # vmax is NaN or Inf where the block holds one. The positive NaN becomes byte 0x7F.
    sf_B = torch.where(vmax_B < torch.inf, scaled_B, torch.nan).to(torch.float8_e4m3fn)
    sf32_B = sf_B.float()
    live_B = sf32_B > 0  # False for zero and for NaN scales: both blocks hold only code 0
    inv_B = torch.where(live_B, (sf32_B * g).reciprocal().clamp(max=FLT_MAX), 0.0)
    x_B16 = torch.where(live_B.unsqueeze(-1), x_B16, 0.0) + 0.0  # -0.0 + 0.0 == +0.0
    # The sign is that of x: the product may underflow, and the rounding gives +0.
    return torch.copysign(round_e2m1(x_B16 * inv_B.unsqueeze(-1)), x_B16), sf_B


def _scales(x: Tensor, g: Tensor | None, gs: Tensor | None, mode: GlobalScaleMode) -> tuple[Tensor, Tensor]:
    if g is None:
        return global_scale(finite_amax(x), mode)
    return g, g.reciprocal() if gs is None else gs


def quantize(
    x: Tensor, g: Tensor | None = None, mode: GlobalScaleMode = "pow2", *, gs: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize along the last dimension.

    x: [..., K], fp32 or bf16 (values are taken as they are). K that is no multiple of 16 is padded with zeros to one;
    the padding is part of the packed result and `dequantize(..., num_elements=K)` cuts it off again. g: fp32 that
    broadcasts against x with a last dimension of 1 (or shape []): [] for one scale, [E, 1, 1] for experts, [..., 1]
    for rows. None takes it from the finite amax of the whole of x, by `mode`. gs: its encode scale, 1 / g by default;
    needed with a given g in mode "amax" (see `global_scale`).

    Returns packed codes uint8 [..., 8 B], block scales float8_e4m3fn [..., B], and g.
    """
    x = x.float()
    g, gs = _scales(x, g, gs, mode)
    values_B16, sf_B = _round(x, g, gs)
    return pack_codes(_codes(values_B16.flatten(-2))), sf_B, g


def dequantize(
    packed: Tensor,
    block_scale: Tensor,
    g: Tensor,
    dtype: torch.dtype = torch.float32,
    num_elements: int | None = None,
) -> Tensor:
    """(e2m1 * sf) * g in fp32, then cast to `dtype`: exact in bf16 for "pow2" scales. [..., K], K = num_elements or
    all."""
    values_B16 = decode_e2m1(unpack_codes(packed)).unflatten(-1, (-1, BLOCK))
    return _apply_scales(values_B16, block_scale, g, dtype, num_elements)


def _apply_scales(values_B16: Tensor, sf_B: Tensor, g: Tensor, dtype: torch.dtype, num_elements: int | None) -> Tensor:
    x = (values_B16 * sf_B.float().unsqueeze(-1)).flatten(-2) * g
    return x[..., :num_elements].to(dtype)


def qdq(
    x: Tensor,
    g: Tensor | None = None,
    mode: GlobalScaleMode = "pow2",
    *,
    gs: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """`dequantize(*quantize(x, g, mode))` without packing: [..., K] -> [..., K] of `dtype`. No gradient (see
    fake_quant)."""
    num_elements = x.shape[-1]
    x = x.float()
    g, gs = _scales(x, g, gs, mode)
    values_B16, sf_B = _round(x, g, gs)
    return _apply_scales(values_B16, sf_B, g, dtype, num_elements)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Q_A: the activation quantizer. Every row of x [..., K] has its own power-of-two g, so it never depends on its
    batch mates.

    Returns packed uint8 [..., 8 B], block scales float8_e4m3fn [..., B], g fp32 [..., 1].
    """
    x = x.float()
    return quantize(x, row_scale(x))


def qdq_rows(x: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Q_A(x), dequantized: [..., K] of `dtype`."""
    x = x.float()
    return qdq(x, row_scale(x), dtype=dtype)


def row_scale(x: Tensor) -> Tensor:
    """The power-of-two g of each row of x (fp32 [..., K]) as activations, fp32 [..., 1]."""
    return global_scale(finite_amax(x, dim=-1), "pow2")[0]
