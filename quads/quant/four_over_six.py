"""NVFP4 with four-over-six (arXiv 2512.02010): each block maps its maximum to 6 or to 4, whichever errs less.

Between 4 and 6 the E2M1 grid has nothing. A block whose second largest numbers lie there errs less when the maximum
becomes 4 and the scale 1.5 times as large. That needs room in the block scale, so the global scale is chosen for 1536 =
6 * 256 in place of 2688 = 6 * 448. What is stored is plain NVFP4: nobody who decodes it has to know.

Every step is IEEE fp32, to nearest even, as in nvfp4.py:

    global  amax over what shares the scale, as in nvfp4.py, with 1536 in place of 2688
    base    fl(fl(vmax / 6) * gs)                                vmax = max |x| in the block
    six     sf = E4M3(min(base, 448));    four   sf = E4M3(min(fl(base * 1.5), 448))
    code    E2M1(fl(x * inv)), inv = min(fl(1 / fl(sf * g)), FLT_MAX); sf == 0: code 0
    error   the sum over the 16 elements in their order, each step fp32, of |d| ("mae") or fl(d * d) ("mse"),
            d = fl(fl(fl(q * sf) * g) - x)                      four only if its error is the smaller one

Tools differ in what they minimize and a checkpoint does not say which ("mse" is the paper's, "mae" TransformerEngine's
default), so the choice is part of a run's config and of an export's. Signs, zeros and non-finite blocks as in nvfp4.py.

Shape suffixes here: K elements, B = ceil(K / 16) blocks. "..." is any number of leading dimensions.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from quads.quant import nvfp4
from quads.quant.nvfp4 import BLOCK, E4M3_MAX, FLT_MAX, decode_e2m1, encode_e2m1, pack_codes, round_e2m1, unpack_codes

RANGE = 6.0 * 256.0  # the largest |value| when g == 1 and the maximum is mapped to 6


def round_blocks(x: Tensor, g: Tensor, gs: Tensor, choose: str) -> tuple[Tensor, Tensor]:
    """fp32 [..., K], scales that broadcast against it -> (E2M1 values fp32 [..., B, 16], E4M3 scales [..., B]).

    choose: "mse" or "mae".
    """
    x_B16 = F.pad(x, (0, -x.shape[-1] % BLOCK)).unflatten(-1, (-1, BLOCK))
    vmax_B = x_B16.abs().amax(-1)
    # A tensor denominator: torch turns `tensor / number` into tensor * (1 / number), which rounds twice.
    base_B = vmax_B / torch.full_like(vmax_B, 6.0) * gs
    values6, sf6_B, error6_B = _candidate(x_B16, vmax_B, base_B, g, choose)
    values4, sf4_B, error4_B = _candidate(x_B16, vmax_B, base_B * 1.5, g, choose)
    four_B = error4_B < error6_B  # False where an error is NaN: those blocks are NaN either way
    sf_B = torch.where(four_B, sf4_B.float(), sf6_B.float()).to(torch.float8_e4m3fn)
    return torch.where(four_B.unsqueeze(-1), values4, values6), sf_B


def _candidate(
    x_B16: Tensor, vmax_B: Tensor, scaled_B: Tensor, g: Tensor, choose: str
) -> tuple[Tensor, Tensor, Tensor]:
    """(E2M1 values, E4M3 scales, error of each block) for one way to map the maximum."""
    scaled_B = torch.where(vmax_B < torch.inf, scaled_B.clamp(max=E4M3_MAX), torch.nan)
    sf_B = scaled_B.to(torch.float8_e4m3fn)
    sf32_B = sf_B.float()
    live_B = sf32_B > 0
    inv_B = torch.where(live_B, (sf32_B * g).reciprocal().clamp(max=FLT_MAX), 0.0)
    x_B16 = torch.where(live_B.unsqueeze(-1), x_B16, torch.where(x_B16.isfinite(), x_B16, 0.0)) + 0.0
    values = torch.copysign(round_e2m1(x_B16 * inv_B.unsqueeze(-1)), x_B16)
    values = torch.where(live_B.unsqueeze(-1), values, 0.0)
    d_B16 = (values * sf32_B.unsqueeze(-1)) * (g.unsqueeze(-1) if g.dim() else g) - x_B16
    terms = d_B16.abs() if choose == "mae" else d_B16 * d_B16
    error_B = terms[..., 0]
    for i in range(1, BLOCK):  # in order: the choice between two near errors is a matter of rounding
        error_B = error_B + terms[..., i]
    return values, sf_B, error_B


def global_scale(amax: Tensor, rule: str) -> tuple[Tensor, Tensor]:
    """(g, gs) for RANGE: `nvfp4.global_scale` with 1536. rule: "pow2+mse" and the like."""
    if rule.startswith("pow2"):
        g = nvfp4.pow2_scale(amax, RANGE)
        return g, g.reciprocal()
    gs = torch.where(amax == 0, 1.0, (torch.full_like(amax, RANGE) / amax).clamp(max=FLT_MAX))
    return gs.reciprocal(), gs


def pack(w: Tensor, rule: str, scales: tuple[Tensor, Tensor] | None, cast: bool) -> tuple[Tensor, Tensor]:
    """w [..., N, K] -> codes uint8 [..., N, 8 B], E4M3 scales [..., N, B]. See `formats.Format`."""
    assert scales is not None
    values_B16, sf_B = round_blocks((w.bfloat16() if cast else w).float(), *scales, rule.partition("+")[2])
    signs = values_B16.signbit().to(torch.uint8) << 3  # encoding would lose the sign of -0.0
    return pack_codes((encode_e2m1(values_B16.abs()) | signs).flatten(-2)), sf_B


def unpack(packed: Tensor, block_scale: Tensor, g: Tensor | None, dtype: torch.dtype, num_columns: int) -> Tensor:
    """The values [..., N, K] in `dtype`."""
    assert g is not None
    values_B16 = decode_e2m1(unpack_codes(packed)).unflatten(-1, (-1, BLOCK))
    return _apply(values_B16, block_scale, g)[..., :num_columns].to(dtype)


def _apply(values_B16: Tensor, sf_B: Tensor, g: Tensor) -> Tensor:
    """fp32 [..., 16 B]; a zero as +0, as the published vectors have it."""
    return (values_B16 * sf_B.float().unsqueeze(-1)).flatten(-2) * g + 0.0


def qdq_rows(x: Tensor, rule: str, dtype: torch.dtype) -> Tensor:
    """The values of x [..., K] as activations: one power-of-two scale for each row, whatever the weights have."""
    x = x.float()
    g = row_scale(x)
    return _apply(*round_blocks(x, g, g.reciprocal(), rule.partition("+")[2]), g)[..., : x.shape[-1]].to(dtype)


def row_scale(x: Tensor) -> Tensor:
    """The power-of-two g of each row of x (fp32 [..., K]) as activations, fp32 [..., 1]."""
    return nvfp4.pow2_scale(nvfp4.finite_amax(x, dim=-1), RANGE)
