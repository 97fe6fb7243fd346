"""Curves of one or several runs in one picture: training reward, test score, and the log-prob gap.

    python -m quads.plot RUN [RUN ...] [--out FILE]

RUN is a run's folder. Folders named NAME_seed0, NAME_seed1, ... are drawn as one curve: the mean over seeds in a band
from the lowest to the highest. Without --out the picture goes to plots/curves.png of a single run, or to curves.png
here.
"""

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from quads.errors import UserError, main_guard
from quads.run.folder import read_rows

PANELS = (
    ("reward/mean", "training reward"),
    ("eval/pass@1", "test score (pass@1)"),
    ("mismatch/logprob_abs_mean", "log-prob gap, mean over tokens"),
    ("mismatch/logprob_abs_max", "log-prob gap, largest"),
)
# One colour a recipe in every picture, from Okabe and Ito's set that colour-blind readers can tell apart.
RECIPE_COLOURS = {
    "bf16": "#0072B2",
    "fp8": "#56B4E9",
    "naive": "#D55E00",
    "qat": "#E69F00",
    "symmetric": "#CC79A7",
    "quads": "#009E73",
}
OTHER_COLOURS = ("#332288", "#882255", "#117733", "#999933", "#661100", "#6699CC", "#888888")
SMOOTHED_FROM = 30  # a curve of so many points is drawn faintly, with its running mean on top


class Curves:
    """Metrics of the seeds of one run: `values[key]` is [seeds, steps], NaN where a seed lacks a value."""

    def __init__(self, rows_of_seeds: Sequence[list[dict[str, float | None]]]) -> None:
        self.steps = sorted({int(row["step"] or 0) for rows in rows_of_seeds for row in rows})
        self.num_seeds = len(rows_of_seeds)
        at = {step: i for i, step in enumerate(self.steps)}
        keys = {key for rows in rows_of_seeds for row in rows for key in row}
        self.values = {key: numpy.full((self.num_seeds, len(self.steps)), numpy.nan) for key in keys}
        for seed, rows in enumerate(rows_of_seeds):
            for row in rows:
                for key, value in row.items():
                    if isinstance(value, int | float):
                        self.values[key][seed, at[int(row["step"] or 0)]] = value

    def points(self, key: str) -> tuple[NDArray, NDArray]:
        """(steps [N], values [seeds, N]) where any seed has `key`; N may be 0."""
        values = self.values.get(key, numpy.full((self.num_seeds, len(self.steps)), numpy.nan))
        present = ~numpy.isnan(values).all(axis=0)
        return numpy.array(self.steps)[present], values[:, present]


def plot_runs(runs: Sequence[Path], out: Path) -> None:
    """Write the picture of `runs` to `out` (PNG, or what the suffix says).

    Raises:
        UserError: a run has no metrics.jsonl, or no row in it yet.
    """
    groups: dict[str, list[Path]] = {}
    for run in runs:
        groups.setdefault(re.sub(r"[_-]seed\d+$", "", run.resolve().name), []).append(run)
    figure = draw({name: Curves([_read(run) for run in seeds]) for name, seeds in groups.items()})
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=130)


def draw(curves: dict[str, Curves]) -> Figure:
    """One panel for each of PANELS that any run has, one colour a run, one legend below."""
    panels = [panel for panel in PANELS if any(len(c.points(panel[0])[0]) for c in curves.values())]
    if not panels:
        raise UserError(f"none of {', '.join(key for key, _ in PANELS)} is in metrics.jsonl: nothing to draw")
    columns = 2 if len(panels) in (2, 4) else len(panels)
    rows = len(panels) // columns
    width = 4.8 * columns
    figure = Figure(figsize=(width, 3.4 * rows + 0.4), layout="constrained", facecolor="white")
    colours = _colours(list(curves))
    for ax, (key, title) in zip(figure.subplots(rows, columns, squeeze=False).flat, panels, strict=True):
        for name, c in curves.items():
            _draw_curve(ax, c, key, colours[name])
        if key.startswith("mismatch/") and _spans_a_decade([c.points(key)[1] for c in curves.values()]):
            ax.set_yscale("log", nonpositive="mask")
        _finish(ax, title)
    handles = [Line2D([], [], color=colours[name], lw=2.5, label=_label(name, c)) for name, c in curves.items()]
    entry = 0.8 + 0.09 * max(len(str(handle.get_label())) for handle in handles)  # inches of one entry at 10 points
    num_columns = max(1, min(len(handles), int(width / entry)))
    figure.legend(handles=handles, loc="outside lower center", ncols=num_columns, frameon=False, fontsize=10)
    return figure


def _read(run: Path) -> list[dict[str, float | None]]:
    file = run / "metrics.jsonl"
    if not file.exists():
        raise UserError(f"no run in {run}: {file} does not exist")
    rows = read_rows(file)
    if not rows:
        raise UserError(f"{file} has no row yet: nothing to draw")
    return rows


def _draw_curve(ax: Axes, curves: Curves, key: str, colour: str) -> None:
    """Mean over seeds in a band from lowest to highest; a long curve gets its running mean on top."""
    steps, values = curves.points(key)
    if not len(steps):
        return
    mean = numpy.nanmean(values, axis=0)
    if curves.num_seeds > 1:
        low, high = numpy.nanmin(values, axis=0), numpy.nanmax(values, axis=0)
        ax.fill_between(steps, low, high, color=colour, alpha=0.15, lw=0)
    if len(steps) >= SMOOTHED_FROM:
        ax.plot(steps, mean, color=colour, lw=0.8, alpha=0.3)
        mean = running_mean(mean, max(3, len(steps) // 15))
    ax.plot(steps, mean, color=colour, lw=1.8, marker="o" if key.startswith("eval/") or len(steps) == 1 else "", ms=3.5)


def _finish(ax: Axes, title: str) -> None:
    ax.set_title(title, loc="left", fontsize=11, fontweight="bold", color="#222222")
    ax.set_xlabel("step", fontsize=10, color="#333333")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    ax.grid(alpha=0.25, lw=0.6)
    ax.spines[["top", "right"]].set_visible(False)
    ax.tick_params(labelsize=9, colors="#333333")


def _spans_a_decade(values: Sequence[NDArray]) -> bool:
    """Positive values that differ tenfold: what a logarithmic axis is for, and what gives it ticks."""
    positive = numpy.concatenate([v[v > 0].ravel() for v in values])
    return len(positive) > 0 and bool(positive.max() > 10 * positive.min())


def running_mean(values: NDArray, width: int) -> NDArray:
    """Centred; near the ends over what there is."""
    kernel = numpy.ones(width)
    return numpy.convolve(values, kernel, "same") / numpy.convolve(numpy.ones_like(values), kernel, "same")


def _colours(names: list[str]) -> dict[str, str]:
    """A run whose name ends with a recipe, such as tiny_quads, gets that recipe's colour; the first of several does."""
    chosen: dict[str, str] = {}
    for name in names:
        colour = RECIPE_COLOURS.get(re.split(r"[_\-.]", name)[-1])
        if colour and colour not in chosen.values():
            chosen[name] = colour
    free = [c for c in (*OTHER_COLOURS, *RECIPE_COLOURS.values()) if c not in chosen.values()]
    others = [name for name in names if name not in chosen]
    return chosen | {name: free[i % len(free)] for i, name in enumerate(others)}


def _label(name: str, curves: Curves) -> str:
    return f"{name} ({curves.num_seeds} seeds)" if curves.num_seeds > 1 else name


@main_guard
def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m quads.plot", description="Draw the curves of runs in one picture.")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run's folder")
    parser.add_argument("--out", type=Path, help="picture file")
    args = parser.parse_args(argv)
    out = args.out or (args.runs[0] / "plots" / "curves.png" if len(args.runs) == 1 else Path("curves.png"))
    plot_runs(args.runs, out)
    print(f"wrote {out}")


if __name__ == "__main__":
    main(sys.argv[1:])
