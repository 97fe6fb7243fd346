import math
from dataclasses import replace

import pytest
import torch

from quads.config.sections import OptimSettings, QuantSettings, RLSettings
from quads.errors import UserError
from quads.model.attention import PackedContext
from quads.model.config import ModelConfig
from quads.model.model import MoEDecoder
from quads.quant.recipes import RECIPES, resolve
from quads.rl.learner import Learner
from quads.rl.optimizer import learning_rate
from quads.rl.packing import Sample, pack
from quads.rl.updates import TOUCHED, UpdateStats, merge_updates
from quads.types import Completion

CONFIG = ModelConfig(
    vocab_size=40, hidden_size=32, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=16,
    moe_intermediate_size=16, num_experts=4, top_k=2, rope_theta=1e4,
)  # fmt: skip


def make_learner(recipe="quads", rl=None, optim=None, reference=False, temperature=1.0):
    def model():
        made = MoEDecoder(CONFIG)
        made.init_weights(torch.Generator().manual_seed(0))
        return made

    rl, optim = rl or RLSettings(), optim or OptimSettings(lr=1e-2, eps=1e-8)
    spec = resolve(QuantSettings(recipe=recipe))
    frozen = model() if reference else None
    return Learner(model(), spec, optim, rl, temperature=temperature, steps=10, updates_per_step=1, reference=frozen)


def make_samples(seed=0, count=12):
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for i in range(count):
        prompt = torch.randint(40, (1 + i % 4,), generator=generator).tolist()
        response = torch.randint(40, (1 + (5 * i) % 7,), generator=generator).tolist()
        logprobs = (-4.0 * torch.rand(len(response), generator=generator) - 0.5).tolist()
        samples.append(Sample(prompt, Completion(response, logprobs, "stop", 0), (-1.0) ** i * (0.5 + i / 8)))
    return samples


def gradients(learner, microbatches, denominator):
    """Gradients of one mini-batch; lr = 0 keeps the weights, so the same learner can be asked again."""
    learner.optim = OptimSettings(lr=0.0, max_grad_norm=0.0)
    learner.update(learner.add_fixed_logprobs(microbatches), denominator)
    return {name: p.grad.clone() for name, p in learner.model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("average", ["sample", "token"])
def test_gradient_is_the_same_for_every_split(average):
    learner = make_learner(rl=RLSettings(loss_average=average))
    whole = gradients(learner, *pack(make_samples(), 10_000, average))
    for budget in (1, 17, 30):
        microbatches, denominator = pack(make_samples(), budget, average)
        assert len(microbatches) > 1
        split = gradients(learner, microbatches, denominator)
        for name, grad in whole.items():
            # fp32 sums in another order: 1e-5 of the largest entry
            torch.testing.assert_close(split[name], grad, rtol=1e-4, atol=1e-5 * float(grad.abs().max()) + 1e-12)


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_a_correction_is_the_same_for_every_split(level):
    """AIS mixes by the effective sample size of the whole mini-batch, not of a micro-batch."""
    learner = make_learner(rl=RLSettings(old_logprobs="learner", correction="ais", correction_level=level))
    whole = gradients(learner, *pack(make_samples(), 10_000, "sample"))
    split = gradients(learner, *pack(make_samples(), 17, "sample"))
    for name, grad in whole.items():
        torch.testing.assert_close(split[name], grad, rtol=1e-4, atol=1e-5 * float(grad.abs().max()) + 1e-12)
    plain = make_learner(rl=RLSettings(old_logprobs="learner", correction_level=level))
    other = gradients(plain, *pack(make_samples(), 10_000, "sample"))
    assert any(float((other[name] - grad).abs().max()) > 1e-3 * float(grad.abs().max()) for name, grad in whole.items())


def with_top(samples, learner=None):
    """The engine's four most likely tokens of each position: those of the learner's own policy, or any."""
    made, generator = [], torch.Generator().manual_seed(5)
    for s in samples:
        ids = torch.stack([torch.randperm(40, generator=generator)[:4] for _ in s.completion.token_ids])
        logprobs = (-1.5 - torch.rand(ids.shape, generator=generator)).float()
        if learner is not None:
            tokens = torch.tensor(s.prompt_ids + s.completion.token_ids)
            hidden = learner.model(tokens, PackedContext.build([len(tokens)], torch.device("cpu")))
            logits = hidden[len(s.prompt_ids) - 1 : -1] @ learner.model.output_weight().t()
            logprobs = (logits / learner.temperature).log_softmax(-1).detach().gather(-1, ids)
        completion = replace(s.completion, top_ids=ids.to(torch.int32), top_logprobs=logprobs)
        made.append(replace(s, completion=completion))
    return made


def test_score_centering_is_the_same_for_every_split_and_nothing_where_both_sides_agree():
    def close(got, expected):
        return all(
            torch.allclose(got[name], grad, rtol=1e-4, atol=1e-5 * float(grad.abs().max()) + 1e-12)
            for name, grad in expected.items()
        )

    def of(samples, budget, centering):
        rl = RLSettings(old_logprobs="learner", correction="mis", score_centering=centering)
        learner = make_learner(rl=rl, temperature=1.7)
        return gradients(learner, *pack(samples, budget, "sample"))

    samples = with_top(make_samples())
    whole = of(samples, 10_000, 4)
    assert close(of(samples, 17, 4), whole) and not close(of(samples, 10_000, 0), whole)
    agreed = with_top(make_samples(), make_learner(temperature=1.7))
    assert close(of(agreed, 10_000, 4), of(agreed, 10_000, 0))


def test_what_ais_mixes_in_is_of_the_responses_of_all_processes():
    """Two processes with half of the micro-batches each: the sums of one, with those of the other, give the whole's."""
    learner = make_learner(rl=RLSettings(old_logprobs="learner", correction="ais"))
    microbatches, _ = pack(make_samples(), 17, "sample")
    (whole,) = {float(mb.ais_share) for mb in learner.add_fixed_logprobs(microbatches)}
    sent = []

    class Other:
        def all_reduce(self, moments):
            sent.append(moments.clone())
            return moments.add_(sent[0] if len(sent) > 1 else 0.0)

    learner.world = Other()
    learner.add_fixed_logprobs(microbatches[:3])
    (share,) = {float(mb.ais_share) for mb in learner.add_fixed_logprobs(microbatches[3:])}
    assert share == pytest.approx(whole, rel=1e-6) and 0.1 < share < 0.9


@pytest.mark.parametrize("average", ["sample", "token"])
def test_samples_that_do_not_count_change_nothing_at_all(average):
    """Left out of the sum and of what divides it: masked ones, and those without any finite log-prob."""
    samples = make_samples()
    masked = [Sample(s.prompt_ids, s.completion, s.advantage, False, False) for s in make_samples(seed=1)]
    lost = [replace(s, completion=replace(s.completion, logprobs=[math.nan])) for s in make_samples(seed=2, count=1)]
    assert len(lost[0].completion.token_ids) == 1
    learner = make_learner(rl=RLSettings(loss_average=average))
    alone = gradients(learner, *pack(samples, 10_000, average))
    together = gradients(learner, *pack([*masked, *samples, *lost], 10_000, average))
    for name, grad in alone.items():
        torch.testing.assert_close(together[name], grad, rtol=1e-4, atol=1e-5 * float(grad.abs().max()) + 1e-12)


def test_untrained_samples_change_nothing_but_the_denominator():
    samples = make_samples()
    dropped = [Sample(s.prompt_ids, s.completion, s.advantage, trained=False) for s in make_samples(seed=1)]
    learner = make_learner()
    (mb, *_), denominator = pack(samples, 10_000, "sample")
    alone = gradients(learner, [mb], denominator)
    together = gradients(learner, *pack(samples + dropped, 10_000, "sample"))
    for name, grad in alone.items():
        expected = grad * denominator / (2 * denominator)
        torch.testing.assert_close(together[name], expected, rtol=1e-4, atol=1e-5 * float(grad.abs().max()) + 1e-12)


@pytest.mark.parametrize("recipe", list(RECIPES))
def test_every_recipe_learns_its_own_samples(recipe):
    """With old log-probs of its own and advantage +1 the probability of the samples rises."""
    learner = make_learner(recipe, RLSettings(old_logprobs="learner"))
    samples = [Sample(s.prompt_ids, s.completion, 1.0) for s in make_samples()]
    microbatches, denominator = pack(samples, 10_000, "token")
    before = float(learner.forward_logprobs(learner.model, microbatches[0])[0].detach().mean())
    stats = [learner.update(learner.add_fixed_logprobs(microbatches), denominator) for _ in range(5)]
    after = float(learner.forward_logprobs(learner.model, microbatches[0])[0].detach().mean())
    assert after > before + 0.1
    metrics = merge_updates(stats)
    assert math.isfinite(metrics["train/grad_norm"]) and metrics["train/skipped_updates"] == 0
    assert 0 < metrics["policy/entropy"] <= math.log(40) + 1e-5


def test_lr_zero_keeps_weights_and_codes():
    learner = make_learner(optim=OptimSettings(lr=0.0))
    weights = {name: p.clone() for name, p in learner.model.named_parameters()}
    learner.update(*pack(make_samples(), 10_000, "sample"))
    for name, p in learner.model.named_parameters():
        assert torch.equal(p, weights[name]), name


def test_nonfinite_updates_are_skipped_and_the_third_stops():
    learner = make_learner()
    weights = {name: p.clone() for name, p in learner.model.named_parameters()}
    bad = [Sample([1, 2], Completion([3], [-1.0], "stop", 0), float("nan"))]
    minibatch = pack(bad, 100, "sample")
    assert learner.update(*minibatch).skipped and learner.update(*minibatch).skipped
    assert not learner.update(*pack(make_samples(), 10_000, "sample")).skipped  # a good one starts the count again
    weights = {name: p.clone() for name, p in learner.model.named_parameters()}
    learner.update(*minibatch)
    learner.update(*minibatch)
    with pytest.raises(UserError, match="3 updates in a row"):
        learner.update(*minibatch)
    assert learner.skipped == 5
    for name, p in learner.model.named_parameters():
        assert torch.equal(p, weights[name]), name


def test_logprobs_that_are_not_finite_skip_an_update_that_has_too_many_of_them():
    """A stray one is masked; more than a tenth, in the rollout or in the learner, and the weights are broken."""
    learner = make_learner(optim=OptimSettings(lr=1e-3))

    def minibatch(num_bad):
        logprobs = [float("nan")] * num_bad + [-1.0] * (20 - num_bad)
        return pack([Sample([1], Completion([2] * 20, logprobs, "stop", 0), 1.0)], 100, "sample")

    assert not learner.update(*minibatch(2)).skipped
    weights = {name: p.clone() for name, p in learner.model.named_parameters()}
    assert learner.update(*minibatch(3)).skipped and learner.update(*minibatch(20)).skipped
    with pytest.raises(UserError, match="log-probs of 100% of the tokens were not finite in 3 updates in a row"):
        learner.update(*minibatch(20))
    for name, p in learner.model.named_parameters():
        assert torch.equal(p, weights[name]), name


def test_the_advice_after_three_skips_fits_the_cause():
    learner, bad = make_learner(), [Sample([1, 2], Completion([3], [-1.0], "stop", 0), float("nan"))]
    for _ in range(2):
        learner.update(*pack(bad, 100, "sample"))
    with pytest.raises(UserError, match="lower optim.lr, or resume from an earlier checkpoint"):
        learner.update(*pack(bad, 100, "sample"))
    learner.skipped_in_a_row = 2
    with torch.no_grad():
        learner.model.get_parameter("model.layers.1.mlp.experts.down_proj")[0, 0, 0] = torch.nan
    with pytest.raises(UserError, match="weight model.layers.1.mlp.experts.down_proj is not finite: resume") as ended:
        learner.update(*pack(bad, 100, "sample"))
    assert "optim.lr" not in str(ended.value)


@pytest.mark.parametrize(("top_k", "normalized", "learns"), [(1, True, False), (1, False, True), (2, True, True)])
def test_a_router_that_cannot_learn_is_left_alone(top_k, normalized, learns):
    """p / p = 1 whatever the router says: its gradient is rounding noise, of which eps = 1e-15 makes full steps."""
    config = replace(CONFIG, top_k=top_k, norm_topk_prob=normalized)
    model = MoEDecoder(config)
    model.init_weights(torch.Generator().manual_seed(0))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optim = OptimSettings(lr=1e-2, eps=1e-15)
    spec = resolve(QuantSettings(recipe="bf16"))
    learner = Learner(model, spec, optim, RLSettings(), temperature=1.0, steps=10, updates_per_step=1)
    for _ in range(3):
        learner.update(*pack(make_samples(), 10_000, "sample"))
    assert config.router_learns == learns
    for name, p in model.named_parameters():
        assert torch.equal(p.detach(), before[name]) == (not learns and name.endswith("mlp.gate.weight")), name


def test_a_batch_without_trained_tokens_changes_nothing():
    learner = make_learner(optim=OptimSettings(lr=1e-2, weight_decay=0.0))
    before = {name: p.detach().clone() for name, p in learner.model.named_parameters()}
    untrained = [Sample(s.prompt_ids, s.completion, s.advantage, trained=False) for s in make_samples()]
    microbatches, denominator = pack(untrained, 10_000, "token")
    stats = learner.update(learner.add_fixed_logprobs(microbatches), denominator)
    assert (denominator, stats.loss, stats.grad_norm, stats.tokens, stats.skipped) == (0.0, 0.0, 0.0, 0, False)
    for name, p in learner.model.named_parameters():
        assert torch.equal(p, before[name]), name


def test_kl_pulls_back_to_the_reference():
    learner = make_learner(rl=RLSettings(kl_coef=1.0, old_logprobs="learner"), reference=True)
    microbatches, denominator = pack([Sample(s.prompt_ids, s.completion, 0.0) for s in make_samples()], 10_000, "token")
    with torch.no_grad():
        for p in learner.model.parameters():
            p.add_(0.05 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())))
    learner.load_counters(learner.counters())  # quantizes the changed weights
    stats = [learner.update(learner.add_fixed_logprobs(microbatches), denominator) for _ in range(8)]
    assert stats[-1].loss < 0.5 * stats[0].loss
    # Advantages are 0 and kl_coef is 1, so the loss over tokens is the KL alone.
    assert merge_updates(stats[:1])["policy/kl"] == pytest.approx(stats[0].loss, rel=1e-5)
    assert "policy/kl" not in merge_updates([make_learner().update(microbatches, denominator)])


def test_metrics_of_two_updates_by_hand():
    """The gap is that of the first update, whose weights drew the responses; counts add up; the last rate stays."""

    def stats(lr, learner, **changes):
        made = UpdateStats(
            loss=0.5, grad_norm=2.0, lr=lr, skipped=False, tokens=10, kl_sum=0.2,
            touched=dict(zip(TOUCHED, (3, 1, 2, 4, 5, 6), strict=True)),
            entropy_sum=4.0, entropy_tokens=8, learner_logprobs_N=torch.tensor(learner),
            rollout_logprobs_N=torch.tensor([-1.0, -2.0]), finite_N=torch.tensor([True, True]),
            routes_repeated=6, routes=8,
        )  # fmt: skip
        return replace(made, **changes)

    second = {"loss": 1.5, "grad_norm": 4.0, "skipped": True, "tokens": 30}
    second |= {"touched": dict(zip(TOUCHED, (5, 3, 10, 12, 7, 8), strict=True))}
    second |= {"kl_sum": 0.6, "entropy_sum": 2.0, "entropy_tokens": 2, "routes_repeated": 0}
    metrics = merge_updates([stats(0.1, [-1.5, -2.0]), stats(0.3, [-9.0, -9.0], **second)])
    assert metrics["mismatch/logprob_abs_max"] == 0.5 and metrics["mismatch/logprob_abs_mean"] == 0.25
    expected = {
        "mismatch/router_agreement": 6 / 8,
        "policy/ratio_clip_frac": 8 / 40,
        "policy/cumulative_masked_frac": 4 / 40,
        "policy/weight_capped_frac": 12 / 40,
        "policy/weight_masked_frac": 16 / 40,
        "policy/tbpo_dropped_frac": 12 / 40,
        "policy/dual_clip_frac": 14 / 40,
        "policy/kl": pytest.approx(0.8 / 40),
        "policy/entropy": 6.0 / 10,
        "train/loss": 1.0,
        "train/grad_norm": 3.0,
        "train/lr": 0.3,
        "train/skipped_updates": 1,
    }
    assert {name: metrics[name] for name in expected} == expected
    assert "policy/kl" not in merge_updates([stats(0.1, [-1.5, -2.0], kl_sum=None)])


def test_masked_tokens_are_reported():
    (mb,), denominator = pack(make_samples(), 10_000, "sample")
    shares = []
    for limit in (0.0, 4.0):
        learner = make_learner(rl=RLSettings(cumulative_ratio_clip=limit))
        logprobs_N = learner.forward_logprobs(learner.model, mb)[0].detach()
        outside = 0
        for s in range(len(mb.lengths)) if limit else ():
            total_N = (logprobs_N - mb.rollout_logprobs_N)[mb.sequence_N == s].cumsum(0).abs() > math.log(limit)
            outside += int(total_N.cummax(0).values.sum())
        shares.append(merge_updates([learner.update([mb], denominator)])["policy/cumulative_masked_frac"])
        assert shares[-1] == outside / len(mb.targets_N)
    assert shares[0] == 0.0 < shares[1] < 1.0


def test_tokens_that_a_correction_touches_are_reported():
    """Shares of the trained tokens whose weight, the learner's probability over the rollout's, is beyond the cap."""
    (mb,), denominator = pack(make_samples(), 10_000, "sample")
    own = make_learner()
    weights_N = (own.forward_logprobs(own.model, mb)[0].detach() - mb.rollout_logprobs_N).exp()
    above, below = float((weights_N > 1.5).float().mean()), float((weights_N < 1 / 1.5).float().mean())
    assert 0 < above < above + below < 1
    for correction, capped, masked in (("tis", above, 0), ("mis", 0, above + below), ("ais", above, 0)):
        learner = make_learner(rl=RLSettings(old_logprobs="learner", correction=correction, correction_cap=1.5))
        metrics = merge_updates([learner.update(learner.add_fixed_logprobs([mb]), denominator)])
        assert metrics["policy/weight_capped_frac"] == pytest.approx(capped), correction
        assert metrics["policy/weight_masked_frac"] == pytest.approx(masked), correction
    learner = make_learner(rl=RLSettings(surrogate="tbpo", dual_clip=0.0))
    dropped = merge_updates([learner.update([mb], denominator)])["policy/tbpo_dropped_frac"]
    learner = make_learner(rl=RLSettings(dual_clip=1.1))
    bounded = merge_updates([learner.update([mb], denominator)])["policy/dual_clip_frac"]
    assert 0 < dropped <= 1 and 0 < bounded <= 1
    assert bounded == pytest.approx(float(((weights_N > 1.1) & (mb.advantages_N < 0)).float().mean()))


def with_routes(samples, ids_of_layer):
    """Every token of the engine went to these experts, two in each of the two layers."""
    routed = []
    for s in samples:
        rows = torch.tensor(ids_of_layer, dtype=torch.int16).expand(s.num_tokens - 1, 2, 2)
        c = s.completion
        made = Completion(c.token_ids, c.logprobs, c.finish_reason, 0, routed_experts=rows)
        routed.append(Sample(s.prompt_ids, made, s.advantage))
    return routed


def test_router_agreement_is_logged_with_and_without_replay():
    own = make_learner()
    samples = make_samples()
    (mb,), _ = pack(samples, 10_000, "sample")
    recorded = own.forward_logprobs(own.model, mb, record_routing=True)[2]
    last_T = torch.tensor(mb.lengths).cumsum(0) - 1  # not among the engine's choices
    counted_T = torch.ones(len(mb.tokens_T), dtype=torch.bool).index_fill(0, last_T, False)
    experts = torch.tensor([[0, 1], [1, 2]])
    expected = torch.stack([torch.isin(recorded[layer][counted_T], experts[layer]).float() for layer in (0, 1)]).mean()
    packed = pack(with_routes(samples, experts.tolist()), 10_000, "sample")
    losses = []
    for replay in (False, True):
        learner = make_learner(rl=RLSettings(routing_replay=replay))
        stats = learner.update(learner.add_fixed_logprobs(packed[0]), packed[1])
        assert stats.routes == 2 * 2 * int(counted_T.sum())
        agreement = merge_updates([stats])["mismatch/router_agreement"]
        if not replay:  # replayed experts change what later layers see, and so choose
            assert agreement == pytest.approx(float(expected))
        assert 0 < agreement < 1
        losses.append(stats.loss)
    assert losses[0] != losses[1]
    assert "mismatch/router_agreement" not in merge_updates([own.update(*[own.add_fixed_logprobs([mb]), 1.0])])


def test_schedules_by_hand():
    assert [learning_rate(i, 1.0, 4, 10, "constant") for i in (0, 3, 4, 9)] == [0.25, 1.0, 1.0, 1.0]
    assert learning_rate(7, 2.0, 4, 10, "linear") == 1.0
    assert learning_rate(7, 2.0, 4, 10, "cosine") == pytest.approx(1.0)
    assert learning_rate(10, 1.0, 0, 10, "linear") == 0.0
