"""The native engine on a GPU: responses, gap to the learner, sync in place, CUDA graphs."""

from dataclasses import replace

import pytest
import torch

from quads.config.sections import RolloutSettings
from quads.model.attention import PackedContext
from quads.model.logprobs import token_logprobs
from quads.quant.masters import pack_group
from quads.quant.matmul import (
    SiteSpec,
    allocate,
    grouped_linear,
    linear,
    product,
    product_dtype,
    quantize_activation,
    widen,
)
from quads.quant.recipes import QuantSpec
from quads.quant.rollout import named_weights
from quads.quant.tensor import QuantizedTensor
from quads.rollout.native.engine import NativeEngine, choose_graphs
from quads.rollout.sync import sync
from quads.types import Sampling
from tests.numerics.test_parity_chain import PROMPTS, N, rollout_logprobs
from tests.rollout_models import CONFIG, PLAIN, SAMPLING, flat, make_learner, make_prompts

pytestmark = pytest.mark.gpu


def make_engine(dtype: torch.dtype, slots: int = 32) -> NativeEngine:
    settings = RolloutSettings(max_batch=slots, max_prompt_tokens=16, max_new_tokens=9)
    engine = NativeEngine(CONFIG, PLAIN, settings, dtype, "cuda", report=lambda line: None)
    sync(make_learner(PLAIN, dtype=dtype).cuda(), engine, PLAIN, version=1, verify=True)
    return engine


@pytest.mark.parametrize("dtype,mean,largest", [(torch.float32, 1e-5, 1e-4), (torch.bfloat16, 0.02, 0.5)])
def test_gap_to_the_learner_is_rounding_noise(dtype: torch.dtype, mean: float, largest: float) -> None:
    groups = make_engine(dtype).generate(PROMPTS, N, Sampling(9, 0.8), list(range(len(PROMPTS) * N)))
    model = make_learner(PLAIN, dtype=dtype).cuda()
    pairs = [(p, c.token_ids) for p, group in zip(PROMPTS, groups, strict=True) for c in group]
    tokens = torch.tensor([token for prompt, response in pairs for token in prompt + response], device="cuda")
    lengths = [len(prompt) + len(response) for prompt, response in pairs]
    with torch.no_grad():
        hidden = model(tokens, PackedContext.build(lengths, "cuda"))
        logprobs, _ = token_logprobs(hidden, model.output_weight(), tokens.roll(-1), temperature=0.8)
    parts = zip(logprobs.cpu().split(lengths), pairs, strict=True)
    ours = torch.cat([part[len(prompt) - 1 : len(prompt) + len(response) - 1] for part, (prompt, response) in parts])
    gap = (ours - rollout_logprobs(groups)).abs()
    assert gap.mean() < mean and gap.max() < largest


def test_fp32_tokens_do_not_depend_on_the_batch() -> None:
    prompts, seeds = make_prompts(12), list(range(12))
    together = flat(make_engine(torch.float32).generate(prompts, 1, SAMPLING, seeds))
    few_slots = flat(make_engine(torch.float32, slots=3).generate(prompts, 1, SAMPLING, seeds))
    assert [c.token_ids for c in together] == [c.token_ids for c in few_slots]


def test_sync_keeps_addresses() -> None:
    engine = make_engine(torch.bfloat16)
    before = [weight.data_ptr() for _, weight in named_weights(engine.model)]
    sync(make_learner(PLAIN, seed=5, dtype=torch.bfloat16).cuda(), engine, PLAIN, version=2, verify=True)
    assert [weight.data_ptr() for _, weight in named_weights(engine.model)] == before
    assert engine.policy_version == 2


WIDE = replace(CONFIG, hidden_size=128, moe_intermediate_size=64, num_experts=8, head_dim=32)
GRAPHED = {
    "bf16": PLAIN,
    "fp8": QuantSpec("fp8", "fp8", "fp8"),
    "w16a4": QuantSpec("bf16", "nvfp4", "w16a4"),
    "w4a16": QuantSpec("nvfp4", "bf16", "w4a16"),
    "w4a4": QuantSpec("nvfp4", "bf16", "w4a4"),
    "residual, batch": QuantSpec("nvfp4", "bf16", "w4a4_residual", selection="batch"),
    "residual, token": QuantSpec("nvfp4", "bf16", "w4a4_residual", selection="token", residual_sites=("w13", "qkv")),
}


@pytest.mark.parametrize("spec", GRAPHED.values(), ids=GRAPHED.keys())
def test_graphs_change_no_bit_and_survive_a_sync(spec: QuantSpec) -> None:
    prompts = make_prompts(37)
    engines = []
    for graphs in (False, True):
        settings = RolloutSettings(max_batch=32, max_prompt_tokens=16, max_new_tokens=120, cuda_graphs=graphs)
        lines: list[str] = []
        engines.append(NativeEngine(WIDE, spec, settings, torch.bfloat16, "cuda", report=lines.append))
        assert lines[1].startswith("decoding: CUDA graphs" if graphs else "decoding: eager (rollout.cuda_graphs")
    for seed, (temperature, stops, routes) in enumerate(((1.0, (0, 1), False), (0.7, (), True), (0.0, (0, 1), False))):
        learner = make_learner(spec, seed, torch.bfloat16, WIDE).cuda()
        sampling = Sampling(100, temperature, stops, top_logprobs=5 if routes else 0)
        results = []
        for engine in engines:
            sync(learner, engine, spec, version=seed, verify=True)
            results.append(flat(engine.generate(prompts, 1, sampling, list(range(37)), routed_experts=routes)))
        for eager, graphed in zip(*results, strict=True):
            assert eager.token_ids == graphed.token_ids and eager.logprobs == graphed.logprobs
            if routes:
                assert torch.equal(eager.routed_experts, graphed.routed_experts)
                assert torch.equal(eager.top_ids, graphed.top_ids)
                assert torch.equal(eager.top_logprobs, graphed.top_logprobs)
                drawn = graphed.top_ids == torch.tensor(graphed.token_ids)[:, None]
                of_drawn = torch.tensor(graphed.logprobs)[drawn.any(-1)]
                assert drawn.any() and torch.allclose(graphed.top_logprobs[drawn], of_drawn, atol=1e-6)
        if seed == 1:
            for engine in engines:
                engine.sleep()
                with pytest.raises(RuntimeError, match="sleeps"):
                    engine.generate(prompts, 1, sampling, list(range(37)))
                engine.wake()
            assert engines[1].decoder._captured  # a cache this small stays, and so do its graphs
        else:
            assert len(engines[1].decoder._captured) > 3 and not engines[0].decoder._captured


@pytest.mark.parametrize("rollout", ["fp8", "w16a4", "w4a4"])
def test_products_in_bf16_are_those_in_fp32_but_for_the_order_of_sums(rollout: str) -> None:
    spec = QuantSpec("bf16", "bf16", rollout)
    site = SiteSpec.of(spec, "w13")
    x, w = torch.randn(40, 256, device="cuda").bfloat16(), torch.randn(4, 64, 256, device="cuda").bfloat16()
    ends = torch.tensor([10, 10, 25, 40], dtype=torch.int32, device="cuda")
    stored = allocate(w.shape, site, torch.bfloat16, w.device)
    stored.copy_(QuantizedTensor.from_hp(w, stored.format) if isinstance(stored, QuantizedTensor) else w)
    operands = quantize_activation(x, site)
    assert product_dtype(site, torch.bfloat16, w.device) == torch.bfloat16
    narrow = grouped_linear(operands, widen(stored, torch.bfloat16), ends, torch.bfloat16).float()
    wide = grouped_linear(operands, widen(stored, torch.float32), ends, torch.bfloat16).float()
    assert ((narrow - wide).abs() <= 2.0**-7 * wide.abs() + 1e-3).all() and (narrow != wide).float().mean() < 0.01


@pytest.mark.parametrize("format", ["nvfp4", "nvfp4_46", "mxfp4", "hif4"])
def test_two_operands_side_by_side_are_one_sum(format: str) -> None:
    """Over a weight that stands there twice, in bf16, nothing is rounded before the residual is taken off."""
    site = SiteSpec.of(QuantSpec("bf16", "bf16", "w4a4_residual", format=format, operand="two"), "w13")
    x, w = torch.randn(40, 256, device="cuda").bfloat16(), torch.randn(64, 256, device="cuda").bfloat16()
    stored = allocate(w.shape, site, torch.bfloat16, w.device)
    stored.copy_(pack_group({"w": w}, format, site.rule(format))["w"])
    operands = quantize_activation(x, site)
    assert len(operands) == 2 and product(site, torch.bfloat16, w.device) == (torch.bfloat16, True)
    narrow = linear(operands, widen(stored, torch.bfloat16, twice=True), torch.bfloat16).float()
    wide = linear(operands, widen(stored, torch.float32), torch.bfloat16).float()
    assert ((narrow - wide).abs() <= 2.0**-7 * wide.abs() + 1e-3).all() and (narrow != wide).float().mean() < 0.02


@pytest.mark.parametrize("format", ["nvfp4_46", "mxfp4", "hif4"])
def test_formats_without_a_kernel_decode_in_graphs(format: str) -> None:
    spec = QuantSpec("bf16", "bf16", "w4a4_residual", format=format, operand="two")
    chosen, why = choose_graphs(True, torch.device("cuda"), torch.bfloat16, spec, "auto")
    assert chosen, why
