"""Activation quantizer kernels: one pass over a row gives its codes and, with compensation, those of its residual.

Legend: T rows, K columns, width = stored columns, KP = power of two >= width.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quads.quant.kernels_codes import (
    encode_words,
    launch_shape,
    row_factors,
    whole_blocks,
)
from quads.quant.kernels_gemm import start_next, wait_for_previous
from quads.quant.kernels_layout import padded
from quads.quant.kernels_math import (
    INF_BITS,
    abs_bits,
    compiled,
    keep_top,
    pack_tile,
    quantize_tile,
    store_values,
    tile_columns,
    values,
)
from quads.quant.kernels_select import clear_unselected, select, store_scores


@triton.jit
def rows_kernel(
    x_ptr,
    mask_ptr,
    main_ptr,
    main_byte_ptr,
    scale_ptr,
    residual_ptr,
    residual_byte_ptr,
    partial_ptr,
    live_ptr,
    slots_ptr,
    slots_end,
    T,
    K,
    width,
    stride_x,
    stride_out,
    keep,
    KP: tl.constexpr,
    EVEN: tl.constexpr,
    STORED: tl.constexpr,
    CODES: tl.constexpr,
    WHOLE: tl.constexpr,
    FOLD: tl.constexpr,
    RESIDUAL: tl.constexpr,
    INDEX_BITS: tl.constexpr,
    HAS_LIVE: tl.constexpr,
    HAS_SLOTS: tl.constexpr,
    AFTER_ROUTE: tl.constexpr,
    ASM: tl.constexpr,
):
    """One row of activations per program: Q_A(x), and Q_A(R) with RESIDUAL "mask" (mask_ptr uint8 [K] given), "token"
    (the row's own `keep` channels; written to mask_ptr [T, K] when CODES), "scored" (values of all channels, and their
    scores to partial_ptr: the others are cleared once the scores are ranked, `clear_kernel`) or "none".

    CODES: packed codes [T, width/2] and scale bytes [T, width/16]. Otherwise bfloat16 values [T, width] in the GEMM's
    order, rows stride_out apart; with FOLD times g (exact: a power of two), the residual negated. The residual is
    masked, except codes with WHOLE. scale_ptr: fp32 [2T], g of x, then g of R. With HAS_SLOTS, rows whose slot entry is
    `slots_end` (padding of a routing map) are skipped. AFTER_ROUTE: the kernel before this one is the routing map,
    which is not read here; it waited for the producer of x, so this one only waits at its end.
    """
    start_next(ASM)
    row = tl.program_id(0).to(tl.int64)
    target = row
    if HAS_SLOTS:
        target = tl.load(slots_ptr + row)  # complete: the GEMM before this kernel read it before it called start_next
    if not AFTER_ROUTE:
        wait_for_previous(ASM)
    if HAS_SLOTS:
        if target >= slots_end:
            return
    position, column = tile_columns(KP, STORED)
    if EVEN:
        x = tl.load(x_ptr + row * stride_x + position)
    else:
        x = tl.load(x_ptr + row * stride_x + position, mask=column < K, other=0.0)
    x = x.to(tl.float32) + 0.0  # -0.0 becomes +0.0
    magnitude, scale, byte, g = quantize_tile(x)
    tl.store(scale_ptr + row, g)
    main = values(magnitude, scale, x)
    if CODES:
        block = tl.arange(0, KP // 16)
        pair = block[:, None] * 8 + tl.arange(0, 8)[None, :]
        packed = pack_tile(magnitude, byte, x, KP // 16)
        tl.store(main_ptr + row * (width // 2) + pair, packed, mask=pair < width // 2)
        tl.store(main_byte_ptr + row * (width // 16) + block, byte.to(tl.uint8), mask=block < width // 16)
    else:
        store_values(main_ptr + row * stride_out, main * g if FOLD else main, width, KP, STORED, ASM)
    if RESIDUAL != "none":
        r = main * g - x + 0.0
        magnitude, scale, byte, g = quantize_tile(r)
        tl.store(scale_ptr + T + row, g)
        if RESIDUAL == "token":
            key = abs_bits(r)
            kept = keep_top(tl.where(key >= INF_BITS, 0, key), column, keep, 30, INDEX_BITS, STORED)
        elif RESIDUAL == "scored":
            kept = column < K
            store_scores(partial_ptr + row * KP, live_ptr + row, r, column, HAS_LIVE)
        else:
            kept = tl.load(mask_ptr + column, mask=column < K, other=0) != 0
        if CODES:
            if not WHOLE:
                magnitude = tl.where(kept, magnitude, 0.0)
                r = tl.where(kept, r, 0.0)
            packed = pack_tile(magnitude, byte, r, KP // 16)
            tl.store(residual_ptr + row * (width // 2) + pair, packed, mask=pair < width // 2)
            tl.store(residual_byte_ptr + row * (width // 16) + block, byte.to(tl.uint8), mask=block < width // 16)
            if RESIDUAL == "token":
                tl.store(mask_ptr + row * K + column, kept.to(tl.uint8), mask=column < K)
        else:
            kept_values = tl.where(kept, values(magnitude, scale, r), 0.0)
            if FOLD:
                kept_values = kept_values * -g
            store_values(residual_ptr + row * stride_out, kept_values, width, KP, STORED, ASM)
    if AFTER_ROUTE:
        wait_for_previous(ASM)


@triton.jit
def row_codes_kernel(
    x_ptr,
    packed_ptr,
    byte_ptr,
    scale_ptr,
    slots_ptr,
    slots_end,
    blocks,
    stride_x,
    NB: tl.constexpr,
    HAS_SLOTS: tl.constexpr,
    AFTER_ROUTE: tl.constexpr,
    ASM: tl.constexpr,
):
    """`rows_kernel` with CODES and no residual, of bfloat16 rows of whole blocks (x_ptr: int32 words of two values,
    rows stride_x blocks apart), a block a thread: see kernels_codes.py."""
    start_next(ASM)
    row = tl.program_id(0).to(tl.int64)
    target = row
    if HAS_SLOTS:
        target = tl.load(slots_ptr + row)
    if not AFTER_ROUTE:
        wait_for_previous(ASM)
    if HAS_SLOTS:
        if target >= slots_end:
            return
    block = tl.arange(0, NB)
    inside = (block < blocks)[:, None]
    words = x_ptr + (row * stride_x + block)[:, None] * 8 + tl.arange(0, 4)[None, :]
    first = tl.load(words, mask=inside, other=0)
    second = tl.load(words + 4, mask=inside, other=0)
    byte, _, inv, g = row_factors(first, second, ASM)
    tl.store(scale_ptr + row, g)
    dead = (byte == 0) | (byte == 0x7F)
    pairs = packed_ptr + (row * blocks + block)[:, None] * 8 + tl.arange(0, 4)[None, :]
    tl.store(pairs, encode_words(first, inv, dead, ASM), mask=inside)
    tl.store(pairs + 4, encode_words(second, inv, dead, ASM), mask=inside)
    tl.store(byte_ptr + row * blocks + block, byte.to(tl.uint8), mask=block < blocks)
    if AFTER_ROUTE:
        wait_for_previous(ASM)


@triton.jit
def reorder_kernel(x_ptr, out_ptr, K, width, stride_x, KP: tl.constexpr, AFTER_ROUTE: tl.constexpr, ASM: tl.constexpr):
    """bfloat16 rows -> the GEMM's column order, padding columns 0 (activations that stay in 16 bits)."""
    start_next(ASM)
    if not AFTER_ROUTE:
        wait_for_previous(ASM)
    row = tl.program_id(0).to(tl.int64)
    position = tl.arange(0, KP)
    p = position % 128
    column = position - p + (p % 8) * 16 + ((p // 8) % 4) * 4 + p // 32
    x = tl.load(x_ptr + row * stride_x + column, mask=column < K, other=0.0)
    tl.store(out_ptr + row * width + position, x, mask=position < width)
    if AFTER_ROUTE:
        wait_for_previous(ASM)


SCORED_ROWS = 512
"""Up to so many rows are quantized and scored in one pass, and unselected channels cleared afterwards: one launch less
and x read once, for a partial score a row and channel."""


class Operand(NamedTuple):
    """Activations as a GEMM reads them."""

    data: Tensor  # bfloat16 [R or 2R, width] in the GEMM's order (main, then residual), or packed codes uint8
    scale: Tensor | None  # fp32 [R or 2R], one global scale a row; None: 16-bit activations
    block_scale: Tensor | None  # E4M3 bytes uint8 [R or 2R, width/16] when data holds codes
    residual: bool


class Compensation(NamedTuple):
    """Settings of residual compensation (quads.quant.residual)."""

    ratio: float
    selection: str


def row_warps(rows: int, kp: int, by_token: bool = False) -> int:
    """Warps of a row's program: more for latency with few rows, fewer for throughput with many. Choosing channels row
    by row counts again and again, which one warp does without barriers."""
    columns = 512 if rows < 1024 else 2048 if by_token else 1024
    return min(max(kp // columns, 1), 8)


def budget(k: int, compensation: Compensation) -> int:
    """How many channels (or blocks of 16, for "block") are kept."""
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
    fold: bool = False,
    slots: tuple[Tensor, int] | None = None,
    after_route: bool = False,
) -> tuple[Operand, Tensor | None]:
    """Q_A of the rows of x (bf16 or fp32 [R, >= k], unit stride in K), and the compensating operand.

    codes: packed NVFP4 (width = k rounded up to 16) instead of bfloat16 values (width = whole tiles of 128).
    whole: with codes, Q_A(R) is not masked.
    stored: x is in the GEMM's order already.
    fold: bfloat16 values with g included, main and negated residual side by side ([R, 2 width], not [2R, width]).
    slots: (int32 [R], end) of a routing map; rows at `end` or beyond are skipped.
    Returns the operand and the channel mask, uint8 [k] or [R, k] (None without compensation, or if never written).
    """
    rows = x_RK.shape[0]
    width = -(-k // 16) * 16 if codes else padded(k)
    kp = max(triton.next_power_of_2(width), 128)
    count = rows if compensation is None else 2 * rows
    device = x_RK.device
    data = torch.empty(
        count, width // 2 if codes else width, dtype=torch.uint8 if codes else torch.bfloat16, device=device
    )
    scale = torch.empty(count, dtype=torch.float32, device=device)
    block_scale = torch.empty(count, width // 16, dtype=torch.uint8, device=device) if codes else None
    by_block = codes and not stored and whole_blocks(x_RK, k)
    if by_block and compensation is None:
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
            AFTER_ROUTE=after_route,
            ASM=compiled(),
            num_warps=warps,
            enable_fp_fusion=False,
            launch_pdl=compiled(),
        )
        return Operand(data, scale, block_scale, False), None
    mask, mode, partial = None, "none", None
    if compensation is not None:
        mode = "token" if compensation.selection == "token" else "mask"
        if mode == "mask" and rows <= SCORED_ROWS and not (codes or stored or fold or slots):
            mode, partial = "scored", torch.empty(rows, kp, dtype=torch.float64, device=device)
        elif mode == "mask":
            mask = select(
                x_RK, k, budget(k, compensation), compensation.selection == "block", live_R, stored, after_route
            )
            after_route = False
        elif codes:
            mask = torch.empty(rows, k, dtype=torch.uint8, device=device)
    unused = scale
    rows_kernel[(rows,)](
        x_RK,
        unused if mask is None else mask,
        data,
        unused if block_scale is None else block_scale,
        scale,
        data.view(-1)[width:] if compensation and fold else data[rows:] if compensation else unused,
        unused if block_scale is None else block_scale[rows:],
        unused if partial is None else partial,
        unused if live_R is None else live_R,
        unused if slots is None else slots[0],
        0 if slots is None else slots[1],
        rows,
        k,
        width,
        x_RK.stride(0),
        count * width // rows if fold else width,
        0 if compensation is None else budget(k, compensation),
        KP=kp,
        EVEN=kp == k,
        STORED=stored,
        CODES=codes,
        WHOLE=whole,
        FOLD=fold,
        RESIDUAL=mode,
        INDEX_BITS=kp.bit_length() - 1,
        HAS_LIVE=live_R is not None,
        HAS_SLOTS=slots is not None,
        AFTER_ROUTE=after_route,
        ASM=compiled(),
        num_warps=row_warps(rows, kp, mode == "token"),
        enable_fp_fusion=False,
        launch_pdl=compiled(),
    )
    if partial is not None and compensation is not None:
        clear_unselected(data[rows:], partial, budget(k, compensation), compensation.selection == "block")
    return Operand(data, scale, block_scale, compensation is not None), mask


def reorder_activations(x_RK: Tensor, k: int, after_route: bool = False) -> Operand:
    """bfloat16 rows in the GEMM's order, for W4A16."""
    width = padded(k)
    data = torch.empty(x_RK.shape[0], width, dtype=torch.bfloat16, device=x_RK.device)
    kp = triton.next_power_of_2(width)
    reorder_kernel[(x_RK.shape[0],)](
        x_RK,
        data,
        k,
        width,
        x_RK.stride(0),
        KP=kp,
        AFTER_ROUTE=after_route,
        ASM=compiled(),
        num_warps=min(max(kp // 512, 1), 8),
        launch_pdl=compiled(),
    )
    return Operand(data, None, None, False)
