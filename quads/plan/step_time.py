"""The time of a whole step, phase by phase, and the changes that would shorten it most."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from quads.config import Config
from quads.model.config import ModelConfig
from quads.plan.arrangement import Plan, make_plan
from quads.plan.learn_time import LearnShape, learn_seconds
from quads.plan.rollout_time import RolloutTime, kv_bytes_per_token, rollout_seconds
from quads.quant.recipes import resolve

SYNC_GIB_PER_S = 20.0  # gather, then write in place; NVLink or InfiniBand


@dataclass(frozen=True)
class Workload:
    """What a step is made of beside the config: lengths in tokens of one GPU's responses and of a prompt."""

    lengths: list[int]
    prompt_tokens: int
    gpus_per_host: int


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step's phases by what bounds them."""

    rollout: RolloutTime
    learn: dict[str, float]
    sync: float

    @property
    def phases(self) -> dict[str, float]:
        return {"rollout": self.rollout.total, "learn": sum(self.learn.values()), "sync": self.sync}

    @property
    def total(self) -> float:
        return sum(self.phases.values())


def kv_cache_tokens(cfg: Config, model_config: ModelConfig) -> float:
    """Tokens of keys and values that an engine's cache holds; infinite where every slot has room for the longest."""
    if cfg.rollout.engine == "native" or not cfg.rollout.gpu_memory_gib:
        return float("inf")
    ranks = cfg.rollout.tensor_parallel
    return cfg.rollout.gpu_memory_gib * 2**30 * ranks / kv_bytes_per_token(model_config)


def step_time(cfg: Config, model_config: ModelConfig, plan: Plan, work: Workload) -> StepTime:
    """All phases of one step, on the GPU that has this work."""
    rl, ranks, spec = cfg.rl, cfg.rollout.tensor_parallel, resolve(cfg.quant)
    trained = [length + work.prompt_tokens for length in work.lengths]
    rollout = rollout_seconds(
        model_config,
        spec.rollout,
        work.lengths * ranks,
        work.prompt_tokens,
        rl.group_size,
        cfg.rollout.max_batch,
        kv_cache_tokens(cfg, model_config),
        ranks,
    )
    shape = LearnShape(
        model_config,
        cfg.parallel.activation_checkpointing,
        cfg.parallel.ep,
        work.gpus_per_host,
        sum(plan.local_sizes),
        updates=rl.epochs * rl.prompts_per_step // rl.minibatch_prompts,
        moments=cfg.optim.moments,
        forwards=(rl.old_logprobs == "learner") + (rl.kl_coef > 0),
        epochs=rl.epochs,
        shards=plan.num_gpus // cfg.parallel.replicate,
        microbatches=math.ceil(sum(trained) / rl.microbatch_tokens),
        gathered_bytes=0.5625 if spec.gathers(cfg.quant.all_gather) == "packed" else 2.0,
    )
    learn = learn_seconds(shape, trained)
    return StepTime(rollout, learn, plan.memory.parts["engine weights"] / SYNC_GIB_PER_S)


def changes(cfg: Config, num_gpus: int) -> Iterator[tuple[str, Config]]:
    """(options, config with them): single changes that keep what is computed, and might be faster."""
    for ep in (1, 2, 4, 8, 16, 32):
        if ep != cfg.parallel.ep and num_gpus % ep == 0:
            yield f"--parallel.ep {ep}", replace(cfg, parallel=replace(cfg.parallel, ep=ep))
    for word in ("none", "selective", "moe"):
        if word != cfg.parallel.activation_checkpointing:
            option = f"--parallel.activation_checkpointing {word}"
            yield option, replace(cfg, parallel=replace(cfg.parallel, activation_checkpointing=word))
    if cfg.optim.moments == "cpu":
        yield "--optim.moments float32", replace(cfg, optim=replace(cfg.optim, moments="float32"))
    rollout = cfg.rollout
    for batch in (rollout.max_batch // 2, rollout.max_batch * 2):
        yield f"--rollout.max_batch {batch}", replace(cfg, rollout=replace(rollout, max_batch=max(batch, 1)))
    if rollout.engine == "vllm":
        for gib in (32, 48, 64, 80, 96, 112):
            if gib > rollout.gpu_memory_gib > 0:
                yield (
                    f"--rollout.gpu_memory_gib {gib}",
                    replace(cfg, rollout=replace(rollout, gpu_memory_gib=float(gib))),
                )


def best_changes(
    cfg: Config, model_config: ModelConfig, plan: Plan, work: Workload, gpu_gib: float, count: int = 3
) -> list[tuple[str, float]]:
    """(options, seconds saved a step) of the single changes that fit and help most; of several values of a key, the
    best. Shards are taken to be as large as now."""
    now = step_time(cfg, model_config, plan, work).total
    by_key: dict[str, tuple[str, float]] = {}
    for option, candidate in changes(cfg, plan.num_gpus):
        if model_config.num_experts % candidate.parallel.ep:
            continue
        changed = make_plan(candidate, model_config, plan.num_gpus, plan.local_sizes, gpu_gib)
        saved = now - step_time(candidate, model_config, changed, work).total
        key = option.split()[0]
        if changed.memory.total <= gpu_gib and saved > 0.01 * now and saved > by_key.get(key, ("", 0.0))[1]:
            by_key[key] = (option, saved)
    return sorted(by_key.values(), key=lambda item: -item[1])[:count]
