"""What linear layers need besides the GEMM of gemm.py: the sum of K shares, and the way for many rows.

With few rows a [N, K] weight makes too few tiles to fill a GPU, so several programs share K. With many rows arithmetic
is the limit, and turning the weight into bfloat16 once (exactly) leaves torch's matmul to do the rest.
"""

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from quads.quant.triton.activations import Compensation, quantize_activations, reorder_activations
from quads.quant.triton.decode import decode_plain
from quads.quant.triton.layout import TILE
from quads.quant.triton.math import compiled, start_next, to_bf16, wait_for_previous

if TYPE_CHECKING:
    from quads.quant.triton.weight import KernelWeight


@triton.jit
def sum_parts_kernel(part_ptr, out_ptr, size, SPLIT: tl.constexpr, BLOCK: tl.constexpr, ASM: tl.constexpr):
    """fp32 [SPLIT, size] -> bfloat16 [size], added in order."""
    start_next(ASM)
    wait_for_previous(ASM)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.load(part_ptr + i, mask=i < size, other=0.0)
    for part in tl.static_range(1, SPLIT):
        total += tl.load(part_ptr + part * size + i, mask=i < size, other=0.0)
    tl.store(out_ptr + i, to_bf16(total, ASM), mask=i < size)


@triton.jit
def expand_kernel(w_ptr, s_ptr, g_ptr, out_ptr, KB, COPIES: tl.constexpr, ASM: tl.constexpr):
    """One stored tile of a matrix -> [rows, COPIES, KB * 128] with columns as stored: bfloat16 values, g included, or
    fp16 values without g.

    Exact where g is a power of two; otherwise rounded to bfloat16, like the learner's weight.
    """
    start_next(ASM)
    wait_for_previous(ASM)
    tile = tl.program_id(0)
    row = tl.arange(0, 128)
    word = tl.arange(0, 32)
    words = tl.load(w_ptr + tile * 4096 + row[:, None] * 32 + word[None, :])
    scale_pairs = tl.load(s_ptr + tile * 512 + row[:, None] * 4 + tl.arange(0, 4)[None, :])
    # In plain arithmetic: the inline PTX of the GEMM wants the register layout of an MMA operand.
    w0, w1, w2, w3 = decode_plain(words, scale_pairs, 128, 1)
    if out_ptr.dtype.element_ty == tl.float16:
        w0 = (w0 * 256.0).to(tl.float16)
        w1 = (w1 * 256.0).to(tl.float16)
        w2 = (w2 * 256.0).to(tl.float16)
        w3 = (w3 * 256.0).to(tl.float16)
    else:
        factor = tl.load(g_ptr) * 256.0
        w0 = to_bf16(w0 * factor, ASM)
        w1 = to_bf16(w1 * factor, ASM)
        w2 = to_bf16(w2 * factor, ASM)
        w3 = to_bf16(w3 * factor, ASM)
    out_row = (tile // KB * 128 + row).to(tl.int64)[:, None] * (COPIES * KB * 128)
    for copy in tl.static_range(COPIES):
        out_ptrs = out_ptr + out_row + copy * KB * 128 + (tile % KB) * 128 + word[None, :]
        tl.store(out_ptrs, w0)
        tl.store(out_ptrs + 32, w1)
        tl.store(out_ptrs + 64, w2)
        tl.store(out_ptrs + 96, w3)


@triton.jit
def scale_rows_kernel(y_ptr, scale_ptr, g_ptr, out_ptr, N, BLOCK: tl.constexpr, ASM: tl.constexpr):
    """fp32 [T, N] times the scale of a row and g of the matrix -> bfloat16."""
    wait_for_previous(ASM)
    start_next(ASM)
    row = tl.program_id(0)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = row.to(tl.int64) * N + n
    y = tl.load(y_ptr + at, mask=n < N, other=0.0) * tl.load(g_ptr) * tl.load(scale_ptr + row)
    tl.store(out_ptr + at, to_bf16(y, ASM), mask=n < N)


def sum_parts(parts_STN: Tensor, out_TN: Tensor) -> None:
    """out (bfloat16) = the fp32 parts added in order."""
    size = out_TN.numel()
    sum_parts_kernel[(triton.cdiv(size, 1024),)](
        parts_STN,
        out_TN,
        size,
        SPLIT=parts_STN.shape[0],
        BLOCK=1024,
        ASM=compiled(),
        num_warps=4,
        launch_pdl=compiled(),
    )


def expanded(
    x: Tensor, weight: "KernelWeight", precision: str, compensation: Compensation, live: Tensor | None
) -> Tensor:
    """Many rows: the weight becomes bfloat16 once, and torch multiplies. As a second operand the residual is a second
    half of K with the same weight, so the sum of both is still one fp32 accumulation. Folded operands are fp16, and so
    is the weight then; the scales follow on the fp32 product."""
    chosen = compensation if precision == "w4a4_residual" else None
    folds = chosen is not None and chosen.fold
    if precision == "w4a16":
        operand = reorder_activations(x, weight.k)
    else:
        operand, _ = quantize_activations(x, weight.k, chosen, live, beside=not folds)
    nb, kb = weight.words.shape[1:3]
    copies = 2 if operand.residual else 1
    dtype = torch.float16 if folds else torch.bfloat16
    full = torch.empty(nb * TILE, copies * kb * TILE, dtype=dtype, device=x.device)
    expand_kernel[(nb * kb,)](
        weight.words,
        weight.scales.view(torch.int16),
        weight.g,
        full,
        kb,
        COPIES=copies,
        ASM=compiled(),
        num_warps=4,
        launch_pdl=compiled(),
    )
    if not folds:
        return operand.data.view(x.shape[0], -1) @ full[: weight.n].t()
    assert operand.scale is not None
    if compiled():
        y = torch.mm(operand.data, full[: weight.n].t(), out_dtype=torch.float32)
    else:  # the CPU has no fp16 product with an fp32 result
        y = operand.data.float() @ full[: weight.n].float().t()
    out = torch.empty(y.shape, dtype=torch.bfloat16, device=x.device)
    scale_rows_kernel[(y.shape[0], triton.cdiv(weight.n, 1024))](
        y, operand.scale, weight.g, out, weight.n, BLOCK=1024, ASM=compiled(), num_warps=4, launch_pdl=compiled()
    )
    return out
