"""`python -m quads.lab curves RUN [RUN ...]`: reward, test score and gap over the steps of any set of runs.

Folders named NAME_seed0, NAME_seed1, ... are one arm: its mean over seeds, in a band from lowest to highest (paper,
Figs. 1, 3, 5, 6 and 8). The table has the first and the last steps of each arm.
"""

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from quads.errors import UserError
from quads.lab import style
from quads.lab.results import markdown, number, provenance, write_result
from quads.plot import RECIPE_COLOURS, SMOOTHED_FROM, Curves, running_mean
from quads.run.folder import read_rows

HELP = "reward, test score and gap over steps, seeds as bands"

PANELS = {
    "reward/mean": "training reward",
    "eval/pass@1": "test score (pass@1)",
    "mismatch/logprob_abs_mean": "log-prob gap, mean over tokens (nats)",
    "mismatch/logprob_abs_max": "log-prob gap, largest (nats)",
    "policy/ratio_clip_frac": "tokens with a clipped ratio",
    "policy/entropy": "entropy of the policy (nats)",
}
MAX_POINTS = 150  # of a curve in the JSON; longer ones are thinned evenly
EDGE = 5  # steps averaged at the beginning and at the end


def collect(runs: Sequence[Path], last: int | None = None) -> dict[str, Any]:
    """{arm: {"seeds": n, "curves": {key: {"steps", "mean", "low", "high"}}}}, up to step `last`.

    Raises UserError for a run without rows.
    """
    arms: dict[str, list[Path]] = {}
    for run in runs:
        arms.setdefault(re.sub(r"[_-]seed\d+$", "", run.resolve().name), []).append(run)
    return {name: _arm([_rows(run, last) for run in seeds]) for name, seeds in arms.items()}


def _rows(run: Path, last: int | None) -> list[dict[str, Any]]:
    file = run / "metrics.jsonl"
    rows = [row for row in read_rows(file) if last is None or row["step"] <= last] if file.exists() else []
    if not rows:
        raise UserError(f"{file} has no row; give the folders of runs that have made a step")
    return rows


def _arm(rows_of_seeds: list[list[dict[str, Any]]]) -> dict[str, Any]:
    curves = Curves(rows_of_seeds)
    data = {}
    for key in PANELS:
        steps, values = curves.points(key)
        if len(steps) == 0:
            continue
        kept = numpy.unique(numpy.linspace(0, len(steps) - 1, min(MAX_POINTS, len(steps))).round().astype(int))
        data[key] = {
            "steps": steps[kept].tolist(),
            "mean": numpy.nanmean(values, axis=0)[kept].tolist(),
            "low": numpy.nanmin(values, axis=0)[kept].tolist(),
            "high": numpy.nanmax(values, axis=0)[kept].tolist(),
        }
    return {"seeds": curves.num_seeds, "curves": data}


def figure(arms: dict[str, Any]) -> Figure:
    """One panel a quantity, one colour an arm; the line of a long curve is a running mean over a fifteenth of it."""
    keys = [key for key in PANELS if any(key in arm["curves"] for arm in arms.values())]
    if not keys:
        raise UserError(f"none of {', '.join(PANELS)} is in these runs: nothing to draw")
    columns = min(3, len(keys))
    fig, axes = style.new_figure(columns, -(-len(keys) // columns), width=4.6, height=3.2)
    colours = arm_colours(list(arms))
    for ax, key in zip(axes, keys, strict=False):
        for name, arm in arms.items():
            curve = arm["curves"].get(key)
            if curve is None:
                continue
            if arm["seeds"] > 1:
                ax.fill_between(curve["steps"], curve["low"], curve["high"], color=colours[name], alpha=0.18, lw=0)
            marker = "o" if key.startswith("eval/") or len(curve["steps"]) == 1 else ""
            mean = numpy.array(curve["mean"])
            if len(mean) >= SMOOTHED_FROM:
                mean = running_mean(mean, max(3, len(mean) // 15))
            ax.plot(curve["steps"], mean, color=colours[name], lw=1.6, marker=marker, ms=3.5)
        if key.startswith("mismatch/"):
            ax.set_yscale("log", nonpositive="mask")
        style.finish(ax, PANELS[key], "step", "")
        style.whole_numbers(ax.xaxis)
    for ax in axes[len(keys) :]:
        ax.set_visible(False)
    labels = {name: name + (f" ({arm['seeds']} seeds)" if arm["seeds"] > 1 else "") for name, arm in arms.items()}
    handles = [Line2D([], [], color=colours[name], lw=2.5, label=labels[name]) for name in arms]
    fig.legend(handles=handles, loc="outside lower center", ncols=min(len(arms), 6), frameon=False, fontsize=9.5,
               labelcolor=style.INK)  # fmt: skip
    return fig


def arm_colours(names: Sequence[str]) -> dict[str, str]:
    """A recipe's name at the end of an arm's name decides; other arms take what is left."""
    chosen: dict[str, str] = {}
    for name in names:
        colour = RECIPE_COLOURS.get(re.split(r"[_\-.]", name)[-1])
        if colour and colour not in chosen.values():
            chosen[name] = colour
    free = [colour for colour in (*style.SEQUENCE, "#332288", "#882255", "#999933") if colour not in chosen.values()]
    others = [name for name in names if name not in chosen]
    return chosen | {name: free[i % len(free)] for i, name in enumerate(others)}


def tables(arms: dict[str, Any]) -> str:
    """Markdown."""

    def edge(arm: dict[str, Any], key: str, part: slice) -> str:
        values = arm["curves"].get(key, {}).get("mean", [])[part]
        return number(sum(values) / len(values)) if values else "-"

    first, last = slice(None, EDGE), slice(-EDGE, None)
    rows = [
        [
            name,
            str(arm["seeds"]),
            f"{edge(arm, 'reward/mean', first)} -> {edge(arm, 'reward/mean', last)}",
            edge(arm, "eval/pass@1", slice(-1, None)),
            f"{edge(arm, 'mismatch/logprob_abs_mean', first)} -> {edge(arm, 'mismatch/logprob_abs_mean', last)}",
            f"{edge(arm, 'mismatch/logprob_abs_max', first)} -> {edge(arm, 'mismatch/logprob_abs_max', last)}",
        ]
        for name, arm in arms.items()
    ]
    return markdown(["arm", "seeds", "reward", "pass@1, last", "gap mean", "gap max"], rows)


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m quads.lab curves", description=HELP)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run folders")
    parser.add_argument("--out", type=Path, default=Path("lab"), help="folder for JSON and PNG (default: lab)")
    args = parser.parse_args(argv)
    arms = collect(args.runs)
    path = write_result(args.out, "curves", provenance("curves", argv), {"arms": arms})
    style.save(figure(arms), path.with_suffix(".png"))
    print(tables(arms))
    print(f"\nwrote {path} and curves.png")
