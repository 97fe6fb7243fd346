"""`python -m quads.lab recipes --config CONFIG [--seeds 3]`: the six recipes side by side.

Each run is `train.py` in a process of its own, in OUT/RECIPE_seedK, with the config as it stands but for the recipe and
the seed. A run that is complete in its folder, of the same config, is not run again; so a long comparison can be made
in several parts. The table has means over seeds, with the lowest and the highest behind them where there are several:

    reward       mean training reward of the first 5 and of the last 5 steps
    pass@1       held-out score at the last evaluation
    gap mean     |learner log-prob - rollout log-prob| of the sampled tokens, mean over tokens and steps
    gap max      the largest of any token in any step (in brackets: lowest and highest over seeds)
    time         of all steps, evaluation included
"""

import concurrent.futures
import dataclasses
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quads.config import Config, load_config
from quads.errors import UserError
from quads.lab import curves, style
from quads.lab.results import config_argv, config_parser, markdown, number, progress, provenance, write_result
from quads.run_folder import read_rows

HELP = "train the same config under each of the six recipes; one table and one picture"

RECIPES = ("bf16", "fp8", "naive", "qat", "symmetric", "quads")
TRAIN = Path(__file__).resolve().parents[2] / "train.py"
EDGE_STEPS = 5  # of the first and of the last reward


@dataclasses.dataclass(frozen=True)
class Run:
    """One training run of the comparison."""

    recipe: str
    seed: int
    out: Path
    argv: tuple[str, ...]  # of train.py

    def config(self) -> Config:
        return load_config(list(self.argv))

    def is_complete(self) -> bool:
        """All steps of this very config are in the folder."""
        if not (self.out / "config.toml").is_file() or not (self.out / "metrics.jsonl").is_file():
            return False
        cfg = self.config()
        try:
            stored = load_config(["--config", str(self.out / "config.toml")])
        except UserError:
            return False  # of a version with other keys
        rows = read_rows(self.out / "metrics.jsonl")
        return stored == cfg and bool(rows) and rows[-1]["step"] == cfg.train.steps


def plan(config: str, overrides: Sequence[str], recipes: Sequence[str], seeds: Sequence[int], out: Path) -> list[Run]:
    """Seed by seed, so that a comparison that is cut short has whole seeds."""
    return [
        Run(recipe, seed, run_out, (
            *config_argv(config, overrides),
            "--quant.recipe", recipe, "--train.seed", str(seed), "--train.out", str(run_out),
        ))
        for seed in seeds
        for recipe in recipes
        for run_out in [out / f"{recipe}_seed{seed}"]
    ]  # fmt: skip


def execute(run: Run) -> None:
    """Train, with the console in OUT/RECIPE_seedK.log. Raises UserError with the end of that log if it fails."""
    log = run.out.with_suffix(".log")
    started = time.monotonic()
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TRAIN.parent), os.environ.get("PYTHONPATH", "")])}
    with open(log, "w", encoding="utf-8") as file:
        status = subprocess.run([sys.executable, str(TRAIN), *run.argv], stdout=file, stderr=file, env=env).returncode
    if status:
        end = "\n".join(log.read_text(encoding="utf-8").splitlines()[-12:])
        raise UserError(f"{run.out.name} ended with status {status}; the end of {log}:\n{end}")
    progress(f"{run.out.name}: {time.monotonic() - started:.0f} s")


def measure(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The numbers of one run's metrics.jsonl."""

    def values(key: str) -> list[float]:
        return [row[key] for row in rows if row.get(key) is not None]

    def mean(numbers: Sequence[float]) -> float:
        return sum(numbers) / len(numbers) if numbers else float("nan")

    rewards, scores, gaps = values("reward/mean"), values("eval/pass@1"), values("mismatch/logprob_abs_max")
    return {
        "reward_first": mean(rewards[:EDGE_STEPS]),
        "reward_last": mean(rewards[-EDGE_STEPS:]),
        "pass_at_1": scores[-1] if scores else float("nan"),
        "gap_mean": mean(values("mismatch/logprob_abs_mean")),
        "gap_max": max(gaps, default=float("nan")),
        "kl_k3": mean(values("mismatch/kl_k3")),
        "time_s": sum(values("time/step_s")),
        "steps": len(rows),
    }


def summarize(runs: Sequence[Run], measured: Sequence[dict[str, float]]) -> dict[str, dict[str, dict[str, float]]]:
    """recipe -> quantity -> {mean, low, high} over seeds."""
    summary: dict[str, dict[str, dict[str, float]]] = {}
    for recipe in dict.fromkeys(run.recipe for run in runs):
        of_seeds = [m for run, m in zip(runs, measured, strict=True) if run.recipe == recipe]
        summary[recipe] = {
            key: {"mean": sum(v) / len(v), "low": min(v), "high": max(v)}
            for key in of_seeds[0]
            for v in [[m[key] for m in of_seeds]]
        }
    return summary


def table(summary: dict[str, dict[str, dict[str, float]]], several: bool) -> str:
    """Markdown."""

    def cell(entry: dict[str, float], form: str = "") -> str:
        low, mean, high = (format(entry[k], form) if form else number(entry[k]) for k in ("low", "mean", "high"))
        return f"{mean} ({low} to {high})" if several else mean

    rows = [
        [
            recipe,
            f"{s['reward_first']['mean']:.3f} -> {cell(s['reward_last'], '.3f')}",
            cell(s["pass_at_1"], ".3f"),
            cell(s["gap_mean"]),
            cell(s["gap_max"]),
            f"{s['time_s']['mean']:.0f} s",
        ]
        for recipe, s in summary.items()
    ]
    return markdown(["recipe", "reward, first 5 -> last 5 steps", "pass@1", "gap mean", "gap max", "time"], rows)


def main(argv: list[str]) -> None:
    parser = config_parser("recipes", HELP)
    parser.set_defaults(out=Path("lab/recipes"))
    parser.add_argument("--seeds", type=int, default=1, help="runs an arm, seeds 0, 1, ... (default: 1)")
    parser.add_argument("--recipes", default=",".join(RECIPES), help="which, comma-separated (default: all six)")
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time (default: 1)")
    args, overrides = parser.parse_known_args(argv)
    recipes = args.recipes.split(",")
    unknown = [recipe for recipe in recipes if recipe not in RECIPES]
    if unknown or args.seeds < 1:
        raise UserError(
            f"--recipes {args.recipes} --seeds {args.seeds}: use at least one seed and recipes of {RECIPES}"
        )
    runs = plan(args.config, overrides, recipes, range(args.seeds), args.out)
    cfg = runs[0].config()  # a wrong config is an error before anything runs
    args.out.mkdir(parents=True, exist_ok=True)
    missing = [run for run in runs if not run.is_complete()]
    progress(f"{len(runs)} runs of {cfg.train.steps} steps, {len(runs) - len(missing)} of them done already")
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        list(pool.map(execute, missing))

    measured = [measure(read_rows(run.out / "metrics.jsonl")) for run in runs]
    summary = summarize(runs, measured)
    text = table(summary, several=args.seeds > 1)
    about = provenance("recipes", argv, cfg, range(args.seeds))
    data = {
        "summary": summary,
        "runs": [{"recipe": run.recipe, "seed": run.seed, **m} for run, m in zip(runs, measured, strict=True)],
        "curves": curves.collect([run.out for run in runs]),
        "table": text,
    }
    path = write_result(args.out, "recipes", about, data)
    path.with_suffix(".md").write_text(text + "\n", encoding="utf-8")
    style.save(curves.figure(data["curves"]), path.with_suffix(".png"))
    print(text)
    print(f"\nwrote {path}, recipes.md and recipes.png")
