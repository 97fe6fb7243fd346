"""A process that fills cells of the table one after the other: train, then judge in own precision and in bf16.

It keeps what cells share: the processes that judge answers, and engines with their captured graphs. The test prompts
are those of seed 0 in every cell, and so are the seeds that draw the answers: cells differ by their policies alone.
"""

import gc
import math
import os
import statistics
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from quads.assemble import Parts, build_engine, build_parts, build_rewards, request_seeds
from quads.checks import DTYPES
from quads.config import Config, load_config
from quads.data.tasks import Task, build_task
from quads.distributed import Distributed, init_distributed
from quads.errors import UserError
from quads.model.config import ModelConfig
from quads.quant.recipes import QuantSpec
from quads.rl.rewards.pool import RewardPool
from quads.rl.scores import evaluate, standard_error
from quads.rollout.engine import Engine
from quads.rollout.sync import sync
from quads.run.checkpoint import TrainState
from quads.run.metrics import RunLog
from quads.types import Sampling
from train import train_step

TEST_SEED, SEED_PURPOSE = 0, "formats"
PLAIN = QuantSpec("bf16", "bf16", "bf16")
CURVES = {"reward": "reward/mean", "gap": "mismatch/logprob_abs_mean", "clipped": "policy/ratio_clip_frac"}

Filled = dict[str, Any]


def serve(connection: Connection, gpu: str | None, threads: int, log: Path) -> None:
    """Fill the cells that come, (argv, number of steps) each, and answer with what was found or {"failed": why}; None
    ends it. What libraries print goes to `log`."""
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    torch.set_num_threads(threads)
    worker, parent = Worker(), os.getppid()
    try:
        while (task := connection.recv()) is not None:
            argv, steps = task
            connection.send(worker.fill(argv, steps, lambda: os.getppid() == parent))
    except EOFError:
        pass  # the parent has gone
    finally:
        worker.close()


class Worker:
    """What one process keeps from cell to cell. All cells must be of one model, one task and one [rollout]."""

    def __init__(self) -> None:
        self._rewards: RewardPool | None = None
        self._task: Task | None = None
        self._engines: dict[QuantSpec, Engine] = {}

    def fill(self, argv: Sequence[str], steps: int, wanted: Callable[[], bool] = lambda: True) -> Filled:
        """The numbers of one cell, or {"failed": why}. wanted: asked before each step; False ends the process."""
        started = time.monotonic()
        try:
            cfg = load_config([*argv, "--train.steps", str(max(steps, 1))])
            with init_distributed(cfg.parallel, cfg.train) as world:
                found = self._fill(cfg, world, steps, wanted)
            return {**found, "seconds": time.monotonic() - started}
        except UserError as error:
            return {"failed": str(error)}
        except Exception as error:  # one cell of many: the others go on
            traceback.print_exc()
            return {"failed": f"{type(error).__name__}: {error}"}
        finally:
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()

    def _fill(self, cfg: Config, world: Distributed, steps: int, wanted: Callable[[], bool]) -> Filled:
        if self._rewards is None:
            self._rewards = build_rewards(cfg)
        parts = build_parts(cfg, world, rewards=self._rewards, make_engine=self.engine)
        assert parts is not None
        rows, state = [], TrainState()
        log = RunLog(Path(cfg.train.out), cfg, 0, world.device)
        try:
            while state.step < steps:
                if not wanted():
                    raise SystemExit(1)
                metrics, state = train_step(cfg, parts, world, state, log)
                log.write(state.step, metrics)
                rows.append(metrics)
        finally:
            log.close()
        plain = self.engine(cfg, parts.model_config, PLAIN, DTYPES[cfg.model.dtype], world.device)
        curves = {name: [_short(row.get(key)) for row in rows] for name, key in CURVES.items()}
        return {"steps": steps, "own": self.judge(parts, parts.engine, parts.spec),
                "bf16": self.judge(parts, plain, PLAIN), "curves": curves}  # fmt: skip

    def engine(
        self,
        cfg: Config,
        model_config: ModelConfig,
        spec: QuantSpec,
        dtype: torch.dtype,
        device: torch.device,
        report: Callable[[str], Any] = print,
    ) -> Engine:
        """`build_engine`, but the last one if it rolls out alike: what the learner does is nothing to an engine. Beside
        it the one that judges in bf16 stays."""
        key = replace(spec, learner_weights="bf16", learner_activations="bf16")
        if key not in self._engines:
            for other in [other for other in self._engines if PLAIN not in (key, other)]:
                self._engines.pop(other).close()
            self._engines[key] = build_engine(cfg, model_config, spec, dtype, device, report)
        return self._engines[key]

    def judge(self, parts: Parts, engine: Engine, spec: QuantSpec) -> dict[str, float]:
        """pass@1 on the test prompts, all sources together, with its standard error over prompts."""
        cfg = parts.cfg
        sync(parts.learner.model, engine, spec, version=cfg.train.steps)
        engine.wake()
        if self._task is None:
            readers, length = parts.rewards.rewards, cfg.rollout.max_prompt_tokens
            self._task = build_task(cfg.task, cfg.sources, readers, parts.tokenizer, TEST_SEED, length)
        examples = self._task.eval_set(cfg.eval.prompts)
        seeds = request_seeds(TEST_SEED, SEED_PURPOSE, range(len(examples)), cfg.eval.samples)
        sampling = Sampling(cfg.rollout.max_new_tokens, cfg.eval.temperature, parts.tokenizer.eos_ids)
        grading = parts.grading(examples, truncated=True)
        results = evaluate(engine.generate, grading, cfg.eval.samples, sampling, seeds)
        engine.sleep()
        scores = [value for result in results for value in result.pass_at_1_prompts if not math.isnan(value)]
        return {"pass@1": statistics.fmean(scores), "error": standard_error(scores)}

    def close(self) -> None:
        for engine in self._engines.values():
            engine.close()
        if self._rewards is not None:
            self._rewards.close()


def _short(value: float | None) -> float | None:
    """Four significant digits are enough for a curve."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.4g}")
