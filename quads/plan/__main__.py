"""The command: what a run needs, without the hardware.

    python -m quads.plan --config configs/moe25b_quads.toml [--gpus N] [--gpu-memory GiB] [--response-tokens N]
                         [--response-spread S] [--lengths RUN] [--measured RUN] [--section.key value ...]

Memory of one process by phase, seconds of a step by what bounds them, the changes that would help most. Times are those
of H200s, from a model of measured rates: they say which phase and which resource a step waits for. Exit code 1 if the
run does not fit.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from quads.checks import load_model_config
from quads.config import Config, load_config
from quads.config.options import real, take_option, whole
from quads.errors import UserError, main_guard
from quads.model.config import ModelConfig
from quads.plan.arrangement import Plan, count_local_sizes, make_plan, ways_to_fit
from quads.plan.compare import compare, measured_medians
from quads.plan.lengths import SPREAD, drawn_from, lengths_of_run, lognormal_lengths
from quads.plan.rollout_time import TAIL
from quads.plan.step_time import StepTime, Workload, best_changes, step_time
from quads.quant.recipes import resolve

N = TypeVar("N", int, float)

OPTIONS = """usage: python -m quads.plan --config FILE [--gpus N] [--gpu-memory GiB] [--response-tokens N] ...

  --gpus N              GPUs of the run (default: 8)
  --gpus-per-host N     of which so many share a host and its fast links (default: 8)
  --gpu-memory GiB      memory of each (default: 139.8, an H200)
  --response-tokens N   mean length of a response before it is cut (default: a quarter of rollout.max_new_tokens)
  --response-spread S   standard deviation of the logarithm of a length, 0: all equal (default: 0.8, an assumption)
  --prompt-tokens N     mean length of a prompt (default: an eighth of rollout.max_prompt_tokens)
  --lengths RUN         draw lengths from the samples.jsonl of a run in place of the last three
  --measured RUN        compare with the times and the memory of a run
It takes all options of train.py:
"""
GPU_GIB = 139.8  # an H200
DEFAULT_GPUS = 8


def memory_lines(plan: Plan, gpu_gib: float) -> Iterator[str]:
    """A table: parts by phase."""
    memory = plan.memory
    yield f"one process holds {sum(plan.local_sizes) / 1e9:.3f}B parameters; memory in GiB, by phase"
    yield "  " + " " * 30 + "".join(f"{name:>9}" for name in memory.phases)
    for part in memory.parts:
        cells = (f"{parts[part]:>9.2f}" if part in parts else f"{'-':>9}" for parts in memory.phases.values())
        yield f"  {part:<30}" + "".join(cells)
    fits = "fits" if memory.total <= gpu_gib else "DOES NOT FIT"
    totals = "".join(f"{memory.of(name):>9.2f}" for name in memory.phases)
    yield f"  {'total':<30}{totals}  of {gpu_gib:.1f}: {fits}"


def time_lines(times: StepTime, work: Workload, steps: int) -> Iterator[str]:
    """Phases, each followed by what it is spent on."""
    lengths = work.lengths
    yield (
        f"seconds of a step at the rates of H200s; responses of {sum(lengths) / len(lengths):,.0f} tokens on average, "
        f"the longest {max(lengths):,}; prompts of {work.prompt_tokens}"
    )
    bounds = {"rollout": times.rollout.parts, "learn": times.learn, "sync": {}}
    for phase, seconds in times.phases.items():
        yield f"  {phase:<30} {seconds:>9.1f}"
        for name, part in bounds[phase].items():
            yield f"    {name:<28} {part:>9.1f}"
        if phase == "rollout":
            yield f"    of it with less than 1/{TAIL} left {times.rollout.tail:>9.1f}"
            if times.rollout.set_back:
                yield f"    {times.rollout.set_back:,} tokens computed again, as the KV cache was full"
    yield f"  {'step':<30} {times.total:>9.1f};  {steps} steps {times.total * steps / 3600:.1f} h"


def describe(cfg: Config, model_config: ModelConfig, plan: Plan, gpu_gib: float, work: Workload) -> str:
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
        *memory_lines(plan, gpu_gib),
    ]
    if cfg.optim.moments == "cpu":
        lines.append(f"  Adam moments in CPU memory {plan.page_locked_gib:.2f}")
    if plan.memory.total > gpu_gib:
        ways = ways_to_fit(cfg, model_config, plan, gpu_gib)
        lines += ["", "it would fit", *(f"  {way}" for way in ways or ["with no setting that this plan knows"])]
    times = step_time(cfg, model_config, plan, work)
    lines += ["", *time_lines(times, work, cfg.train.steps)]
    best = best_changes(cfg, model_config, plan, work, gpu_gib)
    lines += ["", "what would help most", *(f"  {saved:>7.1f} s  {option}" for option, saved in best)]
    return "\n".join(lines if best else [*lines, "  no single setting that this plan knows"])


def workload(argv: list[str], gpus: int) -> Callable[[Config], Workload]:
    """Takes the options about lengths off the command line; the lengths themselves need the config."""
    mean = number(argv, "--response-tokens", whole(1))
    spread = number(argv, "--response-spread", real(low=0.0, high=3.0))
    prompt = number(argv, "--prompt-tokens", whole(1))
    host = number(argv, "--gpus-per-host", whole(1)) or 8
    run = take_option(argv, "--lengths")

    def with_config(cfg: Config) -> Workload:
        count = max(cfg.rl.prompts_per_step * cfg.rl.group_size // gpus, 1)
        longest = cfg.rollout.max_new_tokens
        if run:
            lengths = drawn_from(lengths_of_run(Path(run)), count)
        else:
            typical = mean or max(longest // 4, 1)
            lengths = lognormal_lengths(count, typical, SPREAD if spread is None else spread, longest)
        return Workload(lengths, prompt or max(cfg.rollout.max_prompt_tokens // 8, 1), host)

    return with_config


@main_guard
def main(argv: list[str]) -> int:
    """Print the plan; see the module's docstring."""
    if {"--help", "-h"} & set(argv):
        print(OPTIONS)  # the keys of the config follow
    gpus = number(argv, "--gpus", whole(1)) or DEFAULT_GPUS
    gpu_gib = number(argv, "--gpu-memory", real(above=0.0)) or GPU_GIB
    make_workload = workload(argv, gpus)
    run = take_option(argv, "--measured")
    cfg = load_config(argv)
    if run:
        measured_medians(Path(run))  # a folder without metrics is refused before the model is laid out
    model_config = load_model_config(cfg)
    work = make_workload(cfg)
    plan = make_plan(cfg, model_config, gpus, count_local_sizes(cfg, model_config, gpus), gpu_gib)
    print(describe(cfg, model_config, plan, gpu_gib, work))
    if run:
        print("\n" + "\n".join(compare(Path(run), step_time(cfg, model_config, plan, work), plan.memory)))
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
