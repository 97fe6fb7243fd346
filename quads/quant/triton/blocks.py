"""What the quantizers of MXFP4, HiF4 and four-over-six share: loads and stores, nibbles, E2M1 codes, launches.

Their kernels (mxfp4.py, hif4.py, four_over_six.py) quantize activations and read them back (`..._rows`), weights to
bytes (`pack`) and back (`unpack`), one launch each. These formats have no GEMM kernel; the reference matmul multiplies
values, and in plain torch a layer would launch hundreds of small kernels to make them. Bits are those of the modules of
the same name in quads/quant, in the interpreter and on a GPU.
"""

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from quads.quant.triton.math import compiled, to_bf16

BLOCKS = 16  # of a program


@triton.jit
def store_as(ptr, value, mask, ASM: tl.constexpr):
    """fp32 in the dtype of the tensor behind `ptr`, bfloat16 or fp32."""
    if ptr.dtype.element_ty == tl.bfloat16:
        tl.store(ptr, to_bf16(value, ASM), mask=mask)
    else:
        tl.store(ptr, value, mask=mask)


@triton.jit
def load_as(ptr, mask, CAST: tl.constexpr, ASM: tl.constexpr):
    """fp32 values, with CAST those of their bf16 cast; -0.0 becomes +0.0."""
    x = tl.load(ptr, mask=mask, other=0.0).to(tl.float32)
    if CAST:
        x = to_bf16(x, ASM).to(tl.float32)
    return x + 0.0


@triton.jit
def nibbles(code, NB: tl.constexpr, W: tl.constexpr):
    """int32 codes [NB, W] -> uint8 [NB, W / 2], the low nibble the even column."""
    low, high = tl.split(tl.reshape(code, (NB, W // 2, 2)))
    return (low | (high << 4)).to(tl.uint8)


@triton.jit
def e2m1_code(value):
    """E2M1 values -> codes int32; the sign is that of the value, -0.0 included."""
    bits = value.to(tl.int32, bitcast=True)
    # The magnitude times 2**-126 puts E2M1's subnormal at fp32's: its code is bits 24..22.
    magnitude = (tl.abs(value) * 1.1754943508222875e-38).to(tl.int32, bitcast=True)
    return ((magnitude >> 22) & 7) | ((bits >> 28) & 8)


@triton.jit
def e2m1_value(code):
    """Codes (int32) -> fp32, -0.0 for code 8."""
    magnitude = ((code & 7) << 22).to(tl.float32, bitcast=True) * 8.507059173023462e37
    return tl.where(code & 8 != 0, -magnitude, magnitude)


@triton.jit
def load_codes(ptr, block, inside, W: tl.constexpr):
    """The int32 codes of blocks of W, from W / 2 bytes each."""
    column = tl.arange(0, W)[None, :]
    byte = tl.load(ptr + block.to(tl.int64)[:, None] * (W // 2) + column // 2, mask=inside, other=0).to(tl.int32)
    return (byte >> (column % 2 * 4)) & 15


def whole(x: Tensor, block: int) -> Tensor:
    """x [..., K] with K padded to whole blocks, contiguous."""
    return F.pad(x, (0, -x.shape[-1] % block)).contiguous() if x.shape[-1] % block else x.contiguous()


def room(padded: Tensor, size: int, block: int) -> Tensor:
    """Room for `size` bytes of each block of [..., K]."""
    shape = (*padded.shape[:-1], padded.shape[-1] // block * size)
    return torch.empty(shape, dtype=torch.uint8, device=padded.device)


def casts(w: Tensor, cast: bool) -> bool:
    return cast and w.dtype != torch.bfloat16


def launch_blocks(kernel: Any, x: Tensor, block: int, out: Tensor, scales: Tensor, warps: int, **flags: Any) -> None:
    """Launch over the blocks of x [..., K], K whole blocks."""
    blocks = x.numel() // block
    if blocks:
        grid = (triton.cdiv(blocks, BLOCKS),)
        kernel[grid](
            x, out, scales, blocks, NB=BLOCKS, ASM=compiled(), num_warps=warps, enable_fp_fusion=False, **flags
        )


def launch_values(kernel: Any, codes: Tensor, scales: Tensor, out: Tensor, block: int) -> None:
    blocks = out.numel() // block
    if blocks:
        grid = (triton.cdiv(blocks, BLOCKS),)
        codes, scales = codes.contiguous(), scales.contiguous()
        kernel[grid](codes, scales, out, blocks, NB=BLOCKS, ASM=compiled(), num_warps=4, enable_fp_fusion=False)
