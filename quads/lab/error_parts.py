"""Quantization error of a block-scaled 4-bit format, split exactly into scale bias, dead zone and grid noise.

Q(x) is the format's value of x. Q*(x) is what the same grid gives with the ideal scale, the real number vmax / 6 of
each block, which no format stores (it rounds it to E4M3, or to a power of two):

    dead zone    Q(x) = 0 although x != 0:  the whole error, -x
    scale bias   elsewhere:                 Q(x) - Q*(x)     what rounding the scale moved
    grid noise   elsewhere:                 Q*(x) - x        what the eight levels cannot hold

The three add up to Q(x) - x, element by element. In squares the dead zone stands alone, and bias and noise leave a
cross term 2 <bias, noise>, which is reported. The names and the exactness follow the three-way decomposition published
for MXFP4 in RL post-training; its formulas are not in its abstract, so the definitions here are this project's own.

Everything is float64 after the format itself. Shapes: [..., K], blocks along K.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from quads.quant import nvfp4
from quads.quant.formats import FORMATS


class ErrorParts(NamedTuple):
    """float64 tensors of the input's shape; `scale_bias + dead_zone + grid_noise` is `total`."""

    total: Tensor
    scale_bias: Tensor
    dead_zone: Tensor
    grid_noise: Tensor


# What is compared, by its name in results: (format, scale rule). MXFP4 has OCP's scale, and one that never saturates.
COMPARED = {"nvfp4": ("nvfp4", "pow2"), "mxfp4": ("mxfp4", "floor"), "mxfp4_ceil": ("mxfp4", "ceil")}


def ideal_qdq(x: Tensor, block: int) -> Tensor:
    """Q*: E2M1 with the exact scale vmax / 6 in every block, float64."""
    num_elements = x.shape[-1]
    x_Bb = F.pad(x.double(), (0, -num_elements % block)).unflatten(-1, (-1, block))
    vmax = x_Bb.abs().amax(-1, keepdim=True)
    scale = torch.where(vmax > 0, vmax / 6, 1.0)
    codes = nvfp4.encode_e2m1((x_Bb / scale).float())
    return (nvfp4.decode_e2m1(codes).double() * scale).flatten(-2)[..., :num_elements]


def split_error(x: Tensor, quantized: Tensor, block: int) -> ErrorParts:
    """The three parts of `quantized - x` for finite x [..., K] and the format's values of the same shape."""
    x, quantized = x.double(), quantized.double()
    ideal = ideal_qdq(x, block)
    dead = (quantized == 0) & (x != 0)
    return ErrorParts(
        total=quantized - x,
        scale_bias=torch.where(dead, 0.0, quantized - ideal),
        dead_zone=torch.where(dead, -x, 0.0),
        grid_noise=torch.where(dead, 0.0, ideal - x),
    )


def summarize(x: Tensor, name: str, quantized: Tensor | None = None) -> dict[str, float]:
    """Energies of the parts of one tensor over the energy of x (so that 0.01 is an SNR of 20 dB), and the fraction of
    non-zero values that become zero. name: a key of COMPARED.

    `scale_bias + dead_zone + grid_noise + cross` equals `total`. `quantized`: the values where they are known already
    (a weight with its own global scale).
    """
    x = x.float()
    format, rule = COMPARED[name]
    values = FORMATS[format].qdq_rows(x, rule, torch.float32) if quantized is None else quantized
    parts = split_error(x, values, FORMATS[format].block)
    energy = float(x.double().square().sum()) or 1.0
    nonzero = max(int((x != 0).sum()), 1)
    return {
        "total": float(parts.total.square().sum()) / energy,
        "scale_bias": float(parts.scale_bias.square().sum()) / energy,
        "dead_zone": float(parts.dead_zone.square().sum()) / energy,
        "grid_noise": float(parts.grid_noise.square().sum()) / energy,
        "cross": 2 * float((parts.scale_bias * parts.grid_noise).sum()) / energy,
        "dead_fraction": int((parts.dead_zone != 0).sum()) / nonzero,
    }
