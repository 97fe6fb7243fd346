"""Wiring: from a config to the parts of a run. `train.py`, the lab and the evaluation command start here.

Everything that can be wrong with a config is found here, before anything large is allocated: `build_parts` reads
configs, tokenizer and data first, prints the precision banner and the memory estimate, and only then makes weights.
"""

from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

import torch

from quads.checkpoint import load_model_weights
from quads.config import Config
from quads.distributed import Distributed, derive_seed
from quads.errors import UserError
from quads.memory import check_memory, estimate_memory, format_estimate
from quads.model.config import ARCHITECTURES, ModelConfig, load_config
from quads.model.hf import load_hf
from quads.model.model import MoEDecoder
from quads.quant.recipes import QuantSpec, banner, resolve
from quads.rl.evaluate import EvalResult, evaluate
from quads.rl.learner import Learner
from quads.rl.rewards import RewardPool
from quads.rl.tasks import Task, build_task
from quads.rl.tokenizer import Tokenizer
from quads.rollout.engine import Engine
from quads.rollout.sync import sync
from quads.types import Sampling

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass
class Parts:
    """What a run is made of, ready to use: the engine holds the learner's weights at version 0."""

    cfg: Config
    model_config: ModelConfig
    spec: QuantSpec
    tokenizer: Tokenizer
    task: Task
    learner: Learner
    engine: Engine
    rewards: RewardPool

    def sync(self, version: int) -> None:
        """Ship the learner's weights to the engine; with rollout.verify_sync compare every tensor afterwards."""
        sync(self.learner.model, self.engine, self.spec, version, verify=self.cfg.rollout.verify_sync)

    def sampling(self, temperature: float) -> Sampling:
        return Sampling(self.cfg.rollout.max_new_tokens, temperature, self.tokenizer.eos_ids)

    def evaluate(self, step: int) -> list[EvalResult]:
        """Score the held-out prompts with the engine's present weights."""
        examples = self.task.eval_set(self.cfg.eval.prompts)
        seeds = request_seeds(self.cfg.train.seed, f"eval/{step}", len(examples) * self.cfg.eval.samples)
        sampling = self.sampling(self.cfg.eval.temperature)
        return evaluate(
            self.engine.generate,
            self.rewards.score_batch,
            self.tokenizer.decode,
            examples,
            self.cfg.eval.samples,
            sampling,
            seeds,
        )

    def close(self) -> None:
        self.rewards.close()
        self.engine.close()


def build_parts(cfg: Config, world: Distributed, checkpoint: str = "") -> Parts | None:
    """Build everything, or with cfg.dry_run check everything and return None.

    Args:
        checkpoint: a run or checkpoint folder whose model weights replace the starting ones (evaluation, lab).

    Raises:
        UserError: for anything in the config, the data or the hardware that does not fit, named with its fix.
    """
    dtype, device = DTYPES[cfg.model.dtype], world.device
    spec = resolve(cfg.quant)
    model_config = load_model_config(cfg)
    tokenizer = Tokenizer(cfg.model.tokenizer)
    check_vocabulary(tokenizer, model_config)
    task = build_task(cfg.task, cfg.sources, tokenizer, cfg.train.seed, cfg.rollout.max_prompt_tokens)
    for line in task.report:
        world.print(line)
    world.print(banner(spec, cfg.rollout.engine, cfg.rollout.kernel, device, dtype))
    estimate = estimate_memory(model_config, spec, cfg.rollout, cfg.rl, dtype)
    world.print(format_estimate(estimate))
    check_memory(estimate, device)
    if cfg.dry_run:
        return None

    model = build_model(cfg, model_config, device)
    reference = deepcopy(model) if cfg.rl.kl_coef > 0 else None
    if checkpoint:
        load_model_weights(Path(checkpoint), model)
    learner = Learner(
        model,
        spec,
        cfg.optim,
        cfg.rl,
        cfg.rollout.temperature,
        cfg.train.steps,
        cfg.rl.epochs * cfg.rl.prompts_per_step // cfg.rl.minibatch_prompts,
        reference,
    )
    engine = build_engine(cfg, model_config, spec, dtype, device)
    rewards = RewardPool(cfg.reward)
    parts = Parts(cfg, model_config, spec, tokenizer, task, learner, engine, rewards)
    parts.sync(version=0)
    return parts


def load_model_config(cfg: Config) -> ModelConfig:
    """The architecture: of the folder [model] path, or the built-in one named by [model] arch."""
    if cfg.model.path:
        return load_config(cfg.model.path)
    if cfg.model.arch not in ARCHITECTURES:
        raise UserError(f"[model] arch = {cfg.model.arch!r} is not built in; known: {', '.join(ARCHITECTURES)}")
    return ARCHITECTURES[cfg.model.arch]


def check_vocabulary(tokenizer: Tokenizer, model_config: ModelConfig) -> None:
    """A token id beyond the embedding would fail deep inside the model."""
    if tokenizer.vocab_size > model_config.vocab_size:
        raise UserError(
            f"the tokenizer has {tokenizer.vocab_size} tokens but the model's vocabulary is {model_config.vocab_size}; "
            "set [model] tokenizer to the one the model was trained with"
        )


def build_model(cfg: Config, model_config: ModelConfig, device: torch.device) -> MoEDecoder:
    """fp32 master weights on the device, from the folder or random from train.seed."""
    with device:
        model = MoEDecoder(model_config, DTYPES[cfg.model.dtype])
    if cfg.model.path:
        load_hf(cfg.model.path, model)
    else:
        model.init_weights(torch.Generator(device).manual_seed(cfg.train.seed))
    return model


def build_engine(
    cfg: Config, model_config: ModelConfig, spec: QuantSpec, dtype: torch.dtype, device: torch.device
) -> Engine:
    """The rollout engine that the config names."""
    if cfg.rollout.engine == "native":
        from quads.rollout.native import NativeEngine

        return NativeEngine(model_config, spec, cfg.rollout, dtype, device)
    try:
        from quads.rollout.vllm_engine import VLLMEngine
    except ImportError as error:
        raise UserError(
            f"[rollout] engine = 'vllm' needs the extra: pip install -e '.[vllm]' ({error}); engine = 'native' needs nothing"
        ) from None
    return VLLMEngine(model_config, spec, cfg.rollout, dtype, device)


def request_seeds(seed: int, purpose: str, count: int) -> list[int]:
    """`count` distinct 63-bit seeds, a pure function of (seed, purpose): a resumed run draws the same responses."""
    return [derive_seed(seed, purpose, i) for i in range(count)]
