"""The RL half of the table as Markdown and as a picture. What is missing is shown as missing."""

import statistics
from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from quads.lab import style
from quads.lab.formats.axes import START, UNQUANTIZED, Axes, Cell
from quads.lab.results import markdown

JUDGED = {"own": "own precision", "bf16": "bf16"}


def values(data: dict[str, Any], row: str, column: str, correction: str, seeds: int, judged: str) -> list[float | None]:
    """pass@1 of each seed; None where it is missing."""
    cells = [data["cells"].get(Cell(row, column, correction, seed).key) for seed in range(seeds)]
    return [None if cell is None else cell[judged]["pass@1"] for cell in cells]


def cell_text(found: Sequence[float | None], failed: bool) -> str:
    """ "0.413 (0.402, 0.424)"; a missing seed is a dash; nothing at all: "missing", or "failed" """
    known = [value for value in found if value is not None]
    if not known:
        return "failed" if failed else "missing"
    each = ", ".join("-" if value is None else f"{value:.3f}" for value in found)
    return f"{statistics.fmean(known):.3f} ({each})"


def tables(data: dict[str, Any], axes: Axes) -> str:
    """Markdown: one table for each way to judge."""
    parts = []
    for judged, words in JUDGED.items():
        lines = []
        for row in axes.rows:
            for correction in (START, *axes.corrections):
                of_row = []
                for column in axes.columns:
                    number = 1 if correction == START else axes.seeds
                    found = values(data, row, column, correction, number, judged)
                    keys = {Cell(row, column, correction, seed).key for seed in range(number)}
                    of_row.append(cell_text(found, bool(keys & data["failed"].keys())))
                lines.append([f"{row}, {correction}", *of_row])
        plain = values(data, *UNQUANTIZED, axes.corrections[0], axes.seeds, judged)
        start = values(data, *UNQUANTIZED, START, 1, judged)
        title = f"pass@1 after {data['settings']['steps']} steps, judged in {words}: mean (each seed)"
        baseline = f"Nothing quantized: {cell_text(plain, False)}; before training: {cell_text(start, False)}."
        parts.append(f"{title}\n\n{markdown(['recipe, correction', *axes.columns], lines)}\n\n{baseline}")
    return "\n\n".join(parts)


def figure(data: dict[str, Any], axes: Axes) -> Figure:
    """A panel for each format: recipes along x, a mark for each seed; filled in own precision, hollow in bf16."""
    fig, panels = style.new_figure(columns=len(axes.columns), width=max(3.2, 0.62 * len(axes.rows)), height=3.6)
    width = 0.8 / len(axes.corrections)
    for ax, column in zip(panels, axes.columns, strict=True):
        for place, row in enumerate(axes.rows):
            for i, correction in enumerate(axes.corrections):
                x = place - 0.4 + width * (i + 0.5)
                colour = style.SEQUENCE[i]
                for judged, face in (("own", colour), ("bf16", "none")):
                    y = [v for v in values(data, row, column, correction, axes.seeds, judged) if v is not None]
                    ax.plot([x] * len(y), y, "o", ms=5, mec=colour, mfc=face, mew=1.4, ls="none")
            start = values(data, row, column, START, 1, "own")[0]
            if start is not None:
                ax.plot([place - 0.4, place + 0.4], [start, start], color=style.GREY, lw=1.2, ls=":")
        base = [v for v in values(data, *UNQUANTIZED, axes.corrections[0], axes.seeds, "bf16") if v is not None]
        if base:
            ax.axhline(statistics.fmean(base), color=style.INK, lw=1, ls="--")
        style.finish(ax, column, "", "pass@1, held out")
        ax.set_xlim(-0.5, len(axes.rows) - 0.5)
        ax.set_ylim(bottom=0)
        ax.set_xticks(range(len(axes.rows)), axes.rows, rotation=35, ha="right")
    handles = [
        Line2D([], [], marker="o", ls="none", color=colour, label=name)
        for name, colour in zip(axes.corrections, style.SEQUENCE, strict=False)
    ]
    handles += [
        Line2D([], [], marker="o", ls="none", mec=style.INK, mfc="none", label="the same policy in bf16"),
        Line2D([], [], color=style.GREY, ls=":", label="before training, own precision"),
        Line2D([], [], color=style.INK, ls="--", label="nothing quantized"),
    ]
    fig.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=9,
               labelcolor=style.INK)  # fmt: skip
    return fig
