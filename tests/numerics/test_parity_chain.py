"""The chain that every comparison of learner and rollout stands on, link by link:

    learner's packed forward = native prefill = native decode       same weights, same precision
    learner with quantized weights = rollout w4a16                  the weight error is zero, bit for bit
    learner with the rollout's activation quantizer too = rollout   what is left of the gap is the quantizer alone

"The log-probs of a response" are, for the learner, one packed forward over all prompts and responses; for the
rollout, what its sampler reported: the first from the prefill, the others from decoding.
"""

import pytest
import torch
from torch import Tensor

from quads.model.attention import PackedContext
from quads.model.logprobs import token_logprobs
from quads.model.model import MoEDecoder
from quads.quant.masters import quantized_weights
from quads.quant.recipes import QuantSpec
from quads.quant.rollout import named_weights
from quads.quant.tensor import QuantizedTensor
from quads.rollout.native.engine import NativeEngine
from quads.types import Completion, Sampling
from tests.helpers import assert_bitwise, assert_close
from tests.rollout_models import PLAIN, make_engine, make_learner, make_prompts

PROMPTS = make_prompts(8)
N = 3
FORMATS = {"w4a16": ("nvfp4", "bf16"), "w4a4": ("nvfp4", "nvfp4"), "w16a4": ("bf16", "nvfp4"), "fp8": ("fp8", "fp8"),
           "w4a8": ("nvfp4", "fp8")}  # fmt: skip


def sample(engine: NativeEngine) -> list[list[Completion]]:
    return engine.generate(PROMPTS, N, Sampling(9, 0.8), list(range(len(PROMPTS) * N)))


def rollout_logprobs(groups: list[list[Completion]]) -> Tensor:
    return torch.tensor([value for group in groups for completion in group for value in completion.logprobs])


def learner_logprobs(model: MoEDecoder, groups: list[list[Completion]]) -> Tensor:
    """Of every response token, from one packed forward."""
    pairs = [(p, c.token_ids) for p, group in zip(PROMPTS, groups, strict=True) for c in group]
    tokens = torch.tensor([token for prompt, response in pairs for token in prompt + response])
    lengths = [len(prompt) + len(response) for prompt, response in pairs]
    with torch.no_grad():
        hidden = model(tokens, PackedContext.build(lengths))
        logprobs, _ = token_logprobs(hidden, model.output_weight(), tokens.roll(-1), temperature=0.8, chunk=64)
    parts = zip(logprobs.split(lengths), pairs, strict=True)
    return torch.cat([part[len(prompt) - 1 : len(prompt) + len(response) - 1] for part, (prompt, response) in parts])


def gap(learner_spec: QuantSpec, rollout_spec: QuantSpec, dtype: torch.dtype, learner_dtype: torch.dtype) -> Tensor:
    groups = sample(make_engine(rollout_spec, dtype=dtype))
    ours = learner_logprobs(make_learner(learner_spec, dtype=learner_dtype), groups)
    return (ours.double() - rollout_logprobs(groups).double()).abs()


def test_fp32_learner_equals_rollout() -> None:
    # fp32 sums through two layers against float64: 1e-6 of logits of size ten
    assert_close(gap(PLAIN, PLAIN, torch.float32, torch.float32), torch.zeros(216), atol=2e-5)


def test_float64_learner_equals_rollout() -> None:
    # reported log-probs are compared as fp32 here: 2**-24 of values up to 10
    assert gap(PLAIN, PLAIN, torch.float32, torch.float64).max() < 1e-6


def test_bf16_gap_is_rounding_noise() -> None:
    """Both sides round activations to bf16 after every operation; sums in another order flip some of the roundings."""
    differences = gap(PLAIN, PLAIN, torch.bfloat16, torch.bfloat16)
    assert differences.mean() < 0.02 and differences.max() < 0.3
    # The same learner against a rollout in other arithmetic (no bf16 rounding at all) is several times further away.
    assert differences.mean() < 0.5 * gap(PLAIN, PLAIN, torch.float32, torch.bfloat16).mean()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_learner_and_rollout_multiply_the_same_4_bit_weights(dtype: torch.dtype) -> None:
    spec = QuantSpec("nvfp4", "bf16", "w4a4")
    model, engine = make_learner(spec, dtype=dtype), make_engine(spec, dtype=dtype)
    stored = dict(named_weights(engine.model))
    layer = model.model.layers[1]
    effective = {
        "self_attn.k_proj.weight": layer.self_attn.k_proj.effective_weight(dtype),
        "self_attn.o_proj.weight": layer.self_attn.o_proj.effective_weight(dtype),
        "mlp.experts.gate_up_proj": layer.mlp.experts.effective_weights(dtype)[0],
        "mlp.experts.down_proj": layer.mlp.experts.effective_weights(dtype)[1],
    }
    for name, weight in effective.items():
        rollout = stored[f"model.layers.1.{name}"]
        assert isinstance(rollout, QuantizedTensor)
        assert_bitwise(weight.detach(), rollout.dequantize(dtype))
    for name, shipped in quantized_weights(model, spec):
        if not isinstance(shipped, QuantizedTensor):
            assert_bitwise(stored[name], shipped)


@pytest.mark.parametrize("rollout", FORMATS)
def test_learner_with_the_rollout_s_quantizers_closes_the_gap(rollout: str) -> None:
    weights, activations = FORMATS[rollout]
    same = QuantSpec(weights, activations, rollout)
    # Activations of the learner in float64 too: fp32 ones would flip codes that lie next to a rounding boundary.
    assert gap(same, same, torch.float32, torch.float64).max() < 1e-6
    plain = gap(QuantSpec("bf16", "bf16", rollout), same, torch.float32, torch.float64)
    assert plain.mean() > 0.02  # the quantizers do something


def test_w4a16_learner_in_fp32_equals_rollout() -> None:
    spec = QuantSpec("nvfp4", "bf16", "w4a16")
    assert gap(spec, spec, torch.float32, torch.float32).max() < 2e-5


def test_residual_compensation_narrows_the_gap() -> None:
    """W4A4 against a learner with quantized weights: what is left is the activation error, less with the residual."""
    means = {}
    for selection, ratio in (("token", 0.0), ("token", 0.5), ("token", 1.0), ("batch", 0.5), ("block", 0.5)):
        spec = QuantSpec("nvfp4", "bf16", "w4a4_residual", ratio=ratio, selection=selection)
        spec = QuantSpec(**{**vars(spec), "residual_sites": ("w13", "w2", "qkv", "o")})
        means[selection, ratio] = float(gap(spec, spec, torch.float32, torch.float32).mean())
    plain = QuantSpec("nvfp4", "bf16", "w4a4")
    # without any channel it is plain W4A4
    assert abs(means["token", 0.0] - float(gap(plain, plain, torch.float32, torch.float32).mean())) < 1e-4
    assert means["token", 1.0] < 0.35 * means["token", 0.0]
    assert means["token", 1.0] < means["token", 0.5] < 0.8 * means["token", 0.0]
    assert means["batch", 0.5] < means["token", 0.0] and means["block", 0.5] < means["token", 0.0]
