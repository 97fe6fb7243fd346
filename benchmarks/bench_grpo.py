"""Whole GRPO steps of a large config without its weights and its data: time of every phase, checkpoint, peak memory.

    torchrun --nproc_per_node=2 -m benchmarks.bench_grpo --layers 8 [--config configs/moe25b_quads.toml]
        [--section.key value ...]

Real: the loop of train.py, and the config's learner, engine, sync and checkpoint. Standing in for what is not at hand:
random weights with `--layers` layers (default: all), sums of reasoning-gym for prompts, and rewards drawn by lot, since
random weights earn none and a group without spread is left out of training. Nothing learns here. Lengths and batch are
those of the config unless overridden. A folder that holds a run already is resumed with `--checkpoint.resume`.

The first process prints medians over the steps after the first, which compiles.
"""

import os
import statistics
import sys
import time
from argparse import ArgumentParser
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

import train
from quads.config import load_config
from quads.errors import UserError, main_guard
from quads.model.config import ARCHITECTURES
from quads.rl.advantage import group_advantages
from quads.run.checkpoint import Checkpointer
from quads.run.folder import read_rows
from quads.run.measure import peak_resident_gib

STAND_IN = {
    "task.train": '["sums"]',
    "task.eval": '["sums"]',
    "task.weights": "[1.0]",
    "sources.sums.kind": "reasoning_gym",
    "sources.sums.dataset": "chain_sum",
    "model.tokenizer": "examples/tokenizer",
    "eval.every": "0",
    "checkpoint.every": "0",
    "train.steps": "3",
}
ROWS = {
    "step, s": "time/step_s",
    "rollout, s": "time/rollout_s",
    "reward beyond it, s": "time/reward_s",
    "learn, s": "time/learn_s",
    "sync, s": "time/sync_s",
    "rollout, tokens/s of all": "rollout/tokens_per_s",
    "learn, tokens/s of all": "learn/tokens_per_s",
    "learn, MFU": "learn/mfu",
    "response, tokens": "response/length_mean",
    "gap, mean": "mismatch/logprob_abs_mean",
    "gradient norm": "train/grad_norm",
    "GPU memory in use, rollout, GiB": "memory/rollout_gib",
    "sync, GiB": "memory/sync_gib",
    "learn, GiB": "memory/learn_gib",
    "estimate of the largest, GiB": "memory/estimate_gib",
}


def by_lot(rewards_PG: Tensor, *settings: Any) -> tuple[Tensor, Tensor]:
    """Advantages [P, G] of rewards that are drawn uniformly, and which groups have no spread [P] (none)."""
    generator = torch.Generator().manual_seed(int(os.environ.get("RANK", "0")))
    return group_advantages(torch.rand(rewards_PG.shape, generator=generator), *settings)


def timed(function: Callable, seconds: list[float]) -> Callable:
    def call(*args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        result = function(*args, **kwargs)
        seconds.append(time.perf_counter() - began)
        return result

    return call


@main_guard
def main(argv: list[str]) -> None:
    parser = ArgumentParser(description=__doc__, add_help=False, allow_abbrev=False)
    parser.add_argument("--config", default="configs/moe25b_quads.toml")
    parser.add_argument("--layers", type=int, default=0)
    if {"--help", "-h"} & set(argv):
        parser.print_help()
        print("\nIt takes all options of train.py:\n")  # the keys of the config follow
    args, overrides = parser.parse_known_args(argv)
    stand_in = [word for key, text in STAND_IN.items() for word in (f"--{key}", text)]
    words = ["--config", args.config, "--train.out", "runs/bench_grpo", *stand_in, *overrides]
    cfg = load_config(words)
    if cfg.model.arch not in ARCHITECTURES:
        raise UserError(
            f"[model] arch = {cfg.model.arch!r} is not one of {', '.join(ARCHITECTURES)}; weights stand in, so give one"
        )
    shape = ARCHITECTURES[cfg.model.arch]
    shape = replace(shape, num_layers=args.layers or shape.num_layers)
    saves: dict[str, list[float]] = {"save": [], "wait": [], "resume": []}
    with (
        patch.dict(ARCHITECTURES, {cfg.model.arch: shape}),
        patch.object(train, "group_advantages", by_lot),
        patch.multiple(Checkpointer, **{name: timed(getattr(Checkpointer, name), saves[name]) for name in saves}),
    ):
        train.main(words)
    if os.environ.get("RANK", "0") != "0":
        return
    rows = read_rows(Path(cfg.train.out) / "metrics.jsonl")
    steady = rows[1:] or rows
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    processes = os.environ.get("WORLD_SIZE", "1")
    print(f"\n{device} x {processes}, {shape.num_layers} layers, recipe {cfg.quant.recipe}, {len(rows)} steps")
    print("| median after the first step | |\n| --- | ---: |")
    for name, key in ROWS.items():
        if all(key in row for row in steady):  # no MFU on a CPU
            print(f"| {name} | {statistics.median(row[key] for row in steady):.4g} |")
    print(f"| peak CPU memory of the first process, GiB | {peak_resident_gib():.4g} |")
    for name, seconds in saves.items():
        print(f"| checkpoint: {name}, s | {sum(seconds):.4g} |")


if __name__ == "__main__":
    main(sys.argv[1:])
