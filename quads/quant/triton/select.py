"""Channel selection over a batch: scores summed without atomics, in a fixed order, then the mask; no host sync.

Three small launches: partial scores of row groups, their sum, and the channels whose rank is below the budget. Few
rows are scored by the quantizer itself (`store_scores`), and what is not chosen is cleared at the end (selected.py).
Scores are float64: the squares of fp32 residuals are exact in it.

Legend: T rows, K channels, KP = power of two >= K, P partial sums, a unit is one channel or one block of 16.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quads.quant.triton.math import (
    INF_BITS,
    abs_bits,
    compiled,
    quantize_tile,
    start_next,
    tile_columns,
    values,
    wait_for_previous,
)


@triton.jit
def scores_kernel(
    x_ptr,
    live_ptr,
    partial_ptr,
    T,
    K,
    stride_x,
    ROWS: tl.constexpr,
    KP: tl.constexpr,
    STORED: tl.constexpr,
    HAS_LIVE: tl.constexpr,
    ASM: tl.constexpr,
):
    """Sum of R**2 over this program's ROWS live rows, float64 [KP] in natural order: exact squares, a fixed order."""
    start_next(ASM)
    wait_for_previous(ASM)
    position, column = tile_columns(KP, STORED)
    total = tl.zeros(position.shape, dtype=tl.float64)
    first = tl.program_id(0) * ROWS
    x_ptrs = x_ptr + first.to(tl.int64) * stride_x + position
    for row in range(first, tl.minimum(first + ROWS, T)):
        x = tl.load(x_ptrs, mask=column < K, other=0.0).to(tl.float32) + 0.0
        x_ptrs += stride_x
        magnitude, scale, _, g = quantize_tile(x)
        r = values(magnitude, scale, x) * g - x
        counts = abs_bits(r) < INF_BITS
        if HAS_LIVE:
            counts = counts & (tl.load(live_ptr + row) != 0)
        r64 = tl.where(counts, r, 0.0).to(tl.float64)
        total += r64 * r64
    tl.store(partial_ptr + tl.program_id(0) * KP + column, total)


@triton.jit
def reduce_kernel(
    partial_ptr, out_ptr, P, KP, BP: tl.constexpr, BU: tl.constexpr, GROUP: tl.constexpr, ASM: tl.constexpr
):
    """[P, KP] float64 partial scores -> one score a unit [KP / GROUP], always in the same order."""
    start_next(ASM)
    wait_for_previous(ASM)
    unit = tl.program_id(0) * BU + tl.arange(0, BU)
    column = tl.program_id(0) * BU * GROUP + tl.arange(0, BU * GROUP)
    total = tl.zeros((BU * GROUP,), dtype=tl.float64)
    for first in range(0, P, BP):
        p = first + tl.arange(0, BP)
        total += tl.sum(
            tl.load(partial_ptr + p[:, None] * KP + column[None, :], mask=(p < P)[:, None], other=0.0), axis=0
        )
    tl.store(out_ptr + unit, tl.sum(tl.reshape(total, (BU, GROUP)), axis=1))


@triton.jit
def units_before(score_ptr, own, UNITS: tl.constexpr, CHUNK: tl.constexpr):
    """How many of the UNITS units come before each of `own` (int [OWN]): a larger score, or an equal one at a lower
    index. Counts of CHUNK others are kept apart until the end, so the loads of all chunks are in flight together."""
    score = tl.load(score_ptr + own)
    before = tl.zeros((own.shape[0], CHUNK), dtype=tl.int32)
    for start in tl.static_range(0, UNITS, CHUNK):
        other = start + tl.arange(0, CHUNK)
        theirs = tl.load(score_ptr + other)
        tied = (theirs[None, :] == score[:, None]) & (other[None, :] < own[:, None])
        before += ((theirs[None, :] > score[:, None]) | tied).to(tl.int32)
    return tl.sum(before, axis=1)


@triton.jit
def rank_kernel(
    score_ptr,
    mask_ptr,
    K,
    keep,
    UNITS: tl.constexpr,
    OWN: tl.constexpr,
    CHUNK: tl.constexpr,
    GROUP: tl.constexpr,
    ASM: tl.constexpr,
):
    """Marks the `keep` units (GROUP channels each: 1, or 16 for "block") that come first; uint8 [K]."""
    start_next(ASM)
    wait_for_previous(ASM)
    own = tl.program_id(0) * OWN + tl.arange(0, OWN)
    before = units_before(score_ptr, own, UNITS, CHUNK)
    columns = own[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    kept = tl.broadcast_to((before < keep)[:, None], columns.shape)
    tl.store(mask_ptr + columns, kept.to(tl.uint8), mask=columns < K)


@triton.jit
def store_scores(partial_ptr, live_ptr, r, column, HAS_LIVE: tl.constexpr):
    """R**2 of one row, float64 in natural order; 0 where R is not finite and for a dead row."""
    counts = abs_bits(r) < INF_BITS
    if HAS_LIVE:
        counts = counts & (tl.load(live_ptr) != 0)
    r64 = tl.where(counts, r, 0.0).to(tl.float64)
    tl.store(partial_ptr + column, r64 * r64)


def chunk(units: int, own: int) -> int:
    """How many units are compared with `own` others at a time: 4096 comparisons, 32 a thread."""
    return min(units, 4096 // own)


def reduce_scores(partial: Tensor, group: int) -> Tensor:
    """float64 [P, KP] -> scores of the units, float64 [KP / group]."""
    groups, kp = partial.shape
    if groups == group == 1:
        return partial.view(-1)
    units = kp // group
    score = torch.empty(units, dtype=torch.float64, device=partial.device)
    bp = min(triton.next_power_of_2(groups), 256)
    bu = max(min(units, 32 // group, 2048 // bp // group), 1)  # up to 256 partial sums in one go, 16 a thread
    reduce_kernel[(units // bu,)](
        partial,
        score,
        groups,
        kp,
        BP=bp,
        BU=bu,
        GROUP=group,
        ASM=compiled(),
        num_warps=4,
        launch_pdl=compiled(),
    )
    return score


def select(x_RK: Tensor, k: int, keep: int, by_block: bool, live_R: Tensor | None, stored: bool) -> Tensor:
    """uint8 [k]: 1 at the channels to compensate, chosen over the live rows of x."""
    rows = x_RK.shape[0]
    kp = max(triton.next_power_of_2(k), 128)
    per_program = 1 if rows <= 128 else 4 if rows <= 512 else max(8, triton.cdiv(rows, 1024))
    groups = triton.cdiv(rows, per_program)
    partial = torch.empty(groups, kp, dtype=torch.float64, device=x_RK.device)
    scores_kernel[(groups,)](
        x_RK,
        partial if live_R is None else live_R,
        partial,
        rows,
        k,
        x_RK.stride(0),
        ROWS=per_program,
        KP=kp,
        STORED=stored,
        HAS_LIVE=live_R is not None,
        ASM=compiled(),
        num_warps=min(max(kp // (512 if rows <= 512 else 1024), 1), 8),
        enable_fp_fusion=False,
        launch_pdl=compiled(),
    )
    group = 16 if by_block else 1
    score = reduce_scores(partial, group)
    units = score.numel()
    mask = torch.empty(k, dtype=torch.uint8, device=x_RK.device)
    own = min(units, 8)
    rank_kernel[(units // own,)](
        score,
        mask,
        k,
        keep,
        UNITS=units,
        OWN=own,
        CHUNK=chunk(units, own),
        GROUP=group,
        ASM=compiled(),
        num_warps=4,
        launch_pdl=compiled(),
    )
    return mask
