"""GRPO with 4-bit rollouts, in one readable loop.

    torchrun train.py --config configs/tiny_quads.toml [--section.key value ...] [--dry-run] [--help]

One step: sample prompts -> roll out (policy version v) -> reward -> group advantages -> pack -> learn -> sync the weights
(quantized once, shipped as bytes, written in place) -> version v + 1. Every phase is one call below; what it does is one
file away. A run's folder holds config.toml, metrics.jsonl, samples.jsonl, checkpoints/, tb/ and plots/.
"""

import sys
from pathlib import Path

import torch

from quads.assemble import Parts, build_parts, request_seeds
from quads.checkpoint import Checkpointer, TrainState, stop_requested
from quads.config import Config, load_config
from quads.distributed import init_distributed
from quads.errors import main_guard
from quads.metrics import RunLog, StepTimer
from quads.plot import plot_runs
from quads.rl.advantage import group_advantages
from quads.rl.evaluate import eval_metrics, strip_stop
from quads.rl.learner import merge_updates
from quads.rl.packing import Sample, pack
from quads.types import Completion, Example


@main_guard
def main(argv: list[str]) -> None:
    cfg = load_config(argv)
    with init_distributed(cfg.parallel, cfg.train) as world:
        parts = build_parts(cfg, world)
        if parts is None:
            world.print("dry run: config, data, tokenizer and memory are fine")
            return
        try:
            train(cfg, parts)
        finally:
            parts.close()


def train(cfg: Config, parts: Parts) -> None:
    out = Path(cfg.train.out)
    checkpointer = Checkpointer(out / "checkpoints", cfg.checkpoint)
    state = checkpointer.resume(parts.learner)
    log = RunLog(out, cfg, resume_step=state.step)
    if state.step > 0:
        parts.sync(version=state.step)
    with stop_requested() as stop:
        for step in range(state.step + 1, cfg.train.steps + 1):
            metrics = train_step(cfg, parts, step, log)
            log.write(metrics)
            state = TrainState(step=step)
            last = step == cfg.train.steps or stop.requested
            if last or (cfg.checkpoint.every and step % cfg.checkpoint.every == 0):
                checkpointer.save(state, parts.learner)
            if last:
                break
    checkpointer.wait()
    log.close()
    plot_runs([out], out / "plots" / "curves.png")
