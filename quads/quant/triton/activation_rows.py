"""Kernels that quantize activations a row a program: codes or values, and with compensation those of the residual.

activations.py launches them. Legend: T rows, K columns, width = stored columns, KP = power of two >= width, E
experts.
"""

import triton
import triton.language as tl

from quads.quant.triton.codes import encode_words, row_factors
from quads.quant.triton.math import (
    INF_BITS,
    abs_bits,
    fold_operands,
    keep_top,
    pack_tile,
    quantize_tile,
    start_next,
    store_values,
    tile_columns,
    two_of_four,
    values,
    wait_for_previous,
)
from quads.quant.triton.routing import write_slots
from quads.quant.triton.select import store_scores


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
    ids_ptr,
    map_ptr,
    expert_ptr,
    n_pairs,
    n_blocks,
    n_small,
    T,
    K,
    width,
    stride_x,
    stride_out,
    keep,
    KP: tl.constexpr,
    EVEN: tl.constexpr,
    PLAIN: tl.constexpr,
    STORED: tl.constexpr,
    CODES: tl.constexpr,
    WHOLE: tl.constexpr,
    BESIDE: tl.constexpr,
    FOLD: tl.constexpr,
    RESIDUAL: tl.constexpr,
    INDEX_BITS: tl.constexpr,
    HAS_LIVE: tl.constexpr,
    HAS_SLOTS: tl.constexpr,
    TOP_K: tl.constexpr,
    E: tl.constexpr,
    BINS: tl.constexpr,
    CHUNK: tl.constexpr,
    BM: tl.constexpr,
    BL: tl.constexpr,
    ASM: tl.constexpr,
):
    """One row of activations per program: Q_A(x), and Q_A(R) with RESIDUAL "mask" (mask_ptr uint8 [K] given), "token"
    (the row's own `keep` channels), "2:4" (two of each four neighbours) or "all", the last three written to mask_ptr
    [T, K] when CODES; "scored" (values of all channels, and their
    scores to partial_ptr: the others are cleared once the scores are ranked, `clear_kernel`) or "none".

    CODES: packed codes [T, width/2] and scale bytes [T, width/16]. Otherwise bfloat16 values [T, width] in the GEMM's
    order, rows stride_out apart; with BESIDE times g (exact: a power of two), the residual negated. The residual is
    masked, except codes with WHOLE. scale_ptr: fp32 [2T], g of x, then g of R. With FOLD there is one operand, in
    fp16, and its scale g / 8 (residual.fold). With HAS_SLOTS, rows whose slot entry is
    `slots_end` (padding of a routing map) are skipped. PLAIN: bfloat16 rows in the GEMM's order, not quantized.

    E > 0: before the rows come E programs that write the routing map of these rows (routing.write_slots), which
    spares a decode step a launch.
    """
    start_next(ASM)
    row = tl.program_id(0).to(tl.int64)
    target = row
    if HAS_SLOTS:
        target = tl.load(slots_ptr + row)  # complete: the GEMM before this kernel read it before it called start_next
    wait_for_previous(ASM)
    if E > 0:
        if row < E:
            write_slots(
                tl.program_id(0),
                ids_ptr,
                live_ptr,
                map_ptr,
                expert_ptr,
                n_pairs,
                n_blocks,
                n_small,
                TOP_K,
                E,
                BINS,
                CHUNK,
                BM,
                BL,
                HAS_LIVE,
            )
            return
        row -= E
    if HAS_SLOTS:
        if target >= slots_end:
            return
    position, column = tile_columns(KP, STORED)
    if EVEN:
        x = tl.load(x_ptr + row * stride_x + position)
    else:
        x = tl.load(x_ptr + row * stride_x + position, mask=column < K, other=0.0)
    if PLAIN:
        store_values(main_ptr + row * stride_out, x.to(tl.float32), width, KP, STORED, ASM)
        return
    x = x.to(tl.float32) + 0.0  # -0.0 becomes +0.0
    magnitude, scale, byte, g = quantize_tile(x)
    main = values(magnitude, scale, x)
    if FOLD:
        main_g = g
        tl.store(scale_ptr + row, g * 0.125)
    else:
        tl.store(scale_ptr + row, g)
    if CODES:
        block = tl.arange(0, KP // 16)
        pair = block[:, None] * 8 + tl.arange(0, 8)[None, :]
        packed = pack_tile(magnitude, byte, x, KP // 16)
        tl.store(main_ptr + row * (width // 2) + pair, packed, mask=pair < width // 2)
        tl.store(main_byte_ptr + row * (width // 16) + block, byte.to(tl.uint8), mask=block < width // 16)
    elif not FOLD:
        store_values(main_ptr + row * stride_out, main * g if BESIDE else main, width, KP, STORED, ASM)
    if RESIDUAL != "none":
        r = main * g - x + 0.0
        magnitude, scale, byte, g = quantize_tile(r)
        if not FOLD:
            tl.store(scale_ptr + T + row, g)
        if RESIDUAL == "token":
            key = abs_bits(r)
            kept = keep_top(tl.where(key >= INF_BITS, 0, key), column, keep, 30, INDEX_BITS, STORED)
        elif RESIDUAL == "2:4":
            key = abs_bits(r)
            kept = two_of_four(tl.where(key >= INF_BITS, 0, key), KP, STORED)
        elif RESIDUAL == "all":
            kept = column < K
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
            if RESIDUAL == "token" or RESIDUAL == "2:4" or RESIDUAL == "all":
                tl.store(mask_ptr + row * K + column, kept.to(tl.uint8), mask=column < K)
        else:
            kept_values = tl.where(kept, values(magnitude, scale, r), 0.0)
            if FOLD:
                folded = fold_operands(main, kept_values, main_g, g)
                store_values(main_ptr + row * stride_out, folded, width, KP, STORED, ASM)
            else:
                if BESIDE:
                    kept_values = kept_values * -g
                store_values(residual_ptr + row * stride_out, kept_values, width, KP, STORED, ASM)


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
    ASM: tl.constexpr,
):
    """`rows_kernel` with CODES and no residual, of bfloat16 rows of whole blocks (x_ptr: int32 words of two values,
    rows stride_x blocks apart), a block a thread: see codes.py."""
    start_next(ASM)
    row = tl.program_id(0).to(tl.int64)
    target = row
    if HAS_SLOTS:
        target = tl.load(slots_ptr + row)
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
