import math

import pytest
import torch

from quads.config.sections import RLSettings
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


def corrected(rollout, old, log_ratios, advantages, sequence=None, share=None, **options):
    """(loss, gradient at the log-probs, sums) with old = learner, over tokens, denominator 1."""
    old = torch.tensor(old)
    logprobs = (old + torch.tensor(log_ratios)).requires_grad_()
    made = batch(rollout, advantages, sequence=sequence, old_logprobs_N=old, ais_share=share)
    loss, sums = grpo_loss(logprobs, made, LossConfig(old_logprobs="learner", **options), 1.0)
    loss.backward()
    counts = {name: int(count) for name, count in sums.items() if name != "kl"}
    return float(loss.detach()), logprobs.grad, counts


def test_truncated_importance_weight_by_hand():
    """old = learner: ratio is taken against the learner, the rollout's gap enters as min(exp(old - rollout), C)."""
    # exp(-.5) = .6065; exp(2) = 7.39 -> 2
    _, grad, sums = corrected([-1.0, -3.0], [-1.5, -1.0], [0.0, 0.0], [1.0, 1.0], correction="tis")
    torch.testing.assert_close(grad, torch.tensor([-math.exp(-0.5), -2.0]))
    assert sums["weight_capped"] == 1 and sums["weight_masked"] == 0


def test_masked_weight_by_hand():
    """w = exp(-.5), exp(2), exp(-2): the last two are outside [1/2, 2]."""
    _, grad, sums = corrected([-1.0, -3.0, -1.0], [-1.5, -1.0, -3.0], [0.0] * 3, [1.0] * 3, correction="mis")
    torch.testing.assert_close(grad, torch.tensor([-math.exp(-0.5), 0.0, 0.0]))
    assert sums["weight_masked"] == 2 and sums["weight_capped"] == 0


def test_adaptive_weight_by_hand():
    """l = 0.25 of the batch: 0.75 + 0.25 * min(w, 2)."""
    share = torch.tensor(0.25)
    _, grad, sums = corrected([-1.0, -3.0], [-1.5, -1.0], [0.0, 0.0], [1.0, 1.0], share=share, correction="ais")
    torch.testing.assert_close(grad, torch.tensor([-0.75 - 0.25 * math.exp(-0.5), -0.75 - 0.25 * 2]))
    assert sums["weight_capped"] == 1


def test_weights_of_whole_responses_by_hand():
    """Gaps .2, .4 and -.1, of two responses: product exp(.6), geometric mean exp(.3); the second has one token."""
    arguments = ([-1.0, -1.0, -1.0], [-0.8, -0.6, -1.1], [0.0] * 3, [1.0, 1.0, -1.0], [0, 0, 1])
    for level, first in (("sequence", 0.6), ("geometric", 0.3)):
        _, grad, _ = corrected(*arguments, correction="tis", correction_level=level, correction_cap=9.0)
        torch.testing.assert_close(grad, torch.tensor([-math.exp(first), -math.exp(first), math.exp(-0.1)]))


def test_no_correction_leaves_the_gap_out():
    _, grad, sums = corrected([-1.0, -3.0], [-1.5, -1.0], [0.0, 0.0], [1.0, 1.0], correction="none")
    torch.testing.assert_close(grad, torch.tensor([-1.0, -1.0]))
    assert sums.get("weight_capped", 0) == 0


def test_acr_by_hand():
    """r = 0.5 widens the upper clip to 1.3 / 0.5 = 2.6, so R = 2 still learns, with 0.5 * 2; r = 3 counts twice (cap 2)
    and is clipped at 1.3; a negative advantage is clipped below, at 0.8."""
    half, three = math.log(0.5), math.log(3.0)
    arguments = ([-1.0, -1.0, -1.0], [-1.0 + half, -1.0 + three, -1.0 + half])
    arguments = (*arguments, [math.log(2.0), math.log(2.0), math.log(0.5)], [1.0, 1.0, -1.0])
    options = {"clip_low": 0.2, "clip_high": 0.3, "correction": "tis"}
    loss, grad, sums = corrected(*arguments, surrogate="acr", **options)
    torch.testing.assert_close(grad, torch.tensor([-1.0, 0.0, 0.0]))
    assert loss == pytest.approx(-(0.5 * 2.0 + 2 * 1.3 - 0.5 * 0.8)) and sums["clipped"] == 2
    loss, grad, sums = corrected(*arguments, surrogate="ppo", **options)  # 2 is beyond 1.3 for all
    assert loss == pytest.approx(-(0.5 * 1.3 + 2 * 1.3 - 0.5 * 0.8)) and sums["clipped"] == 3


def test_tbpo_by_hand():
    """Mean log-ratios .15 (in the band: every token moves by exp(.15) A / 2 of the sum of two) and .5 (dropped)."""
    arguments = ([-1.0] * 4, [-1.0] * 4, [0.1, 0.2, 0.4, 0.6], [1.0, 1.0, -1.0, -1.0], [0, 0, 1, 1])
    band = {"clip_low": 0.05, "clip_high": 0.5}
    loss, grad, sums = corrected(*arguments, surrogate="tbpo", correction="none", **band)
    torch.testing.assert_close(grad, torch.tensor([-math.exp(0.15), -math.exp(0.15), 0.0, 0.0]))
    assert loss == pytest.approx(-2 * math.exp(0.15)) and sums["tbpo_dropped"] == 2


def test_dual_clip_by_hand():
    """A negative advantage at R = 4 counts three times and no longer moves; a positive one is not touched."""
    arguments = ([-1.0] * 2, [-1.0] * 2, [math.log(4.0), math.log(1.1)], [-1.0, 1.0])
    loss, grad, sums = corrected(*arguments, dual_clip=3.0, correction="none")
    torch.testing.assert_close(grad, torch.tensor([0.0, -1.1]))
    assert loss == pytest.approx(3.0 - 1.1) and sums["dual_clipped"] == 1
    loss, _, sums = corrected(*arguments, correction="none")
    assert loss == pytest.approx(4.0 - 1.1) and sums["dual_clipped"] == 0


def test_untrained_tokens_do_not_count_as_touched():
    """Both of one response are far outside every bound; the second is not trained on."""
    old = torch.tensor([2.0, 2.0])
    made = batch([0.0, 0.0], [-1.0, -1.0], [1.0, 0.0], [0, 0], old_logprobs_N=old)
    touched = set()
    for options in ({"correction": "mis", "dual_clip": 2.0}, {"correction": "tis"}, {"surrogate": "tbpo"}):
        config = LossConfig(old_logprobs="learner", cumulative_ratio_clip=2.0, **options)
        _, sums = grpo_loss(old + 2.0, made, config, 1.0)
        touched |= {(name, int(count)) for name, count in sums.items() if name not in ("kl", "tokens") and count}
    assert touched == {(name, 1) for name in (
        "cumulative_masked", "weight_masked", "weight_capped", "tbpo_dropped", "dual_clipped")}  # fmt: skip


@pytest.mark.parametrize("correction", ["none", "tis", "mis", "ais"])
def test_the_expected_gradient_of_a_centered_score_is_zero(correction):
    """Over tokens drawn from the rollout, with all of them candidates: a constant advantage moves nothing."""
    rollout_logprobs = torch.tensor([0.05, 0.1, 0.25, 0.6]).log()
    grads = {}
    for centering in (0, 4):
        logits = torch.tensor([0.35, 0.1, 0.15, 0.4]).log().requires_grad_()
        logprobs = logits.log_softmax(-1)
        config = LossConfig(
            old_logprobs="learner", correction=correction, correction_cap=1.5, score_centering=centering
        )
        made = batch(
            rollout_logprobs.tolist(), [2.0] * 4, rollout_logprobs.exp().tolist(), [0, 1, 2, 3],
            old_logprobs_N=logprobs.detach(), top_logprobs_Nk=rollout_logprobs.expand(4, 4),
            ais_share=torch.tensor(0.3),
        )  # fmt: skip
        grpo_loss(logprobs, made, config, 1.0, logprobs.expand(4, 4))[0].backward()
        grads[centering] = logits.grad.abs().max()
    assert grads[4] < 1e-6 < 1e-2 < grads[0]


def test_score_centering_by_hand():
    """q = [.5, .3], p = [.4, .4], w = 1: the candidates' scores count +.1 and -.1 times A / 2; the second token is not
    trained on, and its values may be anything."""
    q = torch.tensor([[0.5, 0.3], [math.nan, 0.3]]).log()
    candidates = torch.tensor([[0.4, 0.4], [0.4, math.nan]]).log().requires_grad_()
    old = torch.tensor([-1.0, -1.0])
    made = batch([-1.0, 0.0], [3.0, 3.0], [0.5, 0.0], old_logprobs_N=old, top_logprobs_Nk=q)
    config = LossConfig(old_logprobs="learner", correction="none", score_centering=2)
    loss, _ = grpo_loss(old.clone(), made, config, 2.0, candidates)
    loss.backward()
    weight = 0.5 * 3.0 / 2.0
    torch.testing.assert_close(candidates.grad, torch.tensor([[0.1 * weight, -0.1 * weight], [0.0, 0.0]]))
    assert float(loss.detach()) == pytest.approx(-weight)


def test_the_word_for_the_correction_is_tis_where_there_is_something_to_correct():
    assert LossConfig.of(RLSettings()).correction == "none"
    assert LossConfig.of(RLSettings(old_logprobs="learner")).correction == "tis"
    assert LossConfig.of(RLSettings(old_logprobs="learner", correction="none")).correction == "none"
    assert LossConfig.of(RLSettings()) == LossConfig()


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
    assert metrics["mismatch/m2"] == pytest.approx((0.25 + 0 + 1) / 3, rel=1e-6)
    w = [math.exp(0.5), 1.0, math.exp(-1.0)]
    assert metrics["mismatch/ess"] == pytest.approx(sum(w) ** 2 / (3 * sum(x * x for x in w)), rel=1e-6)
    empty = mismatch_metrics(learner, rollout, finite & False)
    assert empty.keys() == metrics.keys()
    assert all(math.isnan(value) for name, value in empty.items() if name != "mismatch/nonfinite_tokens")
    learner[2] = torch.nan  # the learner's own value may be the broken one
    metrics = mismatch_metrics(learner, rollout, finite)
    assert metrics["mismatch/nonfinite_tokens"] == 2 and metrics["mismatch/logprob_abs_max"] == 0.5


def test_percentile_takes_a_value_that_occurs():
    assert percentile(torch.arange(1, 101).double(), 0.99) == 99.0
    assert percentile(torch.tensor([5.0]), 0.99) == 5.0
