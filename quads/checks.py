"""What can be wrong with a config, found before anything large is allocated. Each check names the fix."""

import importlib.util
import os
from dataclasses import replace

import torch

from quads.config import Config
from quads.data.tokenizer import Tokenizer
from quads.distributed import Distributed
from quads.errors import UserError
from quads.memory import MemoryEstimate, ProcessShape, check_memory, estimate_memory, format_estimate
from quads.model.config import ARCHITECTURES, ModelConfig, load_config
from quads.quant.recipes import QuantSpec
from quads.rollout.engine import check_tensor_parallel

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def check_run_memory(cfg: Config, model_config: ModelConfig, spec: QuantSpec, world: Distributed) -> MemoryEstimate:
    """Print what the run needs, part by part. UserError if it does not fit."""
    shape = ProcessShape(
        model_config,
        spec,
        cfg.rollout,
        cfg.rl,
        DTYPES[cfg.model.dtype],
        parallel=cfg.parallel,
        num_processes=world.size,
        all_gather=spec.gathers(cfg.quant.all_gather),
        device_type=world.device.type,
        moments=cfg.optim.moments,
    )
    if world.device.type == "cuda":
        shape = replace(shape, device_bytes=torch.cuda.get_device_properties(world.device).total_memory)
    estimate = estimate_memory(shape)
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


def check_context(cfg: Config, model_config: ModelConfig, tokenizer: Tokenizer) -> None:
    """UserError for sequences longer than the model, or its tokenizer, says it is meant for."""
    rollout = cfg.rollout
    longest = rollout.max_prompt_tokens + rollout.max_new_tokens
    limits = {
        f"max_position_embeddings = {model_config.max_position} of the model": model_config.max_position,
        f"model_max_length = {tokenizer.max_tokens} of {tokenizer.folder}/tokenizer_config.json": tokenizer.max_tokens,
    }
    for name, limit in limits.items():
        if limit is not None and longest > limit:
            raise UserError(
                f"[rollout] max_prompt_tokens + max_new_tokens = {longest} is more than {name}; lower one of the two"
            )


def check_engine(cfg: Config, model_config: ModelConfig, spec: QuantSpec, world: Distributed) -> None:
    """UserError where the rollout engine cannot do what the config asks, or is not installed. Importing vLLM takes
    long, so this only looks for it."""
    rollout = cfg.rollout
    if cfg.rl.score_centering > model_config.vocab_size:
        raise UserError(
            f"[rl] score_centering = {cfg.rl.score_centering} is more than the model's vocabulary of "
            f"{model_config.vocab_size} tokens; lower it"
        )
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
