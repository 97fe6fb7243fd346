"""The weight sync's last step on a GPU: checkpoint bytes -> tiles of kernels_layout.py, one pass, written in place.

Or straight from bf16 values, when nobody has quantized them yet: one more kernel, also one pass. Both give the bits of
`kernels_layout.tile`, of `nvfp4.quantize`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quads.quant.kernels_layout import TILE, padded
from quads.quant.kernels_math import abs_bits, block_factors, e2m1_round, with_sign


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


@triton.jit
def _place(code, MAGNITUDE: tl.constexpr, SIGN: tl.constexpr):
    """The bits of e2m1 * 2**-126 -> code in its place of a word (kernels_layout.CODE_BITS)."""
    return (((code >> 22) & 7) << MAGNITUDE) | (((code >> 31) & 1) << SIGN)


@triton.jit
def quantize_repack_kernel(
    x_ptr, g_ptr, gs_ptr, order_ptr, words_ptr, scales_ptr, N, K, NB, KB, stride_e, stride_n, ROWS: tl.constexpr
):
    """ROWS rows of one [128, 128] tile of one expert, bf16 or fp32 values -> stored words and scale bytes.

    order_ptr: as in `repack_kernel`. g, gs: fp32 [E], global scale and its encode scale.
    """
    part = tl.program_id(0) % (128 // ROWS)
    tile = tl.program_id(0) // (128 // ROWS)
    kb = tile % KB
    expert = (tile // KB // NB).to(tl.int64)
    stored = part * ROWS + tl.arange(0, ROWS)
    row = tl.load(order_ptr + (tile // KB % NB) * 128 + stored)
    inside = row < N
    column = kb * 128 + tl.arange(0, 128)
    mask = inside[:, None] & (column < K)[None, :]
    x = tl.load(
        x_ptr + expert * stride_e + row.to(tl.int64)[:, None] * stride_n + column[None, :], mask=mask, other=0.0
    )
    x = tl.reshape(x.to(tl.float32) + 0.0, (ROWS, 8, 16))  # -0.0 becomes +0.0
    byte, _, inv = block_factors(tl.max(abs_bits(x), axis=2), tl.load(g_ptr + expert), tl.load(gs_ptr + expert))
    magnitude = e2m1_round(tl.abs(x) * inv[:, :, None])
    code = with_sign(magnitude * 1.1754943508222875e-38, x).to(tl.int32, bitcast=True)
    code = tl.where(((byte == 0) | (byte == 0x7F))[:, :, None], 0, code)
    even, odd = tl.split(tl.reshape(code, (ROWS, 8, 4, 2, 2)))
    code0, code2 = tl.split(even)
    code1, code3 = tl.split(odd)
    word = _place(code0, 6, 15) | _place(code1, 3, 12) | _place(code2, 0, 14) | _place(code3, 9, 13)
    word = tl.reshape(tl.permute(word, (0, 2, 1)), (ROWS, 32))  # stored word 8 i + g
    at = tile.to(tl.int64) * 4096 + stored[:, None] * 32 + tl.arange(0, 32)[None, :]
    tl.store(words_ptr + at, word.to(tl.int16))
    at = tile.to(tl.int64) * 1024 + stored[:, None] * 8 + tl.arange(0, 8)[None, :]
    tl.store(scales_ptr + at, tl.where(byte == 0x7F, 0xFF, byte).to(tl.uint8))


def quantize_repack(values: Tensor, g: Tensor, gs: Tensor, order: Tensor, words: Tensor, scales: Tensor) -> None:
    """`kernels_layout.tile(nvfp4.quantize(values, g))` into existing tensors, in one pass.

    values: bf16 or fp32 [E, N, K], K a multiple of 16, unit stride in K; g and gs: fp32 [E]; the rest as in `repack`.
    """
    experts, n, k = values.shape
    nb, kb = order.numel() // TILE, padded(k) // TILE
    rows = 32
    quantize_repack_kernel[(experts * nb * kb * (TILE // rows),)](
        values,
        g,
        gs,
        order,
        words,
        scales,
        n,
        k,
        nb,
        kb,
        values.stride(0),
        values.stride(1),
        ROWS=rows,
        num_warps=4,
        enable_fp_fusion=False,
    )
