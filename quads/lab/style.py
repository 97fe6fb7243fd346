"""How the lab's figures look, in light and in dark: one place for fonts, colours and grids."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import MaxNLocator

INK = "#222222"
DARK_INK, DARK_PAPER = "#d8dee6", "#14181d"
# Okabe and Ito's colours, which colour-blind readers can tell apart and which show on white and on black.
BLUE, ORANGE, GREEN, RED, PURPLE, SKY, GREY = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#D55E00",
    "#CC79A7",
    "#56B4E9",
    "#8a8f98",
)
SEQUENCE = (BLUE, ORANGE, GREEN, RED, PURPLE, SKY, GREY)


def new_figure(columns: int = 1, rows: int = 1, width: float = 4.8, height: float = 3.5) -> tuple[Figure, list[Axes]]:
    """A figure of rows x columns panels, each `width` x `height` inches, and its axes in reading order."""
    figure = Figure(figsize=(width * columns, height * rows), layout="constrained", facecolor="white")
    return figure, list(figure.subplots(rows, columns, squeeze=False).flat)


def finish(ax: Axes, title: str, x: str, y: str, legend: bool = False, columns: int = 1) -> None:
    """Titles, labels, a faint grid, no box."""
    ax.set_title(title, loc="left", fontsize=10.5, fontweight="bold", color=INK)
    ax.set_xlabel(x, fontsize=9.5, color=INK)
    ax.set_ylabel(y, fontsize=9.5, color=INK)
    ax.grid(alpha=0.3, lw=0.6)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)
    ax.tick_params(which="both", labelsize=8.5, colors=INK)
    if legend:
        ax.legend(frameon=False, fontsize=8.5, labelcolor=INK, ncols=columns)


def grouped_bars(
    ax: Axes, groups: Sequence[str], series: Mapping[str, Sequence[float]], colours: Sequence[str]
) -> None:
    """One group of bars for each name in `groups`, one colour for each series."""
    width = 0.8 / len(series)
    for i, (name, values) in enumerate(series.items()):
        places = [g - 0.4 + width * (i + 0.5) for g in range(len(groups))]
        ax.bar(places, list(values), width * 0.92, color=colours[i], label=name)
    ax.set_xticks(range(len(groups)), list(groups))


def whole_numbers(axis: Axis) -> None:
    """Ticks at whole numbers only: layers, steps."""
    axis.set_major_locator(MaxNLocator(integer=True, nbins=8))


def legend_below(figure: Figure, ax: Axes, columns: int) -> None:
    """One legend for several panels with the same series, under them."""
    handles, labels = ax.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False, fontsize=9, labelcolor=INK)


def label_ends(ax: Axes) -> None:
    """Each line's label at its right end, in its colour; no legend to look up."""
    for line in ax.get_lines():
        x, y = line.get_xdata()[-1], line.get_ydata()[-1]  # type: ignore[index]
        ax.annotate(
            str(line.get_label()), (x, y), (5, -3), textcoords="offset points", fontsize=8, color=line.get_color()
        )
    ax.margins(x=0.14)


def save(figure: Figure, path: Path) -> Path:
    """The figure as the bytes of a PNG file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    return path


def darken(figure: Figure) -> Figure:
    """The same figure for a dark page: paper and ink change, data colours stay. In place."""
    figure.set_facecolor(DARK_PAPER)
    for text in figure.findobj(Text):
        if isinstance(text, Text) and to_hex(text.get_color()) in (INK, "#000000", "#333333"):
            text.set_color(DARK_INK)
    for ax in figure.axes:
        ax.set_facecolor(DARK_PAPER)
        ax.tick_params(which="both", colors=DARK_INK)
        for spine in ax.spines.values():
            spine.set_edgecolor(DARK_INK)
    return figure
