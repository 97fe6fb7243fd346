"""The axes of the table: recipes, formats with their scale rules, corrections of the loss. Each is config overrides."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from quads.config import Config, load_config
from quads.errors import UserError
from quads.lab.results import config_argv
from quads.quant.recipes import RECIPES, resolve

ROWS = {name: ("--quant.recipe", name) for name in RECIPES if name not in ("bf16", "fp8")}
COLUMNS = {
    "nvfp4": ("--quant.format", "nvfp4", "--quant.four_over_six", "none"),
    "nvfp4_46": ("--quant.format", "nvfp4", "--quant.four_over_six", "mse"),
    "mxfp4_floor": ("--quant.format", "mxfp4", "--quant.scale_rule", "floor"),
    "mxfp4_even": ("--quant.format", "mxfp4", "--quant.scale_rule", "even"),
    "mxfp4_ceil": ("--quant.format", "mxfp4", "--quant.scale_rule", "ceil"),
    "hif4": ("--quant.format", "hif4"),
}
CORRECTIONS = {
    "none": ("--rl.old_logprobs", "rollout"),
    "tis": ("--rl.old_logprobs", "learner", "--rl.correction", "tis"),
    "mis": ("--rl.old_logprobs", "learner", "--rl.correction", "mis"),
    "centering": ("--rl.old_logprobs", "learner", "--rl.correction", "tis", "--rl.score_centering", "128"),
}
START = "start"  # as a correction: no step of training, the policy that runs start from
UNQUANTIZED = ("bf16", "-")  # row and column of the run that quantizes nothing
# For training; what a run does beside it would only take time.
BARE = ("--eval.every", "0", "--checkpoint.every", "0", "--checkpoint.final", "false", "--log.samples_every", "0")


def chosen(words: str, axis: Sequence[str], option: str) -> list[str]:
    """The names in a comma-separated list. UserError for one that is not on the axis."""
    names = [name for name in words.split(",") if name]
    unknown = [name for name in names if name not in axis]
    if unknown or not names:
        raise UserError(f"{option} {words}: use names of {', '.join(axis)}")
    return list(dict.fromkeys(names))


def overrides(row: str, column: str) -> tuple[str, ...]:
    """The [quant] keys of a recipe with a format."""
    return ("--quant.recipe", "bf16") if (row, column) == UNQUANTIZED else (*ROWS[row], *COLUMNS[column])


@dataclass(frozen=True)
class Cell:
    """One training run of the table.

    Example: `Cell("quads", "hif4", "tis", 1).key` is "quads/hif4/tis/1".
    """

    row: str
    column: str
    correction: str
    seed: int

    @property
    def key(self) -> str:
        return f"{self.row}/{self.column}/{self.correction}/{self.seed}"

    @property
    def tier(self) -> tuple[bool, int]:
        """Cells of one tier may be filled in any order."""
        return self.correction == START, self.seed

    def argv(self, config: str, others: Sequence[str]) -> list[str]:
        """The command line of its config; `others` are the overrides of all cells."""
        correction = () if self.correction == START else CORRECTIONS[self.correction]
        return [*config_argv(config, [*others, *overrides(self.row, self.column), *correction, *BARE]),
                "--train.seed", str(self.seed)]  # fmt: skip

    def config(self, config: str, others: Sequence[str]) -> Config:
        """UserError if the recipe refuses the format."""
        cfg = load_config(self.argv(config, others))
        resolve(cfg.quant)
        return cfg


@dataclass(frozen=True)
class Axes:
    """The part of the table that is asked for.

    Example: `Axes(["quads"], ["hif4"], ["none", "tis"], 2)` has two starts and five runs beside those of bf16.
    """

    rows: Sequence[str]
    columns: Sequence[str]
    corrections: Sequence[str]
    seeds: int

    def cells(self) -> list[Cell]:
        """All cells in the order in which they are filled: where runs start from, then seed by seed."""
        pairs: list[tuple[str, str]] = [UNQUANTIZED, *itertools.product(self.rows, self.columns)]
        runs = [
            Cell(*pair, correction, seed)
            for seed in range(self.seeds)
            for correction in self.corrections
            for pair in pairs
            if pair != UNQUANTIZED or correction == self.corrections[0]  # one policy on both sides: nothing to correct
        ]
        return [Cell(*pair, START, 0) for pair in pairs] + runs
