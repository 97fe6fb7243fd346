"""Filling the table in parts: many cells side by side on the GPUs there are, each finished one on disk at once.

A part may end at any moment (its time is up, a signal, a killed process): what is finished is kept, and the next part
with the same settings fills what is missing. A file of other settings is refused, never mixed.
"""

import json
import math
import multiprocessing
import time
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from quads.config import Config, config_to_toml
from quads.errors import UserError
from quads.lab.formats.axes import START, Cell
from quads.lab.formats.worker import Filled, serve
from quads.lab.results import progress, provenance, write_result
from quads.lab.runs.arms import visible_gpus
from quads.quant.recipes import QuantSpec, resolve
from quads.run.signals import StopRequest

WAIT_S = 1.0


class Table:
    """Finished cells on disk: {"about", "settings", "cells": {key: {...}}, "failed": {key: why}}.

    settings: what all cells have in common, as TOML. UserError if the file is of other settings.
    """

    def __init__(self, path: Path, argv: Sequence[str], settings: str, steps: int) -> None:
        self.path, self.steps, self._argv = path, steps, list(argv)
        self.data: dict[str, Any] = {"settings": {"steps": steps, "config": settings}, "cells": {}, "failed": {}}
        if path.is_file():
            stored = json.loads(path.read_text(encoding="utf-8"))
            if stored["settings"] != self.data["settings"]:
                raise UserError(f"{path} is of other settings (config, overrides or --steps); choose another --out")
            self.data = stored | {"failed": {}}
            del self.data["about"]

    @property
    def cells(self) -> dict[str, Filled]:
        return self.data["cells"]

    def missing(self, cells: Sequence[Cell]) -> list[Cell]:
        return [cell for cell in cells if cell.key not in self.cells]

    def put(self, cells: Sequence[Cell], found: Filled, made: dict[str, str]) -> None:
        """The result of the first of `cells`, which is that of all; written at once."""
        for cell in cells:
            if "failed" in found:
                self.data["failed"][cell.key] = found["failed"]
            else:
                self.cells[cell.key] = {**found, **made}
        self.write()

    def write(self) -> None:
        write_result(self.path.parent, self.path.stem, provenance("formats", self._argv), self.data)


def common_settings(cfg: Config) -> str:
    """The config less what the axes of the table decide, and where it is written."""
    plain = replace(
        cfg,
        quant=replace(cfg.quant, recipe="bf16", format="nvfp4", four_over_six="none", scale_rule=""),
        rl=replace(cfg.rl, old_logprobs="rollout", correction="", score_centering=0),
        train=replace(cfg.train, seed=0, steps=1, out=""),
    )
    return config_to_toml(plain)


def rolled_out(cfg: Config) -> QuantSpec:
    """What an engine of this config computes, whatever the learner does."""
    return replace(resolve(cfg.quant), learner_weights="bf16", learner_activations="bf16")


class _Process:
    """One worker and what it is at."""

    def __init__(self, gpu: str | None, threads: int, log: Path) -> None:
        context = multiprocessing.get_context("spawn")  # a forked process cannot use a GPU that its parent has used
        self.pipe, theirs = context.Pipe()
        self.process: BaseProcess = context.Process(target=serve, args=(theirs, gpu, threads, log))
        self.process.start()
        theirs.close()
        self.log = log
        self.cell: Cell | None = None
        self.rollout: QuantSpec | None = None  # of its last cell, whose engine it holds

    def result(self) -> Filled:
        """Of its cell; {"failed": why} if the process has died."""
        try:
            return self.pipe.recv()
        except EOFError:
            self.end()
            return {"failed": f"its process ended with status {self.process.exitcode}; see {self.log}"}

    def end(self) -> None:
        """Let an idle process close what it holds; kill one that is at work."""
        if self.cell is None and self.process.is_alive():
            self.pipe.send(None)
        else:
            self.process.terminate()
        self.process.join(10)
        if self.process.is_alive():
            self.process.kill()


class Filling:
    """One part: what is missing of `cells`, `jobs` at a time, until everything is there or the seconds are over.

    A cell is begun only if the quickest one so far would still end in time. Starts that roll out alike are one run.

    Args:
        config, others: the config file and the overrides of all cells.
        threads: CPU threads of each process.
    """

    def __init__(
        self, table: Table, cells: Sequence[Cell], config: str, others: Sequence[str], jobs: int, threads: int
    ) -> None:
        self.table, self.config, self.others = table, config, list(others)
        self.jobs, self.threads = jobs, threads
        self.folder = table.path.parent / "workers"
        self.waiting: dict[Cell, Config] = {}
        self.quickest_s = 0.0
        about = provenance("formats", [])
        self.made = {key: about[key] for key in ("commit", "hardware")}
        for cell in table.missing(cells):
            try:
                self.waiting[cell] = cell.config(config, others)
            except UserError as error:
                table.put([cell], {"failed": str(error)}, {})
        progress(f"{len(cells)} cells, {len(self.waiting)} to fill, {jobs} at a time")

    def run(self, seconds: float | None) -> None:
        """Fill. Ends early, with what there is, on SIGTERM or Ctrl-C."""
        deadline = math.inf if seconds is None else time.monotonic() + seconds
        self.folder.mkdir(parents=True, exist_ok=True)
        workers: list[_Process] = []
        with StopRequest() as stop:
            try:
                workers += [self._start(number) for number in range(min(self.jobs, len(self.waiting)))]
                while not stop.requested and time.monotonic() < deadline:
                    for process in workers:
                        if process.cell is None and time.monotonic() + self.quickest_s < deadline:
                            self._begin(process)
                    busy: dict[Any, int] = {
                        process.pipe: number for number, process in enumerate(workers) if process.cell
                    }
                    if not busy:
                        break
                    for number in [busy[pipe] for pipe in connection.wait(list(busy), WAIT_S)]:
                        self._end(workers[number])
                        if not workers[number].process.is_alive():
                            workers[number] = self._start(number)
            finally:
                for process in workers:
                    process.end()
        self.table.write()

    def _start(self, number: int) -> _Process:
        gpus = visible_gpus()
        gpu = gpus[number % len(gpus)] if gpus else None
        return _Process(gpu, self.threads, self.folder / f"{number}.log")

    def _begin(self, process: _Process) -> None:
        """Give it the next cell: in order, but of those of one seed first one whose engine it holds."""
        if not self.waiting:
            return
        first = next(iter(self.waiting))
        tier = [cell for cell in self.waiting if cell.tier == first.tier]
        cell = next((cell for cell in tier if rolled_out(self.waiting[cell]) == process.rollout), first)
        cfg = self.waiting.pop(cell)
        process.cell, process.rollout = cell, rolled_out(cfg)
        out = self.folder / "runs" / cell.key.replace("/", "_")
        argv = [*cell.argv(self.config, self.others), "--train.out", str(out)]
        process.pipe.send((argv, 0 if cell.correction == START else self.table.steps))

    def _end(self, process: _Process) -> None:
        cell, process.cell = process.cell, None
        assert cell is not None
        found = process.result()
        alike = [cell]
        if cell.correction == START:
            alike += [c for c in self.waiting if c.tier == cell.tier and rolled_out(self.waiting[c]) == process.rollout]
            for other in alike[1:]:
                del self.waiting[other]
        elif "failed" not in found:
            self.quickest_s = min(self.quickest_s or found["seconds"], found["seconds"])
        self.table.put(alike, found, self.made)
        if "failed" in found:
            progress(f"{cell.key}: failed: {found['failed']}")
        else:
            own, plain = found["own"]["pass@1"], found["bf16"]["pass@1"]
            progress(f"{cell.key}: own {own:.3f}, bf16 {plain:.3f}, {found['seconds']:.0f} s")
