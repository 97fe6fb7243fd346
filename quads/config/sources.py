"""Where the sources of a run come from: its own [sources.NAME] tables, or ready-made files configs/sources/NAME.toml.

A ready-made file holds the keys of `SourceSettings` at its top level. It is looked for in the folder `sources` beside
the config file, then in this repository's configs. `--sources.NAME.key value` changes either kind, or defines a source
on its own.
"""

import re
import tomllib
from pathlib import Path
from typing import Any

from quads.config.sections import SourceSettings
from quads.config.values import check_table, set_text
from quads.errors import UserError

REPOSITORY_CONFIGS = Path(__file__).resolve().parents[2] / "configs"


def read_toml(path: Path) -> dict[str, Any]:
    """Parse one TOML file; every way it can fail is a UserError with the file and, where there is one, the line."""
    text = ""
    try:
        text = path.read_text(encoding="utf-8")
        return tomllib.loads(text)
    except FileNotFoundError:
        raise UserError(f"config file not found: {path}") from None
    except OSError as error:
        raise UserError(f"config file {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"config file {path} is not UTF-8 text (byte {error.start})") from None
    except tomllib.TOMLDecodeError as error:
        reason = str(error).replace("at end of document", f"at line {len(text.splitlines())}, the end of the file")
        raise UserError(f"config file {path} is not valid TOML: {reason}") from None


def build_sources(
    own: Any, overrides: list[tuple[str, str]], used: list[str], config_path: Path | None
) -> dict[str, SourceSettings]:
    """All sources of a run by name.

    own: the [sources] table of the TOML; overrides: (`NAME.key`, text); used: names in [task].
    """
    if not isinstance(own, dict) or not all(isinstance(table, dict) for table in own.values()):
        raise UserError("[sources] must hold tables: write [sources.NAME] and the keys of that source below it")
    tables = {name: dict(table) for name, table in own.items()}
    overridden = [dotted.partition(".")[0] for dotted, _ in overrides]
    for name in dict.fromkeys([*used, *overridden]):
        file = next((file for file in _ready_made(config_path) if file.stem == name), None)
        if name in tables:
            continue
        if file is not None:
            tables[name] = read_toml(file)
        elif name in overridden:
            tables[name] = {}
        else:
            known = known_sources(tables, config_path)
            raise UserError(f"[task] names the source {name!r}: no [sources.{name}], no ready-made one; known: {known}")
    for dotted, text in overrides:
        name, _, source_key = dotted.partition(".")
        set_text(SourceSettings, f"[sources.{name}]", tables[name], source_key, text)
    sources = {name: check_table(SourceSettings, f"[sources.{name}]", table) for name, table in tables.items()}
    for name, source in sources.items():
        _check(f"[sources.{name}]", source)
    return sources


def known_sources(tables: dict[str, Any], config_path: Path | None) -> str:
    """Names for an error message: those of the config and the ready-made ones."""
    return ", ".join(sorted({*tables, *(file.stem for file in _ready_made(config_path))})) or "none"


def _check(where: str, source: SourceSettings) -> None:
    if not source.kind:
        raise UserError(f"{where} kind is missing; one of reasoning_gym, jsonl, datasets")
    needs = "path" if source.kind == "jsonl" else "dataset"
    if not getattr(source, needs):
        raise UserError(f"{where} {needs} is missing; kind = {source.kind!r} needs it")
    if source.reward == "task" and source.kind != "reasoning_gym":
        raise UserError(f"{where} reward = 'task' is for reasoning_gym; with {source.kind!r} use exact, math or code")
    if source.prompt_template and "{prompt}" not in source.prompt_template:
        raise UserError(f"{where} prompt_template = {source.prompt_template!r} must contain {{prompt}}")
    try:
        re.compile(source.answer_pattern)
    except re.error as error:
        pattern = source.answer_pattern
        raise UserError(f"{where} answer_pattern = {pattern!r} is not a regular expression: {error}") from None


def _ready_made(config_path: Path | None) -> list[Path]:
    """Source files beside the config first, then the repository's."""
    folders = [config_path.resolve().parent / "sources"] if config_path else []
    folders.append(REPOSITORY_CONFIGS / "sources")
    return [file for folder in folders for file in sorted(folder.glob("*.toml"))]
