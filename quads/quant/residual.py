"""Residual activation compensation: a second 4-bit pass over the channels that lose most (paper, Eqs. 20-24).

    R  = Q_A(X) - X                       in fp32; Q_A quantizes each row by itself in the format of the activations
    s  = score of a channel               sum over live tokens of R[:, k] ** 2
    S  = the channels kept                by score, the lower index first on a tie
    X~ = Q_A(X) - M_S * Q_A(R)            M_S masks the channels outside S; Q_A(R) is taken over the whole row

[quant] residual_scale subtracts a share a of the second term: outlier fallback (2605.20402) is every channel with 0.5.

Tensor cores for FP4 take the two terms as two operands of the same weight tile: y = Q_A(X) W^T - (M_S Q_A(R)) W^T.
Elsewhere 4-bit numbers are decoded before they are multiplied, and one operand of 16 bits does for both (`fold`):

    X~ = g * 2**-3 * fp16(fl32(Q_A(X) - M_S * Q_A(R)) * 2**3 / g)      g: the power-of-two scale of the row in Q_A(X)

In fp16 nearly all differences are exact (docs/numerics.md), in bf16 four of five. [quant] residual_operand says which
is meant, two operands or one: they are two definitions, not two ways to one number.

`selection` says who shares S:
    "batch"   the paper: one S of floor(ratio * K) channels for all rows of one call
    "block"   the same in whole blocks of the format, floor(ratio * K / 16) of 16 channels in NVFP4 (K padded to whole
              blocks): what a tensor core can skip. The score of a block is the sum of its channels' scores
    "token"   each row ranks its own channels, so a row does not depend on its batch mates
    "2:4"     the two of each four neighbouring channels of a row that lose most (ratio 0.5), as Rollout-ResQ has it
              (2607.26515): what sparse tensor cores can skip
    "all"     every channel: nothing to rank, no dependence on batch mates, the smallest error (ratio 1)

Scores are computed in float64: squares of fp32 values are exact there and the sum does not depend on the order of the
rows in any way that matters. Elements of R that are not finite (their block is NaN in Q_A(X) already) score 0.

Shape suffixes: T rows (tokens), K channels, B = ceil(K / 16) blocks.
"""

import math
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from quads.quant import nvfp4
from quads.quant.formats import FORMATS

OperandWord = Literal["auto", "folded", "two"]
Selection = Literal["batch", "block", "token", "2:4", "all"]
SELECTIONS = ("batch", "block", "token", "2:4", "all")
OPERANDS = ("auto", "folded", "two")
FOLD_SHIFT = 8.0
"""2688 times this fits fp16, and fp16's smallest step then is 2**-27 g."""


class PackedPair(NamedTuple):
    """Both operands as a kernel holds them. Q_A(R) is packed whole; `mask` says which of its channels count."""

    main: tuple[Tensor, Tensor, Tensor]  # packed uint8 [T, 8 B], block scales float8_e4m3fn [T, B], g fp32 [T, 1]
    residual: tuple[Tensor, Tensor, Tensor]  # the same for Q_A(R)
    mask: Tensor  # bool [K] ("batch", "block") or [T, K]


def channel_scores(residual_TK: Tensor, selection: Selection, live_T: Tensor | None = None) -> Tensor:
    """float64 scores of the channels: [K] for "batch" and "block" (rows with live_T False left out), [T, K] for
    "token", "2:4" and "all"."""
    squares_TK = torch.nan_to_num(residual_TK.double().square(), nan=0.0, posinf=0.0)
    if selection in ("token", "2:4", "all"):
        return squares_TK
    if live_T is not None:
        squares_TK = torch.where(live_T.unsqueeze(-1), squares_TK, 0.0)
    return squares_TK.sum(0)


def select_channels(scores: Tensor, ratio: float, selection: Selection, block: int = nvfp4.BLOCK) -> Tensor:
    """bool mask shaped like `scores` [..., K], True for the kept channels. ratio in [0, 1]: 0 keeps none, 1 keeps
    all. block: that of the format."""
    num_channels = scores.shape[-1]
    if selection == "all":
        return torch.ones_like(scores, dtype=torch.bool)
    if selection == "block":
        blocks = F.pad(scores, (0, -num_channels % block)).unflatten(-1, (-1, block)).sum(-1)
        kept = _top(blocks, math.floor(ratio * blocks.shape[-1]))
        return kept.repeat_interleave(block, dim=-1)[..., :num_channels]
    if selection == "2:4":
        if ratio != 0.5:
            raise ValueError(f"2:4 keeps half of the channels, not {ratio}")
        fours = F.pad(scores, (0, -num_channels % 4), value=-1.0).unflatten(-1, (-1, 4))
        return _top(fours, 2).flatten(-2)[..., :num_channels]
    return _top(scores, math.floor(ratio * num_channels))


def _top(scores: Tensor, count: int) -> Tensor:
    """bool, True at the `count` largest scores along the last dimension; of equal ones the lower index wins."""
    order = scores.argsort(dim=-1, descending=True, stable=True)
    return torch.zeros_like(scores, dtype=torch.bool).scatter(-1, order[..., :count], True)


def compensate(
    x_TK: Tensor,
    ratio: float,
    selection: Selection,
    live_T: Tensor | None = None,
    format: str = "nvfp4",
    rule: str = "",
    strength: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """(main, residual), fp32 [T, K] each, with X~ = main - residual; the residual is masked already (+0 outside S).

    x_TK: fp32 or bf16. live_T: bool [T], False for padding rows: they take no part in the scores of the others; their
    own two terms are computed like any row's. ratio 0 gives a zero residual, ratio 1 keeps every channel. format, rule:
    of both terms; "" for the format's default rule. strength: a in X~ = Q_A(X) - a M_S * Q_A(R), in (0, 1].
    """
    main_TK, residual_TK, mask = both_terms(x_TK, ratio, selection, live_T, format, rule)
    return main_TK, torch.where(mask, residual_TK * strength, 0.0)


def both_terms(
    x_TK: Tensor, ratio: float, selection: Selection, live_T: Tensor | None, format: str, rule: str
) -> tuple[Tensor, Tensor, Tensor]:
    """(main, residual, mask): the terms of `compensate`, the residual of all channels, and which of them count."""
    row = FORMATS[format]
    rule = rule or row.rules[0]
    x_TK = x_TK.float()
    main_TK = row.qdq_rows(x_TK, rule, torch.float32)
    residual_TK = main_TK - x_TK
    mask = select_channels(channel_scores(residual_TK, selection, live_T), ratio, selection, row.block)
    return main_TK, row.qdq_rows(residual_TK, rule, torch.float32), mask


def fold(main_TK: Tensor, residual_TK: Tensor, g_T1: Tensor) -> tuple[Tensor, Tensor]:
    """(operand fp16 [T, K], scale fp32 [T, 1]) with X~ = operand * scale: what a kernel without FP4 multiplies.

    main, residual: fp32, as `compensate` gives them. g: fp32, the power-of-two scale of each row in main. The scale is
    taken off first, so that nothing overflows: both factors are powers of two, and the rounding to fp16 (to nearest
    even) is the only one after the subtraction.
    """
    operand_TK = ((main_TK - residual_TK) * g_T1.reciprocal() * FOLD_SHIFT).half()
    return operand_TK, g_T1 * (1 / FOLD_SHIFT)


def compensate_folded(
    x_TK: Tensor,
    ratio: float,
    selection: Selection,
    live_T: Tensor | None = None,
    format: str = "nvfp4",
    rule: str = "",
    strength: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """`fold` of the two terms of `compensate`, with its arguments. ValueError for a format without a scale of rows."""
    row_scale = FORMATS[format].row_scale
    if row_scale is None:
        raise ValueError(f"{format} has no scale of rows, which a folded operand is measured by")
    main_TK, residual_TK = compensate(x_TK, ratio, selection, live_T, format, rule, strength)
    return fold(main_TK, residual_TK, row_scale(x_TK.float()))


def compensate_packed(x_TK: Tensor, ratio: float, selection: Selection, live_T: Tensor | None = None) -> PackedPair:
    """The same two terms in NVFP4 as codes, scales and mask: what a kernel is compared with. Arguments as in
    `compensate`."""
    x_TK = x_TK.float()
    main = nvfp4.quantize_rows(x_TK)
    residual_TK = nvfp4.dequantize(*main, num_elements=x_TK.shape[-1]) - x_TK
    mask = select_channels(channel_scores(residual_TK, selection, live_T), ratio, selection)
    return PackedPair(main, nvfp4.quantize_rows(residual_TK), mask)
