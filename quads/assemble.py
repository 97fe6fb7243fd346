"""Wiring: from a config to the parts of a run. `train.py`, the lab and the evaluation command start here.

Everything that can be wrong with a config is found here, before anything large is allocated: `build_parts` reads
configs, tokenizer and data first, prints the precision banner and the memory estimate, and only then makes weights.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from quads.checks import (
    DTYPES,
    check_context,
    check_engine,
    check_run_memory,
    check_sample_count,
    check_vocabulary,
    load_model_config,
    processes_of_this_machine,
)
from quads.config import Config
from quads.data.tasks import Task, build_task
from quads.data.tokenizer import Tokenizer
from quads.distributed import Distributed, derive_seed
from quads.errors import UserError
from quads.memory import MemoryEstimate
from quads.model.config import ModelConfig
from quads.model.hf import HFCheckpoint, load_hf
from quads.model.model import MoEDecoder
from quads.model.parallelize import load_hf_sharded, parallelize, write_part
from quads.quant.backend import operand_in_force
from quads.quant.banner import banner
from quads.quant.convert import convert_learner
from quads.quant.masters import attach
from quads.quant.recipes import QuantSpec, resolve
from quads.rl.balance import Packer, attention_break_even
from quads.rl.grading import Grading
from quads.rl.learner import Learner
from quads.rl.rewards.pool import RewardPool
from quads.rl.scores import EvalResult, JudgedPrompt, evaluate
from quads.rollout.engine import Engine
from quads.rollout.noise import norm_noise_sigma
from quads.rollout.sync import sync
from quads.run.checkpoint import find_checkpoint, load_model_weights
from quads.sandbox.isolation import LEFT
from quads.types import Example, Sampling

FROZEN_ROUTER = "one expert a token with its gate normalized to 1 leaves them no gradient"
NO_SANDBOX = "generated programs and answers run WITHOUT isolation, as this user ([reward] sandbox = none): limits only"


@dataclass
class Parts:
    """What a run is made of, ready to use: the engine holds the learner's weights at version 0."""

    cfg: Config
    model_config: ModelConfig
    spec: QuantSpec
    tokenizer: Tokenizer
    task: Task
    packer: Packer
    learner: Learner
    engine: Engine
    rewards: RewardPool
    world: Distributed
    estimate: MemoryEstimate

    def sync(self, version: int, silent: bool = False) -> None:
        """Ship the learner's weights to the engine and wake it; with rollout.verify_sync compare every tensor.

        Gradients go first: until the next update their memory is the engine's. silent: without the recipe's noise.
        """
        self.learner.optimizer.zero_grad(set_to_none=True)
        sigma = 0.0 if silent else norm_noise_sigma(self.spec, version, self.cfg.train.steps)
        verify, seed = self.cfg.rollout.verify_sync, self.cfg.train.seed
        sync(self.learner.model, self.engine, self.spec, version, verify=verify, sigma=sigma, seed=seed)
        self.engine.wake()

    def sampling(self, temperature: float, top_logprobs: int = 0) -> Sampling:
        """Up to rollout.max_new_tokens, ended by any of the tokenizer's stop tokens."""
        return Sampling(self.cfg.rollout.max_new_tokens, temperature, self.tokenizer.eos_ids, top_logprobs)

    def request_seeds(self, purpose: str, prompts: range, samples: int) -> list[int]:
        """The seeds of `samples` responses to each of `prompts`, by number: who draws which does not matter."""
        return request_seeds(self.cfg.train.seed, purpose, prompts, samples)

    def grading(self, examples: list[Example], truncated: bool) -> Grading:
        """What grades one rollout of these prompts. truncated: whether a response that was cut may earn a reward."""
        return Grading(self.rewards.submit, self.tokenizer.decode_batch, self.tokenizer.eos_ids, examples, truncated)

    def evaluate(self, step: int) -> list[EvalResult]:
        """Grade the held-out prompts with the engine's present weights, each process its share of them."""
        everything, samples = self.task.eval_set(self.cfg.eval.prompts), self.cfg.eval.samples
        share = self.world.share(len(everything))
        examples = [everything[p] for p in share]
        seeds = self.request_seeds(f"eval/{step}", share, samples)
        sampling = self.sampling(self.cfg.eval.temperature)

        def gather(mine: list[JudgedPrompt]) -> list[JudgedPrompt]:
            by_rank = self.world.gather_objects(mine)
            return [by_rank[p % len(by_rank)][p // len(by_rank)] for p in range(len(everything))]  # as share deals them

        version = self.engine.policy_version
        noisy = norm_noise_sigma(self.spec, version, self.cfg.train.steps) > 0.0
        if noisy:  # the policy is judged, not its exploration
            self.sync(version, silent=True)
        grading = self.grading(examples, truncated=True)
        results = evaluate(self.engine.generate, grading, samples, sampling, seeds, gather)
        if noisy:
            self.sync(version)
        return results

    def close(self) -> None:
        """End the graders' processes and free the engine's memory. The learner stays as it is."""
        self.rewards.close()
        self.engine.close()


def build_parts(
    cfg: Config,
    world: Distributed,
    checkpoint: str = "",
    rewards: RewardPool | None = None,
    make_engine: Callable[..., Engine] | None = None,
) -> Parts | None:
    """Build everything, or with cfg.dry_run check everything and return None.

    Args:
        checkpoint: a run or checkpoint folder whose model weights replace the starting ones (evaluation, lab).
        rewards, make_engine: the caller's own reward pool, which stays open whatever happens here, and what stands in
            for `build_engine`: several runs in one process share them (lab).

    Raises:
        UserError: for anything in the config, the data or the hardware that does not fit, named with its fix.
    """
    make_engine = make_engine or build_engine
    if rewards is not None:
        return _build(cfg, world, checkpoint, rewards, make_engine)
    rewards = build_rewards(cfg)
    try:
        parts = _build(cfg, world, checkpoint, rewards, make_engine)
    except BaseException:
        rewards.close()
        raise
    if parts is None:
        rewards.close()
    return parts


def _build(
    cfg: Config, world: Distributed, checkpoint: str, rewards: RewardPool, make_engine: Callable[..., Engine]
) -> Parts | None:
    dtype, device = DTYPES[cfg.model.dtype], world.device
    cfg = _with_operand(cfg, device)
    spec = resolve(cfg.quant)
    model_config = load_model_config(cfg)
    tokenizer = Tokenizer(cfg.model.tokenizer)
    check_vocabulary(tokenizer, model_config)
    check_context(cfg, model_config, tokenizer)
    isolation = rewards.check()
    task = build_task(cfg.task, cfg.sources, rewards.rewards, tokenizer, cfg.train.seed, cfg.rollout.max_prompt_tokens)
    for line in task.report:
        world.print(line)
    if isolation:
        left = f"; it cannot prevent all: {LEFT[isolation]}" if LEFT[isolation] else ""
        line = f"generated programs and answers run in a sandbox: {isolation}{left}"
        world.print(line if isolation != "none" else NO_SANDBOX)
    world.print(banner(spec, cfg.rollout.engine, cfg.rollout.kernel, device, dtype))
    if not model_config.router_learns:
        world.print(f"the routers stay as they are: {FROZEN_ROUTER}")
    estimate = check_run_memory(cfg, model_config, spec, world)
    check_sample_count(cfg, world)
    if cfg.model.path:
        HFCheckpoint(cfg.model.path, model_config)  # reads the files' headers alone
    if cfg.checkpoint.resume not in ("", "latest"):
        find_checkpoint(Path(cfg.checkpoint.resume))
    check_engine(cfg, model_config, spec, world)
    if cfg.eval.every and not task.eval_set(1):
        raise UserError("[eval] every is set but no source has test rows; raise its eval_rows, or set every = 0")
    if cfg.dry_run:
        return None

    model = build_learner_model(cfg, model_config, spec, world)
    reference = build_learner_model(cfg, model_config, spec, world) if cfg.rl.kl_coef > 0 else None
    if checkpoint:
        load_model_weights(Path(checkpoint), model)
    learner = Learner(
        model,
        spec,
        cfg.optim,
        cfg.rl,
        temperature=cfg.rollout.temperature,
        steps=cfg.train.steps,
        updates_per_step=cfg.rl.epochs * cfg.rl.prompts_per_step // cfg.rl.minibatch_prompts,
        reference=reference,
        world=world,
    )
    engine = make_engine(cfg, model_config, spec, dtype, device, world.print)
    parts = Parts(
        cfg=cfg,
        model_config=model_config,
        spec=spec,
        tokenizer=tokenizer,
        task=task,
        packer=Packer(cfg.rl, world, attention_break_even(model_config)),
        learner=learner,
        engine=engine,
        rewards=rewards,
        world=world,
        estimate=estimate,
    )
    parts.sync(version=0)
    return parts


def _with_operand(cfg: Config, device: torch.device) -> Config:
    """The config with the residual operand that this device has in place of "auto": part of a run's numerics, which its
    config.toml states."""
    spec, rollout = resolve(cfg.quant), cfg.rollout
    if spec.rollout != "w4a4_residual" or spec.operand != "auto":
        return cfg
    kernel = "auto" if rollout.engine == "vllm" else rollout.kernel
    word = operand_in_force(spec.operand, kernel, device, spec.format, spec.residual_scale)
    return replace(cfg, quant=replace(cfg.quant, residual_operand=word))


def build_rewards(cfg: Config) -> RewardPool:
    """The rewards of the sources that [task] names."""
    judges = cfg.reward.workers or max(1, (os.cpu_count() or 1) // processes_of_this_machine())
    used = {name: cfg.sources[name] for name in (*cfg.task.train, *cfg.task.eval)}
    return RewardPool(replace(cfg.reward, workers=judges), used)


def build_model(cfg: Config, model_config: ModelConfig, device: torch.device) -> MoEDecoder:
    """fp32 master weights on the device, from the folder or random from train.seed."""
    with device:
        model = MoEDecoder(model_config, DTYPES[cfg.model.dtype])
    if cfg.model.path:
        load_hf(cfg.model.path, model)
    else:
        model.init_weights(torch.Generator(device).manual_seed(cfg.train.seed))
    return model


def build_learner_model(cfg: Config, model_config: ModelConfig, spec: QuantSpec, world: Distributed) -> MoEDecoder:
    """The model as the learner trains it. With several processes it holds this one's shards, filled part by part; the
    values are those of `build_model`."""
    if world.meshes is None:
        model = build_model(cfg, model_config, world.device)
        convert_learner(model, spec)
        return parallelize(model, None, cfg.parallel.activation_checkpointing, cfg.parallel.compile)
    with torch.device("meta"):
        model = MoEDecoder(model_config, DTYPES[cfg.model.dtype])
    convert_learner(model, spec)
    parallelize(model, world.meshes, cfg.parallel.activation_checkpointing, cfg.parallel.compile)
    model.to_empty(device=world.device)
    if cfg.model.path:
        load_hf_sharded(cfg.model.path, model)
    else:
        model.init_weights(torch.Generator(world.device).manual_seed(cfg.train.seed), write_part)
    world.print(f"FSDP gathers quantized weights as {attach(model, cfg.quant.all_gather, spec)}")
    return model


def build_engine(
    cfg: Config,
    model_config: ModelConfig,
    spec: QuantSpec,
    dtype: torch.dtype,
    device: torch.device,
    report: Callable[[str], Any] = print,
) -> Engine:
    """The rollout engine that the config names. report: takes what it says of itself, the same in every process."""
    if cfg.rollout.engine == "native":
        from quads.rollout.native.engine import NativeEngine

        return NativeEngine(model_config, spec, cfg.rollout, dtype, device, report=report)
    from quads.rollout.vllm.engine import VLLMEngine

    asked = {"routed_experts": cfg.wants_routes, "top_logprobs": cfg.rl.score_centering}
    return VLLMEngine(model_config, spec, cfg.rollout, dtype, device, **asked, report=report)


def request_seeds(seed: int, purpose: str, prompts: range, samples: int) -> list[int]:
    """Distinct 63-bit seeds, prompt by prompt. A pure function of (seed, purpose, number of the prompt and of its
    response): a resumed run draws the same responses, and so does another number of processes."""
    return [derive_seed(seed, purpose, p * samples + j) for p in prompts for j in range(samples)]
