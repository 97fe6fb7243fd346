"""The largest finite value of each weight matrix, from which its global scale follows."""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from quads.quant.triton.gemm import to_bf16
from quads.quant.triton.math import INF_BITS, abs_bits, compiled


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
