"""The weight sync's last step on a GPU: checkpoint bytes -> tiles of kernels_layout.py, one pass, written in place."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quads.quant.kernels_layout import TILE, padded


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
    spread = ((codes & 0x8) << 12) | ((codes & 0x7) << 6)
    spread |= ((codes & 0x80) << 5) | ((codes & 0x70) >> 1)
    spread |= ((codes & 0x800) << 3) | ((codes & 0x700) >> 8)
    spread |= ((codes & 0x8000) >> 2) | ((codes & 0x7000) >> 3)
    at = tile.to(tl.int64) * 4096 + stored[:, None] * 32 + word[None, :]
    tl.store(words_ptr + at, spread.to(tl.int16))

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
