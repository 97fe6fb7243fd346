"""Routing of tokens to experts on the GPU, and the weighted sum back: no host sync, no shape that depends on data.

Legend: T tokens, A experts a token, E experts, H hidden. A slot is a row of the grouped GEMMs; a block is BM slots of
one expert. Slots of an expert are in the order of the flat index t * A + a, so a map is the same each time.

A map of two kinds of blocks knows only on the GPU what a router does: an expert with at most BM rows has one block of
BM, one with more has blocks of BL, so that its weights are not decoded for every BM rows. The small blocks come first,
then the large ones; each kind has room for the worst case, and a GEMM is launched for each.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quads.quant.triton.math import compiled, start_next, to_bf16, wait_for_previous


class Routing(NamedTuple):
    """Slots sorted by expert."""

    rows: Tensor  # int32 [blocks * bm]: flat index t * A + a, or `pairs` in a padding slot
    expert: Tensor  # int32 [blocks], -1: unused
    pairs: int
    bm: int
    large: int = 0  # BL, 0: all blocks are of bm
    num_small: int = 0  # how many blocks lie before the large ones; only of use with these


def max_blocks(pairs: int, experts: int, bm: int) -> int:
    """The most blocks that `pairs` (token, expert) pairs can need: one per expert hit, and one per further bm pairs."""
    hit = min(pairs, experts)
    return hit + (pairs - hit) // bm


def max_large_blocks(pairs: int, experts: int, bm: int, large: int) -> int:
    """The most blocks of `large` that `pairs` can need, if experts with at most bm of them need none: an expert's first
    one takes bm + 1 pairs, its second large - bm more."""
    hit = min(pairs // (bm + 1), experts)
    return hit + (pairs - hit * (bm + 1)) // (large - bm)


@triton.jit
def _load_ids(ids_ptr, live_ptr, i, n_pairs, TOP_K: tl.constexpr, E: tl.constexpr, HAS_LIVE: tl.constexpr):
    """Expert ids at flat indices i; E (no expert) past the end, for dead tokens and for ids out of range."""
    inside = i < n_pairs
    ids = tl.load(ids_ptr + i, mask=inside, other=E).to(tl.int32)
    if HAS_LIVE:
        inside = inside & (tl.load(live_ptr + i // TOP_K, mask=inside, other=0) != 0)
    return tl.where(inside & (ids >= 0) & (ids < E), ids, E)


@triton.jit
def write_slots(
    e,
    ids_ptr,
    live_ptr,
    map_ptr,
    expert_ptr,
    n_pairs,
    n_blocks,
    n_small,
    TOP_K: tl.constexpr,
    E: tl.constexpr,
    BINS: tl.constexpr,
    CHUNK: tl.constexpr,
    BM: tl.constexpr,
    BL: tl.constexpr,
    HAS_LIVE: tl.constexpr,
):
    """The slots of expert e: map[slot] = flat index, or n_pairs in padding slots; expert[block] = e, or -1 for blocks
    that nobody uses. Every program counts all ids itself, so one launch is enough. BL > 0: blocks n_small and following
    are of BL slots, for experts with more than BM rows."""
    MOST: tl.constexpr = BL if BL > BM else BM
    bins = tl.arange(0, BINS)
    lane = tl.arange(0, CHUNK)
    ids = _load_ids(ids_ptr, live_ptr, lane, n_pairs, TOP_K, E, HAS_LIVE)  # of a decode step, all of them
    counts = tl.histogram(ids, BINS)
    for start in range(CHUNK, n_pairs, CHUNK):
        counts += tl.histogram(_load_ids(ids_ptr, live_ptr, start + lane, n_pairs, TOP_K, E, HAS_LIVE), BINS)
    counts = tl.where(bins < E, counts, 0)
    mine = tl.sum(tl.where(bins == e, counts, 0))
    if BL > 0:
        blocks = ((counts > 0) & (counts <= BM)).to(tl.int32)
        large = tl.where(counts > BM, (counts + BL - 1) // BL, 0)
        used_large = tl.sum(large)
        first_large = tl.sum(tl.where(bins < e, large, 0))
    else:
        blocks = (counts + BM - 1) // BM
    used = tl.sum(blocks)
    first = tl.sum(tl.where(bins < e, blocks, 0))
    start_slot = first * BM
    size = BM
    end_small = n_blocks
    if BL > 0:
        end_small = n_small
        if mine > BM:
            first = n_small + first_large
            start_slot = n_small * BM + first_large * BL
            size = BL

    slot = start_slot
    hit = (ids == e).to(tl.int32)
    tl.store(map_ptr + slot + tl.cumsum(hit, 0) - 1, lane, mask=hit != 0)
    slot += tl.sum(hit)
    for start in range(CHUNK, n_pairs, CHUNK):
        hit = (_load_ids(ids_ptr, live_ptr, start + lane, n_pairs, TOP_K, E, HAS_LIVE) == e).to(tl.int32)
        tl.store(map_ptr + slot + tl.cumsum(hit, 0) - 1, start + lane, mask=hit != 0)
        slot += tl.sum(hit)
    last = first + (mine + size - 1) // size
    pad = slot + tl.arange(0, MOST)
    tl.store(map_ptr + pad, tl.zeros((MOST,), dtype=tl.int32) + n_pairs, mask=pad < start_slot + (last - first) * size)
    for block in range(first, last):
        tl.store(expert_ptr + block, e)
    for block in range(used + e, end_small, E):
        tl.store(expert_ptr + block, -1)
        tl.store(map_ptr + block * BM + tl.arange(0, BM), tl.zeros((BM,), dtype=tl.int32) + n_pairs)
    if BL > 0:
        for block in range(n_small + used_large + e, n_blocks, E):
            tl.store(expert_ptr + block, -1)
            at = n_small * BM + (block - n_small) * BL + tl.arange(0, BL)
            tl.store(map_ptr + at, tl.zeros((BL,), dtype=tl.int32) + n_pairs)


@triton.jit
def route_kernel(
    ids_ptr,
    live_ptr,
    map_ptr,
    expert_ptr,
    n_pairs,
    n_blocks,
    n_small,
    TOP_K: tl.constexpr,
    E: tl.constexpr,
    BINS: tl.constexpr,
    CHUNK: tl.constexpr,
    BM: tl.constexpr,
    BL: tl.constexpr,
    HAS_LIVE: tl.constexpr,
    ASM: tl.constexpr,
):
    """The whole map, a program an expert."""
    start_next(ASM)
    wait_for_previous(ASM)
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


@triton.jit
def combine_kernel(
    y_ptr,
    ids_ptr,
    gates_ptr,
    live_ptr,
    out_ptr,
    H,
    TOP_K: tl.constexpr,
    E: tl.constexpr,
    BA: tl.constexpr,
    BH: tl.constexpr,
    HAS_LIVE: tl.constexpr,
    ASM: tl.constexpr,
):
    """out[t] = sum over a of gate[t, a] * y[t, a], each product rounded to bfloat16 as torch does, the sum in fp32 in
    one order for all tokens. Dead tokens give 0."""
    start_next(ASM)
    t = tl.program_id(0)
    h = tl.program_id(1) * BH + tl.arange(0, BH)
    a = tl.arange(0, BA)
    pair = t * TOP_K + a
    expert = tl.load(ids_ptr + pair, mask=a < TOP_K, other=E).to(tl.int32)
    gate = tl.load(gates_ptr + pair, mask=a < TOP_K, other=0.0).to(tl.float32)
    limit = E
    if HAS_LIVE:
        limit = tl.where(tl.load(live_ptr + t) != 0, E, 0)
    there = (expert >= 0) & (expert < limit)
    wait_for_previous(ASM)  # ids and gates are older than the kernel before this one
    y = tl.load(y_ptr + pair.to(tl.int64)[:, None] * H + h[None, :], mask=there[:, None] & (h < H)[None, :], other=0.0)
    product = to_bf16(y.to(tl.float32) * gate[:, None], ASM).to(tl.float32)
    tl.store(out_ptr + t.to(tl.int64) * H + h, to_bf16(tl.sum(product, axis=0), ASM), mask=h < H)


def empty_map(ids_TA: Tensor, experts: int, bm: int, large: int = 0) -> Routing:
    """Room for a map, and its sizes. large: of two kinds of blocks, at least twice bm."""
    pairs = ids_TA.numel()
    if large and pairs > bm:
        small, most = min(pairs, experts), max_large_blocks(pairs, experts, bm, large)
    else:
        small, most, large = max_blocks(pairs, experts, bm), 0, 0
    sizes = small * bm + most * large, small + most
    rows, expert = (torch.empty(n, dtype=torch.int32, device=ids_TA.device) for n in sizes)
    return Routing(rows, expert, pairs, bm, large, small)


def map_arguments(routing: Routing, ids_TA: Tensor, experts: int) -> dict:
    """What a kernel needs to write the map, by the names of `write_slots`."""
    return {
        "ids_ptr": ids_TA,
        "map_ptr": routing.rows,
        "expert_ptr": routing.expert,
        "n_pairs": routing.pairs,
        "n_blocks": routing.expert.numel(),
        "n_small": routing.num_small,
        "TOP_K": ids_TA.shape[1],
        "E": experts,
        "BINS": triton.next_power_of_2(experts + 1),
        "CHUNK": min(max(triton.next_power_of_2(routing.pairs), 128), 2048),
        "BM": routing.bm,
        "BL": routing.large,
    }


def route(ids_TA: Tensor, experts: int, bm: int, live_T: Tensor | None = None, large: int = 0) -> Routing:
    """Group (token, expert) pairs by expert in blocks of `bm` slots, or of `large`. Dead tokens and ids out of range
    get no slot."""
    routing = empty_map(ids_TA, experts, bm, large)
    route_kernel[(experts,)](
        live_ptr=ids_TA if live_T is None else live_T,
        HAS_LIVE=live_T is not None,
        ASM=compiled(),
        num_warps=4,
        launch_pdl=compiled(),
        **map_arguments(routing, ids_TA, experts),
    )
    return routing


def combine(y_RH: Tensor, ids_TA: Tensor, gates_TA: Tensor, experts: int, live_T: Tensor | None = None) -> Tensor:
    """bfloat16 [T, H] from y [T * A, H] in flat order."""
    tokens, top_k = ids_TA.shape
    hidden = y_RH.shape[1]
    out = torch.empty(tokens, hidden, dtype=torch.bfloat16, device=y_RH.device)
    bh = min(triton.next_power_of_2(hidden), 512)
    combine_kernel[(tokens, triton.cdiv(hidden, bh))](
        y_RH,
        ids_TA,
        gates_TA,
        ids_TA if live_T is None else live_T,
        out,
        hidden,
        TOP_K=top_k,
        E=experts,
        BA=triton.next_power_of_2(top_k),
        BH=bh,
        HAS_LIVE=live_T is not None,
        ASM=compiled(),
        num_warps=max(bh // 256, 1),  # a thread holds 8 columns of every expert, so the sum stays in its registers
        enable_fp_fusion=False,
        launch_pdl=compiled(),
    )
    return out
