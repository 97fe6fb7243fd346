"""The gap half of the table: one policy, fixed tokens, every recipe with every format.

Each cell is learner minus rollout in log-prob, mean of its size over the response tokens, and where it comes from:

    weights      learner - a rollout that quantizes the weights alone (W4A16)
    activations  that rollout - the recipe's: what quantizing the activations adds, compensated where the recipe does

Below it the error of each format by itself on the inputs of all sites of one layer: its signal-to-noise ratio, and the
published parts of error_parts.py.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from matplotlib.figure import Figure

from quads.config import Config, load_config
from quads.lab import style
from quads.lab.capture import capture
from quads.lab.error_parts import split_error
from quads.lab.formats.axes import COLUMNS, ROWS
from quads.lab.policies import Evaluation, evaluate, gap_statistics, rollout
from quads.lab.results import config_argv, markdown, number, progress
from quads.lab.subject import Subject, as_learner
from quads.quant.formats import FORMATS
from quads.quant.recipes import QuantSpec, precision, resolve
from quads.quant.sites import SITES

# Arms beside the recipes: quads with other choices of channels.
SELECTIONS = {f"quads, {word}": ("--quant.recipe", "quads", "--quant.residual_selection", word)
              for word in ("token", "2:4", "all")}  # fmt: skip
GAP_ROWS = {**ROWS, **SELECTIONS}


def cell_config(config: str, others: Sequence[str], row: str, column: str) -> Config:
    """UserError where a recipe refuses a format."""
    cfg = load_config(config_argv(config, [*others, *GAP_ROWS[row], *COLUMNS[column]]))
    resolve(cfg.quant)
    return cfg


class Sides:
    """Learners and rollouts of many specs on the same tokens; each side that two cells share is evaluated once."""

    def __init__(self, subject: Subject, batch_tokens: int) -> None:
        self._subject, self._batch_tokens = subject, batch_tokens
        self._done: dict[tuple[str, QuantSpec], Evaluation] = {}

    def learner(self, spec: QuantSpec) -> Evaluation:
        key = ("learner", replace(spec, rollout="bf16", ratio=0.5, selection="batch", residual_sites=("w13",)))
        if key not in self._done:
            model = as_learner(self._subject.master, spec)
            self._done[key] = evaluate(model, self._subject.sequences, self._batch_tokens)
        return self._done[key]

    def rollout(self, spec: QuantSpec) -> Evaluation:
        spec = replace(spec, learner_weights="bf16", learner_activations="bf16", backward="quantized")
        if not precision(spec.rollout, spec.format).residual:
            spec = replace(spec, ratio=0.5, selection="batch", residual_sites=("w13",))
        if ("rollout", spec) not in self._done:
            model = rollout(replace(self._subject, spec=spec), spec)
            self._done["rollout", spec] = evaluate(model, self._subject.sequences, self._batch_tokens)
        return self._done["rollout", spec]


def measure(
    subject: Subject, config: str, others: Sequence[str], rows: Sequence[str], columns: Sequence[str], batch_tokens: int
) -> dict[str, Any]:
    """Cells by row and column. UserError where a recipe refuses a format."""
    specs = {(r, c): resolve(cell_config(config, others, r, c).quant) for c in columns for r in rows}
    cells: dict[str, dict[str, Any]] = {row: {} for row in rows}
    for column in columns:
        sides = Sides(subject, batch_tokens)
        for row in rows:
            spec = specs[row, column]
            progress(f"{row} in {column}")
            learned, rolled = sides.learner(spec).logprobs, sides.rollout(spec).logprobs
            plain = sides.rollout(replace(spec, rollout="w4a16")).logprobs
            cells[row][column] = {
                **gap_statistics(learned - rolled),
                "weights": gap_statistics(learned - plain)["mean"],
                "activations": gap_statistics(plain - rolled)["mean"],
            }
    return {
        "batch": subject.facts,
        "cells": cells,
        "errors": format_errors(subject, specs, rows, columns, batch_tokens),
    }


def format_errors(
    subject: Subject, specs: dict[tuple[str, str], QuantSpec], rows: Sequence[str], columns: Sequence[str], tokens: int
) -> dict[str, dict[str, float]]:
    """Of each column: squared error of the activations of the layer shown, by site equally, over their energy."""
    plain = as_learner(subject.master, replace(subject.spec, learner_weights="bf16", learner_activations="bf16"))
    captured = capture(plain, subject.sequences, tokens, w2=True)
    result: dict[str, dict[str, float]] = {}
    for column in columns:
        spec = specs[rows[0], column]
        format, rule = FORMATS[spec.format], spec.rule(spec.format)
        shares = {"total": 0.0, "scale_bias": 0.0, "dead_zone": 0.0, "grid_noise": 0.0}
        for site in SITES:
            x = captured.sites[site][subject.layer].float()
            parts = split_error(x, format.qdq_rows(x, rule, x.dtype), spec.format, "published")._asdict()
            energy = float(x.double().square().sum())
            for part in shares:
                shares[part] += float(parts[part].square().sum()) / energy / len(SITES)
        result[column] = {**shares, "snr_db": -10 * math.log10(shares["total"])}
    return result


def tables(data: dict[str, Any]) -> str:
    """Markdown: gaps with their parts, then the formats by themselves."""
    columns = list(next(iter(data["cells"].values())))
    gaps = [[row, *(number(cells[c]["mean"]) for c in columns)] for row, cells in data["cells"].items()]
    parts = [
        [row, *(f"{number(cells[c]['weights'])} + {number(cells[c]['activations'])}" for c in columns)]
        for row, cells in data["cells"].items()
    ]
    names = {"snr_db": "SNR, dB", "scale_bias": "scale bias", "dead_zone": "dead zone", "grid_noise": "grid noise"}
    errors = [[name, *(number(data["errors"][c][part]) for c in columns)] for part, name in names.items()]
    return "\n\n".join(
        [
            "Mean |log-prob gap|, nats a token:",
            markdown(["recipe", *columns], gaps),
            "By the weights alone + what the activations add:",
            markdown(["recipe", *columns], parts),
            "The formats by themselves, activations of one layer (shares of their energy):",
            markdown(["error", *columns], errors),
        ]
    )


def figure(data: dict[str, Any]) -> Figure:
    """Mean gap of each recipe, a colour for each format."""
    rows = list(data["cells"])
    columns = list(data["cells"][rows[0]])
    fig, (ax,) = style.new_figure(width=max(6.0, 0.9 * len(rows)), height=4.0)
    for i, column in enumerate(columns):
        gaps = [max(data["cells"][row][column]["mean"], 1e-7) for row in rows]
        ax.plot(range(len(rows)), gaps, "o", ms=6, color=style.SEQUENCE[i], label=column, alpha=0.85)
    ax.set_yscale("log")
    ax.set_xticks(range(len(rows)), rows, rotation=30, ha="right")
    style.finish(ax, "Log-prob gap by recipe and format", "", "mean |gap| (nats a token)")
    style.legend_below(fig, ax, len(columns))
    return fig
