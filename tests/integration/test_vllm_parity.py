"""vLLM with the quantization method `quads` computes what the project's own model computes, at every precision."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from quads.distributed import agree, in_process_group
from quads.errors import UserError
from quads.rollout.sync import sync
from quads.types import Sampling
from tests.rollout_models import flat
from tests.vllm_models import (
    CONFIG,
    CPU,
    LOGPROB_TOLERANCE,
    SETTINGS,
    assert_same_policy,
    gaps,
    make_learner,
    make_native,
    make_prompts,
    make_vllm,
    spec_of,
)

pytestmark = pytest.mark.vllm

TOP = 40
PRECISIONS = ["bf16", "w4a16", "w4a8", "w16a4", "w4a4", "w4a4_residual"]


def test_a_model_without_qk_norm() -> None:
    """vLLM has no such class; setup.register_models makes one of Qwen3-MoE."""
    spec, config = spec_of("w4a16"), replace(CONFIG, qk_norm=False, tie_embeddings=True)
    learner = make_learner(config=config)
    engine = make_vllm(spec, config)
    try:
        sync(learner, engine, spec, version=1, verify=True)
        prompts = make_prompts(4)
        groups = engine.generate(prompts, 2, Sampling(9), list(range(8)))
        assert gaps(make_native(learner, spec).model, prompts, groups, 1.0)[-1] < LOGPROB_TOLERANCE
        assert in_process_group() and agree(True) and not agree(False)  # vLLM's group of one
    finally:
        engine.close()
    assert not in_process_group()


def test_an_engine_that_cannot_be_made_leaves_no_group() -> None:
    with pytest.raises(ValueError):
        make_vllm(spec_of("bf16"), max_model_len=-5)
    assert not in_process_group()


@pytest.fixture(scope="module", params=PRECISIONS)
def pair(request: pytest.FixtureRequest) -> Any:
    """(precision, vLLM engine, native engine) with the same weights. Residual channels are chosen per token here, so
    that a log-prob does not depend on what else is in the batch."""
    spec = spec_of(request.param, selection="token", residual_sites=("w13", "w2", "qkv", "o"))
    learner = make_learner()
    engine = make_vllm(spec, top_logprobs=TOP)
    sync(learner, engine, spec, version=5, verify=True)  # all bytes equal to the learner's
    yield request.param, engine, make_native(learner, spec)
    engine.close()


@pytest.mark.parametrize("temperature", [0.7, 1.5])
def test_logprobs_are_those_of_our_model(pair: Any, temperature: float) -> None:
    precision, engine, native = pair
    prompts = make_prompts(5)
    groups = engine.generate(prompts, 2, Sampling(9, temperature), list(range(10)))
    assert [len(group) for group in groups] == [2] * 5
    assert {(c.finish_reason, c.policy_version, len(c.token_ids)) for g in groups for c in g} == {("length", 5, 9)}
    assert_same_policy(gaps(native.model, prompts, groups, temperature), "a4" in precision)
    assert gaps(native.model, prompts, groups, 1.0)[0] > 1e-2  # the temperature is in the log-probs


def test_seeds_decide(pair: Any) -> None:
    """Two requests with one seed agree, also in another batch; two seeds differ."""
    _, engine, _ = pair
    prompts = make_prompts(3)
    together = engine.generate(prompts, 2, Sampling(8), [7, 7, 8, 9, 10, 11])
    alone = engine.generate(prompts[:1], 1, Sampling(8), [7])
    assert together[0][0].token_ids == together[0][1].token_ids == alone[0][0].token_ids
    assert together[1][0].token_ids != together[1][1].token_ids


def test_greedy_takes_the_same_tokens_as_the_native_engine(pair: Any) -> None:
    _, engine, native = pair
    prompts = make_prompts(4)
    sampling = Sampling(6, temperature=0.0)
    ours, reference = (e.generate(prompts, 1, sampling, [0, 1, 2, 3]) for e in (engine, native))
    assert [g[0].token_ids for g in ours] == [g[0].token_ids for g in reference]
    assert ours[0][0].logprobs == reference[0][0].logprobs == [0.0] * 6


def test_the_most_likely_tokens_are_the_native_engine_s(pair: Any) -> None:
    """At every position of vLLM's responses, as the native engine finds them behind the same tokens."""
    precision, engine, native = pair
    prompts, sampling = make_prompts(5), Sampling(9, 0.8, top_logprobs=TOP)
    groups = engine.generate(prompts, 2, sampling, list(range(10)))
    assert engine.generate(prompts, 1, Sampling(9, 0.8), list(range(5)))[0][0].top_ids is None
    gaps = []
    for prompt, group in zip(prompts, groups, strict=True):
        for c in group:
            assert (c.top_ids.shape, c.top_ids.dtype, c.top_logprobs.dtype) == ((9, TOP), torch.int32, torch.float32)
            until = [prompt + c.token_ids[:i] for i in range(9)]
            theirs = flat(native.generate(until, 1, Sampling(1, 0.8, top_logprobs=TOP), list(range(9))))
            logprobs = torch.cat([one.top_logprobs for one in theirs])
            gaps.append(float((c.top_logprobs - logprobs).abs().max()))
            if gaps[-1] < LOGPROB_TOLERANCE:  # then those further apart than this come in the same order
                apart = (logprobs[:, :-1] - logprobs[:, 1:]) > 4 * LOGPROB_TOLERANCE
                clear = torch.cat([apart, apart[:, :1]], 1) & torch.cat([apart[:, :1], apart], 1)
                clear[:, -1] = False  # the next one, which is not there, may be as likely
                assert clear.float().mean() > 0.9
                assert torch.equal(c.top_ids[clear], torch.cat([one.top_ids for one in theirs])[clear])
            drawn = c.top_ids == torch.tensor(c.token_ids)[:, None]
            assert torch.equal(c.top_logprobs[drawn], torch.tensor(c.logprobs)[drawn.any(-1)])
    assert_same_policy(sorted(gaps), "a4" in precision)
    with pytest.raises(UserError, match=f"made with top_logprobs = {TOP}, fewer than {TOP + 1}"):
        engine.generate(prompts, 1, Sampling(9, 0.8, top_logprobs=TOP + 1), list(range(5)))


def test_stop_tokens_end_a_response_and_belong_to_it(pair: Any) -> None:
    _, engine, _ = pair
    prompts = make_prompts(1)
    free = engine.generate(prompts, 1, Sampling(8), [3])[0][0]
    stop = free.token_ids[3]
    stopped = engine.generate(prompts, 1, Sampling(8, stop_token_ids=(stop,)), [3])[0][0]
    assert stopped.finish_reason == "stop"
    assert stopped.token_ids == free.token_ids[: free.token_ids.index(stop) + 1]


def test_precisions_differ(pair: Any) -> None:
    """The comparison above would not notice an engine that quantizes nothing."""
    precision, engine, _ = pair
    prompts = make_prompts(3)
    groups = engine.generate(prompts, 1, Sampling(8), [1, 2, 3])
    to_bf16 = gaps(make_native(make_learner(), spec_of("bf16")).model, prompts, groups, 1.0)
    assert to_bf16[-1] < LOGPROB_TOLERANCE if precision == "bf16" else to_bf16[0] > 1e-2


def test_bad_requests_are_refused(pair: Any) -> None:
    _, engine, _ = pair
    with pytest.raises(UserError, match="exceed the 192"):
        engine.generate([[5] * 180], 1, Sampling(16), [0])
    with pytest.raises(UserError, match="outside the vocabulary"):
        engine.generate([[5, 517]], 1, Sampling(4), [0])
    with pytest.raises(UserError, match="routed_experts"):
        engine.generate([[5]], 1, Sampling(4), [0], routed_experts=True)


@pytest.mark.parametrize("max_batch", [1, 3, 16, 100, 256, 512, 1000])
def test_graphs_cover_every_batch(max_batch: int) -> None:
    """Ascending, the last is the largest batch, and none is padded to more than twice its size."""
    from quads.rollout.vllm.setup import graph_sizes

    sizes = graph_sizes(max_batch)
    assert sizes == sorted(set(sizes)) and sizes[-1] == max_batch and len(sizes) < 25
    assert all(next(size for size in sizes if size >= batch) <= 2 * batch for batch in range(1, max_batch + 1))


def test_what_vllm_cannot_serve_is_refused() -> None:
    from quads.rollout.vllm.engine import VLLMEngine

    with pytest.raises(UserError, match="no fp8"):
        VLLMEngine(CONFIG, spec_of("fp8"), SETTINGS, torch.float32, CPU)
    with pytest.raises(UserError, match="head_dim = 16"):
        VLLMEngine(replace(CONFIG, head_dim=16), spec_of("bf16"), SETTINGS, torch.float32, CPU)
