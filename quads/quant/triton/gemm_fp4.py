"""Native FP4 for Blackwell (sm_100): both operands stay 4-bit up to the tensor core, which applies the block scales.

`tl.dot_scaled` with E2M1 codes and E4M3 scales lowers to `tcgen05.mma ... kind::mxf4nvf4.block_scale`; this repository
checks that by compiling, no Blackwell GPU has run it here. Global scales are applied to the fp32 sum. As in
gemm.py the weights are the M side, and the residual's rows are extra token columns of the same MMA.

Legend: BN weight rows, BM tokens, MB = BM or 2 BM, BK columns a step.
"""

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from quads.quant.triton.activations import Operand
from quads.quant.triton.gemm import silu_mul
from quads.quant.triton.math import compiled, e4m3_decode, start_next, to_bf16, wait_for_previous
from quads.quant.triton.routing import Routing

if TYPE_CHECKING:
    from quads.quant.triton.weight import KernelWeight


@triton.jit
def _values(codes, scale, ROWS: tl.constexpr, BK: tl.constexpr):
    """uint8 [ROWS, BK/2] and E4M3 [ROWS, BK/16] -> fp32 [ROWS, BK]."""
    codes = codes.to(tl.int32)
    codes = tl.reshape(tl.join(codes & 0xF, codes >> 4), (ROWS, BK // 16, 16))
    bits = ((codes & 8) << 28) | ((codes & 7) << 22)
    byte = scale.to(tl.uint8, bitcast=True).to(tl.int32)
    factor = tl.where(byte == 0x7F, float("nan"), e4m3_decode(byte))
    return tl.reshape(bits.to(tl.float32, bitcast=True) * 8.507059173023462e37 * factor[:, :, None], (ROWS, BK))


@triton.jit
def _mma(w, s, x, xs, acc, BN: tl.constexpr, MB: tl.constexpr, BK: tl.constexpr, ASM: tl.constexpr):
    if ASM:
        acc = tl.dot_scaled(w, s, "e2m1", tl.trans(x), xs, "e2m1", acc)
    else:  # the interpreter reads E4M3 scale bytes as E8M0
        acc = tl.dot(_values(w, s, BN, BK), tl.trans(_values(x, xs, MB, BK)), acc, input_precision="ieee")
    return acc


@triton.jit
def native_gemm_kernel(
    x_ptr,
    x_byte_ptr,
    x_scale_ptr,
    w_ptr,
    s_ptr,
    g_ptr,
    rows_ptr,
    expert_ptr,
    out_ptr,
    n_rows,
    N,
    K,
    stride_out,
    TOP_K: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    MODE: tl.constexpr,
    RESIDUAL: tl.constexpr,
    ASM: tl.constexpr,
):
    """As `w4_gemm_kernel`: modes, padding slots and residual rows mean the same. x uint8 [R or 2R, K/2] and its scale
    bytes, w uint8 [E, N, K/2], s float8_e4m3fn [E, N, K/16]."""
    MB: tl.constexpr = 2 * BM if RESIDUAL else BM
    tiles_n = tl.cdiv(N, BN)
    wait_for_previous(ASM)
    start_next(ASM)
    pid = tl.program_id(0)
    block = pid // tiles_n
    n = (pid % tiles_n) * BN + tl.arange(0, BN)
    expert = 0
    if MODE != "dense":
        expert = tl.load(expert_ptr + block)
    if expert < 0:
        return

    column = tl.arange(0, MB)
    slot = block * BM + column % BM
    if MODE == "gather":
        target = tl.load(rows_ptr + slot)
        x_row = tl.where(target < n_rows, target // TOP_K, 0)
        half_rows = n_rows // TOP_K
    elif MODE == "scatter":
        x_row = slot
        half_rows = (tl.num_programs(0) // tiles_n) * BM
    else:
        x_row = tl.minimum(slot, n_rows - 1)
        half_rows = n_rows
    if RESIDUAL:
        x_row += (column // BM) * half_rows
    x_row64 = x_row.to(tl.int64)

    row = tl.minimum(n, N - 1)
    if MODE != "dense":
        w_ptr += expert.to(tl.int64) * N * (K // 2)
        s_ptr += expert.to(tl.int64) * N * (K // 16)
    pair = tl.arange(0, BK // 2)
    unit = tl.arange(0, BK // 16)
    acc = tl.zeros((BN, MB), dtype=tl.float32)
    for k in range(0, K, BK):
        pairs = k // 2 + pair
        units = k // 16 + unit
        in_pairs = pairs < K // 2
        in_units = units < K // 16
        w = tl.load(w_ptr + row[:, None] * (K // 2) + pairs[None, :], mask=in_pairs[None, :], other=0)
        s = tl.load(s_ptr + row[:, None] * (K // 16) + units[None, :], mask=in_units[None, :], other=0.0)
        x = tl.load(x_ptr + x_row64[:, None] * (K // 2) + pairs[None, :], mask=in_pairs[None, :], other=0)
        xs = tl.load(x_byte_ptr + x_row64[:, None] * (K // 16) + units[None, :], mask=in_units[None, :], other=0.0)
        acc = _mma(w, s, x, xs, acc, BN, MB, BK, ASM)

    acc *= tl.load(g_ptr + expert)
    acc *= tl.load(x_scale_ptr + x_row)[None, :]
    if RESIDUAL:
        sign = tl.where(column // BM == 0, 1.0, -1.0)
        acc = tl.sum(tl.reshape(acc * sign[None, :], (BN, 2, BM)), axis=1)

    slot = block * BM + tl.arange(0, BM)
    if MODE == "gather":
        pairs_ = tl.permute(tl.reshape(acc, (BN // 16, 2, 8, BM)), (0, 2, 3, 1))
        gate, up = tl.split(pairs_)
        hidden = tl.reshape(silu_mul(gate, up, ASM), (BN // 2, BM))
        h = (pid % tiles_n) * (BN // 2) + tl.arange(0, BN // 2)
        tl.store(out_ptr + slot.to(tl.int64)[None, :] * stride_out + h[:, None], hidden, mask=(h < N // 2)[:, None])
    else:
        out_row = slot
        if MODE == "scatter":
            out_row = tl.load(rows_ptr + slot)
        keep = (out_row < n_rows)[None, :] & (n < N)[:, None]
        tl.store(out_ptr + out_row.to(tl.int64)[None, :] * stride_out + n[:, None], to_bf16(acc, ASM), mask=keep)


def launch(
    operand: Operand,
    weight: "KernelWeight",
    out: Tensor,
    *,
    mode: str,
    bm: int,
    blocks: int,
    n_rows: int,
    routing: Routing | None,
    top_k: int,
) -> None:
    """One GEMM with packed operands; arguments as in ops.py."""
    assert operand.block_scale is not None and operand.scale is not None
    bn = 128 if compiled() else 32
    unused = weight.g
    native_gemm_kernel[(blocks * triton.cdiv(weight.n, bn),)](
        operand.data,
        operand.block_scale.view(torch.float8_e4m3fn),
        operand.scale,
        weight.words,
        weight.scales.view(torch.float8_e4m3fn),
        weight.g,
        unused if routing is None else routing.rows,
        unused if routing is None else routing.expert,
        out,
        n_rows,
        weight.n,
        weight.k,
        out.stride(0),
        TOP_K=top_k,
        BM=bm,
        BN=bn,
        BK=256 if compiled() else 64,
        MODE=mode,
        RESIDUAL=operand.residual,
        ASM=compiled(),
        num_warps=4,
        num_stages=3,
        launch_pdl=compiled(),
    )
