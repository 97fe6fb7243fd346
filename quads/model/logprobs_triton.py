"""The elementwise work on logits of `logprobs.py` as two Triton kernels that read each logit once.

In plain torch a chunk's logits pass through memory about 17 times in the forward and 21 times in the backward; at a
vocabulary of 151,936 that is the largest cost of the learner outside its matmuls. The functions here have the names,
arguments and meaning of the plain ones in `logprobs.py`, their reference, and need fp32 logits with contiguous rows.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096  # logits of one row that a program holds at a time
NUM_WARPS = 8


@triton.jit
def stats_kernel(logits_ptr, targets_ptr, out_ptr, num_rows, vocabulary, temperature, BLOCK: tl.constexpr):
    """One row a program, one pass: out [3, rows] = log-prob of the target, entropy, normalizer.

    Keeps m = max z, sum exp(z - m) and sum exp(z - m) z; the sums are rescaled whenever m grows.
    """
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * vocabulary
    column = tl.arange(0, BLOCK)
    peak = float("-inf")
    total = tl.zeros([BLOCK], dtype=tl.float32)
    moment = tl.zeros([BLOCK], dtype=tl.float32)
    for first in range(0, vocabulary, BLOCK):
        inside = first + column < vocabulary
        z = tl.div_rn(tl.load(logits_ptr + first + column, mask=inside, other=float("-inf")), temperature)
        new_peak = tl.maximum(peak, tl.max(z, axis=0))
        shrink = tl.exp(peak - new_peak)
        e = tl.exp(z - new_peak)
        total = total * shrink + e
        moment = moment * shrink + e * tl.where(inside, z, 0.0)  # outside: 0 times -inf is NaN
        peak = new_peak
    sum_e = tl.sum(total, axis=0)
    normalizer = peak + tl.log(sum_e)
    target = tl.div_rn(tl.load(logits_ptr + tl.load(targets_ptr + row)), temperature)
    tl.store(out_ptr + row, target - normalizer)
    tl.store(out_ptr + num_rows + row, normalizer - tl.sum(moment, axis=0) / sum_e)
    tl.store(out_ptr + 2 * num_rows + row, normalizer)


@triton.jit
def gradient_kernel(
    logits_ptr,
    targets_ptr,
    normalizer_ptr,
    entropy_ptr,
    grad_logprob_ptr,
    grad_entropy_ptr,
    out_ptr,
    vocabulary,
    temperature,
    BLOCK: tl.constexpr,
):
    """BLOCK logits of one row a program."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < vocabulary
    z = tl.div_rn(tl.load(logits_ptr + row * vocabulary + column, mask=inside, other=0.0), temperature)
    logp = z - tl.load(normalizer_ptr + row)
    grad_logprob = tl.load(grad_logprob_ptr + row)
    spread = grad_logprob + tl.load(grad_entropy_ptr + row) * (logp + tl.load(entropy_ptr + row))
    grad = -tl.exp(logp) * spread + tl.where(column == tl.load(targets_ptr + row), grad_logprob, 0.0)
    grad = tl.div_rn(grad, temperature).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * vocabulary + column, grad, mask=inside)


def token_stats(logits_CV: Tensor, targets_C: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """See `logprobs.token_stats`."""
    num_rows, vocabulary = logits_CV.shape
    out = torch.empty(3, num_rows, dtype=torch.float32, device=logits_CV.device)
    stats_kernel[(num_rows,)](
        logits_CV, targets_C, out, num_rows, vocabulary, float(temperature), BLOCK=BLOCK, num_warps=NUM_WARPS
    )
    return out[0], out[1], out[2]


def logits_gradient(
    logits_CV: Tensor,
    targets_C: Tensor,
    normalizer_C: Tensor,
    entropy_C: Tensor,
    grad_logprob_C: Tensor,
    grad_entropy_C: Tensor,
    temperature: float,
    dtype: torch.dtype,
) -> Tensor:
    """See `logprobs.logits_gradient`."""
    num_rows, vocabulary = logits_CV.shape
    out = torch.empty(num_rows, vocabulary, dtype=dtype, device=logits_CV.device)
    gradient_kernel[(num_rows, triton.cdiv(vocabulary, BLOCK))](
        logits_CV,
        targets_C,
        normalizer_C,
        entropy_C,
        grad_logprob_C.contiguous(),
        grad_entropy_C.contiguous(),
        out,
        vocabulary,
        float(temperature),
        BLOCK=BLOCK,
        num_warps=NUM_WARPS,
    )
    return out
