"""A small learner with sharp distributions, and native engines that run its weights."""

from dataclasses import replace

import torch

from quads.config.sections import RolloutSettings
from quads.model.config import ARCHITECTURES, ModelConfig
from quads.model.model import MoEDecoder
from quads.quant.convert import convert_learner
from quads.quant.masters import requantize
from quads.quant.recipes import QuantSpec
from quads.rollout.native.engine import NativeEngine
from quads.rollout.sync import sync
from quads.types import Completion, Sampling

CONFIG = replace(ARCHITECTURES["tiny"], vocab_size=40)
SAMPLING = Sampling(max_new_tokens=9, stop_token_ids=(0, 1, 2, 3))
PLAIN = QuantSpec("bf16", "bf16", "bf16")


def make_learner(
    spec: QuantSpec, seed: int = 3, dtype: torch.dtype = torch.float32, config: ModelConfig = CONFIG
) -> MoEDecoder:
    model = MoEDecoder(config, dtype)
    model.init_weights(torch.Generator().manual_seed(seed))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(6.0)  # sharp distributions and routing
    convert_learner(model, spec)
    requantize(model)
    return model


def make_engine(
    spec: QuantSpec = PLAIN, slots: int = 32, seed: int = 3, dtype: torch.dtype = torch.float32
) -> NativeEngine:
    """An engine with the weights of `make_learner(spec, seed)` as policy version `seed`."""
    settings = RolloutSettings(max_batch=slots, max_prompt_tokens=16, max_new_tokens=9)
    engine = NativeEngine(CONFIG, spec, settings, dtype, report=lambda line: None)
    sync(make_learner(spec, seed, dtype), engine, spec, version=seed)
    return engine


def make_prompts(count: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(4, 40, (1 + i % 7,), generator=generator).tolist() for i in range(count)]


def flat(groups: list[list[Completion]]) -> list[Completion]:
    return [completion for group in groups for completion in group]
