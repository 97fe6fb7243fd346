"""What the 4-bit kernels are measured against: bf16 grouped matmuls of torch, and a native FP8 (W8A8) expert layer.

The FP8 layer is written for this comparison with the same care as the 4-bit one: weights on the M side of wgmma, small
token tiles, fp32 accumulation, per-row scales for weights and activations in the epilogue, the same routing, and SwiGLU
fused with the quantization of its output.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from quads.quant.triton.routing import combine, route


@triton.jit
def fp8_gemm_kernel(
    x_ptr,
    xs_ptr,
    w_ptr,
    ws_ptr,
    rows_ptr,
    expert_ptr,
    out_ptr,
    n_rows,
    N,
    K,
    TOP_K: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    MODE: tl.constexpr,
):
    """out[slot or rows[slot], n] = sum_k w[e, n, k] x[row, k], times both scales; modes as in triton/gemm.py."""
    tiles_n = tl.cdiv(N, BN)
    pid = tl.program_id(0)
    block = pid // tiles_n
    n = (pid % tiles_n) * BN + tl.arange(0, BN)
    expert = 0
    if MODE != "dense":
        expert = tl.load(expert_ptr + block)
    if expert < 0:
        return
    slot = block * BM + tl.arange(0, BM)
    target = slot
    x_row = slot
    if MODE == "dense":
        x_row = tl.minimum(slot, n_rows - 1)
    else:
        target = tl.load(rows_ptr + slot)
    if MODE == "gather":
        x_row = tl.where(target < n_rows, target // TOP_K, 0)
    k = tl.arange(0, BK)
    if MODE != "dense":
        w_ptr += expert.to(tl.int64) * N * K
        ws_ptr += expert * N
    w_ptrs = w_ptr + n[:, None] * K + k[None, :]
    x_ptrs = x_ptr + x_row.to(tl.int64)[None, :] * K + k[:, None]
    acc = tl.zeros((BN, BM), dtype=tl.float32)
    for _ in range(0, K, BK):
        acc = tl.dot(tl.load(w_ptrs), tl.load(x_ptrs), acc)
        w_ptrs += BK
        x_ptrs += BK
    acc *= tl.load(ws_ptr + n)[:, None]
    acc *= tl.load(xs_ptr + x_row)[None, :]
    out_row = slot if MODE == "gather" else target
    keep = (out_row < n_rows) | (MODE == "gather")
    tl.store(
        out_ptr + out_row.to(tl.int64)[None, :] * N + n[:, None],
        acc.to(tl.bfloat16),
        mask=keep[None, :] & (n < N)[:, None],
    )


@triton.jit
def fp8_rows_kernel(x_ptr, out_ptr, scale_ptr, slots_ptr, end, K, SWIGLU: tl.constexpr, KP: tl.constexpr):
    """One row: (SwiGLU of its two halves, then) FP8 with one scale. Rows whose slot is `end` are skipped."""
    row = tl.program_id(0).to(tl.int64)
    if SWIGLU:
        if tl.load(slots_ptr + row) >= end:
            return
    k = tl.arange(0, KP)
    if SWIGLU:
        gate = tl.load(x_ptr + row * 2 * K + k, mask=k < K, other=0.0).to(tl.float32)
        up = tl.load(x_ptr + row * 2 * K + K + k, mask=k < K, other=0.0).to(tl.float32)
        x = gate / (1.0 + tl.exp(-gate)) * up
    else:
        x = tl.load(x_ptr + row * K + k, mask=k < K, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(x)), 1e-12) / 448.0
    tl.store(scale_ptr + row, scale)
    tl.store(out_ptr + row * K + k, (x / scale).to(tl.float8e4nv), mask=k < K)


def fp8_rows(x: Tensor, slots: Tensor | None = None, end: int = 0) -> tuple[Tensor, Tensor]:
    rows, k = x.shape
    k = k // 2 if slots is not None else k
    out = torch.empty(rows, k, dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty(rows, dtype=torch.float32, device=x.device)
    kp = triton.next_power_of_2(k)
    fp8_rows_kernel[(rows,)](x, out, scale, x if slots is None else slots, end, k, SWIGLU=slots is not None, KP=kp)
    return out, scale


FP8_CONFIGS = [(bn, bk, stages, warps) for bn in (64, 128) for bk in (128, 256) for stages, warps in ((3, 4),)]


def fp8_gemm(x, xs, w, ws, out, mode, bm, blocks, n_rows, routing, top_k, config) -> None:
    bn, bk, stages, warps = config
    n, k = w.shape[-2:]
    fp8_gemm_kernel[(blocks * triton.cdiv(n, bn),)](
        x,
        xs,
        w,
        ws,
        xs if routing is None else routing.rows,
        xs if routing is None else routing.expert,
        out,
        n_rows,
        n,
        k,
        TOP_K=top_k,
        BM=bm,
        BN=bn,
        BK=bk,
        MODE=mode,
        num_warps=warps,
        num_stages=stages,
    )


def fp8_weight(w: Tensor) -> tuple[Tensor, Tensor]:
    """Per-row FP8 weight and scales."""
    scale = w.float().abs().amax(-1).clamp(min=1e-12) / 448.0
    return (w.float() / scale.unsqueeze(-1)).to(torch.float8_e4m3fn), scale


def fp8_moe(x, w13, w2, ids, gates, bm, configs) -> Tensor:
    """w13, w2: (fp8 [E, N, K], fp32 [E, N]); configs: one of FP8_CONFIGS for each."""
    tokens, top_k = ids.shape
    experts = w13[0].shape[0]
    routing = route(ids, experts, bm)
    blocks, pairs = routing.expert.numel(), routing.pairs
    q, s = fp8_rows(x)
    gate_up = torch.empty(blocks * bm, w13[0].shape[1], dtype=torch.bfloat16, device=x.device)
    fp8_gemm(q, s, *w13, gate_up, "gather", bm, blocks, pairs, routing, top_k, configs[0])
    q, s = fp8_rows(gate_up, routing.rows, pairs)
    y = torch.empty(pairs, w2[0].shape[1], dtype=torch.bfloat16, device=x.device)
    fp8_gemm(q, s, *w2, y, "scatter", bm, blocks, pairs, routing, 1, configs[1])
    return combine(y, ids, gates, experts)


def bf16_moe(x, w13, w2, ids, gates) -> Tensor:
    """torch: sort, gather, grouped_mm, SwiGLU, grouped_mm, scatter, weighted sum."""
    tokens, top_k = ids.shape
    flat = ids.flatten()
    order = flat.argsort(stable=True)
    counts = torch.zeros(w13.shape[0], dtype=torch.int32, device=x.device)
    counts.index_add_(0, flat, torch.ones_like(flat, dtype=torch.int32))
    ends = counts.cumsum(0, dtype=torch.int32)
    gate, up = torch._grouped_mm(x[order // top_k], w13.transpose(1, 2), offs=ends).chunk(2, -1)
    y = torch._grouped_mm(F.silu(gate) * up, w2.transpose(1, 2), offs=ends)
    back = torch.empty_like(y)
    back[order] = y
    return combine(back, ids, gates, w13.shape[0])


def scaled_grouped_moe(x, w13, w2, ids, gates) -> Tensor:
    """torch._scaled_grouped_mm (CUTLASS, FP8 with row scales)."""
    tokens, top_k = ids.shape
    flat = ids.flatten()
    order = flat.argsort(stable=True)
    counts = torch.zeros(w13[0].shape[0], dtype=torch.int32, device=x.device)
    counts.index_add_(0, flat, torch.ones_like(flat, dtype=torch.int32))
    ends = counts.cumsum(0, dtype=torch.int32)
    q, s = fp8_rows(x)
    rows = order // top_k
    gate_up = torch._scaled_grouped_mm(
        q[rows], w13[0].transpose(1, 2), s[rows], w13[1], offs=ends, out_dtype=torch.bfloat16, use_fast_accum=True
    )
    q, s = fp8_rows(gate_up, torch.zeros(gate_up.shape[0], dtype=torch.int32, device=x.device), 1)
    y = torch._scaled_grouped_mm(
        q, w2[0].transpose(1, 2), s, w2[1], offs=ends, out_dtype=torch.bfloat16, use_fast_accum=True
    )
    back = torch.empty_like(y)
    back[order] = y
    return combine(back, ids, gates, w13[0].shape[0])
