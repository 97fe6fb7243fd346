"""`python -m quads.lab report`: every analysis of a checkpoint on one self-contained page.

Runs the analyses that OUT does not hold yet for this very config and batch (small ones: minutes on a CPU), then writes
OUT/report.html. Training comparisons take longer and are taken as they lie: OUT/recipes.json, or recipes.json in
OUT/recipes (`python -m quads.lab recipes`), and arms.json (`... --name arms --arm ...`) and scores.json (`python -m
quads.lab scores`) likewise. The page needs nothing beside it: figures are inline, drawn for light and for dark.
"""

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from quads.config import config_to_toml, load_config
from quads.errors import UserError
from quads.lab import channels, decompose, drift, gap, layers, ratio
from quads.lab.report import page
from quads.lab.report.page import Section
from quads.lab.report.text import ABOUT, TEXTS
from quads.lab.results import config_argv, config_parser, progress, without_out
from quads.lab.runs import curves, recipes, scores

HELP = "all analyses of one checkpoint as a page for the browser"

DEFAULT_CONFIG = "configs/tiny_quads.toml"
COMPARISONS = ("recipes", "arms")  # of the command recipes, as --name called them
TRAININGS = (*COMPARISONS, "scores")  # what needs trained runs
ANALYSES = {"gap": gap, "layers": layers, "channels": channels, "ratio": ratio, "decompose": decompose, "drift": drift}


def analysis_argv(
    name: str, config: str, out: Path, checkpoint: str, batch: list[str], overrides: list[str]
) -> list[str]:
    """The command line of one analysis. Drift is shown in bf16, where there is some."""
    extra = ["--model.dtype", "bfloat16"] if name == "drift" else []
    chosen = ["--checkpoint", checkpoint] if checkpoint else []
    return ["--config", config, "--out", str(out), *chosen, *batch, *overrides, *extra]


def is_fresh(path: Path, config_text: str, argv: list[str]) -> bool:
    """The file holds the result of this command line and config."""
    if not path.is_file():
        return False
    about = json.loads(path.read_text(encoding="utf-8"))["about"]
    words = shlex.split(about["command"])[4:]  # after: python -m quads.lab NAME
    return about["config"] == config_text and words == without_out(argv)


def sections(out: Path) -> list[Section]:
    """What the page shows, from the files in `out`."""
    found = []
    for name in (*TRAININGS, *ANALYSES):
        places = [out / f"{name}.json", out / name / f"{name}.json"]  # training writes into a folder of its own
        path = next((place for place in places if place.is_file()), None)
        if path is None:
            progress(f"{places[0]} is not there; the page goes without it")
            continue
        data = json.loads(path.read_text(encoding="utf-8"))
        draw, tables = _views(name, data)
        text = TEXTS[name]
        about = {**data["about"], **{f"arm {arm}": words for arm, words in data.get("arms", {}).items()}}
        found.append(Section(name, text.title, text.shows, text.reading(data), draw, tables, about, data.get("batch")))
    return found


def _views(name: str, data: dict[str, Any]) -> tuple[Callable[[], Figure], str]:
    if name in COMPARISONS:
        several = max(arm["seeds"] for arm in data["curves"].values()) > 1
        return lambda: curves.figure(data["curves"]), recipes.table(data["summary"], several)
    module = scores if name == "scores" else ANALYSES[name]
    return lambda: module.figure(data), module.tables(data)


def main(argv: list[str]) -> None:
    parser = config_parser("report", HELP)
    for action in parser._actions:  # a config of its own: the tiny model needs no choice
        if action.dest == "config":
            action.required, action.default = False, DEFAULT_CONFIG
    parser.add_argument("--checkpoint", default="", help="run or checkpoint folder whose weights replace the config's")
    parser.add_argument("--prompts", default="32", help="held-out prompts (default: 32)")
    parser.add_argument("--samples", default="4", help="responses to each (default: 4)")
    parser.add_argument("--only-page", action="store_true", help="run nothing, show what is there")
    args, overrides = parser.parse_known_args(argv)
    batch = ["--prompts", args.prompts, "--samples", args.samples]
    for name in () if args.only_page else ANALYSES:
        words = analysis_argv(name, args.config, args.out, args.checkpoint, batch, overrides)
        text = config_to_toml(load_config(config_argv(args.config, words[words.index("--samples") + 2 :])))
        if is_fresh(args.out / f"{name}.json", text, words):
            progress(f"{name}: there already")
            continue
        progress(f"{name}: running")
        ANALYSES[name].main(words)
    shown = sections(args.out)
    if not shown:
        raise UserError(f"{args.out} holds no results; run without --only-page")
    path = page.write(args.out / "report.html", ABOUT, shown)
    print(f"wrote {path} ({path.stat().st_size / 2**20:.1f} MiB)")
