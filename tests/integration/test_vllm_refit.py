"""Weights replaced in a live vLLM engine: in place, completely, exactly, and nothing stale afterwards."""

import gc
import random
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

from quads.errors import UserError
from quads.model.attention import PackedContext
from quads.model.model import MoEDecoder
from quads.quant.masters import quantized_weights
from quads.quant.tensor import QuantizedTensor
from quads.rollout.sync import checksum, sync
from quads.types import Sampling
from tests.vllm_models import (
    LOGPROB_TOLERANCE,
    make_learner,
    make_native,
    make_prompts,
    make_vllm,
    spec_of,
)

pytestmark = pytest.mark.vllm

SPEC = spec_of("w4a4_residual", residual_sites=("w13", "qkv"))  # channels chosen over the batch, the default


@pytest.fixture(scope="module")
def engine() -> Iterator[Any]:
    engine = make_vllm(SPEC)
    assert gc.get_freeze_count() > 0, "sleep() collects garbage: not among everything that was there before"
    with pytest.raises(RuntimeError, match="before a complete update_weights"):
        engine.generate([[5]], 1, Sampling(1), [0])
    yield engine
    engine.close()
    assert gc.get_freeze_count() == 0


def parameters(engine: Any) -> dict[str, Tensor]:
    return engine._on_model(lambda model: dict(model.named_parameters()))


def snapshot(engine: Any) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in parameters(engine).items()}


def changed(engine: Any, before: dict[str, Tensor]) -> set[str]:
    """Names of the parameters whose bytes are no longer those of `before`."""
    return {name for name, p in parameters(engine).items() if not torch.equal(as_bytes(p), as_bytes(before[name]))}


def as_bytes(tensor: Tensor) -> Tensor:
    """uint8 [rows, bytes]; a scalar is one row."""
    return tensor.detach().reshape(len(tensor) if tensor.dim() else 1, -1).view(torch.uint8)


def per_expert(learner: MoEDecoder) -> Iterator[tuple[str, Tensor]]:
    """The bf16 checkpoint form: experts one by one, as on the hub, and all projections of a layer shuffled."""
    weights = []
    for name, parameter in learner.named_parameters():
        tensor = parameter.detach().bfloat16()
        stem, _, leaf = name.rpartition(".")
        if leaf == "gate_up_proj":
            for e, (gate, up) in enumerate(t.chunk(2) for t in tensor):
                weights += [(f"{stem}.{e}.gate_proj.weight", gate), (f"{stem}.{e}.up_proj.weight", up)]
        elif leaf == "down_proj":
            weights += [(f"{stem}.{e}.down_proj.weight", t) for e, t in enumerate(tensor)]
        else:
            weights.append((name, tensor))
    random.Random(0).shuffle(weights)
    return iter(weights)


def alone(tensor: Tensor) -> Tensor:
    """Packed with a global scale of its own, not its sharing group's."""
    return QuantizedTensor.from_hp(8 * tensor.dequantize(torch.float32), "nvfp4")


def test_two_reloads_and_back(engine: Any) -> None:
    """New weights are right, the same weights are bit-identical, addresses never move."""
    one, two, sampling = make_learner(1), make_learner(2), Sampling(6)
    prompt = make_prompts(6)[-1:]
    sync(one, engine, SPEC, version=1, verify=True)
    addresses = {name: (p.data_ptr(), p.shape, p.dtype) for name, p in parameters(engine).items()}
    first = engine.generate(prompt, 1, sampling, [4])
    before = snapshot(engine)
    sync(two, engine, SPEC, version=2, verify=True)
    second = engine.generate(prompt, 1, sampling, [4])
    moved = {name for name in changed(engine, before) if "global_scale" not in name}  # powers of two may agree
    assert moved == {name for name in before if "norm" not in name and "global_scale" not in name}  # norms start at 1
    sync(one, engine, SPEC, version=3, verify=True)
    assert changed(engine, before) == set()
    third = engine.generate(prompt, 1, sampling, [4])
    assert [c.policy_version for c in (first[0][0], second[0][0], third[0][0])] == [1, 2, 3]
    assert (third[0][0].token_ids, third[0][0].logprobs) == (first[0][0].token_ids, first[0][0].logprobs)
    assert second[0][0].logprobs != first[0][0].logprobs
    assert {name: (p.data_ptr(), p.shape, p.dtype) for name, p in parameters(engine).items()} == addresses


def test_first_token_of_each_policy_is_ours(engine: Any) -> None:
    """Channels chosen over the batch: with one prompt the first forward holds the same rows here and in our model."""
    prompt = make_prompts(6)[-1]
    for seed in (1, 2):
        learner = make_learner(seed)
        sync(learner, engine, SPEC, version=seed)
        completion = engine.generate([prompt], 1, Sampling(1, 0.7), [4])[0][0]
        model = make_native(learner, SPEC).model
        with torch.no_grad():
            hidden = model(torch.tensor(prompt), PackedContext.build([len(prompt)]))
            expected = (model.logits(hidden[-1:]).double() / 0.7).log_softmax(-1)[0, completion.token_ids[0]]
        assert abs(float(expected) - completion.logprobs[0]) < LOGPROB_TOLERANCE


def test_one_expert_changes_only_what_it_should(engine: Any) -> None:
    learner = make_learner(1)
    sync(learner, engine, SPEC, version=1)
    before = snapshot(engine)
    with torch.no_grad():
        learner.model.layers[1].mlp.experts.gate_up_proj[4] *= -0.37
    sync(learner, engine, SPEC, version=2, verify=True)
    stem = "model.layers.1.mlp.experts.routed_experts.w13_weight"
    assert changed(engine, before) == {stem, f"{stem}_scale", f"{stem}_global_scale"}
    now = parameters(engine)
    for suffix in ("", "_scale", "_global_scale"):
        rows = (as_bytes(now[stem + suffix]) != as_bytes(before[stem + suffix])).any(1)
        assert rows.nonzero().flatten().tolist() == [4]


def test_full_precision_tensors_become_the_learners_bytes(engine: Any) -> None:
    """Quantized on arrival, in any order and under either naming, they are what the learner packs: shared global
    scales of q, k, v and of gate, up."""
    learner = make_learner(1)
    packed = {name: checksum(tensor) for name, tensor in quantized_weights(learner, SPEC)}
    fused = [(name, p.detach().bfloat16()) for name, p in learner.named_parameters()]
    for weights in (fused, fused[::-1], per_expert(learner)):
        engine.update_weights(weights, version=1)
        mine = engine.checksums()
        quantized = {name for name, t in quantized_weights(learner, SPEC) if isinstance(t, QuantizedTensor)}
        assert {name: mine[name] for name in quantized} == {name: packed[name] for name in quantized}
        assert len(quantized) == 2 * 6


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda w: w[:-1], "did not bring lm_head.weight"),
        (
            lambda w: [x for x in w if "layers.1.self_attn.k_proj" not in x[0]],
            r"layers.1.self_attn.qkv_proj.weight \(k\)",
        ),
        (lambda w: [x for x in w if "layers.0.mlp.experts.down" not in x[0]], r"layers.0.mlp.experts.w2_weight"),
        (lambda w: [*w, w[3]], "twice"),
        (lambda w: [*w, w[0]], "twice"),
        (lambda w: [*w, ("model.layers.0.self_attn.rotary_emb.inv_freq", torch.ones(4))], "no place for .*inv_freq"),
    ],
    ids=["no lm_head", "no k_proj", "no experts", "matrix twice", "embedding twice", "dropped by vLLM"],
)
def test_incomplete_refits_are_errors(engine: Any, damage: Any, message: str) -> None:
    weights = list(quantized_weights(make_learner(1), SPEC))
    engine.update_weights(weights, version=1)
    with pytest.raises(UserError, match=message):
        engine.update_weights(damage(weights), version=2)
    assert engine.policy_version == 1
    with pytest.raises(RuntimeError, match="complete update_weights"):
        engine.generate([[5]], 1, Sampling(1), [0])
    engine.update_weights(weights, version=3)  # a whole set repairs it


def test_unknown_and_foreign_tensors_are_errors(engine: Any) -> None:
    weights = list(quantized_weights(make_learner(1), SPEC))
    with pytest.raises(UserError, match="weight sync: vLLM does not take model.layers.7"):
        engine.update_weights([("model.layers.7.self_attn.q_proj.weight", torch.zeros(4, 4)), *weights], version=2)
    codes = [(name, torch.zeros(128, 32, dtype=torch.uint8) if "1.self_attn.q" in name else t) for name, t in weights]
    with pytest.raises(UserError, match="neither full precision nor packed by quads"):
        engine.update_weights(codes, version=2)
    with pytest.raises(UserError, match="different global scales"):
        engine.update_weights(
            [(name, alone(t) if name.endswith("q_proj.weight") else t) for name, t in weights], version=2
        )


def test_no_prefix_survives_a_refit(engine: Any) -> None:
    """A prompt of several KV blocks, cached under the old policy, is computed anew under the new one."""
    prompt = torch.randint(4, 500, (150,), generator=torch.Generator().manual_seed(0)).tolist()
    spec, sampling = SPEC, Sampling(1)
    sync(make_learner(1), engine, spec, version=1)
    engine.generate([prompt], 1, sampling, [4])
    sync(make_learner(2), engine, spec, version=2)
    after = engine.generate([prompt], 1, sampling, [4])[0][0]
    assert engine._llm.llm_engine.vllm_config.cache_config.enable_prefix_caching
    assert engine._llm.llm_engine.vllm_config.cache_config.block_size == 32
    sync(make_learner(2), engine, spec, version=3)
    fresh = engine.generate([prompt], 1, sampling, [4])[0][0]
    assert (after.token_ids, after.logprobs) == (fresh.token_ids, fresh.logprobs)


def test_the_trainers_random_numbers_are_untouched(engine: Any) -> None:
    sync(make_learner(1), engine, SPEC, version=1)
    for use in (torch.manual_seed, numpy.random.seed, random.seed):
        use(17)
    expected = torch.rand(2).tolist(), numpy.random.rand(), random.random()
    for use in (torch.manual_seed, numpy.random.seed, random.seed):
        use(17)
    engine.generate(make_prompts(2), 1, Sampling(5), [1, 2])
    assert (torch.rand(2).tolist(), numpy.random.rand(), random.random()) == expected


def test_sleep_without_a_gpu_changes_nothing(engine: Any) -> None:
    sync(make_learner(1), engine, SPEC, version=1)
    before = engine.checksums()
    engine.sleep()
    engine.wake()
    assert engine.checksums() == before
    assert len(engine.generate([[5]], 1, Sampling(2), [0])[0][0].token_ids) == 2


def test_the_banner_names_every_kind_of_layer(engine: Any) -> None:
    banner = engine.banner()
    assert "model.layers.*.self_attn.qkv_proj     x 2: w4a4_residual, reference" in banner
    assert "model.layers.*.mlp.experts.w2_weight  x 2: w4a4, reference" in banner
    assert "model.layers.*.mlp.gate               x 2: not quantized" in banner
    assert "lm_head                               x 1: not quantized" in banner


def test_twenty_refits_move_nothing(engine: Any) -> None:
    before = {name: p.data_ptr() for name, p in parameters(engine).items()}
    learners = make_learner(1), make_learner(2)
    for step in range(20):
        sync(learners[step % 2], engine, SPEC, version=step, verify=True)
    assert {name: p.data_ptr() for name, p in parameters(engine).items()} == before


def test_more_prompts_than_a_step_takes(engine: Any) -> None:
    """Prompts wait for a later step where the tokens of one are used up, and are not cut in two."""
    sync(make_learner(), engine, SPEC, version=1)
    generator = torch.Generator().manual_seed(7)
    prompts = [torch.randint(4, 500, (50,), generator=generator).tolist() for _ in range(12)]  # 192 tokens a step
    groups = engine.generate(prompts, 1, Sampling(3), list(range(12)))
    assert [len(group[0].token_ids) for group in groups] == [3] * 12


def test_every_router_knows_its_experts(engine: Any) -> None:
    """On a GPU the layer of that name starts on the router's input; vLLM's two layers do not know each other."""

    def names(model: torch.nn.Module) -> tuple[set[str], set[str]]:
        from quads.rollout.vllm.experts import Experts
        from quads.rollout.vllm.linear import Router

        layers = [(m, getattr(m, "quant_method", None)) for m in model.modules()]
        return (
            {method.experts for _, method in layers if isinstance(method, Router)},
            {layer.layer_name for layer, method in layers if isinstance(method, Experts)},
        )

    routers, experts = engine._on_model(names)
    assert routers == experts and len(experts) == 2
