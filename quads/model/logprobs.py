"""Log-probabilities of given tokens, without ever holding all logits.

    logprob_t = log softmax(logits_t / temperature)[target_t]        entropy_t = -sum_v p_tv log p_tv

At a vocabulary of 151,936 the fp32 logits of 4,096 tokens are 2.3 GiB, and autograd would keep several such tensors.
Here logits exist for one chunk of tokens at a time; backward computes them again and adds the weight's gradient up in
fp32 over the chunks. The sampler draws from the same distribution, so learner and rollout log-probs mean the same
thing.

Logits are the product of hidden states and weights in the activation dtype, accumulated and kept in fp32 (bf16 logits
would be off by 0.4 %, far more than the gap between learner and rollout that this project measures).

`token_stats` and `logits_gradient` are what happens to a chunk's logits. On a CUDA GPU they are two Triton kernels
(logprobs_triton.py), elsewhere the plain functions below.

Shapes: T tokens, H hidden, V vocabulary, C tokens of a chunk, k candidates of a token.
"""

import importlib
from typing import Any

import torch
from torch import Tensor

LOGITS_CHUNK = 4096  # tokens whose [chunk, vocabulary] fp32 logits exist at once


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b accumulated and returned in fp32 (float64 for float64), operands in their own dtype."""
    if a.dtype in (torch.float32, torch.float64):
        return a @ b
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()  # the CPU has no mixed product; bf16 products are exact in fp32


def output_logits(hidden_TH: Tensor, weight_VH: Tensor) -> Tensor:
    """Logits [T, V] in fp32 (float64 for float64). `weight_VH` has the dtype of the hidden states."""
    return _product(hidden_TH, weight_VH.t())


def token_stats(logits_CV: Tensor, targets_C: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """(log-prob of each target, entropy, normalizer log sum_v exp(z_v)), each [C], of z = logits / temperature."""
    z_CV = logits_CV / temperature
    normalizer_C = z_CV.logsumexp(-1)
    logprob_C = z_CV.gather(-1, targets_C[:, None]).squeeze(-1) - normalizer_C
    mean_logit_C = ((z_CV - normalizer_C[:, None]).exp() * z_CV).sum(-1)
    return logprob_C, normalizer_C - mean_logit_C, normalizer_C


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
    """The gradient [C, V] at the logits, in `dtype`, from those at log-probs and entropies.

    d logprob / d z_v = [v = target] - p_v        d entropy / d z_v = -p_v (log p_v + entropy)
    """
    grad_logprob_C1 = grad_logprob_C[:, None]
    logp_CV = logits_CV / temperature - normalizer_C[:, None]
    grad_CV = -logp_CV.exp() * (grad_logprob_C1 + grad_entropy_C[:, None] * (logp_CV + entropy_C[:, None]))
    grad_CV.scatter_add_(-1, targets_C[:, None], grad_logprob_C1.to(grad_CV.dtype))
    return (grad_CV / temperature).to(dtype)


def _fused(logits_CV: Tensor) -> bool:
    """Whether the Triton kernels serve these logits."""
    return logits_CV.is_cuda and logits_CV.dtype == torch.float32


def _stats(logits_CV: Tensor, targets_C: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    serve = importlib.import_module("quads.model.logprobs_triton").token_stats if _fused(logits_CV) else token_stats
    return serve(logits_CV, targets_C, temperature)


def _gradient(logits_CV: Tensor, *args: Any) -> Tensor:
    fused = _fused(logits_CV)
    serve = importlib.import_module("quads.model.logprobs_triton").logits_gradient if fused else logits_gradient
    return serve(logits_CV, *args)


class _TokenLogprobs(torch.autograd.Function):
    """(log-probs, entropies, log-probs of the candidates); k may be 0."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_TH: Tensor,
        weight_VH: Tensor,
        targets_T: Tensor,
        candidates_Tk: Tensor,
        temperature: float,
        chunk: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        weight = weight_VH.to(hidden_TH.dtype)
        parts = []
        for chunks in zip(hidden_TH.split(chunk), targets_T.split(chunk), candidates_Tk.split(chunk), strict=True):
            hidden_CH, targets_C, candidates_Ck = chunks
            logits_CV = output_logits(hidden_CH, weight)
            logprobs_C, entropy_C, normalizer_C = _stats(logits_CV, targets_C, temperature)
            candidate_logprobs_Ck = logits_CV.gather(-1, candidates_Ck) / temperature - normalizer_C[:, None]
            parts.append((logprobs_C, entropy_C, normalizer_C, candidate_logprobs_Ck))
        logprobs_T, entropy_T, normalizer_T, candidate_logprobs_Tk = map(torch.cat, zip(*parts, strict=True))
        ctx.save_for_backward(hidden_TH, weight_VH, targets_T, candidates_Tk, normalizer_T, entropy_T)
        ctx.temperature, ctx.chunk = temperature, chunk
        return logprobs_T, entropy_T, candidate_logprobs_Tk

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None, None, None]:
        hidden_TH, weight_VH, targets_T, candidates_Tk, normalizer_T, entropy_T = ctx.saved_tensors
        grad_logprob_T, grad_entropy_T, grad_candidates_Tk = grads
        # Every log-prob has the same -p_v in its gradient: what candidates get goes through that of the target, and is
        # taken back where the target alone gets its own.
        through_T = grad_candidates_Tk.sum(-1)
        weight = weight_VH.to(hidden_TH.dtype)
        grad_hidden_TH = torch.empty_like(hidden_TH)
        grad_weight_VH = torch.zeros(weight_VH.shape, dtype=normalizer_T.dtype, device=weight_VH.device)
        per_token = (targets_T, normalizer_T, entropy_T, grad_logprob_T + through_T, grad_entropy_T)
        for start in range(0, hidden_TH.shape[0], ctx.chunk):
            rows = slice(start, start + ctx.chunk)
            hidden_CH, per_row = hidden_TH[rows], [values_T[rows] for values_T in per_token]
            grad_CV = _gradient(output_logits(hidden_CH, weight), *per_row, ctx.temperature, hidden_TH.dtype)
            if candidates_Tk.shape[1]:
                add = grad_candidates_Tk[rows] / ctx.temperature, -through_T[rows, None] / ctx.temperature
                grad_CV.scatter_add_(-1, candidates_Tk[rows], add[0].to(grad_CV.dtype))
                grad_CV.scatter_add_(-1, targets_T[rows, None], add[1].to(grad_CV.dtype))
            grad_hidden_TH[rows] = grad_CV @ weight
            grad_weight_VH += _product(grad_CV.t(), hidden_CH)
            del grad_CV  # or it is still there when the next chunk's logits are made
        return grad_hidden_TH, grad_weight_VH.to(weight_VH.dtype), None, None, None, None


def token_logprobs(
    hidden_TH: Tensor, lm_head_weight: Tensor, targets_T: Tensor, temperature: float = 1.0, chunk: int = LOGITS_CHUNK
) -> tuple[Tensor, Tensor]:
    """Log-prob of each target and entropy of each distribution, both fp32 [T] (float64 for float64 hidden states).

    `lm_head_weight` [V, H] is the master weight (`model.output_weight()`); `targets_T` int64, any valid id where the
    result is not used. `chunk` is the number of tokens whose logits exist at the same time. Both results are
    differentiable in the hidden states and the weight.
    """
    none_T0 = targets_T.new_empty(len(targets_T), 0)
    return candidate_logprobs(hidden_TH, lm_head_weight, targets_T, none_T0, temperature, chunk)[:2]


def candidate_logprobs(
    hidden_TH: Tensor,
    lm_head_weight: Tensor,
    targets_T: Tensor,
    candidates_Tk: Tensor,
    temperature: float = 1.0,
    chunk: int = LOGITS_CHUNK,
) -> tuple[Tensor, Tensor, Tensor]:
    """What `token_logprobs` gives, and the log-probs [T, k] of further tokens of each distribution, from the same
    logits. candidates_Tk: int64, a row's are distinct. All three are differentiable."""
    if hidden_TH.shape[0] == 0:
        empty = hidden_TH.new_zeros(0, dtype=torch.float64 if hidden_TH.dtype == torch.float64 else torch.float32)
        return empty, empty.clone(), empty.new_zeros(0, candidates_Tk.shape[1])
    return _TokenLogprobs.apply(  # type: ignore[return-value]
        hidden_TH, lm_head_weight, targets_T, candidates_Tk, temperature, chunk
    )
