import math

import pytest
import torch

from quads.rl.loss import LossConfig, cumulative_ratio_mask, grpo_loss, k3
from quads.rl.mismatch import mismatch_metrics, percentile
from quads.rl.packing import Microbatch


def batch(rollout, advantages, weights=None, sequence=None, **extra):
    n = len(rollout)
    return Microbatch(
        tokens_T=torch.zeros(n + 1, dtype=torch.int64),
        lengths=(n + 1,),
        predict_N=torch.arange(n),
        targets_N=torch.zeros(n, dtype=torch.int64),
        sequence_N=torch.tensor(sequence or [0] * n),
        rollout_logprobs_N=torch.tensor(rollout),
        advantages_N=torch.tensor(advantages),
        weights_N=torch.tensor(weights or [1.0] * n),
        finite_N=torch.ones(n, dtype=torch.bool),
        **extra,
    )


def test_gradient_by_hand():
    """d loss / d logprob = -w * ratio * A / denominator where unclipped, 0 where the clip is active.

    ratios: 1.1 (inside, A=+1), 1.5 (above 1.27, A=+1: clipped), 1.5 (A=-1: the min keeps the unclipped branch),
    0.5 (below 0.8, A=-1: clipped), 0.5 (A=+2: unclipped).
    """
    ratios = [1.1, 1.5, 1.5, 0.5, 0.5]
    advantages = [1.0, 1.0, -1.0, -1.0, 2.0]
    logprobs = torch.tensor([math.log(r) - 1.0 for r in ratios], requires_grad=True)
    loss, sums = grpo_loss(logprobs, batch([-1.0] * 5, advantages, [1.0, 1.0, 1.0, 1.0, 0.5]), LossConfig(), 4.0)
    loss.backward()
    expected_loss = -(1.1 + 1.27 - 1.5 - 0.8 + 0.5 * 0.5 * 2.0) / 4.0
    torch.testing.assert_close(loss.detach(), torch.tensor(expected_loss))  # fp32 defaults: rtol 1.3e-6
    torch.testing.assert_close(logprobs.grad, torch.tensor([-1.1, 0.0, 1.5, 0.0, -0.5]) / 4.0)
    assert int(sums["clipped"]) == 2 and int(sums["tokens"]) == 5


def test_untrained_tokens_have_no_gradient_even_when_nan():
    logprobs = torch.tensor([-1.0, float("nan")], requires_grad=True)
    loss, sums = grpo_loss(logprobs, batch([-1.0, 0.0], [1.0, 1.0], [1.0, 0.0]), LossConfig(), 1.0)
    loss.backward()
    assert float(loss.detach()) == -1.0
    assert logprobs.grad is not None and logprobs.grad.tolist() == [-1.0, 0.0]
    assert int(sums["tokens"]) == 1


def test_huge_ratio_does_not_overflow():
    logprobs = torch.tensor([0.0], requires_grad=True)
    loss, _ = grpo_loss(logprobs, batch([-1000.0], [-1.0]), LossConfig(), 1.0)
    loss.backward()
    assert torch.isfinite(loss) and logprobs.grad is not None and torch.isfinite(logprobs.grad).all()


def test_truncated_importance_weight_by_hand():
    """old = learner: ratio is taken against the learner, the rollout's gap enters as min(exp(old - rollout), C)."""
    config = LossConfig(old_logprobs="learner", tis_clip=2.0)
    rollout = [-1.0, -3.0]
    old = torch.tensor([-1.5, -1.0])  # exp(-.5) = .6065; exp(2) = 7.39 -> 2
    logprobs = old.clone().requires_grad_()
    loss, _ = grpo_loss(logprobs, batch(rollout, [1.0, 1.0], old_logprobs_N=old), config, 1.0)
    loss.backward()
    torch.testing.assert_close(logprobs.grad, torch.tensor([-math.exp(-0.5), -2.0]))


def test_kl_by_hand():
    """k3 = exp(ref - lp) - 1 - (ref - lp); d k3 / d lp = 1 - exp(ref - lp)."""
    logprobs = torch.tensor([-1.0], requires_grad=True)
    mb = batch([-1.0], [0.0], ref_logprobs_N=torch.tensor([-0.5]))
    loss, sums = grpo_loss(logprobs, mb, LossConfig(kl_coef=0.1), 2.0)
    loss.backward()
    expected = math.exp(0.5) - 1 - 0.5
    assert float(sums["kl"]) == pytest.approx(expected, rel=1e-6)
    assert float(loss.detach()) == pytest.approx(0.1 * expected / 2, rel=1e-6)
    assert logprobs.grad is not None
    assert float(logprobs.grad) == pytest.approx(0.1 * (1 - math.exp(0.5)) / 2, rel=1e-6)


def test_cumulative_mask_starts_where_the_product_leaves_and_restarts_with_a_response():
    log2 = math.log(2.0)
    # response 0: products 2, 4, 2, 8 -> outside [1/3, 3] from the second token on, also where it comes back
    # response 1: products 1/2, 1 -> inside; response 2: 1/4 at once
    log_ratio = torch.tensor([log2, log2, -log2, 2 * log2, -log2, log2, -2 * log2])
    sequence = torch.tensor([0, 0, 0, 0, 1, 1, 2])
    mask = cumulative_ratio_mask(log_ratio, sequence, 3.0)
    assert mask.tolist() == [False, True, True, True, False, False, True]


def test_cumulative_mask_in_the_loss():
    config = LossConfig(clip_low=0.9, clip_high=9.0, cumulative_ratio_clip=3.0)
    logprobs = torch.tensor([math.log(2.0), math.log(2.0), 0.0], requires_grad=True)
    loss, sums = grpo_loss(logprobs, batch([0.0] * 3, [1.0] * 3, sequence=[0, 0, 1]), config, 1.0)
    loss.backward()
    torch.testing.assert_close(logprobs.grad, torch.tensor([-2.0, 0.0, -1.0]))
    assert int(sums["cumulative_masked"]) == 1


def test_k3_is_zero_at_zero_and_positive():
    assert float(k3(torch.tensor(0.0))) == 0.0
    assert (k3(torch.tensor([-2.0, -1e-3, 1e-3, 2.0])) > 0).all()


def test_mismatch_metrics_by_hand():
    learner = torch.tensor([-1.0, -2.0, -3.0, -4.0])
    rollout = torch.tensor([-1.5, -2.0, -2.0, 0.0])
    finite = torch.tensor([True, True, True, False])
    metrics = mismatch_metrics(learner, rollout, finite)
    assert metrics["mismatch/logprob_abs_max"] == 1.0
    assert metrics["mismatch/logprob_abs_mean"] == 0.5
    assert metrics["mismatch/logprob_abs_p99"] == 1.0
    assert metrics["mismatch/nonfinite_tokens"] == 1
    # gaps +.5, 0, -1: k3 = exp(d) - 1 - d = .1487, 0, .3679
    expected = ((math.exp(0.5) - 1.5) + 0 + math.exp(-1.0)) / 3
    assert metrics["mismatch/kl_k3"] == pytest.approx(expected, rel=1e-6)
    assert math.isnan(mismatch_metrics(learner, rollout, finite & False)["mismatch/logprob_abs_max"])
    learner[2] = torch.nan  # the learner's own value may be the broken one
    metrics = mismatch_metrics(learner, rollout, finite)
    assert metrics["mismatch/nonfinite_tokens"] == 2 and metrics["mismatch/logprob_abs_max"] == 0.5


def test_percentile_takes_a_value_that_occurs():
    assert percentile(torch.arange(1, 101).double(), 0.99) == 99.0
    assert percentile(torch.tensor([5.0]), 0.99) == 5.0
