"""What few rows still need once their channels are chosen: the other channels of the residual are cleared, or the two
operands are folded into one. The quantizer wrote all channels, and their scores (select.py).

Each program ranks the channels it writes itself, which spares the launch that would write a mask.

Legend: T rows, a unit is one channel or one block of 16.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quads.quant.triton.math import compiled, fold_operands, start_next, stored_column, wait_for_previous
from quads.quant.triton.select import chunk, reduce_scores, units_before


@triton.jit
def clear_kernel(
    score_ptr,
    r_ptr,
    T,
    width,
    keep,
    UNITS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,
    GROUP: tl.constexpr,
    BT: tl.constexpr,
    ASM: tl.constexpr,
):
    """Zeroes what `rank_kernel` would not mark, in place: COLUMNS neighbours of T rows that are stored in the GEMM's
    order (r_ptr: int16 [T, width]) per program."""
    wait_for_previous(ASM)
    start_next(ASM)
    position = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    drop = units_before(score_ptr, stored_column(position) // GROUP, UNITS, CHUNK) >= keep
    zero = tl.zeros((BT, COLUMNS), dtype=tl.int16)
    for first in range(0, T, BT):
        row = first + tl.arange(0, BT)
        at = r_ptr + row.to(tl.int64)[:, None] * width + position[None, :]
        tl.store(at, zero, mask=(row < T)[:, None] & (drop & (position < width))[None, :])


@triton.jit
def fold_kernel(
    score_ptr,
    data_ptr,
    scale_ptr,
    out_ptr,
    out_scale_ptr,
    T,
    width,
    keep,
    UNITS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,
    GROUP: tl.constexpr,
    BT: tl.constexpr,
    ASM: tl.constexpr,
):
    """As `clear_kernel`, with the two operands folded into one: data_ptr bfloat16 [2 T, width] and scale_ptr fp32
    [2 T], main and then residual; out_ptr fp16 [T, width], out_scale_ptr fp32 [T]. See residual.fold."""
    wait_for_previous(ASM)
    start_next(ASM)
    position = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    keeps = units_before(score_ptr, stored_column(position) // GROUP, UNITS, CHUNK) < keep
    for first in range(0, T, BT):
        row = first + tl.arange(0, BT)
        there = row < T
        second = (T + row).to(tl.int64)[:, None] * width + position[None, :]
        at = row.to(tl.int64)[:, None] * width + position[None, :]
        mask = there[:, None] & (position < width)[None, :]
        main = tl.load(data_ptr + at, mask=mask, other=0.0).to(tl.float32)
        kept = tl.load(data_ptr + second, mask=mask & keeps[None, :], other=0.0).to(tl.float32)
        g = tl.load(scale_ptr + row, mask=there, other=1.0)
        g_kept = tl.load(scale_ptr + T + row, mask=there, other=1.0)
        folded = fold_operands(main, kept, g[:, None], g_kept[:, None])
        tl.store(out_ptr + at, folded.to(tl.float16), mask=mask)
        if tl.program_id(0) == 0:
            tl.store(out_scale_ptr + row, g * 0.125, mask=there)


def clear_unselected(values_RW: Tensor, partial: Tensor, keep: int, by_block: bool) -> None:
    """Zero the channels that are not chosen. values: bf16 [R, width] in the GEMM's order; partial: float64 [R, KP]."""
    rows, width = values_RW.shape
    group = 16 if by_block else 1
    score = reduce_scores(partial, group)
    columns = 128 if by_block else 8
    clear_kernel[(width // columns,)](
        score,
        values_RW.view(torch.int16),
        rows,
        width,
        keep,
        UNITS=score.numel(),
        COLUMNS=columns,
        CHUNK=chunk(score.numel(), columns),
        GROUP=group,
        BT=min(triton.next_power_of_2(rows), 1024 // columns),
        ASM=compiled(),
        num_warps=4,
        launch_pdl=compiled(),
    )


def fold_selected(
    data_RW: Tensor, scale_R: Tensor, partial: Tensor, keep: int, by_block: bool
) -> tuple[Tensor, Tensor]:
    """(fp16 [R, width], fp32 [R]) of two operands bf16 [2 R, width] in the GEMM's order, with their scales fp32 [2 R].
    The residual counts in the chosen channels. partial: as in `clear_unselected`."""
    rows, width = data_RW.shape[0] // 2, data_RW.shape[1]
    group = 16 if by_block else 1
    score = reduce_scores(partial, group)
    columns = 128 if by_block else 8
    out = torch.empty(rows, width, dtype=torch.float16, device=data_RW.device)
    out_scale = torch.empty(rows, dtype=torch.float32, device=data_RW.device)
    fold_kernel[(width // columns,)](
        score,
        data_RW,
        scale_R,
        out,
        out_scale,
        rows,
        width,
        keep,
        UNITS=score.numel(),
        COLUMNS=columns,
        CHUNK=chunk(score.numel(), columns),
        GROUP=group,
        BT=min(triton.next_power_of_2(rows), 1024 // columns),
        ASM=compiled(),
        num_warps=4,
        enable_fp_fusion=False,
        launch_pdl=compiled(),
    )
    return out, out_scale
