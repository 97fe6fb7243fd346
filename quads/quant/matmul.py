"""The rollout's matmul in plain torch: the reference of every kernel.

    y = sum of +- operand @ W^T        W and the operands hold exactly the values that their 4- or 8-bit codes stand for

The operands of an activation are one (x, or Q_A(x)) or two (Q_A(x), and the residual that is subtracted: residual.py).
Both multiply the same W. If the residual is folded, they are one again, in fp16 times a power of two.

On a CPU the products accumulate in float64 and the result is rounded once to the activation dtype. Products of codes
are exact in float64 and their sum nearly so, which makes a row's result independent of how many rows it is computed
with: no activation code flips because a matmul was blocked another way. On a GPU this path accumulates in fp32 and is
there for what no kernel serves, and to compare kernels with (`rollout_classes` in convert.py chooses).

Shapes: T rows, N output features, K input features, E experts.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from quads.model.moe import expert_matmul, matmul_mode
from quads.quant import residual
from quads.quant.formats import FORMATS, find_rule, is_exact
from quads.quant.recipes import Precision, QuantSpec, precision
from quads.quant.tensor import QuantizedTensor


@dataclass(frozen=True)
class SiteSpec:
    """What happens at one matrix input of the rollout.

    Example: `SiteSpec("w4a4_residual", 0.5, "batch", "pow2")`
    """

    precision: str  # a word of `PRECISIONS`, whose "4" is `format`
    ratio: float
    selection: residual.Selection
    global_scale: str
    format: str = "nvfp4"
    scale_rule: str = ""
    operand: residual.OperandWord = "auto"  # here the same as "two"
    residual_scale: float = 1.0

    @classmethod
    def of(cls, spec: QuantSpec, site: str) -> "SiteSpec":
        word = spec.rollout_precision(site)
        return cls(
            word,
            spec.ratio,
            spec.selection,
            spec.global_scale,
            spec.format,
            spec.scale_rule,
            spec.operand,
            spec.residual_scale,
        )

    @property
    def formats(self) -> Precision:
        """(weights, activations, residual or not)."""
        return precision(self.precision, self.format)

    @property
    def path(self) -> str:
        """What the Triton kernels are asked for: only operands that are decoded can be folded. The two matmuls of an
        expert layer take the same path, so this does not ask whether the site has a residual."""
        return "decoded" if self.operand == "folded" else "auto"

    def rule(self, name: str) -> str:
        """The scale rule of one of its formats."""
        return find_rule(name, self.global_scale, self.scale_rule if name == self.format else "")


def allocate(shape: torch.Size, site: SiteSpec, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Storage for a rollout weight: a QuantizedTensor, or a plain tensor of `dtype`."""
    weights = site.formats.weights
    if weights == "bf16":
        return torch.zeros(shape, dtype=dtype, device=device)
    return QuantizedTensor.empty(shape, dtype, weights, site.rule(weights), device)


def quantize_activation(x_TK: Tensor, site: SiteSpec, live_T: Tensor | None = None) -> tuple[Tensor, ...]:
    """The operands (x,) or (main, residual), each [T, K] in the dtype of x, which holds their values exactly if bf16 or
    wider; or a folded one, in fp32 or wider. live_T: see `residual.compensate`."""
    _, name, with_residual = site.formats
    if name == "bf16":
        return (x_TK,)
    rule = site.rule(name)
    arguments = x_TK, site.ratio, site.selection, live_T, name, rule, site.residual_scale
    if with_residual and site.operand == "folded":
        operand_TK, scale_T1 = residual.compensate_folded(*arguments)
        return ((operand_TK.float() * scale_T1).to(torch.promote_types(x_TK.dtype, torch.float32)),)
    if with_residual:
        main_TK, residual_TK = residual.compensate(*arguments)
        return main_TK.to(x_TK.dtype), residual_TK.to(x_TK.dtype)
    return (FORMATS[name].qdq_rows(x_TK, rule, x_TK.dtype),)


def wide_dtype(device: torch.device) -> torch.dtype:
    """The dtype that the reference path multiplies and accumulates in, where bf16 will not do (`product_dtype`)."""
    return torch.float64 if device.type == "cpu" else torch.float32


def product_dtype(site: SiteSpec, dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype of the operands of a site's matmul, for activations of `dtype`.

    On a GPU bf16 if it holds them exactly: the values of all codes, unless scales are those of "amax". The product is
    the same (fp32 sums, rounded once to bf16), on tensor cores, and torch groups experts in bf16 without a word to the
    host, so that a CUDA graph can hold it. A folded residual has 11 bits and needs fp32.
    """
    exact = all(is_exact(site.rule(name)) for name in site.formats[:2] if name != "bf16")
    exact = exact and math.frexp(site.residual_scale)[0] == 0.5  # a power of two moves no bit of the residual
    folded = site.formats.residual and site.operand == "folded"
    if device.type == "cuda" and dtype == torch.bfloat16 and exact and not folded:
        return torch.bfloat16
    return wide_dtype(device)


def product(site: SiteSpec, dtype: torch.dtype, device: torch.device) -> tuple[torch.dtype, bool]:
    """(`product_dtype`, whether the weight stands there twice, for two operands side by side: see `linear`)."""
    chosen = product_dtype(site, dtype, device)
    return chosen, chosen == torch.bfloat16 and site.formats.residual


def widen(weight: Tensor, dtype: torch.dtype, twice: bool = False) -> Tensor:
    """The values of a stored weight [..., N, K] in the dtype that is multiplied in, [..., N, 2 K] if `twice`: for two
    operands side by side (`linear`)."""
    wide = weight.dequantize(dtype) if isinstance(weight, QuantizedTensor) else weight.to(dtype)
    return torch.cat([wide, wide], dim=-1) if twice else wide


def side_by_side(operands: tuple[Tensor, ...], wide: Tensor) -> tuple[Tensor, ...]:
    """Two operands as one, [T, 2 K], where the weight stands there twice: one sum takes the second off the first before
    anything is rounded to bf16."""
    if wide.shape[-1] == operands[0].shape[-1]:
        return operands
    main, residual = operands
    return (torch.cat([main, -residual], dim=-1),)


def linear(operands: tuple[Tensor, ...], wide_NK: Tensor, dtype: torch.dtype) -> Tensor:
    """First operand minus the second, each times W^T: [T, N] in `dtype`."""
    operands = side_by_side(operands, wide_NK)
    first, *rest = (F.linear(operand.to(wide_NK.dtype), wide_NK) for operand in operands)
    return (first - rest[0] if rest else first).to(dtype)


def grouped_linear(operands: tuple[Tensor, ...], wide_ENK: Tensor, offsets_E: Tensor, dtype: torch.dtype) -> Tensor:
    """The same for rows sorted by expert; offsets_E int32 [E] are the ends of the experts' rows."""
    operands = side_by_side(operands, wide_ENK)
    mode = matmul_mode(operands[0].to(wide_ENK.dtype), wide_ENK)
    first, *rest = (expert_matmul(operand.to(wide_ENK.dtype), wide_ENK, offsets_E, mode) for operand in operands)
    return (first - rest[0] if rest else first).to(dtype)
