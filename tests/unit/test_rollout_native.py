"""The native engine: a response depends on its prompt, its seed and the weights, on nothing else in the batch."""

import math
from dataclasses import replace

import pytest
import torch

from quads.config.sections import RolloutSettings
from quads.errors import UserError
from quads.model.attention import PackedContext, routing
from quads.quant.masters import quantized_weights
from quads.quant.recipes import QuantSpec
from quads.rollout.native.decode import Decoder, rounded
from quads.rollout.native.engine import NativeEngine, choose_graphs
from quads.rollout.sync import sync
from quads.types import Completion, Sampling
from tests.helpers import assert_bitwise, assert_close
from tests.rollout_models import CONFIG, PLAIN, SAMPLING, flat, make_engine, make_learner, make_prompts

PRECISIONS = {
    "fp32": PLAIN,
    "w4a4": QuantSpec("nvfp4", "bf16", "w4a4"),
    "w4a4_residual, token": QuantSpec(
        "nvfp4", "bf16", "w4a4_residual", selection="token", residual_sites=("w13", "qkv")
    ),
}


def assert_same(ours: list[Completion], theirs: list[Completion], atol: float = 1e-5) -> None:
    """Same tokens, log-probs to the promised 1e-5."""
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert a.token_ids == b.token_ids and a.finish_reason == b.finish_reason
        assert_close(torch.tensor(a.logprobs), torch.tensor(b.logprobs), atol=atol)


@pytest.mark.parametrize("spec", PRECISIONS.values(), ids=PRECISIONS.keys())
def test_a_response_does_not_depend_on_its_batch(spec: QuantSpec) -> None:
    engine, prompts, seeds = make_engine(spec), make_prompts(16), list(range(100, 116))
    together = flat(engine.generate(prompts, 1, SAMPLING, seeds))
    assert len({tuple(c.token_ids) for c in together}) > 10 and {c.finish_reason for c in together} == {
        "stop",
        "length",
    }
    alone = [engine.generate([p], 1, SAMPLING, [s])[0][0] for p, s in zip(prompts[:4], seeds[:4], strict=True)]
    assert_same(together[:4], alone)
    backwards = flat(engine.generate(prompts[::-1], 1, SAMPLING, seeds[::-1]))[::-1]
    assert_same(together, backwards)
    for slots in (2, 5):  # more requests than slots: every slot is used several times
        assert_same(together, flat(make_engine(spec, slots).generate(prompts, 1, SAMPLING, seeds)))


PADDED = {**PRECISIONS, "w4a4_residual, batch": QuantSpec("nvfp4", "bf16", "w4a4_residual", selection="batch")}


@pytest.mark.parametrize("spec", PADDED.values(), ids=PADDED.keys())
def test_rounded_sizes_and_a_host_that_is_a_step_ahead_change_nothing(
    spec: QuantSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a GPU does for its graphs, on the CPU: dead rows, a longer window, responses that stop unnoticed."""
    exact, padded, prompts, seeds = make_engine(spec), make_engine(spec), make_prompts(11), list(range(11))
    padded.decoder.exact = False
    steps: list[tuple[int, int]] = []
    monkeypatch.setattr(
        padded.decoder, "_step", lambda size: steps.append(size[:2]) or Decoder._step(padded.decoder, size)
    )
    expected = flat(exact.generate(prompts, 1, SAMPLING, seeds, routed_experts=True))
    got = flat(padded.generate(prompts, 1, SAMPLING, seeds, routed_experts=True))
    assert_same(got, expected)
    for mine, theirs in zip(got, expected, strict=True):
        assert mine.routed_experts is not None and theirs.routed_experts is not None
        assert_bitwise(mine.routed_experts, theirs.routed_experts)
    assert steps[0][0] == 12 and {window for _, window in steps} == {25} and len({rows for rows, _ in steps}) > 1
    if spec.selection != "batch" or spec.rollout == "bf16":  # with batch selection it matters who decodes together
        few = make_engine(spec, slots=3)
        few.decoder.exact = False
        assert_same(flat(few.generate(prompts, 1, SAMPLING, seeds)), expected)


@pytest.mark.parametrize(("size", "smallest", "expected"), [(1, 1, 1), (3, 1, 3), (5, 1, 6), (7, 1, 8), (70, 64, 128)])
def test_sizes_are_rounded_up(size: int, smallest: int, expected: int) -> None:
    assert rounded(size, smallest, 1000) == expected
    assert rounded(size, smallest, size) == size  # never above what there is


def test_batch_selection_shares_channels_by_definition() -> None:
    """The counterpart of the test above: with "batch" selection the batch enters, so the log-probs move."""
    spec = QuantSpec("nvfp4", "bf16", "w4a4_residual", selection="batch")
    engine, prompts = make_engine(spec), make_prompts(8)
    together = engine.generate(prompts, 1, SAMPLING, list(range(8)))
    alone = [engine.generate([p], 1, SAMPLING, [s])[0] for s, p in enumerate(prompts)]
    assert any(a[0].logprobs[0] != b[0].logprobs[0] for a, b in zip(together, alone, strict=True))


@pytest.mark.parametrize("slots", [64, 12, 4, 3, 1])
def test_shared_prefill_equals_separate_prefill_and_runs_each_prompt_once(slots: int) -> None:
    prompts, n = make_prompts(5), 4
    seeds = list(range(20))
    separate = flat(make_engine().generate([p for p in prompts for _ in range(n)], 1, SAMPLING, seeds))
    engine = make_engine(slots=slots)
    fed: list[int] = []
    engine.model.register_forward_pre_hook(lambda _, args: fed.append(args[0].shape[0]))
    shared = engine.generate(prompts, n, SAMPLING, seeds)
    assert [len(group) for group in shared] == [n] * 5
    assert_same(flat(shared), separate)
    drawn = sum(len(c.token_ids) for c in separate)
    # every prompt token once, and every drawn token but the last of each response
    assert sum(fed) == sum(len(p) for p in prompts) + drawn - len(separate)


def test_prefill_in_several_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, prompts = make_engine(), make_prompts(8)
    whole = engine.generate(prompts, 2, SAMPLING, list(range(16)))
    monkeypatch.setattr("quads.rollout.native.generation.PREFILL_TOKENS", 9)
    assert_same(flat(engine.generate(prompts, 2, SAMPLING, list(range(16)))), flat(whole))


def test_same_seed_same_response_other_seed_other_response() -> None:
    engine, prompts = make_engine(), make_prompts(1)
    group = engine.generate(prompts, 4, Sampling(9), [7, 8, 7, 9])[0]
    assert group[0].token_ids == group[2].token_ids and group[0].logprobs == group[2].logprobs
    assert len({tuple(c.token_ids) for c in group}) == 3


def test_stop_tokens_and_limits() -> None:
    engine, prompts = make_engine(), make_prompts(20)
    responses = flat(engine.generate(prompts, 2, SAMPLING, list(range(40))))
    for response in responses:
        stops = [i for i, token in enumerate(response.token_ids) if token in SAMPLING.stop_token_ids]
        if response.finish_reason == "stop":
            assert stops == [len(response.token_ids) - 1]
        else:
            assert stops == [] and len(response.token_ids) == 9
        assert len(response.logprobs) == len(response.token_ids) and response.policy_version == 3
    assert {c.finish_reason for c in responses} == {"stop", "length"}
    without = flat(engine.generate(prompts, 2, Sampling(9), list(range(40))))
    assert all(c.finish_reason == "length" and len(c.token_ids) == 9 for c in without)
    for cut, full in zip(responses, without, strict=True):  # stopping changes nothing before the stop
        assert full.token_ids[: len(cut.token_ids)] == cut.token_ids
    one = flat(engine.generate(prompts, 2, Sampling(1), list(range(40))))
    assert [c.token_ids for c in one] == [c.token_ids[:1] for c in without]


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_are_those_of_the_sampling_distribution(temperature: float) -> None:
    engine, prompts = make_engine(), make_prompts(4)
    learner = make_learner(PLAIN)
    for prompt, (response,) in zip(
        prompts, engine.generate(prompts, 1, Sampling(9, temperature), [0, 1, 2, 3]), strict=True
    ):
        tokens = torch.tensor(prompt + response.token_ids)
        with torch.no_grad():
            logits = learner.logits(learner(tokens[:-1], PackedContext.build([len(tokens) - 1])))[len(prompt) - 1 :]
        expected = (logits / temperature).log_softmax(-1).gather(1, tokens[len(prompt) :, None]).squeeze(1)
        assert_close(torch.tensor(response.logprobs), expected, atol=1e-5)


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize(("n", "slots"), [(1, 32), (2, 5), (3, 2)])
def test_the_most_likely_tokens_are_those_of_the_sampling_distribution(n: int, slots: int, exact: bool) -> None:
    engine, prompts, sampling = make_engine(slots=slots), make_prompts(6), replace(SAMPLING, temperature=0.8)
    engine.decoder.exact = exact
    seeds = list(range(6 * n))
    plain = flat(engine.generate(prompts, n, sampling, seeds))
    groups = engine.generate(prompts, n, replace(sampling, top_logprobs=5), seeds, routed_experts=True)
    assert_same(flat(groups), plain, atol=0.0)
    assert all(c.top_ids is None and c.top_logprobs is None for c in plain)
    for prompt, group in zip(prompts, groups, strict=True):
        for c in group:
            tokens = torch.tensor(prompt + c.token_ids)
            context = PackedContext.build([len(tokens)], torch.device("cpu"))
            with torch.no_grad():
                logits = engine.model.logits(engine.model(tokens, context))
            expected = (logits[len(prompt) - 1 : -1] / 0.8).log_softmax(-1).topk(5)
            assert c.top_ids is not None and c.top_logprobs is not None
            assert c.top_ids.untyped_storage().nbytes() == c.top_ids.nbytes  # as it travels between processes
            assert c.top_logprobs.untyped_storage().nbytes() == c.top_logprobs.nbytes
            assert c.top_ids.dtype == torch.int32 and torch.equal(c.top_ids.long(), expected.indices)
            assert_close(c.top_logprobs, expected.values.float(), atol=1e-5)
            for token, logprob, ids, logprobs in zip(
                c.token_ids, c.logprobs, c.top_ids.tolist(), c.top_logprobs.tolist(), strict=True
            ):
                assert token not in ids or logprobs[ids.index(token)] == pytest.approx(logprob, abs=1e-6)


def test_top_logprobs_that_cannot_be_had_are_refused() -> None:
    engine = make_engine()
    for sampling in (replace(SAMPLING, top_logprobs=41), replace(SAMPLING, top_logprobs=2, temperature=0.0)):
        with pytest.raises(UserError, match="cannot return top_logprobs"):
            engine.generate(make_prompts(1), 1, sampling, [0])


def test_temperature_zero_is_greedy() -> None:
    engine, prompts = make_engine(), make_prompts(3)
    first, second = (flat(engine.generate(prompts, 1, Sampling(9, 0.0), seeds)) for seeds in ([1, 2, 3], [4, 5, 6]))
    assert [c.token_ids for c in first] == [c.token_ids for c in second]
    assert all(set(c.logprobs) == {0.0} for c in first)


@pytest.mark.parametrize("n,slots", [(2, 32), (3, 2), (1, 1)])
def test_routed_experts_are_those_of_a_forward_over_the_whole_sequence(n: int, slots: int) -> None:
    prompts, learner = make_prompts(3), make_learner(PLAIN)
    groups = make_engine(slots=slots).generate(prompts, n, SAMPLING, list(range(3 * n)), routed_experts=True)
    for prompt, group in zip(prompts, groups, strict=True):
        for response in group:
            tokens = torch.tensor(prompt + response.token_ids[:-1])
            context = PackedContext.build([len(tokens)])
            context.record_routing = True
            with torch.no_grad():
                learner(tokens, context)
            assert response.routed_experts is not None
            assert_bitwise(response.routed_experts, routing(context))


def test_routing_of_responses_of_one_token() -> None:
    (response,) = make_engine().generate([[5, 6]], 1, Sampling(1), [0], routed_experts=True)[0]
    assert response.routed_experts is not None and response.routed_experts.shape == (2, 2, 2)


def test_what_does_not_fit_is_refused() -> None:
    engine = make_engine()
    engine.generate([[5] * 16], 1, SAMPLING, [0])
    with pytest.raises(UserError, match="17 tokens and 9 new ones exceed the 25 tokens of a KV slot"):
        engine.generate([[5], [5] * 17], 1, SAMPLING, [0, 1])
    with pytest.raises(UserError, match="prompt 1 is empty"):
        engine.generate([[5], []], 1, SAMPLING, [0, 1])
    with pytest.raises(UserError, match="prompt 0 has a token id outside the vocabulary of 40"):
        engine.generate([[40]], 1, SAMPLING, [0])
    with pytest.raises(UserError, match="max_new_tokens"):
        engine.generate([[5]], 1, Sampling(0), [0])
    with pytest.raises(ValueError, match="as many seeds"):
        engine.generate([[5]], 2, SAMPLING, [0])
    assert engine.generate([], 2, SAMPLING, []) == []


def test_memory_is_reported_before_it_is_allocated() -> None:
    lines: list[str] = []
    huge = RolloutSettings(max_batch=10**6, max_prompt_tokens=10**5, max_new_tokens=10**5)
    with pytest.raises(UserError, match="KV cache needs"):
        NativeEngine(CONFIG, PLAIN, huge, torch.float32, report=lines.append)
    assert lines[0].startswith("KV cache: 1000000 slots of 200000 tokens in float64")


def test_sleeping_frees_the_cache_and_keeps_the_weights() -> None:
    engine = make_engine()
    before = engine.generate([[5, 6]], 2, SAMPLING, [0, 1])
    engine.sleep()
    with pytest.raises(RuntimeError, match="sleeps"):
        engine.generate([[5, 6]], 2, SAMPLING, [0, 1])
    engine.wake()
    assert engine.generate([[5, 6]], 2, SAMPLING, [0, 1]) == before


def test_a_policy_of_nans_leaves_nothing_behind() -> None:
    engine, spec = make_engine(), PLAIN
    expected = engine.generate([[5, 6], [7]], 2, SAMPLING, [0, 1, 2, 3])
    broken, good = make_learner(spec), make_learner(spec)
    with torch.no_grad():
        broken.model.norm.weight.fill_(torch.nan)
        broken.model.layers[0].input_layernorm.weight.fill_(torch.nan)
    engine.update_weights(quantized_weights(broken, spec), 4)  # `sync` would refuse it
    assert all(value != value for c in flat(engine.generate([[5, 6]], 1, SAMPLING, [0])) for value in c.logprobs)
    sync(good, engine, spec, version=3)
    assert engine.generate([[5, 6], [7]], 2, SAMPLING, [0, 1, 2, 3]) == expected


def test_a_sync_clears_keys_and_values_that_a_short_prompt_would_leave_behind() -> None:
    """Beside a long prompt, the unused places of a short one are read (and weighted with 0, and 0 * NaN is NaN)."""
    settings = RolloutSettings(max_batch=2, max_prompt_tokens=32, max_new_tokens=9)
    engine = NativeEngine(CONFIG, PLAIN, settings, torch.float32, report=lambda line: None)
    long, short = [4 + i % 30 for i in range(30)], [5, 6, 7]
    broken = make_learner(PLAIN)
    with torch.no_grad():
        broken.model.layers[0].input_layernorm.weight.fill_(torch.nan)
    engine.update_weights(quantized_weights(broken, PLAIN), 1)  # `sync` would refuse it
    engine.generate([long, long], 1, SAMPLING, [0, 1])
    sync(make_learner(PLAIN), engine, PLAIN, version=2)
    completions = flat(engine.generate([short, long], 1, SAMPLING, [0, 1]))
    assert all(math.isfinite(value) for c in completions for value in c.logprobs)


@pytest.mark.parametrize(("slots", "n"), [(32, 4), (6, 2), (3, 4)])
def test_groups_are_told_when_complete(slots: int, n: int) -> None:
    """Every prompt once, with the responses that are returned in the end; the first ones while others are drawn."""
    engine, told = make_engine(slots=slots), {}

    def on_group(prompt: int, group: list[Completion]) -> None:
        told[prompt] = [list(c.token_ids) for c in group]

    prompts, seeds = make_prompts(7), list(range(7 * n))
    groups = engine.generate(prompts, n, SAMPLING, seeds, routed_experts=True, on_group=on_group)
    assert [told[prompt] for prompt in range(7)] == [[c.token_ids for c in group] for group in groups]
    order = list(told)
    assert order != sorted(order) or slots < 32  # a short answer is not held back by a longer one before it


def test_what_is_captured_and_what_is_not_and_why() -> None:
    cuda = torch.device("cuda")
    for spec, kernel in (
        (QuantSpec("nvfp4", "bf16", "w4a4_residual", operand="folded"), "reference"),  # 11 bits: fp32
        (QuantSpec("fp8", "fp8", "fp8", global_scale="amax"), "auto"),
    ):
        captured, why = choose_graphs(True, cuda, torch.bfloat16, spec, kernel)
        assert not captured and why.startswith("eager (the reference kernel of")
    # Two operands are exact in bf16, each by itself.
    assert choose_graphs(True, cuda, torch.bfloat16, QuantSpec("nvfp4", "bf16", "w4a4_residual"), "reference")[0]
    assert choose_graphs(True, cuda, torch.float32, PLAIN, "auto")[1].startswith("eager (CUDA graphs need model.dtype")
    assert choose_graphs(False, cuda, torch.bfloat16, PLAIN, "auto")[1] == "eager (rollout.cuda_graphs = false)"
    assert choose_graphs(True, torch.device("cpu"), torch.bfloat16, PLAIN, "auto")[1] == "eager (no CUDA device)"
    for precision in ("bf16", "fp8", "w16a4", "w4a16", "w4a8", "w4a4", "w4a4_residual"):
        assert choose_graphs(True, cuda, torch.bfloat16, QuantSpec("bf16", "bf16", precision), "auto")[0]
