"""4-bit weights times 16-bit operands: one Triton kernel for linear layers and for routed experts (Hopper).

The weights (layout: layout.py) are the M side of the tensor-core instruction and go from memory to registers to
the MMA, never through shared memory after decoding (decode.py); the few tokens of a decode step are the N side. The
16-bit types hold a code times its block scale exactly, and a quantized activation as well, so the only rounding is the
fp32 accumulation. Global scales (weight: per matrix, activation: per row) are applied to the fp32 sum.

Operands in fp16 are those with a folded residual: x as any other. As a second operand the residual rides in the same
MMA: its rows are extra token columns (x rows first, then r rows), so one decoded weight tile serves both, and the
epilogue subtracts the second half.

Legend: BN weight rows of a tile, BM tokens of a tile, MB = BM or 2 BM (with residual), CW = 32 * KSTEP words a step.
"""

import triton
import triton.language as tl

from quads.quant.triton.decode import decode_asm, decode_half_asm, decode_plain
from quads.quant.triton.math import start_next, to_bf16, wait_for_previous


@triton.jit
def _mma(w, x, acc, ASM: tl.constexpr):
    if ASM:
        acc = tl.dot(w, x, acc)
    else:
        acc = tl.dot(w, x.to(tl.float32), acc, input_precision="ieee")
    return acc


@triton.jit
def silu_mul(gate, up, ASM: tl.constexpr):
    """silu(gate) * up with the roundings of bfloat16 tensors: gate, up, silu(gate) and the product are each rounded."""
    gate = to_bf16(gate, ASM).to(tl.float32)
    up = to_bf16(up, ASM).to(tl.float32)
    act = to_bf16(gate / (1.0 + tl.exp(-gate)), ASM).to(tl.float32)
    return to_bf16(act * up, ASM)


@triton.jit
def multiply(words, scale_pairs, x0, x1, x2, x3, acc, BN: tl.constexpr, KSTEP: tl.constexpr, ASM: tl.constexpr):
    """acc + one K step: words [BN, CW], pairs of scale bytes [BN, 4 KSTEP], the four parts of x [CW, MB]."""
    if ASM and x0.dtype == tl.float16:
        w0, w1, w2, w3 = decode_half_asm(words, scale_pairs, BN, KSTEP)
    elif ASM:
        w0, w1, w2, w3 = decode_asm(words, scale_pairs, BN, KSTEP)
    else:
        w0, w1, w2, w3 = decode_plain(words, scale_pairs, BN, KSTEP)
    acc = _mma(w0, x0, acc, ASM)
    acc = _mma(w1, x1, acc, ASM)
    acc = _mma(w2, x2, acc, ASM)
    acc = _mma(w3, x3, acc, ASM)
    if ASM:
        # Triton 3.6 leaves the last MMA pending over the loop's back edge while the next iteration overwrites its
        # register operand (a race, seen as errors that move). Reading the accumulator makes it wait here.
        acc = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [acc], dtype=tl.float32, is_pure=True, pack=1)
    return acc


@triton.jit
def main_minus_residual(acc, BN: tl.constexpr, BM: tl.constexpr):
    """[BN, 2 BM], columns of main and then of the residual -> [BN, BM]."""
    sign = tl.where(tl.arange(0, 2 * BM) // BM == 0, 1.0, -1.0)
    return tl.sum(tl.reshape(acc * sign[None, :], (BN, 2, BM)), axis=1)


@triton.jit
def store_swiglu(out_ptr, acc, slot, n0, stride_out, BN: tl.constexpr, BM: tl.constexpr, ASM: tl.constexpr):
    """out[slot, :] = SwiGLU of the gate and up rows from n0 on."""
    pairs = tl.permute(tl.reshape(acc, (BN // 16, 2, 8, BM)), (0, 2, 3, 1))
    gate, up = tl.split(pairs)
    hidden = tl.reshape(silu_mul(gate, up, ASM), (BN // 2, BM))
    n = n0 // 2 + tl.arange(0, BN // 2)
    tl.store(out_ptr + slot.to(tl.int64)[None, :] * stride_out + n[:, None], hidden)


@triton.jit
def store_rows(out_ptr, acc, out_row, n0, n_rows, N, stride_out, BN: tl.constexpr, ASM: tl.constexpr):
    """out[out_row, n0 : n0 + BN], bfloat16, or fp32 for a share of K."""
    n = n0 + tl.arange(0, BN)
    keep = (out_row < n_rows)[None, :] & (n < N)[:, None]
    at = out_ptr + out_row.to(tl.int64)[None, :] * stride_out + n[:, None]
    if out_ptr.dtype.element_ty == tl.float32:
        tl.store(at, acc, mask=keep)
    else:
        tl.store(at, to_bf16(acc, ASM), mask=keep)


@triton.jit
def w4_gemm_kernel(
    x_ptr,
    x_scale_ptr,
    w_ptr,
    s_ptr,
    g_ptr,
    rows_ptr,
    expert_ptr,
    out_ptr,
    n_rows,
    N,
    NB,
    KB,
    stride_x,
    stride_out,
    TOP_K: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    KSTEP: tl.constexpr,
    MODE: tl.constexpr,
    SCALED: tl.constexpr,
    RESIDUAL: tl.constexpr,
    SPLIT: tl.constexpr,
    LATE: tl.constexpr,
    ASM: tl.constexpr,
):
    """One [BN, BM] tile of W x^T.

    MODE "dense":   token = slot; writes out[slot, n].
         "gather":  slots are sorted by expert; x row = rows[slot] // TOP_K; out[slot, :] = SwiGLU of the gate/up rows.
         "scatter": x row = slot; writes out[rows[slot], n].
    SPLIT > 1 ("dense"): each of SPLIT programs sums its share of K and writes fp32 to out[part]; see `sum_parts`.
    rows[slot] >= n_rows marks a padding slot; expert[block] < 0 an unused block. SCALED: x_scale holds a fp32 factor a
    row. RESIDUAL: x and x_scale hold 2R rows, main then residual, R = the rows of main (n_rows / TOP_K, or the slots).
    LATE: the second of two launches over the blocks of one map, which runs beside the first. That one let it start only
    once all its programs had waited, so what both read is complete. Its end comes after the end of the first, because
    one program waits for that: who waits for this kernel has then waited for both.
    """
    MB: tl.constexpr = 2 * BM if RESIDUAL else BM
    CW: tl.constexpr = 32 * KSTEP
    tiles_n = NB * (128 // BN)
    pid = tl.program_id(0)
    part = pid % SPLIT
    pid = pid // SPLIT
    block = pid // tiles_n
    n0 = (pid % tiles_n) * BN
    column = tl.arange(0, MB)
    slot = block * BM + column % BM
    expert = 0
    target = slot
    if MODE == "scatter":
        # The routing map is complete: the "gather" GEMM called start_next after its own wait.
        expert = tl.load(expert_ptr + block)
        target = tl.load(rows_ptr + slot)
    if not LATE:
        wait_for_previous(ASM)
    start_next(ASM)
    if MODE == "gather":
        expert = tl.load(expert_ptr + block)
        target = tl.load(rows_ptr + slot)
    if expert < 0:
        if LATE:
            if tl.program_id(0) == tl.num_programs(0) - 1:
                wait_for_previous(ASM)
        return

    # Padding slots load nothing (cp.async fills zeros): all reading one row would queue at one place of the L2 cache.
    if MODE == "gather":
        there = target < n_rows
        x_row = target // TOP_K
        half_rows = n_rows // TOP_K
    elif MODE == "scatter":
        there = target < n_rows
        x_row = slot
        half_rows = (tl.num_programs(0) // SPLIT // tiles_n) * BM
    else:
        there = slot < n_rows
        x_row = slot
        half_rows = n_rows
    if RESIDUAL:
        x_row += (column // BM) * half_rows

    row = n0 % 128 + tl.arange(0, BN)
    word = tl.arange(0, CW)
    pair = tl.arange(0, 4 * KSTEP)
    first_tile = (expert.to(tl.int64) * NB + n0 // 128) * KB if MODE != "dense" else (n0 // 128) * KB
    first_k = part * (KB // SPLIT)
    first_tile += first_k
    w_ptrs = w_ptr + first_tile * 4096 + (row[:, None] * 32 + (word % 32)[None, :] + ((word // 32) * 4096)[None, :])
    s_ptrs = s_ptr + first_tile * 512 + (row[:, None] * 4 + (pair % 4)[None, :] + ((pair // 4) * 512)[None, :])
    x_ptrs = x_ptr + x_row.to(tl.int64)[None, :] * stride_x + (first_k * 128 + word % 32 + (word // 32) * 128)[:, None]

    acc = tl.zeros((BN, MB), dtype=tl.float32)
    for _ in range(0, KB // SPLIT, KSTEP):
        words = tl.load(w_ptrs)
        scale_pairs = tl.load(s_ptrs)
        x0 = tl.load(x_ptrs, mask=there[None, :], other=0.0)
        x1 = tl.load(x_ptrs + 32, mask=there[None, :], other=0.0)
        x2 = tl.load(x_ptrs + 64, mask=there[None, :], other=0.0)
        x3 = tl.load(x_ptrs + 96, mask=there[None, :], other=0.0)
        acc = multiply(words, scale_pairs, x0, x1, x2, x3, acc, BN, KSTEP, ASM)
        w_ptrs += KSTEP * 4096
        s_ptrs += KSTEP * 512
        x_ptrs += KSTEP * 128

    # what the decoders leave out: 2**7 in fp16, else 2**8
    factor: tl.constexpr = 128.0 if ASM and x_ptr.dtype.element_ty == tl.float16 else 256.0
    acc *= tl.load(g_ptr + expert) * factor
    if SCALED:
        acc *= tl.load(x_scale_ptr + x_row, mask=there, other=0.0)[None, :]
    if RESIDUAL:
        acc = main_minus_residual(acc, BN, BM)
    slot = block * BM + tl.arange(0, BM)
    if MODE == "gather":
        store_swiglu(out_ptr, acc, slot, n0, stride_out, BN, BM, ASM)
    else:
        out_row = tl.load(rows_ptr + slot) if MODE == "scatter" else slot
        out_ptr += part.to(tl.int64) * n_rows * stride_out
        store_rows(out_ptr, acc, out_row, n0, n_rows, N, stride_out, BN, ASM)
    if LATE:
        if tl.program_id(0) == tl.num_programs(0) - 1:
            wait_for_previous(ASM)
