"""The expert GEMM of a decode step: as many programs as fit the GPU at once, each an equal share of all weight tiles.

Numbers and layouts are those of kernels_gemm.py, bit for bit. There a program is one tile, and a GPU runs four or five
rounds of programs, each of which starts with an idle pipeline and two loads that depend on each other. Here the loop
over K goes on from one tile to the next, so the weights of the next tile are on their way while the last one is
finished, and the shares differ by one tile at most, whatever the routing.
"""

import triton
import triton.language as tl

from quads.quant.kernels_gemm import (
    main_minus_residual,
    multiply,
    start_next,
    store_rows,
    store_swiglu,
    wait_for_previous,
)


@triton.jit
def w4_persistent_kernel(
    x_ptr,
    x_scale_ptr,
    w_ptr,
    s_ptr,
    g_ptr,
    rows_ptr,
    expert_ptr,
    used_ptr,
    out_ptr,
    n_rows,
    half_rows,
    N,
    NB,
    stride_x,
    stride_out,
    STEPS: tl.constexpr,
    TOP_K: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    KSTEP: tl.constexpr,
    MODE: tl.constexpr,
    SCALED: tl.constexpr,
    RESIDUAL: tl.constexpr,
    ASM: tl.constexpr,
):
    """`w4_gemm_kernel` in MODE "gather" or "scatter". used_ptr: int32 [1], the blocks in use, which come first;
    half_rows: rows of main in x; STEPS: K steps of a tile."""
    MB: tl.constexpr = 2 * BM if RESIDUAL else BM
    CW: tl.constexpr = 32 * KSTEP
    if MODE == "gather":
        wait_for_previous(ASM)
        start_next(ASM)
    tiles_n = NB * (128 // BN)
    tiles = tl.load(used_ptr) * tiles_n
    programs = tl.num_programs(0)
    tile = tiles * tl.program_id(0) // programs
    end = tiles * (tl.program_id(0) + 1) // programs
    column = tl.arange(0, MB)
    # Which expert and tokens a tile is of is read one tile ahead.
    next_block = tl.minimum(tile, tl.maximum(tiles - 1, 0)) // tiles_n
    next_expert = tl.load(expert_ptr + next_block)
    next_target = tl.load(rows_ptr + next_block * BM + column % BM)
    if MODE == "scatter":
        # Here the routing map was complete already: the "gather" GEMM called start_next after its own wait.
        wait_for_previous(ASM)
        start_next(ASM)

    row = tl.arange(0, BN)
    word = tl.arange(0, CW)
    pair = tl.arange(0, 4 * KSTEP)
    w_at = row[:, None] * 32 + (word % 32)[None, :] + ((word // 32) * 4096)[None, :]
    s_at = row[:, None] * 4 + (pair % 4)[None, :] + ((pair // 4) * 512)[None, :]
    x_at = (word % 32 + (word // 32) * 128)[:, None]

    step = STEPS - 1
    block = 0
    n0 = 0
    first = tl.full((), 0, dtype=tl.int64)
    expert = 0
    x_row = column
    there = column < 0
    acc = tl.zeros((BN, MB), dtype=tl.float32)
    for _ in range(0, (end - tile) * STEPS):
        step = tl.where(step == STEPS - 1, 0, step + 1)
        if step == 0:
            block = next_block
            n0 = (tile % tiles_n) * BN
            expert = next_expert
            target = next_target
            tile += 1
            next_block = tl.minimum(tile, end - 1) // tiles_n
            next_expert = tl.load(expert_ptr + next_block)
            next_target = tl.load(rows_ptr + next_block * BM + column % BM)
            there = target < n_rows
            x_row = target // TOP_K if MODE == "gather" else block * BM + column % BM
            if RESIDUAL:
                x_row += (column // BM) * half_rows
            first = (expert.to(tl.int64) * NB + n0 // 128) * (STEPS * KSTEP)
        w_ptrs = w_ptr + ((first + step * KSTEP) * 4096 + (n0 % 128) * 32) + w_at
        s_ptrs = s_ptr + ((first + step * KSTEP) * 512 + (n0 % 128) * 4) + s_at
        x_ptrs = x_ptr + step * (KSTEP * 128) + x_row.to(tl.int64)[None, :] * stride_x + x_at
        words = tl.load(w_ptrs)
        scale_pairs = tl.load(s_ptrs)
        x0 = tl.load(x_ptrs, mask=there[None, :], other=0.0)
        x1 = tl.load(x_ptrs + 32, mask=there[None, :], other=0.0)
        x2 = tl.load(x_ptrs + 64, mask=there[None, :], other=0.0)
        x3 = tl.load(x_ptrs + 96, mask=there[None, :], other=0.0)
        acc = multiply(words, scale_pairs, x0, x1, x2, x3, acc, BN, KSTEP, ASM)
        if step == STEPS - 1:
            total = acc * (tl.load(g_ptr + expert) * 256.0)
            if SCALED:
                total *= tl.load(x_scale_ptr + x_row, mask=there, other=0.0)[None, :]
            if RESIDUAL:
                total = main_minus_residual(total, BN, BM)
            out_slot = block * BM + tl.arange(0, BM)
            if MODE == "gather":
                store_swiglu(out_ptr, total, out_slot, n0, stride_out, BN, BM, ASM)
            else:
                store_rows(out_ptr, total, tl.load(rows_ptr + out_slot), n0, n_rows, N, stride_out, BN, ASM)
            acc = tl.zeros((BN, MB), dtype=tl.float32)
