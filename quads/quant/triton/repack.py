"""The weight sync's last step on a GPU: checkpoint bytes -> tiles of layout.py, one pass, written in place.

Or straight from bf16 values, when nobody has quantized them yet: one more kernel, also one pass. Both give the bits of
`kernels_layout.tile`, of `nvfp4.quantize`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quads.quant.triton.codes import encode_words, word_block_max
from quads.quant.triton.layout import TILE, padded
from quads.quant.triton.math import block_factors, compiled


@triton.jit
def spread(codes):
    """int32, code j in bits 4j..4j+3 -> the same codes in the places of kernels_layout.CODE_BITS."""
    word = ((codes & 0x8) << 12) | ((codes & 0x7) << 6)
    word |= ((codes & 0x80) << 5) | ((codes & 0x70) >> 1)
    word |= ((codes & 0x800) << 3) | ((codes & 0x700) >> 8)
    return word | ((codes & 0x8000) >> 2) | ((codes & 0x7000) >> 3)


@triton.jit
def repack_kernel(packed_ptr, byte_ptr, order_ptr, words_ptr, scales_ptr, N, K, NB, KB):
    """One [128 rows, 128 columns] tile of one expert. packed_ptr: int16 [E, N, K/4], four codes a word; byte_ptr: E4M3
    bytes [E, N, K/16]; order_ptr: int32 [NB * 128], checkpoint row of each stored row (N or more: padding)."""
    tile = tl.program_id(0)
    kb = tile % KB
    expert = (tile // KB // NB).to(tl.int64)
    stored = tl.arange(0, 128)
    row = tl.load(order_ptr + (tile // KB % NB) * 128 + stored)
    inside = row < N
    row = expert * N + row

    word = tl.arange(0, 32)
    source = kb * 32 + (word % 8) * 4 + word // 8  # stored word 8 i + g is checkpoint word 4 g + i
    mask = inside[:, None] & (source < K // 4)[None, :]
    codes = tl.load(packed_ptr + row[:, None] * (K // 4) + source[None, :], mask=mask, other=0).to(tl.int32)
    at = tile.to(tl.int64) * 4096 + stored[:, None] * 32 + word[None, :]
    tl.store(words_ptr + at, spread(codes).to(tl.int16))

    group = tl.arange(0, 8)
    source = kb * 8 + group
    mask = inside[:, None] & (source < K // 16)[None, :]
    byte = tl.load(byte_ptr + row[:, None] * (K // 16) + source[None, :], mask=mask, other=0)
    at = tile.to(tl.int64) * 1024 + stored[:, None] * 8 + group[None, :]
    tl.store(scales_ptr + at, tl.where(byte == 0x7F, 0xFF, byte).to(tl.uint8))


def repack(packed: Tensor, block_scale: Tensor, order: Tensor, words: Tensor, scales: Tensor) -> None:
    """`kernels_layout.tile` into existing tensors.

    packed: uint8 [E, N, K/2]; block_scale: uint8 [E, N, K/16]; order: int32 `row_order`. Written: words int16
    [E, NB, KB, 128, 32], scales uint8 [E, NB, KB, 128, 8].
    """
    experts, n, half_k = packed.shape
    nb, kb = order.numel() // TILE, padded(2 * half_k) // TILE
    repack_kernel[(experts * nb * kb,)](
        packed.contiguous().view(torch.int16),
        block_scale.contiguous(),
        order,
        words,
        scales,
        n,
        2 * half_k,
        nb,
        kb,
        num_warps=4,
    )


@triton.jit
def _words(codes, B: tl.constexpr):
    """uint8 [B, 4], two codes a byte in order -> int16 [B, 2] stored words of four codes each."""
    low, high = tl.split(tl.reshape(codes.to(tl.int32), (B, 2, 2)))
    return spread(low | (high << 8)).to(tl.int16)


@triton.jit
def quantize_repack_kernel(
    x_ptr,
    g_ptr,
    gs_ptr,
    order_ptr,
    words_ptr,
    scales_ptr,
    N,
    K,
    NB,
    KB,
    stride_e,
    stride_n,
    ROWS: tl.constexpr,
    ASM: tl.constexpr,
):
    """ROWS rows of one [128, 128] tile of one expert, bfloat16 -> stored words and scale bytes, a block a thread.

    x_ptr: int32 words of two values, strides in blocks. order_ptr: as in `repack_kernel`. g, gs: fp32 [E], global scale
    and its encode scale.
    """
    B: tl.constexpr = ROWS * 8
    part = tl.program_id(0) % (128 // ROWS)
    tile = tl.program_id(0) // (128 // ROWS)
    kb = tile % KB
    expert = (tile // KB // NB).to(tl.int64)
    block = tl.arange(0, B)
    stored = part * ROWS + block // 8
    group = block % 8
    row = tl.load(order_ptr + (tile // KB % NB) * 128 + stored)
    inside = ((row < N) & (kb * 128 + group * 16 < K))[:, None]
    source = expert * stride_e + row.to(tl.int64) * stride_n + kb * 8 + group
    at = source[:, None] * 8 + tl.arange(0, 4)[None, :]
    first = tl.load(x_ptr + at, mask=inside, other=0)
    second = tl.load(x_ptr + at + 4, mask=inside, other=0)
    byte, _, inv = block_factors(word_block_max(first, second, ASM), tl.load(g_ptr + expert), tl.load(gs_ptr + expert))
    dead = (byte == 0) | (byte == 0x7F)
    # Stored word 8 i + g holds the columns 16 g + 4 i ... + 3; `first` gives i = 0, 1 and `second` i = 2, 3.
    at = (tile.to(tl.int64) * 4096 + stored * 32 + group)[:, None] + tl.arange(0, 2)[None, :] * 8
    tl.store(words_ptr + at, _words(encode_words(first, inv, dead, ASM), B))
    tl.store(words_ptr + at + 16, _words(encode_words(second, inv, dead, ASM), B))
    at = tile.to(tl.int64) * 1024 + stored * 8 + group
    tl.store(scales_ptr + at, tl.where(byte == 0x7F, 0xFF, byte).to(tl.uint8))


def quantize_repack(values: Tensor, g: Tensor, gs: Tensor, order: Tensor, words: Tensor, scales: Tensor) -> None:
    """`kernels_layout.tile(nvfp4.quantize(values, g))` into existing tensors, in one pass.

    values: bf16 [E, N, K] with `kernels_codes.whole_blocks`; g and gs: fp32 [E]; the rest as in `repack`.
    """
    experts, n, k = values.shape
    nb, kb = order.numel() // TILE, padded(k) // TILE
    rows = 32
    quantize_repack_kernel[(experts * nb * kb * (TILE // rows),)](
        values.view(torch.int32),
        g,
        gs,
        order,
        words,
        scales,
        n,
        k,
        nb,
        kb,
        values.stride(0) // 16,
        values.stride(1) // 16,
        ROWS=rows,
        ASM=compiled(),
        num_warps=4,
        enable_fp_fusion=False,
    )
