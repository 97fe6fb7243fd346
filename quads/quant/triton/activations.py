"""Quantizing activations on a GPU: one pass over a row gives its codes and, with compensation, those of its residual.

The kernels are in activation_rows.py.
"""

import math
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from quads.quant.triton.activation_rows import row_codes_kernel, rows_kernel
from quads.quant.triton.codes import launch_shape, whole_blocks
from quads.quant.triton.layout import padded
from quads.quant.triton.math import compiled
from quads.quant.triton.select import select
from quads.quant.triton.selected import clear_unselected, fold_selected

SCORED_ROWS = 512
"""Up to so many rows are quantized and scored in one pass, and unselected channels cleared afterwards: one launch less
and x read once, for a partial score a row and channel."""


class Operand(NamedTuple):
    """Activations as a GEMM reads them."""

    data: Tensor  # bfloat16 [R or 2R, width] in the GEMM's order (main, then residual), fp16 [R, width] if folded, or
    # packed codes uint8
    scale: Tensor | None  # fp32 [R or 2R], one global scale a row; None: 16-bit activations
    block_scale: Tensor | None  # E4M3 bytes uint8 [R or 2R, width/16] when data holds codes
    residual: bool  # a second half of rows is subtracted


class Compensation(NamedTuple):
    """Settings of residual compensation (quads.quant.residual)."""

    ratio: float
    selection: str
    fold: bool = False  # one fp16 operand in place of two; never of codes


def row_warps(rows: int, kp: int, by_token: bool = False) -> int:
    """Warps of a row's program: more for latency with few rows, fewer for throughput with many. Choosing channels row
    by row counts again and again, which one warp does without barriers."""
    columns = 512 if rows < 1024 else 2048 if by_token else 1024
    return min(max(kp // columns, 1), 8)


def budget(k: int, compensation: Compensation) -> int:
    """How many channels (or blocks of 16, for "block") are kept."""
    if compensation.selection == "all":
        return k
    units = -(-k // 16) if compensation.selection == "block" else k
    return math.floor(compensation.ratio * units)


def quantize_activations(
    x_RK: Tensor,
    k: int,
    compensation: Compensation | None = None,
    live_R: Tensor | None = None,
    *,
    codes: bool = False,
    whole: bool = False,
    stored: bool = False,
    beside: bool = False,
    slots: tuple[Tensor, int] | None = None,
    route: dict | None = None,
) -> tuple[Operand, Tensor | None]:
    """Q_A of the rows of x (bf16 or fp32 [R, >= k], unit stride in K), and the compensating operand.

    codes: packed NVFP4 (width = k rounded up to 16) instead of bfloat16 values (width = whole tiles of 128).
    whole: with codes, Q_A(R) is not masked.
    stored: x is in the GEMM's order already.
    beside: bfloat16 values with g included, main and negated residual side by side ([R, 2 width], not [2R, width]).
    slots: (int32 [R], end) of a routing map; rows at `end` or beyond are skipped.
    route: arguments of a map to write on the way (routing.map_arguments; values of up to SCORED_ROWS rows only).
    Returns the operand and the channel mask, uint8 [k] or [R, k] (None without compensation, or if never written).
    """
    rows = x_RK.shape[0]
    width = -(-k // 16) * 16 if codes else padded(k)
    kp = max(triton.next_power_of_2(width), 128)
    folds = compensation is not None and compensation.fold
    assert not (folds and (codes or beside)), "a folded operand is values, one a channel"
    mode, keep, by_block = "none", 0, False
    if compensation is not None:
        mode = compensation.selection if compensation.selection in ("token", "2:4", "all") else "mask"
        keep, by_block = budget(k, compensation), compensation.selection == "block"
        if mode == "mask" and rows <= SCORED_ROWS and not (codes or stored or beside or slots):
            mode, folds = "scored", False  # two operands first; once the channels are known they are folded
    count = rows if compensation is None or folds else 2 * rows
    device = x_RK.device
    dtype = torch.uint8 if codes else torch.float16 if folds else torch.bfloat16
    data = torch.empty(count, width // 2 if codes else width, dtype=dtype, device=device)
    scale = torch.empty(count, dtype=torch.float32, device=device)
    block_scale = torch.empty(count, width // 16, dtype=torch.uint8, device=device) if codes else None
    if codes and not stored and compensation is None and whole_blocks(x_RK, k):
        assert block_scale is not None
        blocks = k // 16
        nb, warps = launch_shape(blocks, 1 if rows < 1024 else 4)
        row_codes_kernel[(rows,)](
            x_RK.view(torch.int32),
            data,
            block_scale,
            scale,
            scale if slots is None else slots[0],
            0 if slots is None else slots[1],
            blocks,
            x_RK.stride(0) // 16,
            NB=nb,
            HAS_SLOTS=slots is not None,
            ASM=compiled(),
            num_warps=warps,
            enable_fp_fusion=False,
            launch_pdl=compiled(),
        )
        return Operand(data, scale, block_scale, False), None
    mask, partial = None, scale
    if mode == "scored":
        partial = torch.empty(rows, kp, dtype=torch.float64, device=device)
    elif mode == "mask":
        mask = select(x_RK, k, keep, by_block, live_R, stored)
    elif mode != "none" and codes:
        mask = torch.empty(rows, k, dtype=torch.uint8, device=device)  # each row chooses its own: written there
    _launch_rows(
        x_RK,
        k,
        width,
        data,
        scale,
        live_R,
        route,
        mask_ptr=scale if mask is None else mask,
        main_byte_ptr=scale if block_scale is None else block_scale,
        residual_ptr=data.view(-1)[width:] if beside and compensation else data[rows:] if count > rows else scale,
        residual_byte_ptr=scale if block_scale is None else block_scale[rows:],
        partial_ptr=partial,
        slots_ptr=scale if slots is None else slots[0],
        slots_end=0 if slots is None else slots[1],
        stride_out=count * width // rows if beside else width,
        keep=keep,
        PLAIN=False,
        STORED=stored,
        CODES=codes,
        WHOLE=whole,
        BESIDE=beside,
        FOLD=folds,
        RESIDUAL=mode,
        HAS_SLOTS=slots is not None,
    )
    if mode == "scored" and compensation is not None and compensation.fold:
        return Operand(*fold_selected(data, scale, partial, keep, by_block), None, False), None
    if mode == "scored":
        clear_unselected(data[rows:], partial, keep, by_block)
    return Operand(data, scale, block_scale, count > rows), mask


def reorder_activations(x_RK: Tensor, k: int, live_R: Tensor | None = None, route: dict | None = None) -> Operand:
    """bfloat16 rows in the GEMM's order, for W4A16. live_R and route: only for a map to write on the way."""
    width = padded(k)
    data = torch.empty(x_RK.shape[0], width, dtype=torch.bfloat16, device=x_RK.device)
    flags = dict.fromkeys(("STORED", "CODES", "WHOLE", "BESIDE", "FOLD", "HAS_SLOTS"), False)
    unused = ("mask_ptr", "main_byte_ptr", "residual_ptr", "residual_byte_ptr", "partial_ptr", "slots_ptr")
    _launch_rows(
        x_RK,
        k,
        width,
        data,
        data,
        live_R,
        route,
        **dict.fromkeys(unused, data),
        slots_end=0,
        stride_out=width,
        keep=0,
        PLAIN=True,
        RESIDUAL="none",
        **flags,
    )
    return Operand(data, None, None, False)


_NO_ROUTE = {"n_pairs": 0, "n_blocks": 0, "n_small": 0, "TOP_K": 1, "E": 0, "BINS": 1, "CHUNK": 1, "BM": 1, "BL": 0}


def _launch_rows(
    x_RK: Tensor,
    k: int,
    width: int,
    data: Tensor,
    scale: Tensor,
    live_R: Tensor | None,
    route: dict | None,
    **others,
) -> None:
    rows = x_RK.shape[0]
    kp = max(triton.next_power_of_2(width), 128)
    route = route or {**_NO_ROUTE, **dict.fromkeys(("ids_ptr", "map_ptr", "expert_ptr"), scale)}
    rows_kernel[(rows + route["E"],)](
        x_RK,
        main_ptr=data,
        scale_ptr=scale,
        live_ptr=scale if live_R is None else live_R,
        T=rows,
        K=k,
        width=width,
        stride_x=x_RK.stride(0),
        KP=kp,
        EVEN=kp == k,
        INDEX_BITS=kp.bit_length() - 1,
        HAS_LIVE=live_R is not None,
        ASM=compiled(),
        num_warps=row_warps(rows, kp, others["RESIDUAL"] == "token"),
        enable_fp_fusion=False,
        launch_pdl=compiled(),
        **route,
        **others,
    )
