"""Weight quantizer kernels: amax, pack and QDQ with given global scales, and the way back.

A matrix (or expert) of K % 16 == 0 columns is a flat run of 16-element blocks, so 2-D and 3-D weights are one kernel.
"""

from typing import Literal

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from quads.quant import nvfp4
from quads.quant.triton.codes import encode_words, launch_shape, whole_blocks, word_block_max
from quads.quant.triton.math import (
    INF_BITS,
    abs_bits,
    block_factors,
    compiled,
    e2m1_round,
    e4m3_decode,
    pack_tile,
    to_bf16,
    values,
)


@triton.jit
def load_weights(pointers, mask, CAST: tl.constexpr, ASM: tl.constexpr):
    """fp32 values, with CAST those of their bf16 cast: the master is then read once and no cast of it is stored."""
    x = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    if CAST:
        x = to_bf16(x, ASM).to(tl.float32)
    return x


@triton.jit
def amax_kernel(x_ptr, out_ptr, size, BLOCK: tl.constexpr, CAST: tl.constexpr, ASM: tl.constexpr):
    """Bits of the largest finite |x| of each matrix [size]; out int32 [E] starts at 0. Max is exact in any order."""
    e = tl.program_id(1)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    bits = abs_bits(load_weights(x_ptr + e.to(tl.int64) * size + i, i < size, CAST, ASM))
    tl.atomic_max(out_ptr + e, tl.max(tl.where(bits >= INF_BITS, 0, bits)))


def flat_matrices(w: Tensor) -> tuple[Tensor, int, int]:
    """(w padded to whole blocks and contiguous, matrices E, elements of one); leading dims beyond 2 are experts."""
    if w.shape[-1] % 16:
        w = F.pad(w, (0, -w.shape[-1] % 16))
    w = w.contiguous()
    experts = w.shape[:-2].numel() if w.dim() > 2 else 1
    return w, experts, w.numel() // experts


def weight_amax(w: Tensor, cast: bool = False) -> Tensor:
    """fp32 [E] ([1] for a matrix or vector): the largest finite |w| of each expert. w: [N, K] or [E, N, K]. cast: of
    bf16(w)."""
    w, experts, size = flat_matrices(w)
    out = torch.zeros(experts, dtype=torch.int32, device=w.device)
    amax_kernel[(triton.cdiv(size, 8192), experts)](
        w, out, size, BLOCK=8192, CAST=cast and w.dtype != torch.bfloat16, ASM=compiled(), num_warps=4
    )
    return out.view(torch.float32)


@triton.jit
def places(block, ROW: tl.constexpr):
    """Where the 8 code bytes and the scale byte of a block lie. ROW = 0: codes and scales are tensors of their own.
    Else rows of ROW blocks stand in one buffer, first their code bytes, then their scale bytes."""
    if ROW == 0:
        codes, scale = block * 8, block
    else:
        row, place = block // ROW, block % ROW
        codes, scale = row * (9 * ROW) + place * 8, row * (9 * ROW) + 8 * ROW + place
    return codes, scale


@triton.jit
def weight_kernel(
    x_ptr,
    g_ptr,
    gs_ptr,
    packed_ptr,
    byte_ptr,
    value_ptr,
    blocks,
    NB: tl.constexpr,
    PACK: tl.constexpr,
    VALUE: tl.constexpr,
    CAST: tl.constexpr,
    ROW: tl.constexpr,
    ASM: tl.constexpr,
):
    """NB scale blocks of one matrix per program, global scales given: packed bytes and scale bytes (PACK), and the
    dequantized value in value_ptr's dtype (VALUE): QDQ in one pass. A matrix is `blocks` blocks of 16. CAST: of
    bf16(x)."""
    e = tl.program_id(1)
    block = tl.program_id(0) * NB + tl.arange(0, NB)
    base = e.to(tl.int64) * blocks
    offsets = (base + block)[:, None] * 16 + tl.arange(0, 16)[None, :]
    inside = (block < blocks)[:, None]
    x = load_weights(x_ptr + offsets, inside, CAST, ASM) + 0.0  # -0.0 becomes +0.0
    g = tl.load(g_ptr + e)
    byte, scale, inv = block_factors(tl.max(abs_bits(x), axis=1), g, tl.load(gs_ptr + e))
    magnitude = e2m1_round(tl.abs(x) * inv[:, None])
    if PACK:
        codes_at, scale_at = places(base + block, ROW)
        pairs = codes_at[:, None] + tl.arange(0, 8)[None, :]
        tl.store(packed_ptr + pairs, pack_tile(magnitude, byte, x, NB), mask=inside)
        tl.store(byte_ptr + scale_at, byte.to(tl.uint8), mask=block < blocks)
    if VALUE:
        # A zero-scale block dequantizes to +0 (its codes are 0), whatever the signs of x.
        value = tl.where((byte == 0)[:, None], 0.0, values(magnitude, scale, x)) * g
        if value_ptr.dtype.element_ty == tl.bfloat16:
            tl.store(value_ptr + offsets, to_bf16(value, ASM), mask=inside)
        else:
            tl.store(value_ptr + offsets, value, mask=inside)


@triton.jit
def pack_kernel(x_ptr, g_ptr, gs_ptr, packed_ptr, byte_ptr, blocks, NB: tl.constexpr, ASM: tl.constexpr):
    """`weight_kernel` with PACK, of bfloat16 values (x_ptr: int32 words of two), a block a thread."""
    e = tl.program_id(1)
    block = tl.program_id(0) * NB + tl.arange(0, NB)
    at = e.to(tl.int64) * blocks + block
    inside = (block < blocks)[:, None]
    words = x_ptr + at[:, None] * 8 + tl.arange(0, 4)[None, :]
    first = tl.load(words, mask=inside, other=0)
    second = tl.load(words + 4, mask=inside, other=0)
    byte, _, inv = block_factors(word_block_max(first, second, ASM), tl.load(g_ptr + e), tl.load(gs_ptr + e))
    dead = (byte == 0) | (byte == 0x7F)
    pairs = packed_ptr + at[:, None] * 8 + tl.arange(0, 4)[None, :]
    tl.store(pairs, encode_words(first, inv, dead, ASM), mask=inside)
    tl.store(pairs + 4, encode_words(second, inv, dead, ASM), mask=inside)
    tl.store(byte_ptr + at, byte.to(tl.uint8), mask=block < blocks)


@triton.jit
def dequantize_kernel(
    packed_ptr, byte_ptr, g_ptr, out_ptr, blocks, NB: tl.constexpr, ROW: tl.constexpr, ASM: tl.constexpr
):
    """(e2m1 * e4m3) * g of NB blocks of one matrix (or row) per program, in out_ptr's dtype."""
    e = tl.program_id(1)
    block = tl.program_id(0) * NB + tl.arange(0, NB)
    base = e.to(tl.int64) * blocks
    inside = (block < blocks)[:, None]
    codes_at, scale_at = places(base + block, ROW)
    pairs = tl.load(packed_ptr + codes_at[:, None] + tl.arange(0, 8)[None, :], mask=inside, other=0)
    pairs = pairs.to(tl.int32)
    code = tl.reshape(tl.join(pairs & 0xF, pairs >> 4), (NB, 16))
    # Sign and magnitude as fp32 bits read as e2m1 * 2**-126; both factors that undo it are powers of two.
    bits = ((code & 8) << 28) | ((code & 7) << 22)
    byte = tl.load(byte_ptr + scale_at, mask=block < blocks, other=0).to(tl.int32)
    scale = tl.where(byte == 0x7F, float("nan"), e4m3_decode(byte))
    value = (bits.to(tl.float32, bitcast=True) * 8.507059173023462e37) * scale[:, None] * tl.load(g_ptr + e)
    offsets = (base + block)[:, None] * 16 + tl.arange(0, 16)[None, :]
    if out_ptr.dtype.element_ty == tl.bfloat16:
        tl.store(out_ptr + offsets, to_bf16(value, ASM), mask=inside)
    else:
        tl.store(out_ptr + offsets, value, mask=inside)


def _launch(
    w: Tensor,
    g: Tensor | None,
    gs: Tensor | None,
    mode: Literal["pow2", "amax"],
    dtype: torch.dtype | None,
    cast: bool = False,
    rows: Tensor | None = None,
):
    w, experts, size = flat_matrices(w)
    if g is None:
        g, gs = nvfp4.global_scale(weight_amax(w, cast), mode)
    gs = g.reciprocal() if gs is None else gs
    g_E = g.reshape(-1).expand(experts).contiguous()
    gs_E = gs.reshape(-1).expand(experts).contiguous()
    pack = dtype is None
    shape = w.shape[:-1]
    if rows is not None:
        packed = byte = rows
    else:
        packed = torch.empty(*shape, w.shape[-1] // 2, dtype=torch.uint8, device=w.device) if pack else w
        byte = torch.empty(*shape, w.shape[-1] // 16, dtype=torch.uint8, device=w.device) if pack else w
    value = w if dtype is None else torch.empty(w.shape, dtype=dtype, device=w.device)
    blocks = size // 16
    if pack and rows is None and whole_blocks(w, w.shape[-1]):
        nb, warps = launch_shape(blocks, 2, 256)
        pack_kernel[(triton.cdiv(blocks, nb), experts)](
            w.view(torch.int32),
            g_E,
            gs_E,
            packed,
            byte,
            blocks,
            NB=nb,
            ASM=compiled(),
            num_warps=warps,
            enable_fp_fusion=False,
        )
        return packed, byte, value, g
    nb = min(triton.next_power_of_2(blocks), 128)
    weight_kernel[(triton.cdiv(blocks, nb), experts)](
        w,
        g_E,
        gs_E,
        packed,
        byte,
        value,
        blocks,
        NB=nb,
        PACK=pack,
        VALUE=not pack,
        CAST=cast and w.dtype != torch.bfloat16,
        ROW=0 if rows is None else w.shape[-1] // 16,
        ASM=compiled(),
        num_warps=4,
        enable_fp_fusion=False,
    )
    return packed, byte, value, g


def quantize(
    x: Tensor,
    g: Tensor | None = None,
    mode: Literal["pow2", "amax"] = "pow2",
    *,
    gs: Tensor | None = None,
    cast: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """`quads.quant.nvfp4.quantize` on the GPU for tensors with one scale, and [E, N, K] with one scale an expert.

    Without g: x is one tensor with one scale when it has up to two dimensions, else each expert has its own. cast:
    quantize bf16(x).
    """
    packed, byte, _, g = _launch(x, g, gs, mode, None, cast)
    if x.dim() < 3:
        g = g.reshape(())
    return packed, byte.view(torch.float8_e4m3fn), g


def qdq(
    x: Tensor,
    g: Tensor | None = None,
    mode: Literal["pow2", "amax"] = "pow2",
    *,
    gs: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Quantize and dequantize in one pass, without the codes ever reaching memory. Shapes as in `quantize`."""
    return _launch(x, g, gs, mode, dtype)[2][..., : x.shape[-1]]


def dequantize(
    packed: Tensor,
    block_scale: Tensor,
    g: Tensor,
    dtype: torch.dtype = torch.float32,
    num_elements: int | None = None,
) -> Tensor:
    """`quads.quant.nvfp4.dequantize`: g holds one scale, or one for each row ([..., 1]) or expert ([E, 1, 1])."""
    blocks = block_scale.numel() // g.numel()
    out = torch.empty(*packed.shape[:-1], packed.shape[-1] * 2, dtype=dtype, device=packed.device)
    _launch_dequantize(packed.contiguous(), block_scale.contiguous().view(torch.uint8), g, out, blocks)
    return out[..., :num_elements]


def _launch_dequantize(codes: Tensor, scales: Tensor, g: Tensor, out: Tensor, blocks: int, row_blocks: int = 0) -> None:
    """blocks: of one matrix; row_blocks: of one row, where codes and scales share rows of bytes."""
    nb = min(triton.next_power_of_2(blocks), 128)
    dequantize_kernel[(triton.cdiv(blocks, nb), g.numel())](
        codes,
        scales,
        g.contiguous(),
        out,
        blocks,
        NB=nb,
        ROW=row_blocks,
        ASM=compiled(),
        num_warps=4,
        enable_fp_fusion=False,
    )


def quantize_rows_into(
    w: Tensor, g: Tensor, mode: Literal["pow2", "amax"], gs: Tensor | None, rows: Tensor, cast: bool
) -> None:
    """`quantize` into rows: uint8 [..., N, 9 B], the 8 B code bytes of a row, then its B = K / 16 scale bytes."""
    _launch(w, g, gs, mode, None, cast, rows)


def dequantize_rows_into(rows: Tensor, g: Tensor, out: Tensor) -> None:
    """The values [..., N, K] of such rows, K % 16 == 0, into `out` (contiguous, bf16 or fp32)."""
    _launch_dequantize(rows, rows, g, out, out.numel() // 16 // g.numel(), out.shape[-1] // 16)
