"""Sampling with a seed for each request, all rows at once.

vLLM draws the noise of seeded requests row by row: a launch for each, which on an H200 takes a quarter of the
throughput at 256 sequences. Here one uniform number a row decides, the same function of (seed, number of the token)
as in the native engine (sampling.py), and two kernels find its place in the cumulative distribution:

    sums of chunks of the row -> the chunk in which the cumulative sum passes u * total -> the place inside it

vLLM counts a request's tokens in the offset of its torch.Generator (4 a token, taken back where a step computes only a
part of a prompt), and so does this.

Shapes: B rows, V vocabulary, C chunks of a row.
"""

# pyright: reportMissingImports=false
# vLLM is an extra.

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from quads.rollout.sampling import seed_tensor, uniforms

CHUNK = 2048
OFFSET_A_TOKEN = 4


@triton.jit
def chunk_sums_kernel(probs_ptr, sums_ptr, V, C, CHUNK: tl.constexpr):
    """sums fp64 [B, C] of probs fp32 [B, V]."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    v = chunk * CHUNK + tl.arange(0, CHUNK)
    p = tl.load(probs_ptr + row.to(tl.int64) * V + v, mask=v < V, other=0.0)
    tl.store(sums_ptr + row * C + chunk, tl.sum(p.to(tl.float64)))


@triton.jit
def place_kernel(probs_ptr, chunk_ptr, target_ptr, token_ptr, V, CHUNK: tl.constexpr):
    """token int64 [B]: how many cumulative sums inside chunk[b] are <= target[b], counted from the start of the row."""
    row = tl.program_id(0)
    start = tl.load(chunk_ptr + row) * CHUNK
    v = start + tl.arange(0, CHUNK)
    p = tl.load(probs_ptr + row.to(tl.int64) * V + v, mask=v < V, other=0.0)
    below = (tl.cumsum(p.to(tl.float64), 0) <= tl.load(target_ptr + row)) & (v < V)
    token = start + tl.sum(below.to(tl.int64))
    last = tl.minimum(start + CHUNK, V) - 1  # rounding may leave the target a little beyond the end
    tl.store(token_ptr + row, tl.minimum(token, last))


def place(probs_BV: Tensor, uniforms_B: Tensor) -> Tensor:
    """int64 [B]: first v with p_0 + ... + p_v > u * (sum of p). probs: fp32 [B, V], contiguous; uniforms: fp64 [B]."""
    rows, vocabulary = probs_BV.shape
    chunks = triton.cdiv(vocabulary, CHUNK)
    sums_BC = torch.empty(rows, chunks, dtype=torch.float64, device=probs_BV.device)
    chunk_sums_kernel[(rows, chunks)](probs_BV, sums_BC, vocabulary, chunks, CHUNK=CHUNK)
    cumulative_BC = sums_BC.cumsum(-1)
    target_B1 = uniforms_B[:, None] * cumulative_BC[:, -1:]
    chunk_B1 = torch.searchsorted(cumulative_BC, target_B1, right=True).clamp_(max=chunks - 1)
    before_B1 = cumulative_BC.gather(-1, chunk_B1) - sums_BC.gather(-1, chunk_B1)
    tokens_B = torch.empty(rows, dtype=torch.int64, device=probs_BV.device)
    place_kernel[(rows,)](probs_BV, chunk_B1, target_B1 - before_B1, tokens_B, vocabulary, CHUNK=CHUNK)
    return tokens_B


def next_uniforms(generators: list[Any], device: torch.device) -> Tensor:
    """fp64 [B]: the uniform number of each request's next token; its generator moves on by one token."""
    seeds, counters = [], []
    for generator in generators:
        offset = generator.get_offset()
        seeds.append(generator.initial_seed())
        counters.append(offset // OFFSET_A_TOKEN)
        generator.set_offset(offset + OFFSET_A_TOKEN)
    numbers_B = uniforms(seed_tensor(seeds), torch.tensor(counters, dtype=torch.int64))
    return numbers_B.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else numbers_B


def batch_seeded_sampling() -> None:
    """Make vLLM's V1 sampler on a GPU draw batches in which every request has a seed as above. Idempotent."""
    from vllm.v1.sample.ops import topk_topp_sampler

    original = topk_topp_sampler.random_sample
    if getattr(original, "draws_seeded_batches", False):
        return

    def random_sample(probs: Tensor, generators: dict[int, Any], *options: Any) -> Tensor:
        if not probs.is_cuda or len(generators) != len(probs):
            return original(probs, generators, *options)
        in_order = [generators[row] for row in range(len(probs))]
        return place(probs.contiguous(), next_uniforms(in_order, probs.device))

    random_sample.draws_seeded_batches = True  # pyright: ignore[reportFunctionMemberAccess]
    topk_topp_sampler.random_sample = random_sample
