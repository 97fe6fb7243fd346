"""Sampling in vLLM on a GPU: token, log-prob and rank of every row, straight from the logits in three kernels.

vLLM turns the logits into fp32, divides them by the temperature, takes softmax and log-softmax, draws noise for each
token of the vocabulary (row by row where requests have seeds) and counts the rank: some ten passes over [B, V] in fp32.
The trainer asks for less: a token, drawn by one uniform number a row, and its log-prob. Two readings of the logits are
enough for that, and the rank, which vLLM's outputs hold, takes a third:

    maximum and sum of exp(x - maximum), x = logits / temperature, of each chunk of a row
    the chunk in which the cumulative sum passes u * total, the token inside it, its log-prob
    how many logits are at least the token's

Where log-probs of the most likely tokens are asked for, their logits come from torch.topk and share the normalizer.

u of a request with a seed is the native engine's function of (seed, number of the token) (sampling.py), so both engines
draw the same tokens but where rounding moves the boundary between two. vLLM counts a request's tokens in the offset of
its torch.Generator (4 a token, taken back where a step computes only a part of a prompt), and so does this.

Shapes: B rows, V vocabulary, C chunks of a row.
"""

# pyright: reportMissingImports=false
# vLLM is an extra.

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from quads.quant.triton.math import compiled
from quads.rollout.sampling import host_uniforms

CHUNK = 2048
OFFSET_A_TOKEN = 4


@triton.jit
def load_chunk(logits_ptr, stride, temperature_ptr, V, row, chunk, CHUNK: tl.constexpr):
    """x = logits / temperature, fp32 [CHUNK], -inf behind the end of the row; and the place of each in the row."""
    v = chunk * CHUNK + tl.arange(0, CHUNK)
    logits = tl.load(logits_ptr + row.to(tl.int64) * stride + v, mask=v < V, other=float("-inf"))
    return tl.div_rn(logits.to(tl.float32), tl.load(temperature_ptr + row)), v


@triton.jit
def chunk_kernel(logits_ptr, stride, temperature_ptr, maxima_ptr, sums_ptr, V, C, CHUNK: tl.constexpr):
    """maxima, sums fp32 [B, C]: the largest x of each chunk, and the sum of exp(x - largest)."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    x, _ = load_chunk(logits_ptr, stride, temperature_ptr, V, row, chunk, CHUNK)
    largest = tl.max(x, 0)
    total = tl.sum(tl.exp(x - largest), 0)
    tl.store(maxima_ptr + row * C + chunk, largest)
    tl.store(sums_ptr + row * C + chunk, tl.where(largest == float("-inf"), 0.0, total))


@triton.jit
def draw_kernel(
    logits_ptr,
    stride,
    temperature_ptr,
    maxima_ptr,
    sums_ptr,
    uniform_ptr,
    token_ptr,
    logprob_ptr,
    rank_ptr,
    V,
    C,
    CP: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """token int32 [B]: the first whose cumulative probability is beyond u; its log-prob fp32 [B]; rank becomes 0.

    CP: power of two >= C. Rounding may leave u beyond every sum: the last token of a probability above 0 then.
    """
    row = tl.program_id(0)
    c = tl.arange(0, CP)
    maxima = tl.load(maxima_ptr + row * C + c, mask=c < C, other=float("-inf"))
    largest = tl.max(maxima, 0)
    sums = tl.load(sums_ptr + row * C + c, mask=c < C, other=0.0) * tl.exp(maxima - largest)
    weight = tl.where(c < C, sums, 0.0).to(tl.float64)
    total = tl.sum(weight, 0)
    target = tl.load(uniform_ptr + row) * total
    passed = tl.sum((tl.cumsum(weight, 0) <= target).to(tl.int32), 0)
    chunk = tl.minimum(passed, tl.max(tl.where(weight > 0, c, 0), 0))
    target -= tl.sum(tl.where(c < chunk, weight, 0.0), 0)

    x, v = load_chunk(logits_ptr, stride, temperature_ptr, V, row, chunk, CHUNK)
    p = tl.exp(x - largest).to(tl.float64)
    passed = tl.sum((tl.cumsum(p, 0) <= target).to(tl.int32), 0)
    first = chunk * CHUNK
    token = tl.minimum(first + passed, tl.max(tl.where(p > 0, v, first), 0))
    chosen = tl.sum(tl.where(v == token, x, 0.0), 0).to(tl.float64)
    tl.store(token_ptr + row, token)
    tl.store(logprob_ptr + row, (chosen - largest - tl.log(total)).to(tl.float32))
    tl.store(rank_ptr + row, 0)


@triton.jit
def rank_kernel(logits_ptr, stride, token_ptr, rank_ptr, V, CHUNK: tl.constexpr):
    """Adds up rank int64 [B]: how many logits of a row are at least that of its token (1: the most likely)."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    start = logits_ptr + row.to(tl.int64) * stride
    chosen = tl.load(start + tl.load(token_ptr + row)).to(tl.float32)
    v = chunk * CHUNK + tl.arange(0, CHUNK)
    logits = tl.load(start + v, mask=v < V, other=float("-inf")).to(tl.float32)
    tl.atomic_add(rank_ptr + row, tl.sum(((logits >= chosen) & (v < V)).to(tl.int64), 0))


def draw(logits_BV: Tensor, temperature_B: Tensor, uniforms_B: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(tokens int32 [B], log-probs fp32 [B], ranks int64 [B]), as `quads.rollout.sampling.draw` draws.

    logits: bf16, fp16 or fp32 [B, V], the columns side by side; temperature: fp32 above 0; uniforms: fp64 in [0, 1).
    A row with NaN gives some token and the log-prob NaN.
    """
    rows, vocabulary = logits_BV.shape
    assert logits_BV.stride(1) == 1
    chunks, device = triton.cdiv(vocabulary, CHUNK), logits_BV.device
    maxima_BC, sums_BC = torch.empty(2, rows, chunks, dtype=torch.float32, device=device)
    tokens_B = torch.empty(rows, dtype=torch.int32, device=device)
    logprobs_B = torch.empty(rows, dtype=torch.float32, device=device)
    ranks_B = torch.empty(rows, dtype=torch.int64, device=device)
    source = logits_BV, logits_BV.stride(0)
    chunk_kernel[(rows, chunks)](
        *source, temperature_B, maxima_BC, sums_BC, vocabulary, chunks, CHUNK=CHUNK, num_warps=4
    )
    draw_kernel[(rows,)](
        *source,
        temperature_B,
        maxima_BC,
        sums_BC,
        uniforms_B,
        tokens_B,
        logprobs_B,
        ranks_B,
        vocabulary,
        chunks,
        CP=triton.next_power_of_2(chunks),
        CHUNK=CHUNK,
        num_warps=8,
    )
    rank_kernel[(rows, chunks)](*source, tokens_B, ranks_B, vocabulary, CHUNK=CHUNK, num_warps=4)
    return tokens_B, logprobs_B, ranks_B


def most_likely(
    logits_BV: Tensor, temperature_B: Tensor, tokens_B: Tensor, logprobs_B: Tensor, k: int
) -> tuple[Tensor, Tensor]:
    """(ids int32 [B, k], log-probs fp32 [B, k]) of the k most likely tokens, best first, from what `draw` found:

    log-prob = x - normalizer,  normalizer = x of the drawn token - its log-prob,  x = logits / temperature
    """
    chosen_B1 = logits_BV.gather(-1, tokens_B[:, None].long())
    top = logits_BV.topk(k)
    normalizer_B1 = chosen_B1.float() / temperature_B[:, None] - logprobs_B[:, None]
    return top.indices.to(torch.int32), top.values.float() / temperature_B[:, None] - normalizer_B1


def next_uniforms(generators: list[Any], device: torch.device) -> Tensor:
    """fp64 [B]: the uniform number of each request's next token; its generator moves on by one token."""
    seeds, counters = [], []
    for generator in generators:
        offset = generator.get_offset()
        seeds.append(generator.initial_seed())
        counters.append(offset // OFFSET_A_TOKEN)
        generator.set_offset(offset + OFFSET_A_TOKEN)
    numbers_B = host_uniforms(seeds, counters)
    return numbers_B.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else numbers_B


def batch_uniforms(rows: int, generators: dict[int, Any], device: torch.device) -> Tensor:
    """fp64 [B]: `next_uniforms` in rows that have a generator, torch's global generator in the others."""
    if len(generators) == rows:
        return next_uniforms([generators[row] for row in range(rows)], device)
    numbers_B = torch.rand(rows, dtype=torch.float64, device=device)
    if generators:
        seeded = torch.tensor(sorted(generators), device=device)
        numbers_B[seeded] = next_uniforms([generators[row] for row in sorted(generators)], device)
    return numbers_B


def only_temperature(metadata: Any) -> bool:
    """Whether vLLM's SamplingMetadata asks for a draw from softmax(logits / temperature) in every row, with the
    log-probs of the drawn and of the most likely tokens at most."""
    holder = metadata.thinking_budget_state_holder
    return (
        metadata.all_random
        and not metadata.logprob_token_ids
        and metadata.top_p is None
        and metadata.top_k is None
        and metadata.no_penalties
        and metadata.allowed_token_ids_mask is None
        and not metadata.bad_words_token_ids
        and (holder is None or not holder.has_tracked_requests())
        and all(_idle(processor) for processor in metadata.logitsprocs.all)
    )


def _idle(processor: Any) -> bool:
    """Whether one of vLLM's own logits processors would leave the logits alone; others always count as busy."""
    from vllm.v1.sample.logits_processor import builtin

    match processor:
        case builtin.MinPLogitsProcessor():
            return not processor.min_p_count
        case builtin.LogitBiasLogitsProcessor():
            return not processor.biases
        case builtin.MinTokensLogitsProcessor():
            return not processor.min_toks
    return False


def can_draw(logits_BV: Tensor, metadata: Any) -> bool:
    """Whether `sample` serves a batch: on a GPU (or interpreted), with nothing asked for but a temperature."""
    return (logits_BV.is_cuda or not compiled()) and only_temperature(metadata)


def sample(logits_BV: Tensor, metadata: Any) -> Any:
    """vLLM's SamplerOutput for a batch for which `can_draw` holds."""
    from vllm.v1.outputs import LogprobsTensors, SamplerOutput

    numbers_B = batch_uniforms(len(logits_BV), metadata.generators, logits_BV.device)
    tokens_B, logprobs_B, ranks_B = draw(logits_BV, metadata.temperature, numbers_B)
    tokens_B1 = tokens_B.unsqueeze(-1)
    ids_BK, logprobs_BK = tokens_B1, logprobs_B.unsqueeze(-1)
    if metadata.max_num_logprobs:
        top = most_likely(logits_BV, metadata.temperature, tokens_B, logprobs_B, metadata.max_num_logprobs)
        ids_BK, logprobs_BK = torch.cat([ids_BK, top[0]], 1), torch.cat([logprobs_BK, top[1]], 1)
    wanted = metadata.max_num_logprobs is not None
    logprobs = LogprobsTensors(ids_BK, logprobs_BK, ranks_B) if wanted else None
    return SamplerOutput(sampled_token_ids=tokens_B1, logprobs_tensors=logprobs)
