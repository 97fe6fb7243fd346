"""A small model that vLLM's CPU attention can run, its learner, and engines that hold its weights."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from quads.config.sections import RolloutSettings
from quads.model.attention import PackedContext
from quads.model.config import ARCHITECTURES, ModelConfig
from quads.model.logprobs import token_logprobs
from quads.model.model import MoEDecoder
from quads.quant.convert import convert_learner
from quads.quant.masters import requantize
from quads.quant.recipes import QuantSpec
from quads.rollout.native.engine import NativeEngine
from quads.rollout.sync import sync
from quads.types import Completion

CONFIG = replace(ARCHITECTURES["tiny"], vocab_size=517, head_dim=32, num_experts=6)
SETTINGS = RolloutSettings(max_batch=16, max_prompt_tokens=176, max_new_tokens=16)
LLM_OPTIONS = {"block_size": 32, "max_num_batched_tokens": 192}  # a step takes one prompt of full length
CPU = torch.device("cpu")
# |log-prob| differences: fp32 arithmetic in another order, over two layers; measured 1e-6.
LOGPROB_TOLERANCE = 1e-5


def spec_of(precision: str, **changes: Any) -> QuantSpec:
    """A bf16 learner with this rollout."""
    return replace(QuantSpec("bf16", "bf16", "bf16"), rollout=precision, **changes)


def make_learner(seed: int = 3, spec: QuantSpec | None = None, config: ModelConfig = CONFIG) -> MoEDecoder:
    model = MoEDecoder(config)
    model.init_weights(torch.Generator().manual_seed(seed))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4.0)  # sharp distributions and routing
        for layer in model.model.layers:  # ranges that differ inside a sharing group
            layer.self_attn.k_proj.weight.mul_(3.0)
            layer.self_attn.v_proj.weight.mul_(0.3)
    if spec is not None:
        convert_learner(model, spec)
        requantize(model)
    return model


def make_vllm(spec: QuantSpec, config: ModelConfig = CONFIG, top_logprobs: int = 0, **options: Any) -> Any:
    """A VLLMEngine without weights. Imported late: vLLM is an extra."""
    from quads.rollout.vllm.engine import VLLMEngine

    asked = {"top_logprobs": top_logprobs, "llm_options": LLM_OPTIONS | options}
    return VLLMEngine(config, spec, SETTINGS, torch.float32, CPU, report=lambda text: None, **asked)


def make_native(learner: MoEDecoder, spec: QuantSpec) -> NativeEngine:
    engine = NativeEngine(learner.config, spec, SETTINGS, torch.float32, report=lambda line: None)
    sync(learner, engine, spec, version=1)
    return engine


def make_prompts(count: int, longest: int = 12) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(4, 500, (3 + 2 * i % longest,), generator=generator).tolist() for i in range(count)]


@torch.no_grad()
def logprobs_of(model: MoEDecoder, prompt: list[int], response: list[int], temperature: float) -> Tensor:
    """Log-probs of a response under the project's own model, one sequence in one forward."""
    weight = model.output_weight()
    tokens = torch.tensor(prompt + response, device=weight.device)
    hidden = model(tokens, PackedContext.build([len(tokens)], weight.device))
    rows = hidden[len(prompt) - 1 : -1].float()
    targets = tokens[len(prompt) :]
    return token_logprobs(rows, weight.float(), targets, temperature)[0]


def gaps(
    model: MoEDecoder, prompts: list[list[int]], groups: list[list[Completion]], temperature: float
) -> list[float]:
    """The largest |log-prob of the engine - log-prob of the model| of each response, in ascending order."""
    return sorted(
        float((logprobs_of(model, prompt, c.token_ids, temperature) - torch.tensor(c.logprobs)).abs().max())
        for prompt, group in zip(prompts, groups, strict=True)
        for c in group
    )


def assert_same_policy(gaps: list[float], activations_4bit: bool) -> None:
    """Every response within the tolerance. Where activations are 4-bit, one in five may hold a code that sits so close
    to a rounding boundary that another order of additions tips it: half a step of one channel, in all its tokens."""
    strict = len(gaps) - (len(gaps) // 5 if activations_4bit else 0)
    assert gaps[strict - 1] < LOGPROB_TOLERANCE, gaps
    assert gaps[-1] < 0.3, gaps
