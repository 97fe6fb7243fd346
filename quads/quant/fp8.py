"""FP8 (E4M3) with block scales: the 8-bit recipe.

    weights      one fp32 scale for each block of 128 x 128 of [N, K]; blocks at the edges may be smaller
    activations  one fp32 scale for each row and 128 channels

    scale = smallest power of two with scale * 448 >= amax of the block ("pow2"), or max(amax / 448, 2**-126) ("amax");
            1 where amax is 0
    code  = E4M3(min(max(x / scale, -448), 448)), NaN where x is NaN or Inf; amax is over finite elements
    value = code * scale                          exact in bf16 with "pow2", so both sides multiply the same numbers

All steps are IEEE fp32, round to nearest even. As with NVFP4, do not compile the quantizer: it divides.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from quads.quant.nvfp4 import E4M3_MAX, GlobalScaleMode, finite_amax, pow2_scale

BLOCK = 128


def _scale(amax: Tensor, mode: GlobalScaleMode) -> Tensor:
    if mode == "pow2":
        return pow2_scale(amax, E4M3_MAX)
    if mode == "amax":
        # A tensor divisor: CUDA turns division by a number into a product with its rounded reciprocal.
        return torch.where(amax == 0, 1.0, (amax / torch.full_like(amax, E4M3_MAX)).clamp(min=2.0**-126))
    raise ValueError(f'scale mode is "pow2" or "amax", not {mode!r}')


def _encode(x: Tensor, scale: Tensor) -> Tensor:
    codes = (x / scale).clamp(-E4M3_MAX, E4M3_MAX)
    return torch.where(x.isfinite(), codes, torch.nan).to(torch.float8_e4m3fn)


def _spread(scales: Tensor, size: int, dim: int) -> Tensor:
    """Repeat every scale for the elements of its block along `dim`, up to `size`."""
    return scales.repeat_interleave(BLOCK, dim=dim).narrow(dim, 0, size)


def quantize_weight(w: Tensor, mode: GlobalScaleMode = "pow2") -> tuple[Tensor, Tensor]:
    """w [..., N, K] -> codes float8_e4m3fn [..., N, K], scales fp32 [..., ceil(N / 128), ceil(K / 128)]."""
    w = w.float()
    num_rows, num_columns = w.shape[-2:]
    padded = F.pad(w, (0, -num_columns % BLOCK, 0, -num_rows % BLOCK))
    blocks = padded.unflatten(-1, (-1, BLOCK)).unflatten(-3, (-1, BLOCK))  # [..., n, 128, k, 128]
    scales = _scale(finite_amax(blocks, dim=(-3, -1)).squeeze(-1).squeeze(-2), mode)
    return _encode(w, _spread(_spread(scales, num_rows, -2), num_columns, -1)), scales


def dequantize_weight(codes: Tensor, scales: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """code * scale in fp32, then cast to `dtype`: [..., N, K]."""
    num_rows, num_columns = codes.shape[-2:]
    return (codes.float() * _spread(_spread(scales, num_rows, -2), num_columns, -1)).to(dtype)


def quantize_rows(x: Tensor, mode: GlobalScaleMode = "pow2") -> tuple[Tensor, Tensor]:
    """x [..., K] -> codes float8_e4m3fn [..., K], scales fp32 [..., ceil(K / 128)]."""
    x = x.float()
    num_channels = x.shape[-1]
    groups = F.pad(x, (0, -num_channels % BLOCK)).unflatten(-1, (-1, BLOCK))
    scales = _scale(finite_amax(groups, dim=-1).squeeze(-1), mode)
    return _encode(x, _spread(scales, num_channels, -1)), scales


def dequantize_rows(codes: Tensor, scales: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """code * scale in fp32, then cast to `dtype`: [..., K]."""
    return (codes.float() * _spread(scales, codes.shape[-1], -1)).to(dtype)


def qdq_weight(w: Tensor, mode: GlobalScaleMode = "pow2", dtype: torch.dtype = torch.float32) -> Tensor:
    """Quantize and dequantize a weight [..., N, K]. No gradient (see fake_quant)."""
    return dequantize_weight(*quantize_weight(w, mode), dtype)


def qdq_rows(x: Tensor, mode: GlobalScaleMode = "pow2", dtype: torch.dtype = torch.float32) -> Tensor:
    """Quantize and dequantize activations [..., K], each row by itself. No gradient (see fake_quant)."""
    return dequantize_rows(*quantize_rows(x, mode), dtype)
