"""Chunked log-probs and entropy against log_softmax, values and gradients."""

import pytest
import torch
from torch import Tensor

from quads.model.logprobs import candidate_logprobs, output_logits, token_logprobs
from tests.helpers import assert_close


def plain(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    logp = (hidden @ weight.t() / temperature).log_softmax(-1)
    return logp.gather(-1, targets[:, None]).squeeze(-1), -(logp.exp() * logp).sum(-1)


@pytest.mark.parametrize("chunk", [1, 4, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_values_and_gradients_equal_log_softmax(chunk: int, temperature: float) -> None:
    hidden = torch.randn(11, 6, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(9, 6, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(9, (11,))
    upstream = torch.randn(2, 11, dtype=torch.float64)
    results = []
    for values in (
        token_logprobs(hidden, weight, targets, temperature, chunk),
        plain(hidden, weight, targets, temperature),
    ):
        loss = (values[0] * upstream[0] + values[1] * upstream[1]).sum()
        results.append((*values, *torch.autograd.grad(loss, [hidden, weight])))
    for ours, theirs in zip(*results, strict=True):
        assert_close(ours, theirs, atol=1e-12)


@pytest.mark.parametrize("chunk", [1, 4, 100])
def test_candidates_equal_log_softmax(chunk: int) -> None:
    """Values and gradients, where the target is among the candidates and where it is not."""
    hidden = torch.randn(11, 6, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(9, 6, dtype=torch.float64, requires_grad=True)
    targets, candidates = torch.arange(11) % 9, torch.arange(44).view(11, 4) % 9
    assert (candidates == targets[:, None]).any() and not (candidates == targets[:, None]).any(-1).all()
    upstream, of_candidates = torch.randn(2, 11, dtype=torch.float64), torch.randn(11, 4, dtype=torch.float64)
    logp = (hidden @ weight.t() / 0.7).log_softmax(-1)
    expected = (*plain(hidden, weight, targets, 0.7), logp.gather(-1, candidates))
    results = []
    for values in (candidate_logprobs(hidden, weight, targets, candidates, 0.7, chunk), expected):
        loss = (values[0] * upstream[0] + values[1] * upstream[1]).sum() + (values[2] * of_candidates).sum()
        results.append((*values, *torch.autograd.grad(loss, [hidden, weight])))
    for ours, theirs in zip(*results, strict=True):
        assert_close(ours, theirs, atol=1e-12)


def test_gradcheck() -> None:
    hidden = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda h, w: token_logprobs(h, w, torch.tensor([0, 3, 1, 1, 2]), 0.5, 2), [hidden, weight]
    )


def test_bf16_hidden_states_give_fp32_logprobs_of_exact_products() -> None:
    hidden, weight = torch.randn(7, 32).bfloat16(), torch.randn(20, 32)
    targets = torch.randint(20, (7,))
    logprobs, entropy = token_logprobs(hidden, weight, targets)
    expected = plain(hidden.double(), weight.bfloat16().double(), targets, 1.0)
    assert logprobs.dtype == entropy.dtype == torch.float32
    assert_close(logprobs, expected[0], atol=1e-5)  # fp32 sums of logits up to about 20
    assert_close(entropy, expected[1], atol=1e-5)


def test_bf16_gradients_of_candidates() -> None:
    """A bf16 gradient at the logits has a relative error of 2**-9, of what goes through the target as well."""
    hidden, weight = torch.randn(64, 16).bfloat16(), torch.randn(50, 16)
    targets, candidates = torch.randint(50, (64,)), torch.rand(64, 50).topk(8).indices
    upstream = torch.randn(64, 8)
    grads = []
    for dtype in (torch.bfloat16, torch.float64):
        leaf = hidden.detach().to(dtype).requires_grad_()
        values = candidate_logprobs(leaf, weight.bfloat16().to(torch.float64), targets, candidates)
        (values[2] * upstream).sum().backward()
        grads.append(leaf.grad)
    assert_close(grads[0], grads[1], atol=0.02 * float(grads[1].abs().max()))


def test_bf16_weight_gradient_adds_up_in_fp32_over_chunks() -> None:
    # 512 equal rows, one per chunk: a bf16 sum would stall at 256 times the first term
    hidden = torch.ones(512, 1, dtype=torch.bfloat16)
    weight = torch.zeros(2, 1, requires_grad=True)
    token_logprobs(hidden, weight, torch.zeros(512, dtype=torch.int64), chunk=1)[0].sum().backward()
    assert weight.grad is not None and weight.grad.flatten().tolist() == [256.0, -256.0]


def test_no_tokens() -> None:
    logprobs, entropy = token_logprobs(torch.randn(0, 3), torch.randn(4, 3), torch.zeros(0, dtype=torch.int64))
    assert logprobs.shape == entropy.shape == (0,)
    none = torch.zeros(0, dtype=torch.int64)
    assert candidate_logprobs(torch.randn(0, 3), torch.randn(4, 3), none, none.view(0, 2))[2].shape == (0, 2)


def test_uniform_and_certain_distributions() -> None:
    logprobs, entropy = token_logprobs(
        torch.tensor([[0.0], [1.0]]), torch.tensor([[0.0], [200.0]]), torch.tensor([1, 1])
    )
    assert_close(logprobs, torch.tensor([0.5, 1.0]).log(), atol=1e-6)
    assert_close(entropy, torch.tensor([2.0, 1.0]).log(), atol=1e-6)
    assert output_logits(torch.tensor([[1.0]]), torch.tensor([[0.0], [200.0]])).tolist() == [[0.0, 200.0]]
