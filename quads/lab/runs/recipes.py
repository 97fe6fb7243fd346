"""`python -m quads.lab recipes --config CONFIG [--seeds 3]`: the six recipes side by side, and any other arms.

Each run is `train.py` in a process of its own, in OUT/ARM_seedK, with the config as it stands but for the arm's
overrides and the seed; `--jobs` run at the same time, dealt out to the GPUs. An arm is a recipe, or what `--arm` names:

    --arm quads_token '--quant.recipe quads --quant.residual_selection token'

A long comparison can be made in several parts (see arms.py); `--minutes` ends a part, and `--minutes 0` draws what is
there. Where runs have got to different steps, all are cut at the last step that every run has, or at `--at STEP`, where
runs that have not got there are left out and named. The table has means over seeds, with the lowest and the highest
behind them where there are several:

    reward       mean training reward of the first 5 and of the last 5 steps
    pass@1       held-out score at the last evaluation
    gap mean     |learner log-prob - rollout log-prob| of the sampled tokens, mean over tokens and steps
    gap max      the largest of any token in any step (in brackets: lowest and highest over seeds)
    time         of all steps, evaluation included
"""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quads.errors import UserError
from quads.lab import style
from quads.lab.runs import curves
from quads.lab.runs.arms import Arm, Run, execute, plan
from quads.lab.results import config_parser, markdown, number, progress, provenance, write_result
from quads.config.options import real, whole
from quads.rl.scores import standard_error

HELP = "train the same config under each of the six recipes, and other arms; one table and one picture"

RECIPES = ("bf16", "fp8", "naive", "qat", "symmetric", "quads")
EDGE_STEPS = 5  # of the first and of the last reward
PEAK_STEPS = 10  # whose mean reward is a peak


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
        "truncated_last": mean(values("response/truncated_frac")[-PEAK_STEPS:]),
        "reward_peak": max((mean(part) for part in windows(rewards, PEAK_STEPS)), default=float("nan")),
        "pass_at_1": scores[-1] if scores else float("nan"),
        "pass_at_1_best": max(scores, default=float("nan")),
        "gap_mean": mean(values("mismatch/logprob_abs_mean")),
        "gap_max": max(gaps, default=float("nan")),
        "kl_k3": mean(values("mismatch/kl_k3")),
        "time_s": sum(values("time/step_s")),
        "steps": len(rows),
    }


def windows(values: Sequence[float], size: int) -> list[Sequence[float]]:
    """All stretches of `size` neighbours; all of it where there are fewer."""
    return [values[i : i + size] for i in range(max(1, len(values) - size + 1))] if values else []


def cut(runs: Sequence[Run], at: int = 0) -> tuple[int, dict[Run, list[dict[str, Any]]]]:
    """(the step, the rows up to it of each run that has it). at = 0: the last step that every run has."""
    rows_of_runs = {run: run.rows() for run in runs}
    last = at or min(rows[-1]["step"] for rows in rows_of_runs.values())
    kept = {run: rows for run, rows in rows_of_runs.items() if rows[-1]["step"] >= last}
    if not kept:
        raise UserError(
            f"no run has step {last}; the longest one has {max(r[-1]['step'] for r in rows_of_runs.values())}"
        )
    return last, {run: [row for row in rows if row["step"] <= last] for run, rows in kept.items()}


def paired(runs: Sequence[Run]) -> dict[str, list[dict[str, float]]]:
    """ "A - B" -> for each seed of both arms, the mean difference of their rewards over all steps that both have, with
    its standard error. The runs of a seed see the same prompts in the same steps, which varies more than most arms do.
    """
    rewards = {(run.arm, run.seed): [row["reward/mean"] for row in run.rows()] for run in runs}
    result: dict[str, list[dict[str, float]]] = {}
    for (a, seed), of_a in rewards.items():
        for (b, other), of_b in rewards.items():
            count = min(len(of_a), len(of_b))
            if a == b or seed != other or f"{b} - {a}" in result or count < 2:
                continue
            differences = [x - y for x, y in zip(of_a, of_b, strict=False)]
            error = standard_error(differences)
            entry = {"seed": seed, "steps": count, "mean": statistics.fmean(differences), "error": error}
            result.setdefault(f"{a} - {b}", []).append(entry)
    return result


def summarize(runs: Sequence[Run], measured: Sequence[dict[str, float]]) -> dict[str, dict[str, dict[str, float]]]:
    """arm -> quantity -> {mean, low, high} over seeds."""
    summary: dict[str, dict[str, dict[str, float]]] = {}
    for arm in dict.fromkeys(run.arm for run in runs):
        of_seeds = [m for run, m in zip(runs, measured, strict=True) if run.arm == arm]
        summary[arm] = {
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
            arm,
            f"{s['reward_first']['mean']:.3f} -> {cell(s['reward_last'], '.3f')}",
            cell(s["pass_at_1"], ".3f"),
            cell(s["gap_mean"]),
            cell(s["gap_max"]),
            f"{s['time_s']['mean']:.0f} s",
        ]
        for arm, s in summary.items()
    ]
    return markdown(["arm", "reward, first 5 -> last 5 steps", "pass@1", "gap mean", "gap max", "time"], rows)


def main(argv: list[str]) -> None:
    parser = config_parser("recipes", HELP)
    parser.set_defaults(out=Path("lab/recipes"))
    parser.add_argument("--seeds", type=whole(1), default=1, help="runs an arm, seeds 0, 1, ... (default: 1)")
    parser.add_argument("--recipes", default=",".join(RECIPES), help="which, comma-separated (default: all six)")
    parser.add_argument(
        "--arm", nargs=2, action="append", default=[], metavar=("NAME", "OVERRIDES"), help="a further arm, see above"
    )
    parser.add_argument("--jobs", type=whole(1), default=1, help="runs at the same time (default: 1)")
    parser.add_argument(
        "--minutes", type=real(above=0.0), default=None, help="stop training then, and compare what there is"
    )
    parser.add_argument(
        "--at", type=whole(0), default=0, help="compare at this step (default: the last that all runs have)"
    )
    parser.add_argument("--name", default="recipes", help="of JSON, table and picture (default: recipes)")
    args, overrides = parser.parse_known_args(argv)
    recipes = [name for name in args.recipes.split(",") if name]
    unknown = [name for name in recipes if name not in RECIPES]
    if unknown:
        raise UserError(f"--recipes {args.recipes}: use recipes of {RECIPES}")
    further = [Arm.parse(*words) for words in args.arm]
    arms = [*map(Arm.recipe, recipes), *further]
    names = [arm.name for arm in arms]
    if not arms or len(set(names)) < len(names):
        raise UserError(f"arms {', '.join(names) or 'none'}: name at least one, and each once")
    groups = [arms[: len(recipes)], further]  # all seeds of the recipes come first
    runs = [run for group in groups for run in plan(args.config, overrides, group, range(args.seeds), args.out)]
    cfg = [run.config() for run in runs][0]  # a wrong config is an error before anything runs
    args.out.mkdir(parents=True, exist_ok=True)
    missing = [run for run in runs if not run.is_complete()]
    progress(f"{len(runs)} runs of {cfg.train.steps} steps, {len(runs) - len(missing)} of them done already")
    problems = execute(missing, args.jobs, args.minutes)
    started = [run for run in runs if run.rows()]
    if started:
        about = provenance("recipes", argv, cfg, range(args.seeds))
        print(compare(args.out / f"{args.name}.json", started, arms, about, args.at))
    if problems or not started:
        raise UserError("\n".join(problems) or "no run has made a step; give more --minutes")


def compare(path: Path, runs: Sequence[Run], arms: Sequence[Arm], about: dict[str, Any], at: int = 0) -> str:
    """Write `path` (JSON), and .md and .png beside it, about runs that have made a step; returns the table."""
    last, rows = cut(runs, at)
    kept = list(rows)
    measured = [measure(of_run) for of_run in rows.values()]
    summary = summarize(kept, measured)
    text = table(summary, several=len(kept) > len(summary))
    data = {
        "last_step": last,
        "arms": {arm.name: " ".join(arm.overrides) for arm in arms},
        "summary": summary,
        "runs": [
            {"arm": run.arm, "seed": run.seed, "steps_made": run.rows()[-1]["step"], **m, "made": run.made_by()}
            for run, m in zip(kept, measured, strict=True)
        ],
        "left_out": {run.out.name: run.rows()[-1]["step"] for run in runs if run not in rows},
        "paired": paired(kept),
        "curves": curves.collect([run.out for run in kept], last),
        "table": text,
    }
    made = {(of_run["made"].get("machine"), of_run["made"].get("commit")) for of_run in data["runs"]}
    trained = [f"{machine}, commit {commit}" for machine, commit in sorted(made, key=str)]
    write_result(path.parent, path.stem, {**about, "trained_on": trained}, data)
    path.with_suffix(".md").write_text(text + "\n", encoding="utf-8")
    style.save(curves.figure(data["curves"]), path.with_suffix(".png"))
    left_out = "".join(f"\nleft out: {name} with {step} steps" for name, step in data["left_out"].items())
    return f"{text}\n\nat step {last}; wrote {path}, .md and .png{left_out}"
