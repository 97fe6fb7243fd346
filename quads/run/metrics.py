"""What a run reports: a line a step on the console, metrics.jsonl, samples.jsonl, TensorBoard, optionally W&B.

metrics.jsonl has one JSON object a step, flushed at once. A value that is not finite is null: NaN is not JSON. Keys are
`<part>/<what>` with the unit at the end where there is one; the README lists them.
"""

import dataclasses
import errno
import importlib
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from quads.config import Config
from quads.errors import UserError
from quads.run.folder import open_run_folder
from quads.run.measure import Timers
from quads.run.tensorboard import EventFile
from quads.types import Completion, Example

Sink = Callable[[int, dict[str, float]], None]

# (label, key, format) of the console line; keys that a step lacks are left out.
CONSOLE = (
    ("reward", "reward/mean", ".3f"),
    ("pass@1", "eval/pass@1", ".3f"),
    ("gap mean", "mismatch/logprob_abs_mean", ".2g"),
    ("max", "mismatch/logprob_abs_max", ".2g"),
    ("length", "response/length_mean", ".1f"),
    ("entropy", "policy/entropy", ".2f"),
    ("clipped", "policy/ratio_clip_frac", ".1%"),
    ("grad", "train/grad_norm", ".2g"),
    ("tok/s", "rollout/tokens_per_s", ",.0f"),
    ("s", "time/step_s", ".1f"),
)


NO_SPREAD = (
    "  nothing was learned in this step: in no group did rewards differ. If that goes on, the prompts are all too hard "
    "or all too easy, or the reward does not read the answers (samples.jsonl shows them)"
)


class RunLog:
    """The log of one run. With is_main = False (every process but the first) it keeps time and writes nothing.

    Args:
        out: the run's folder; see `quads.run.folder` for what happens to an earlier run in it.
        on_phase: called with the name of each phase that begins.
        resume_step: steps that a checkpoint has brought back, 0 for a fresh start.

    Raises:
        UserError: log.wandb_project is set and wandb is not installed; here and later, a file cannot be written.
    """

    def __init__(
        self,
        out: Path,
        cfg: Config,
        resume_step: int = 0,
        device: torch.device | None = None,
        is_main: bool = True,
        on_phase: Callable[[str], None] = lambda name: None,
    ) -> None:
        self._on_phase = on_phase
        self._device = device or torch.device("cpu")
        self._timers = Timers(self._device)
        self._is_main, self._steps = is_main, cfg.train.steps
        self._close: list[Callable[[], Any]] = []
        self._sinks: list[Sink] = []
        if not is_main:
            return
        wandb = import_wandb() if cfg.log.wandb_project else None
        with naming_the_fault(out):
            open_run_folder(out, cfg, resume_step)
        self._metrics, self._samples = RowFile(out / "metrics.jsonl"), RowFile(out / "samples.jsonl")
        self._close += [self._metrics.close, self._samples.close]
        if cfg.log.tensorboard:
            with naming_the_fault(out / "tb"):
                events = EventFile(out / "tb", resume_step)
            self._sinks.append(naming_the_fault(out / "tb")(events.write))
            self._close.append(events.close)
        if wandb is not None:
            self._add_wandb(wandb, out, cfg)
        # A bar only where someone watches; in a log file the lines are enough.
        self._bar = tqdm(total=cfg.train.steps, initial=resume_step, disable=not sys.stderr.isatty(), unit="step")
        self._close.append(self._bar.close)

    def timer(self, name: str) -> AbstractContextManager[None]:
        """Time a phase of the present step; it becomes `time/<name>_s`."""
        self._on_phase(name)
        return self._timers.phase(name)

    def seconds(self, name: str) -> float:
        """Seconds that a phase of the present step has taken so far."""
        return self._timers.seconds(name)

    def write(self, step: int, metrics: dict[str, float]) -> None:
        """End the step: add the times and the memory of its phases, and write the row everywhere."""
        row = {"step": step, **metrics, **self._timers.metrics()}
        self._timers.reset()
        if not self._is_main:
            return
        self._metrics.write(row)
        for sink in self._sinks:
            sink(step, row)
        self._bar.update(step - self._bar.n)
        tqdm.write(console_line(step, self._steps, row), file=sys.stdout)
        if row.get("group/zero_std_frac") == 1.0:
            tqdm.write(NO_SPREAD, file=sys.stdout)
        sys.stdout.flush()

    def samples(
        self,
        step: int,
        decode: Callable[[list[int]], str],
        examples: Sequence[Example],
        groups: Sequence[Sequence[Completion]],
        rewards_PG: Tensor,
    ) -> None:
        """One row for each of `examples` with all its responses and their rewards."""
        if not self._is_main:
            return
        for example, group, rewards in zip(examples, groups, rewards_PG.tolist(), strict=False):
            responses = [
                {"text": decode(c.token_ids), "reward": reward, "tokens": len(c.token_ids), "finish": c.finish_reason}
                for c, reward in zip(group, rewards, strict=True)
            ]
            row = {"step": step, "id": example.id, "source": example.source, "prompt": example.prompt}
            self._samples.write({**row, "policy_version": group[0].policy_version, "responses": responses})

    def close(self) -> None:
        for close in self._close:
            close()

    def _add_wandb(self, wandb: Any, out: Path, cfg: Config) -> None:
        run = wandb.init(project=cfg.log.wandb_project, name=out.name, dir=str(out), config=dataclasses.asdict(cfg))
        self._close.append(run.finish)
        self._sinks.append(lambda step, row: run.log(row, step=step))


def console_line(step: int, steps: int, row: dict[str, float]) -> str:
    """`step  3/60  reward 0.412  gap mean 0.002  max 0.31 ...`"""
    words = [f"{label} {row[key]:{form}}" for label, key, form in CONSOLE if row.get(key) is not None]
    return "  ".join([f"step {step:>{len(str(steps))}}/{steps}", *words])


class RowFile:
    """A JSONL file to add rows to. UserError where that fails: then it ends with the last whole row."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with naming_the_fault(path):
            self._file = open(path, "ab", buffering=0)
        self.close = self._file.close

    def write(self, row: dict[str, Any]) -> None:
        """Add one line, at once."""
        line = (json.dumps(jsonable(row), ensure_ascii=False, allow_nan=False) + "\n").encode()
        with naming_the_fault(self._path):
            if os.fstat(self._file.fileno()).st_nlink == 0:
                raise OSError(errno.ENOENT, "it was removed while the run was writing it")
            size = self._file.seek(0, os.SEEK_END)
            try:
                while line:
                    line = line[self._file.write(line) :]
            except OSError:
                self._file.truncate(size)
                raise


@contextmanager
def naming_the_fault(path: Path) -> Iterator[None]:
    """Within it, an OSError is a UserError about `path`. Usable as a decorator."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{path} cannot be written: {error.strerror}; free some space there, or choose another train.out"
        ) from None


def jsonable(value: Any) -> Any:
    """Plain numbers out of tensors, null for what is not finite."""
    if isinstance(value, dict):
        return {key: jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(item) for item in value]
    if isinstance(value, Tensor):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def import_wandb() -> Any:
    """The package, loaded only where a config asks for it. UserError where it is not installed."""
    try:
        return importlib.import_module("wandb")
    except ImportError:
        raise UserError("[log] wandb_project needs the package wandb: pip install wandb, or leave it empty") from None
