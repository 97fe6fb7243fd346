"""Quantization error of a block-scaled 4-bit format, split exactly into scale bias, dead zone and grid noise: twice.

Q(x) is the format's value of x. Q*(x) is what the same grid gives with the ideal scale, the real number that maps the
largest of a block to the grid's largest (amax / 6 for E2M1, amax / 7 for HiF4), which no format stores.

    published (arXiv 2605.20402)      D: what the ideal scale sends to 0, |x| < amax / 24 in E2M1
        scale bias   everywhere       Q(x) - Q*(x)     what rounding the scale moved
        dead zone    on D             Q*(x) - x = -x
        grid noise   off D            Q*(x) - x        what the levels cannot hold
    stored                            D: what the format itself sends to 0, Q(x) = 0
        dead zone    on D             Q(x) - x = -x    the whole error
        scale bias   off D            Q(x) - Q*(x)
        grid noise   off D            Q*(x) - x

Either way the three add up to Q(x) - x, element by element. They ask different things: "published" what an ideal scale
would still lose, "stored" what becomes of the values that the format loses whole. A scale above the ideal one widens
the stored dead zone, which is then several times the published one. Under "published" the dead zone is orthogonal to
both others where the scale is never below the ideal one (MXFP4 ceil: what the ideal scale sends to 0, Q sends to 0 as
well), and for no other rule; bias and noise partly cancel under each, and the cross term 2 <bias, noise> is reported.

Everything is float64 after the format itself. Shapes: [..., K], blocks along K.
"""

import math
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from quads.quant import nvfp4
from quads.quant.formats import FORMATS

Definition = Literal["published", "stored"]
DEFINITIONS: tuple[Definition, ...] = ("published", "stored")


class ErrorParts(NamedTuple):
    """float64 tensors of the input's shape; `scale_bias + dead_zone + grid_noise` is `total`."""

    total: Tensor
    scale_bias: Tensor
    dead_zone: Tensor
    grid_noise: Tensor


# What is compared, by its name in results: (format, scale rule). MXFP4 has OCP's scale, and one that never saturates.
COMPARED = {
    "nvfp4": ("nvfp4", "pow2"),
    "mxfp4": ("mxfp4", "floor"),
    "mxfp4_ceil": ("mxfp4", "ceil"),
    "hif4": ("hif4", "half_away"),
}


def ideal_qdq(x: Tensor, format: str) -> Tensor:
    """Q*: the grid of a 4-bit format with the exact scale in every block, float64."""
    num_elements, block = x.shape[-1], FORMATS[format].block
    x_Bb = F.pad(x.double(), (0, -num_elements % block)).unflatten(-1, (-1, block))
    vmax = x_Bb.abs().amax(-1, keepdim=True)
    scale = torch.where(vmax > 0, vmax / (7 if format == "hif4" else 6), 1.0)
    return (_on_grid(x_Bb / scale, format) * scale).flatten(-2)[..., :num_elements]


def _on_grid(y_Bb: Tensor, format: str) -> Tensor:
    """Values of scaled elements, |y| <= 6, or 7 in HiF4."""
    if format != "hif4":
        return nvfp4.decode_e2m1(nvfp4.encode_e2m1(y_Bb.float())).double()
    magnitude = y_Bb.abs()  # the doublings of hif4.py, chosen by the exact scale
    double8 = magnitude.unflatten(-1, (8, 8)).amax(-1) >= 4
    unit4 = 0.25 * (1 + double8.double()).repeat_interleave(2, -1)
    double4 = magnitude.unflatten(-1, (16, 4)).amax(-1) >= 8 * unit4
    unit = (unit4 * (1 + double4.double())).repeat_interleave(4, -1)
    return torch.floor(magnitude / unit + 0.5).clamp(max=7) * unit * y_Bb.sign()


def split_error(x: Tensor, quantized: Tensor, format: str, definition: Definition) -> ErrorParts:
    """The three parts of `quantized - x` for finite x [..., K] and the format's values of the same shape."""
    x, quantized = x.double(), quantized.double()
    ideal = ideal_qdq(x, format)
    if definition == "published":
        dead = ideal == 0
        bias = quantized - ideal
    else:
        dead = quantized == 0
        bias = torch.where(dead, 0.0, quantized - ideal)
    return ErrorParts(
        total=quantized - x,
        scale_bias=bias,
        dead_zone=torch.where(dead, -x, 0.0),
        grid_noise=torch.where(dead, 0.0, ideal - x),
    )


def summarize(x: Tensor, name: str, quantized: Tensor | None = None) -> dict[str, Any]:
    """Of one tensor: `total`, the error's energy over that of x (0.01 is an SNR of 20 dB); `dead_fraction`, the share
    of non-zero values that become zero; and for each definition the energies of its parts over that of x, with the
    cross term (`scale_bias + dead_zone + grid_noise + cross` is `total`) and the cosine of bias and noise.

    name: a key of COMPARED. quantized: the values where they are known already (a weight with its own global scale).
    """
    format, rule = COMPARED[name]
    return measure(x, format, rule, quantized)


def measure(x: Tensor, format: str, rule: str, quantized: Tensor | None = None) -> dict[str, Any]:
    """`summarize` for a format and its scale rule."""
    x = x.float()
    values = FORMATS[format].qdq_rows(x, rule, torch.float32) if quantized is None else quantized
    energy = float(x.double().square().sum()) or 1.0
    nonzero = max(int((x != 0).sum()), 1)
    found: dict[str, Any] = {"dead_fraction": int(((values == 0) & (x != 0)).sum()) / nonzero}
    for definition in DEFINITIONS:
        parts = split_error(x, values, format, definition)
        total, bias, dead, noise = (float(part.square().sum()) for part in parts)
        product = float((parts.scale_bias * parts.grid_noise).sum())
        beside = float((parts.scale_bias * parts.dead_zone).sum())  # 0 where the two are orthogonal
        found["total"] = total / energy
        found[definition] = {
            "scale_bias": bias / energy,
            "dead_zone": dead / energy,
            "grid_noise": noise / energy,
            "cross": 2 * (product + beside) / energy,
            "cosine": product / (math.sqrt(bias * noise) or 1.0),
        }
    return found
