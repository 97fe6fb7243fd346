"""The command that judges a checkpoint (scores.py has what it reports).

    python -m quads.rl.evaluate --config configs/tiny_quads.toml --checkpoint runs/tiny_quads
        [--rollouts bf16,w4a4_residual] [--out eval.json]

judges a checkpoint with the engine of the config, under the rollout precision of the config or under several side by
side: with the same prompts and seeds, so that the difference to the first one has a standard error of its own. Each of
several is judged by a process of its own: vLLM does not give back all the memory of an engine that was closed.
"""

import json
import math
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from quads.assemble import build_parts
from quads.config import Config, load_config
from quads.config.options import take_option
from quads.distributed import init_distributed
from quads.errors import UserError, main_guard
from quads.rl.scores import EvalResult, format_side_by_side, format_table
from quads.run.metrics import jsonable
from quads.sandbox.helpers import REPOSITORY

OPTIONS = """usage: python -m quads.rl.evaluate --config FILE [--checkpoint RUN] [--rollouts LIST] [--out FILE]

  --checkpoint RUN   run or checkpoint folder whose weights are judged (default: those that [model] starts from)
  --rollouts LIST    rollout precisions to judge side by side, e.g. bf16,w4a4_residual (default: that of the config)
  --out FILE         also write the results as JSON
It takes all options of train.py:
"""


@main_guard
def main(argv: list[str]) -> None:
    """Evaluate one checkpoint; see the module's docstring."""
    if {"--help", "-h"} & set(argv):
        print(OPTIONS)  # the keys of the config follow
    argv = list(argv)
    checkpoint, out, rollouts = (take_option(argv, name) for name in ("--checkpoint", "--out", "--rollouts"))
    names = list(dict.fromkeys(name.strip() for name in rollouts.split(",")))
    if rollouts and not all(names):
        raise UserError(f"--rollouts {rollouts}: precisions separated by commas, such as bf16,w4a4_residual")
    if out and not Path(out).absolute().parent.is_dir():
        raise UserError(f"--out {out}: the folder does not exist; make it first")
    choices = [["--quant.rollout", name] for name in names] if rollouts else [[]]
    configs = [load_config([*argv, *choice]) for choice in choices]  # all of them are checked before anything runs
    if len(names) == 1:
        rows = judge(configs[0], checkpoint)
    else:
        rows = [row for i, choice in enumerate(choices) for row in judge_apart([*argv, *choice], checkpoint, i)]
    if rows and os.environ.get("RANK", "0") == "0":
        if len(names) > 1:
            print(format_side_by_side({name: _results(rows, name) for name in names}))
        if out:
            report = {"config": configs[0].path, "checkpoint": checkpoint, "results": rows}
            Path(out).write_text(json.dumps(jsonable(report), indent=2, allow_nan=False) + "\n")


def judge(cfg: Config, checkpoint: str) -> list[dict[str, Any]]:
    """Evaluate under one precision and print the table -> the results as JSON has them; none for a dry run."""
    with init_distributed(cfg.parallel, cfg.train) as world:
        parts = build_parts(cfg, world, checkpoint=checkpoint)
        if parts is None:
            return []
        try:
            results = parts.evaluate(step=0)
        finally:
            parts.close()
        world.print(f"rollout {parts.spec.rollout}\n{format_table(results)}")
        return [{"rollout": parts.spec.rollout, **asdict(result)} for result in results]


def judge_apart(argv: list[str], checkpoint: str, number: int) -> list[dict[str, Any]]:
    """`judge` in a process of its own, the `number`-th. Under torchrun each process starts one; they form a group."""
    path = os.pathsep.join(filter(None, [REPOSITORY, os.environ.get("PYTHONPATH", "")]))
    environment = {**os.environ, "PYTHONPATH": path}
    if "MASTER_PORT" in os.environ:
        # torchrun's own store keeps the addresses of an earlier group; each group gets a store on a port of its own.
        port = int(os.environ["MASTER_PORT"]) + 1 + number
        environment |= {"TORCHELASTIC_USE_AGENT_STORE": "False", "MASTER_PORT": str(port)}
    with tempfile.TemporaryDirectory(prefix="quads-eval-") as folder:
        file = Path(folder) / "results.json"
        inputs = ["--checkpoint", checkpoint] if checkpoint else []
        command = [sys.executable, "-m", "quads.rl.evaluate", *argv, *inputs, "--out", str(file)]
        sys.stdout.flush()
        status = subprocess.run(command, env=environment).returncode
        if status:
            raise SystemExit(status)  # it has said why
        return json.loads(file.read_text())["results"] if file.exists() else []


def _results(rows: list[dict[str, Any]], rollout: str) -> list[EvalResult]:
    names = [field.name for field in fields(EvalResult)]
    results = [EvalResult(**{name: row[name] for name in names}) for row in rows if row["rollout"] == rollout]
    # JSON has null for the NaN of a prompt, or of a source, without any verdict.
    nan = lambda value: math.nan if value is None else value  # noqa: E731
    return [
        replace(r, pass_at_1=nan(r.pass_at_1), pass_at_1_prompts=[nan(value) for value in r.pass_at_1_prompts])
        for r in results
    ]


if __name__ == "__main__":
    main(sys.argv[1:])
