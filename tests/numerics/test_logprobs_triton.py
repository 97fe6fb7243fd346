"""The Triton kernels of the log-probs against plain torch: on a GPU, or interpreted in a process of its own."""

import os

import pytest
import torch

from quads.model import logprobs
from tests.helpers import assert_close, assert_passes_interpreted

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

if INTERPRETED or torch.cuda.is_available():
    from quads.model import logprobs_triton

    DEVICE = "cpu" if INTERPRETED else "cuda"

    @pytest.mark.parametrize("temperature", [1.0, 0.7])
    @pytest.mark.parametrize("vocabulary", [5, 4096, 9001])
    def test_kernels_equal_plain_torch(vocabulary: int, temperature: float) -> None:
        logits = torch.randn(3, vocabulary, device=DEVICE) * 5
        logits[1, vocabulary // 2] = 60.0  # nearly certain; the running maximum jumps
        targets = torch.tensor([0, vocabulary // 2, vocabulary - 1], device=DEVICE)
        plain = logprobs.token_stats(logits, targets, temperature)
        for ours, theirs in zip(logprobs_triton.token_stats(logits, targets, temperature), plain, strict=True):
            assert_close(ours, theirs, atol=2e-5, rtol=1e-6)  # fp32 sums over the vocabulary in another order
        upstream = torch.randn(2, 3, device=DEVICE)
        for dtype in (torch.float32, torch.bfloat16):
            inputs = (logits, targets, plain[2], plain[1], *upstream, temperature, dtype)
            ours, theirs = logprobs_triton.logits_gradient(*inputs), logprobs.logits_gradient(*inputs)
            assert ours.dtype == dtype
            # On a GPU torch multiplies by 1 / temperature: logits of up to 86 move by an ulp, 8e-6, and so do their p.
            assert_close(ours, theirs, atol=2e-5, rtol=2**-7 if dtype == torch.bfloat16 else 1e-5)

    def test_candidates_go_through_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
        """Log-probs and gradients of further tokens of a row, one of which may be the target."""
        hidden, weight = torch.randn(5, 16, device=DEVICE), torch.randn(4099, 16, device=DEVICE)
        targets = torch.tensor([0, 7, 4098, 9, 3], device=DEVICE)
        candidates = torch.tensor([[0, 4098], [8, 7], [1, 2], [4000, 9], [5, 4]], device=DEVICE)
        upstream = torch.randn(2, 5, device=DEVICE), torch.randn(5, 2, device=DEVICE)
        results = []
        for fused in (True, False):
            monkeypatch.setattr(logprobs, "_fused", lambda logits_CV, fused=fused: fused)
            leaves = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
            values = logprobs.candidate_logprobs(*leaves, targets, candidates, 0.8, chunk=3)
            loss = (values[0] * upstream[0][0] + values[1] * upstream[0][1]).sum() + (values[2] * upstream[1]).sum()
            results.append((*values, *torch.autograd.grad(loss, leaves)))
        for ours, theirs in zip(*results, strict=True):
            assert_close(ours, theirs, atol=1e-4, rtol=1e-5)

    def test_non_finite_logits_are_not_hidden() -> None:
        logits = torch.zeros(3, 4100, device=DEVICE)
        logits[0, 4099], logits[1, 7] = float("nan"), float("inf")
        logprob, entropy, _ = logprobs_triton.token_stats(logits, torch.tensor([1, 1, 1], device=DEVICE), 1.0)
        assert logprob.isfinite().tolist() == entropy.isfinite().tolist() == [False, False, True]


@pytest.mark.skipif(INTERPRETED, reason="is the interpreter's own process")
def test_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    assert_passes_interpreted(__file__)
