"""What a run needs, without the hardware: memory of one process, times of a step, and what would make it fit.

    python -m quads.plan --config configs/moe25b_quads.toml [--gpus N] [--gpu-memory GiB] [--response-tokens N]
                         [--section.key value ...]

The learner's shards are those of the real thing: the model is built on the meta device and parallelized over processes
that are only imagined. The rest is arithmetic on shapes (quads/memory.py) and a table of measured rates, so times are
rough: they say whether a step takes a minute or an hour. Exit code 1 if the run does not fit.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TypeVar

import torch

from quads.checks import DTYPES, check_sample_count, load_model_config
from quads.config import Config, load_config
from quads.config.options import real, take_option, whole
from quads.distributed import imagined_processes
from quads.errors import UserError, main_guard
from quads.memory import GIB, MemoryEstimate, ProcessShape, estimate_memory
from quads.model.config import ModelConfig
from quads.model.model import MoEDecoder
from quads.model.parallelize import local_tensor, parallelize
from quads.quant.recipes import resolve

N = TypeVar("N", int, float)

OPTIONS = """usage: python -m quads.plan --config FILE [--gpus N] [--gpu-memory GiB] [--response-tokens N]

  --gpus N              GPUs of the run (default: 8)
  --gpu-memory GiB      memory of each (default: 139.8, an H200)
  --response-tokens N   mean length of a response, for times (default: a quarter of rollout.max_new_tokens)
It takes all options of train.py:
"""
GPU_GIB = 139.8  # an H200
CONTEXT_GIB = 3.0  # CUDA context, NCCL buffers, workspaces, fragmentation
DEFAULT_GPUS = 8

# Rates of one H200. Learner: useful TFLOP/s (recomputation not counted) of bf16 training of an 8-layer cut of the 25.5B
# model, 4096 tokens a sequence, by what is computed again (torchtitan 0.2.2). Rollout: tokens/s of the whole model at
# (sequences, tokens/s) in vLLM 0.26, bf16 and fp8 stock, w4 this project's w4a4_residual; scaled by active parameters.
# An fp4 rollout on Blackwell is faster.
LEARNER_TFLOPS = {"none": 271.0, "selective": 225.0, "moe": 225.0, "full": 222.0}
ROLLOUT_RATES = {
    "bf16": ((16, 1_456.0), (64, 4_051.0), (256, 11_550.0)),
    "fp8": ((16, 2_110.0), (64, 6_236.0), (256, 15_845.0)),
    "w4": ((16, 2_835.0), (64, 8_017.0), (256, 16_715.0)),
}
ROLLOUT_ACTIVE = 2.93e9
SYNC_GIB_PER_S = 20.0  # gather, then write in place; NVLink or InfiniBand


@dataclass(frozen=True)
class Plan:
    """Memory of one process of an arrangement."""

    num_gpus: int
    local_sizes: list[int]
    memory: MemoryEstimate

    @property
    def page_locked_gib(self) -> float:
        """Adam's two moments in CPU memory; torch rounds a page-locked tensor up to a power of two."""
        return sum(2 * (1 << (4 * size - 1).bit_length()) for size in self.local_sizes if size) / GIB


def count_local_sizes(cfg: Config, model_config: ModelConfig, num_gpus: int) -> list[int]:
    """Elements of each parameter that the first of `num_gpus` processes holds.

    Raises:
        UserError: [parallel] does not fit the number of GPUs or the model.
    """
    with imagined_processes(cfg.parallel, num_gpus) as world:
        check_sample_count(cfg, world)
        with torch.device("meta"):
            model = MoEDecoder(model_config, DTYPES[cfg.model.dtype])
        parallelize(model, world.meshes)
        return [local_tensor(parameter).numel() for parameter in model.parameters()]


def make_plan(cfg: Config, model_config: ModelConfig, num_gpus: int, local_sizes: list[int]) -> Plan:
    """Add up what one process holds."""
    spec, dtype = resolve(cfg.quant), DTYPES[cfg.model.dtype]
    shape = ProcessShape(
        model_config,
        spec,
        cfg.rollout,
        cfg.rl,
        dtype,
        parallel=cfg.parallel,
        num_processes=num_gpus,
        all_gather=spec.gathers(cfg.quant.all_gather),
        moments=cfg.optim.moments,
        held=sum(local_sizes),
    )
    parts = {**estimate_memory(shape).parts, "context and reserve": CONTEXT_GIB}
    return Plan(num_gpus, local_sizes, MemoryEstimate(parts))


def savings(cfg: Config) -> Iterator[tuple[str, str, Config]]:
    """(key, value, config with it and all before it) for everything that saves memory, the cheapest in time first."""
    if cfg.quant.all_gather == "bf16" and resolve(cfg.quant).gathers("auto") == "packed":
        cfg = replace(cfg, quant=replace(cfg.quant, all_gather="packed"))
        yield "quant.all_gather", "packed", cfg
    if cfg.parallel.activation_checkpointing != "full":
        cfg = replace(cfg, parallel=replace(cfg.parallel, activation_checkpointing="full"))
        yield "parallel.activation_checkpointing", "full", cfg
    if cfg.optim.moments == "float32":
        cfg = replace(cfg, optim=replace(cfg.optim, moments="cpu"))
        yield "optim.moments", "cpu", cfg
    while cfg.rollout.max_batch > 1 and cfg.rollout.engine == "native":
        cfg = replace(cfg, rollout=replace(cfg.rollout, max_batch=cfg.rollout.max_batch // 2))
        yield "rollout.max_batch", str(cfg.rollout.max_batch), cfg


def ways_to_fit(cfg: Config, model_config: ModelConfig, plan: Plan, gpu_gib: float) -> list[str]:
    """Settings with which the run fits on these GPUs, and the number of GPUs on which it fits without, or with them."""

    def fits(candidate: Config, factor: int) -> bool:
        sizes = [size // factor for size in plan.local_sizes]
        return make_plan(candidate, model_config, factor * plan.num_gpus, sizes).memory.total <= gpu_gib

    settings, thrifty = {}, cfg
    for key, value, thrifty in savings(cfg):
        settings[key] = value
        if fits(thrifty, 1):
            break
    words = " ".join(f"--{key} {value}" for key, value in settings.items())
    ways = [f"on {plan.num_gpus} GPUs: {words}"] if fits(thrifty, 1) else []
    for candidate, how in ((cfg, "as it is"), (thrifty, f"with {words}")):
        factor = next((factor for factor in (2, 4, 8, 16, 32) if fits(candidate, factor)), None)
        if factor is not None:
            return [*ways, f"on {factor * plan.num_gpus} GPUs {how}"]
    return ways


def rollout_rate(rollout: str, sequences: float, model_config: ModelConfig) -> float:
    """Tokens/s of one GPU with so many sequences at once: linear between the measured batches, flat beyond."""
    table = ROLLOUT_RATES["w4" if rollout.startswith("w4") else "fp8" if rollout == "fp8" else "bf16"]
    rate = table[0][1] * min(sequences / table[0][0], 1.0)
    for (low, at_low), (high, at_high) in zip(table, table[1:], strict=False):
        if sequences > low:
            rate = at_low + (at_high - at_low) * min((sequences - low) / (high - low), 1.0)
    return rate * ROLLOUT_ACTIVE / model_config.num_parameters()[1]


def step_times(cfg: Config, model_config: ModelConfig, plan: Plan, response_tokens: int) -> dict[str, float]:
    """Seconds of each phase of a step."""
    responses = cfg.rl.prompts_per_step * cfg.rl.group_size
    here = responses / plan.num_gpus
    rate = rollout_rate(resolve(cfg.quant).rollout, min(here, cfg.rollout.max_batch), model_config)
    flops = here * cfg.rl.epochs * model_config.train_flops([response_tokens])
    return {
        "rollout": here * response_tokens / rate,
        "learn": flops / (1e12 * LEARNER_TFLOPS[cfg.parallel.activation_checkpointing]),
        "sync": plan.memory.parts["engine weights"] / SYNC_GIB_PER_S,
    }


def describe(cfg: Config, model_config: ModelConfig, plan: Plan, gpu_gib: float, response_tokens: int) -> str:
    """The text of the command."""
    total, active = model_config.num_parameters()
    parallel, gpus = cfg.parallel, plan.num_gpus
    spec = resolve(cfg.quant)
    fsdp = gpus // parallel.replicate
    lines = [
        f"{total / 1e9:.2f}B parameters, {active / 1e9:.2f}B active; learner weights {spec.learner_weights}, "
        f"rollout {spec.rollout} ({cfg.rollout.engine})",
        f"{gpus} GPUs: replicate {parallel.replicate} x fsdp {fsdp} "
        f"(experts: {fsdp // parallel.ep} x ep {parallel.ep}), checkpointing {parallel.activation_checkpointing}, "
        f"gathers {spec.gathers(cfg.quant.all_gather)}, moments {cfg.optim.moments}",
        "",
        f"one process holds {sum(plan.local_sizes) / 1e9:.3f}B parameters; memory in GiB",
    ]
    for name, gib in plan.memory.parts.items():
        lines.append(f"  {name:<30} {gib:>9.2f}")
    fits = plan.memory.total <= gpu_gib
    lines.append(f"  {'total':<30} {plan.memory.total:>9.2f}  of {gpu_gib:.1f}: {'fits' if fits else 'DOES NOT FIT'}")
    if cfg.optim.moments == "cpu":
        lines.append(f"  {'Adam moments in CPU memory':<30} {plan.page_locked_gib:>9.2f}")
    if not fits:
        ways = ways_to_fit(cfg, model_config, plan, gpu_gib)
        lines += ["", "it would fit", *(f"  {way}" for way in ways or ["with no setting that this plan knows"])]
    times = step_times(cfg, model_config, plan, response_tokens)
    step_s = sum(times.values())
    lines += ["", f"rough times of a step at the rates of H200s, {response_tokens} tokens a response"]
    lines += [f"  {name:<30} {seconds:>9.0f} s" for name, seconds in times.items()]
    lines.append(f"  {'step':<30} {step_s:>9.0f} s;  {cfg.train.steps} steps {step_s * cfg.train.steps / 3600:.1f} h")
    return "\n".join(lines)


@main_guard
def main(argv: list[str]) -> int:
    """Print the plan; see the module's docstring."""
    if {"--help", "-h"} & set(argv):
        print(OPTIONS)  # the keys of the config follow
    gpus = number(argv, "--gpus", whole(1)) or DEFAULT_GPUS
    gpu_gib = number(argv, "--gpu-memory", real(above=0.0)) or GPU_GIB
    response_tokens = number(argv, "--response-tokens", whole(1))
    cfg = load_config(argv)
    response_tokens = response_tokens or max(cfg.rollout.max_new_tokens // 4, 1)
    model_config = load_model_config(cfg)
    plan = make_plan(cfg, model_config, gpus, count_local_sizes(cfg, model_config, gpus))
    print(describe(cfg, model_config, plan, gpu_gib, response_tokens))
    return 0 if plan.memory.total <= gpu_gib else 1


def number(argv: list[str], name: str, parse: Callable[[str], N]) -> N | None:
    """Remove `name NUMBER` from a command line and return the number, None where it was not given. `parse` is of
    options.py; UserError for what it refuses."""
    text = take_option(argv, name)
    try:
        return parse(text) if text else None
    except argparse.ArgumentTypeError as refusal:
        raise UserError(f"{name} {refusal}") from None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
