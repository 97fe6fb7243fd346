"""The runs of a comparison: what is trained, where, on which GPU, and until when.

An arm is a name and the config overrides that make it; every recipe is one. A run is an arm with a seed, a process of
`train.py` in a folder of its own. What a folder holds of the same config is not computed again: a run that has all its
steps is kept, one that left a checkpoint goes on from there, any other starts afresh.
"""

import concurrent.futures
import dataclasses
import os
import queue
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from quads.config import Config, load_config
from quads.errors import UserError
from quads.lab.results import config_argv, progress
from quads.run.folder import read_header, read_rows

TRAIN = Path(__file__).resolve().parents[3] / "train.py"
LAST_STEP_S = 60  # for the step that a stopped run is in


@dataclasses.dataclass(frozen=True)
class Arm:
    """Example: `Arm("quads_token", ("--quant.recipe", "quads", "--quant.residual_selection", "token"))`."""

    name: str
    overrides: tuple[str, ...]

    @classmethod
    def recipe(cls, name: str) -> "Arm":
        return cls(name, ("--quant.recipe", name))

    @classmethod
    def parse(cls, name: str, overrides: str) -> "Arm":
        """An arm as the command line has it: `quads_token "--quant.recipe quads --quant.residual_selection token"`."""
        words = tuple(shlex.split(overrides))
        if not name.isidentifier() or not words or not words[0].startswith("--"):
            raise UserError(f"--arm {name} {overrides!r}: give a name and '--section.key value ...' in one word")
        return cls(name, words)


@dataclasses.dataclass(frozen=True)
class Run:
    """One training run of the comparison."""

    arm: str
    seed: int
    out: Path
    argv: tuple[str, ...]  # of train.py

    def config(self) -> Config:
        return load_config(list(self.argv))

    def rows(self) -> list[dict[str, Any]]:
        """The rows of metrics.jsonl if the folder is of this very config; where it saves and logs does not matter."""
        if not (self.out / "config.toml").is_file() or not (self.out / "metrics.jsonl").is_file():
            return []
        cfg = self.config()
        try:
            stored = load_config(["--config", str(self.out / "config.toml")])
        except UserError:
            return []  # of a version with other keys
        train = dataclasses.replace(stored.train, out=cfg.train.out)  # folders may be moved
        same = dataclasses.replace(stored, train=train, checkpoint=cfg.checkpoint, log=cfg.log) == cfg
        return read_rows(self.out / "metrics.jsonl") if same else []

    def made_by(self) -> dict[str, str]:
        """Commit and machine of the training, which need not be those of the table."""
        header = read_header(self.out / "config.toml")
        return {key: header[key] for key in ("started", "commit", "machine") if key in header}

    def is_complete(self) -> bool:
        rows = self.rows()
        return bool(rows) and rows[-1]["step"] == self.config().train.steps


def plan(config: str, overrides: Sequence[str], arms: Sequence[Arm], seeds: Sequence[int], out: Path) -> list[Run]:
    """Seed by seed, so that a comparison that is cut short has whole seeds."""
    return [
        Run(arm.name, seed, run_out, (
            *config_argv(config, overrides), *arm.overrides, "--train.seed", str(seed), "--train.out", str(run_out),
        ))
        for seed in seeds
        for arm in arms
        for run_out in [out / f"{arm.name}_seed{seed}"]
    ]  # fmt: skip


def visible_gpus() -> list[str]:
    """What CUDA_VISIBLE_DEVICES of a child may name; empty without a GPU."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return listed.split(",") if listed else [str(i) for i in range(torch.cuda.device_count())]


def execute(runs: Sequence[Run], jobs: int, minutes: float | None = None) -> list[str]:
    """Train `jobs` runs at a time, in order, dealt out to the GPUs in turn; returns what went wrong, a text a run.

    minutes: then runs get SIGTERM, finish their step and leave their rows; runs that wait are not started.
    """
    deadline = None if minutes is None else time.monotonic() + 60 * minutes
    gpus = visible_gpus()
    slots: queue.SimpleQueue[int] = queue.SimpleQueue()
    for slot in range(jobs):
        slots.put(slot)

    def one(run: Run) -> str:
        slot = slots.get()
        try:
            return _train(run, gpus[slot % len(gpus)] if gpus else None, deadline)
        finally:
            slots.put(slot)

    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        return [problem for problem in pool.map(one, runs) if problem]


def _train(run: Run, gpu: str | None, deadline: float | None) -> str:
    """One run, with the console in OUT/ARM_seedK.log. Returns "" or what went wrong, with the end of that log."""
    if deadline is not None and time.monotonic() >= deadline:
        return ""
    log = run.out.with_suffix(".log")
    started = time.monotonic()
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TRAIN.parent), os.environ.get("PYTHONPATH", "")])}
    if gpu is not None:
        env["CUDA_VISIBLE_DEVICES"] = gpu
    resume = ["--checkpoint.resume", "latest"] if run.rows() else []
    with open(log, "w", encoding="utf-8") as file:
        process = subprocess.Popen([sys.executable, str(TRAIN), *run.argv, *resume], stdout=file, stderr=file, env=env)
        stopped, status = _wait(process, deadline)
    rows = run.rows()
    progress(f"{run.out.name}: {rows[-1]['step'] if rows else 0} steps, {time.monotonic() - started:.0f} s")
    if status == 0 or (stopped and status < 0):  # a run that is stopped while it loads is killed by the signal
        return ""
    end = "\n".join(log.read_text(encoding="utf-8").splitlines()[-12:])
    return f"{run.out.name} ended with status {status}; the end of {log}:\n{end}"


def _wait(process: "subprocess.Popen[bytes]", deadline: float | None) -> tuple[bool, int]:
    """(whether it had to be stopped, its exit status)."""
    if deadline is None:
        return False, process.wait()
    try:
        return False, process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.terminate()
    try:
        return True, process.wait(LAST_STEP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        return True, process.wait()
