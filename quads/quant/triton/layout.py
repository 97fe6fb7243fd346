"""The weight layout that the Hopper kernels read: a fixed permutation of the checkpoint bytes, and its exact inverse.

Legend: E experts, N output rows, K input columns, B = 128 (tile edge), NB = ceil(N/B), KB = ceil(K/B).

Why not the checkpoint bytes as they are: a tile of them is 128 short strided pieces, and unpacking nibbles costs right
shifts and shuffles. Measured on an H200 the layout below is worth 25 % at 64 tokens (w13 of a 128-expert layer).

  1. tiles      [E, NB, KB, 128 rows, 64 bytes]: what one program reads is contiguous; scales likewise, 8 bytes a row.
  2. K order    inside 128 columns, k = 16 g + 4 i + j (g: scale block; i, j < 4) goes to word 8 i + g, position j.
                A thread of the tensor-core fragment then owns whole scale blocks, so it loads one pair of scales.
                Activations are stored in the matching order [j, i, g] (`activation_order`).
  3. bits       the four codes of a 16-bit word are spread so that each becomes a bfloat16 (sign, two exponent bits, one
                mantissa bit) with one AND and at most two shifts (`CODE_BITS`).
  4. rows       for a gate/up pair, rows come in groups of 16: 8 gate rows, then the matching 8 up rows, so SwiGLU finds
                both in one thread's registers; and in `activation_order` of the next matrix's K, so that its output
                needs no shuffle.

A scale byte 0x7F (NaN) is stored as 0xFF: the decoder turns bit 7 into an infinite scale, and 0 * inf is the NaN that
the specification asks for. Padding rows and columns hold code 0 and scale 0.
"""

import torch
from torch import Tensor

TILE = 128
"""Rows and columns of one stored tile."""

CODE_BITS = ((15, 8, 7, 6), (12, 5, 4, 3), (14, 2, 1, 0), (13, 11, 10, 9))
"""For code j of a word: where its sign bit and its three magnitude bits (high to low) go."""


def padded(size: int) -> int:
    """`size` rounded up to whole tiles."""
    return -(-size // TILE) * TILE


def activation_order(k: int, device: torch.device | str = "cpu") -> Tensor:
    """Int64 [padded(k)]: position p of a stored activation row holds column `order[p]` (columns >= k are padding)."""
    columns = torch.arange(padded(k), device=device)
    return columns.view(-1, 8, 4, 4).permute(0, 3, 2, 1).reshape(-1)


def row_order(n: int, swiglu: bool, device: torch.device | str = "cpu") -> Tensor:
    """Int64 [stored rows]: stored row r holds checkpoint row `order[r]`; values >= n (or the mark n) are padding rows.

    With `swiglu`, n counts gate and up rows together (gate first), and the order pairs them (point 4 above).
    """
    if not swiglu:
        return torch.arange(padded(n), device=device)
    half = n // 2
    hidden = activation_order(half, device)
    gate = torch.where(hidden < half, hidden, n)
    up = torch.where(hidden < half, hidden + half, n)
    return torch.stack((gate.view(-1, 8), up.view(-1, 8)), dim=1).reshape(-1)


def _spread(words: Tensor) -> Tensor:
    """int32 words with code j in bits 4j..4j+3 -> the same codes in the places of CODE_BITS."""
    out = torch.zeros_like(words)
    for j, bits in enumerate(CODE_BITS):
        for source, target in zip((3, 2, 1, 0), bits, strict=True):
            out |= ((words >> (4 * j + source)) & 1) << target
    return out


def _gather(words: Tensor) -> Tensor:
    """The inverse of `_spread`."""
    out = torch.zeros_like(words)
    for j, bits in enumerate(CODE_BITS):
        for source, target in zip((3, 2, 1, 0), bits, strict=True):
            out |= ((words >> target) & 1) << (4 * j + source)
    return out


def tile(packed: Tensor, block_scale: Tensor, swiglu: bool = False) -> tuple[Tensor, Tensor]:
    """Checkpoint bytes -> stored bytes.

    packed uint8 [E, N, K/2], block_scale float8_e4m3fn or uint8 [E, N, K/16]; K a multiple of 16.
    Returns words int16 [E, NB, KB, 128, 32] and scales uint8 [E, NB, KB, 128, 8].
    """
    e, n, half_k = packed.shape
    k = 2 * half_k
    order = row_order(n, swiglu, packed.device)
    rows, kb = order.numel(), padded(k) // TILE
    source = torch.zeros(e, n + 1, padded(k) // 2, dtype=torch.uint8, device=packed.device)
    source[:, :n, :half_k] = packed
    scale = torch.zeros(e, n + 1, padded(k) // 16, dtype=torch.uint8, device=packed.device)
    scale[:, :n, : k // 16] = block_scale.view(torch.uint8)
    index = order.clamp(max=n)
    low, high = source[:, index].to(torch.int32).view(e, rows // TILE, TILE, kb, 32, 2).unbind(-1)
    words = _spread(low | (high << 8)).to(torch.int16)
    words = words.view(e, rows // TILE, TILE, kb, 8, 4).permute(0, 1, 3, 2, 5, 4)
    scale = scale[:, index].view(e, rows // TILE, TILE, kb, 8).permute(0, 1, 3, 2, 4)
    scale = torch.where(scale == 0x7F, 0xFF, scale)
    return words.reshape(e, rows // TILE, kb, TILE, 32).contiguous(), scale.contiguous()


def untile(words: Tensor, scales: Tensor, n: int, k: int, swiglu: bool = False) -> tuple[Tensor, Tensor]:
    """The exact inverse of `tile`: (packed uint8 [E, n, k/2], block_scale float8_e4m3fn [E, n, k/16])."""
    e, nb, kb = words.shape[:3]
    flat = words.view(e, nb, kb, TILE, 4, 8).permute(0, 1, 3, 2, 5, 4).reshape(e, nb * TILE, kb * 32)
    codes = _gather(flat.to(torch.int32))
    pairs = torch.stack((codes & 0xFF, (codes >> 8) & 0xFF), dim=-1).to(torch.uint8).view(e, nb * TILE, kb * 64)
    scale = scales.permute(0, 1, 3, 2, 4).reshape(e, nb * TILE, kb * 8)
    order = row_order(n, swiglu, words.device)
    position = torch.empty(max(order.numel(), n + 1), dtype=torch.int64, device=words.device)
    position[order] = torch.arange(order.numel(), device=words.device)
    rows = position[:n]
    block_scale = torch.where(scale == 0xFF, 0x7F, scale)[:, rows, : k // 16]
    return pairs[:, rows, : k // 2].contiguous(), block_scale.contiguous().view(torch.float8_e4m3fn)
