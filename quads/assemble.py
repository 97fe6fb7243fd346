"""Wiring: from a config to the parts of a run. `train.py`, the lab and the evaluation command start here.

Everything that can be wrong with a config is found here, before anything large is allocated: `build_parts` reads
configs, tokenizer and data first, prints the precision banner and the memory estimate, and only then makes weights.
"""

import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from quads.config import Config
from quads.data.tasks import Task, build_task
from quads.data.tokenizer import Tokenizer
from quads.distributed import Distributed, derive_seed
from quads.errors import UserError
from quads.memory import MemoryEstimate, check_memory, estimate_memory, format_estimate
from quads.model.config import ARCHITECTURES, ModelConfig, load_config
from quads.model.hf import HFCheckpoint, load_hf
from quads.model.model import MoEDecoder
from quads.model.parallelize import load_hf_sharded, parallelize, write_part
from quads.quant.learner import convert_learner
from quads.quant.recipes import QuantSpec, banner, resolve
from quads.quant.sharded import SHARDED, attach
from quads.rl.balance import attention_break_even, pack_balanced
from quads.rl.evaluate import EvalResult, JudgedPrompt, evaluate
from quads.rl.grading import Grading
from quads.rl.learner import Learner
from quads.rl.packing import Microbatch, Sample
from quads.rl.rewards.pool import RewardPool
from quads.rollout.engine import Engine, check_tensor_parallel
from quads.rollout.sync import sync
from quads.run.checkpoint import find_checkpoint, load_model_weights
from quads.types import Example, Sampling

NO_SANDBOX = "generated programs run WITHOUT isolation, as this user ([reward] sandbox = none): limits only"
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
    world: Distributed
    estimate: MemoryEstimate

    def pack(self, samples: list[Sample]) -> tuple[list[Microbatch], float]:
        """Micro-batches for this process, from the samples of one mini-batch that all processes rolled out."""
        return pack_balanced(samples, self.cfg.rl, self.world, attention_break_even(self.model_config))

    def sync(self, version: int) -> None:
        """Ship the learner's weights to the engine and wake it; with rollout.verify_sync compare every tensor."""
        sync(self.learner.model, self.engine, self.spec, version, verify=self.cfg.rollout.verify_sync)
        self.engine.wake()

    def sampling(self, temperature: float) -> Sampling:
        """Up to rollout.max_new_tokens, ended by any of the tokenizer's stop tokens."""
        return Sampling(self.cfg.rollout.max_new_tokens, temperature, self.tokenizer.eos_ids)

    def request_seeds(self, purpose: str, prompts: range, samples: int) -> list[int]:
        """For each of `samples` responses to each of `prompts`, by number: who draws which does not matter."""
        return [derive_seed(self.cfg.train.seed, purpose, p * samples + j) for p in prompts for j in range(samples)]

    def grading(self, examples: list[Example], truncated: bool) -> Grading:
        """For one rollout of these prompts. truncated: whether a response that was cut may earn a reward."""
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

        grading = self.grading(examples, truncated=True)
        return evaluate(self.engine.generate, grading, samples, sampling, seeds, gather)

    def close(self) -> None:
        """End the graders' processes and free the engine's memory. The learner stays as it is."""
        self.rewards.close()
        self.engine.close()


def build_parts(cfg: Config, world: Distributed, checkpoint: str = "") -> Parts | None:
    """Build everything, or with cfg.dry_run check everything and return None.

    Args:
        checkpoint: a run or checkpoint folder whose model weights replace the starting ones (evaluation, lab).

    Raises:
        UserError: for anything in the config, the data or the hardware that does not fit, named with its fix.
    """
    rewards = build_rewards(cfg)
    try:
        parts = _build(cfg, world, checkpoint, rewards)
    except BaseException:
        rewards.close()
        raise
    if parts is None:
        rewards.close()
    return parts


def _build(cfg: Config, world: Distributed, checkpoint: str, rewards: RewardPool) -> Parts | None:
    dtype, device = DTYPES[cfg.model.dtype], world.device
    spec = resolve(cfg.quant)
    model_config = load_model_config(cfg)
    tokenizer = Tokenizer(cfg.model.tokenizer)
    check_vocabulary(tokenizer, model_config)
    isolation = rewards.check()
    task = build_task(cfg.task, cfg.sources, rewards.rewards, tokenizer, cfg.train.seed, cfg.rollout.max_prompt_tokens)
    for line in task.report:
        world.print(line)
    if isolation:
        world.print(f"generated programs run in a sandbox: {isolation}" if isolation != "none" else NO_SANDBOX)
    world.print(banner(spec, cfg.rollout.engine, cfg.rollout.kernel, device, dtype))
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
        cfg.rollout.temperature,
        cfg.train.steps,
        cfg.rl.epochs * cfg.rl.prompts_per_step // cfg.rl.minibatch_prompts,
        reference,
        world,
    )
    engine = build_engine(cfg, model_config, spec, dtype, device, world.print)
    parts = Parts(cfg, model_config, spec, tokenizer, task, learner, engine, rewards, world, estimate)
    parts.sync(version=0)
    return parts


def build_rewards(cfg: Config) -> RewardPool:
    """The rewards of the sources that [task] names."""
    judges = cfg.reward.workers or max(1, (os.cpu_count() or 1) // processes_of_this_machine())
    used = {name: cfg.sources[name] for name in (*cfg.task.train, *cfg.task.eval)}
    return RewardPool(replace(cfg.reward, workers=judges), used)


def check_run_memory(cfg: Config, model_config: ModelConfig, spec: QuantSpec, world: Distributed) -> MemoryEstimate:
    """Print what the run needs, part by part. UserError if it does not fit."""
    estimate = estimate_memory(
        model_config,
        spec,
        cfg.rollout,
        cfg.rl,
        DTYPES[cfg.model.dtype],
        cfg.parallel,
        world.size,
        spec.gathers(cfg.quant.all_gather),
        world.device.type,
        cfg.optim.moments,
    )
    world.print(format_estimate(estimate))
    check_memory(estimate, world.device, processes_of_this_machine())
    return estimate


def processes_of_this_machine() -> int:
    """How many of the run's processes share this machine's CPU and memory, as torchrun says."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def load_model_config(cfg: Config) -> ModelConfig:
    """The architecture: of the folder [model] path, or the built-in one named by [model] arch. UserError if there is
    no such folder or name, or the folder's config.json is none of a model that this decoder can be."""
    if cfg.model.path:
        return load_config(cfg.model.path)
    if cfg.model.arch not in ARCHITECTURES:
        raise UserError(f"[model] arch = {cfg.model.arch!r} is not built in; known: {', '.join(ARCHITECTURES)}")
    return ARCHITECTURES[cfg.model.arch]


def check_vocabulary(tokenizer: Tokenizer, model_config: ModelConfig) -> None:
    """UserError for a tokenizer with ids beyond the embedding, which would fail deep inside the model."""
    if tokenizer.vocab_size > model_config.vocab_size:
        raise UserError(
            f"the tokenizer has {tokenizer.vocab_size} tokens but the model's vocabulary is {model_config.vocab_size}; "
            "set [model] tokenizer to the one the model was trained with"
        )


def check_engine(cfg: Config, model_config: ModelConfig, spec: QuantSpec, world: Distributed) -> None:
    """UserError where the rollout engine cannot do what the config asks, or is not installed. Importing vLLM takes
    long, so this only looks for it."""
    rollout = cfg.rollout
    if rollout.tensor_parallel > 1 and rollout.engine != "vllm":
        raise UserError(
            f"[rollout] tensor_parallel = {rollout.tensor_parallel} needs engine = 'vllm'; each process of the "
            "native engine holds all weights"
        )
    if rollout.engine == "vllm":
        from quads.rollout.vllm.setup import check_settings

        check_settings(spec, rollout, cfg.wants_routes, world.device)
        if importlib.util.find_spec("vllm") is None:
            raise UserError(
                "[rollout] engine = 'vllm' needs the extra: pip install -e '.[vllm]'; 'native' needs nothing"
            )
    check_tensor_parallel(rollout.tensor_parallel, model_config, world.size)


def check_sample_count(cfg: Config, world: Distributed) -> None:
    """UserError unless every process rolls out a prompt at least, and trains on equally many responses of a
    mini-batch."""
    if cfg.rl.prompts_per_step < world.size:
        raise UserError(
            f"[rl] prompts_per_step = {cfg.rl.prompts_per_step} is fewer than the {world.size} processes, which each "
            "roll out a share of the prompts; raise it"
        )
    count = cfg.rl.minibatch_prompts * cfg.rl.group_size
    if count % world.size:
        raise UserError(
            f"[rl] minibatch_prompts * group_size = {count} responses cannot be split evenly over {world.size} "
            "processes; change one of the three so that it divides"
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


def build_learner_model(cfg: Config, model_config: ModelConfig, spec: QuantSpec, world: Distributed) -> MoEDecoder:
    """The model as the learner trains it. With several processes it holds this one's shards, filled part by part; the
    values are those of `build_model`."""
    if world.meshes is None:
        model = build_model(cfg, model_config, world.device)
        convert_learner(model, spec)
        return parallelize(model, None, cfg.parallel.activation_checkpointing, cfg.parallel.compile)
    with torch.device("meta"):
        model = MoEDecoder(model_config, DTYPES[cfg.model.dtype])
    convert_learner(model, spec, SHARDED)
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

    return VLLMEngine(model_config, spec, cfg.rollout, dtype, device, routed_experts=cfg.wants_routes, report=report)


def request_seeds(seed: int, purpose: str, count: int) -> list[int]:
    """`count` distinct 63-bit seeds, a pure function of (seed, purpose): a resumed run draws the same responses."""
    return [derive_seed(seed, purpose, i) for i in range(count)]
