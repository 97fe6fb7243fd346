"""Where the sources of a run come from: its own [sources.NAME] tables, or ready-made files configs/sources/NAME.toml.

A ready-made file holds the keys of `SourceSettings` at its top level. It is looked for in the folder `sources` beside
the config file, then in this repository's configs. `--sources.NAME.key value` changes either kind, or defines a source
on its own.
"""

import dataclasses
import re
import tomllib
from pathlib import Path
from typing import Any

from quads.config.sections import REWARDS, SourceSettings, WeightedReward
from quads.config.values import check_table, cut, parse_toml, set_text
from quads.errors import UserError

RESERVED = ("mean", "std", "ungraded")  # reward/NAME of every run
# Keys that only sources of some kinds read.
ROWS = ("jsonl", "datasets")
READ_BY = {
    ("reasoning_gym",): ("params", "size"),
    ("jsonl",): ("path",),
    ("reasoning_gym", "datasets"): ("dataset",),
    ("datasets",): ("subset", "split", "eval_split", "streaming"),
    ROWS: (
        "eval_path",
        "prompt_column",
        "answer_column",
        "id_column",
        "answer_pattern",
        "bad_rows",
        "where",
        "code_format",
    ),
}
REPOSITORY_CONFIGS = Path(__file__).resolve().parents[2] / "configs"


def read_toml(path: Path) -> dict[str, Any]:
    """Parse one TOML file; every way it can fail is a UserError with the file and, where there is one, the line."""
    text = ""
    try:
        text = path.read_text(encoding="utf-8")
        return parse_toml(text)
    except FileNotFoundError:
        raise UserError(f"config file not found: {path}") from None
    except OSError as error:
        raise UserError(f"config file {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"config file {path} is not UTF-8 text (byte {error.start})") from None
    except tomllib.TOMLDecodeError as error:
        reason = str(error).replace("at end of document", f"at line {len(text.splitlines())}, the end of the file")
        raise UserError(f"config file {path} is not valid TOML: {cut(reason, 200)}") from None


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
            known, short = known_sources(tables, config_path), cut(name, 40)
            raise UserError(
                f"[task] names the source {short!r}: no [sources.{short}], no ready-made one; known: {known}"
            )
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
    _check_unread(where, source)
    _check_rewards(where, source)
    if source.prompt_template:
        check_template(where, source.prompt_template)
    try:
        re.compile(source.answer_pattern)
    except re.error as error:
        pattern = source.answer_pattern
        raise UserError(f"{where} answer_pattern = {cut(repr(pattern))} is not a regular expression: {error}") from None


def _check_unread(where: str, source: SourceSettings) -> None:
    """A key that sources of this kind do not read would be without effect, and nobody would notice."""
    for f in dataclasses.fields(source):
        kinds = next((kinds for kinds, keys in READ_BY.items() if f.name in keys), (source.kind,))
        default = f.default_factory() if f.default is dataclasses.MISSING else f.default  # type: ignore[misc]
        if source.kind not in kinds and getattr(source, f.name) != default:
            raise UserError(
                f"{where} {f.name} is for kind = {' or '.join(map(repr, kinds))}; {source.kind!r} does not read it, so "
                "take it out"
            )


def check_template(where: str, template: str) -> None:
    """UserError for a prompt template without {prompt}, or with another name in braces, which would be left as it is.
    Braces behind a word or a backslash, as in LaTeX, are text."""
    if "{prompt}" not in template:
        raise UserError(f"{where} prompt_template = {cut(repr(template))} must contain {{prompt}}")
    unknown = [name for name in re.findall(r"(?<![\\\w])\{([A-Za-z_]\w*)\}", template) if name != "prompt"]
    if unknown:
        raise UserError(
            f"{where} prompt_template has {{{cut(unknown[0])}}}, which nothing fills in; only {{prompt}} is replaced"
        )


def weighted_rewards(source: SourceSettings) -> tuple[WeightedReward, ...]:
    """The rewards of a source, one where it has no list."""
    default = "task" if source.kind == "reasoning_gym" else ""
    return source.rewards or (WeightedReward(source.reward or default),)


def split_function(reward: str) -> tuple[str, str]:
    """`folder/file.py:function` -> its two parts; ("", "") for anything else."""
    file, colon, function = reward.rpartition(":")
    return (file, function) if colon and file.endswith(".py") and function.isidentifier() else ("", "")


def reward_name(reward: str) -> str:
    """What a reward is called in metrics: its word, or the name of its function."""
    return split_function(reward)[1] or reward


def _check_rewards(where: str, source: SourceSettings) -> None:
    choices = f"one of {', '.join(REWARDS)}, or FILE.py:FUNCTION"
    if source.reward and source.rewards:
        raise UserError(f"{where} has both reward = {cut(repr(source.reward))} and rewards; keep one")
    names: list[str] = []
    for i, weighted in enumerate(weighted_rewards(source)):
        key = f"rewards[{i}].reward" if source.rewards else "reward"
        if not weighted.reward:
            raise UserError(f"{where} {key} is missing; {choices}")
        if weighted.reward not in REWARDS and not split_function(weighted.reward)[0]:
            raise UserError(f"{where} {key} = {cut(repr(weighted.reward))}: must be {choices}")
        name = reward_name(weighted.reward)
        if name in names:
            raise UserError(f"{where} rewards has {name!r} twice; each is logged as reward/NAME, so names must differ")
        if source.rewards and name in RESERVED:
            raise UserError(f"{where} {key}: reward/{name} is a metric of every run; give the function another name")
        names.append(name)
    if source.rewards and not any(weighted.weight for weighted in source.rewards):
        raise UserError(f"{where} rewards all weigh 0; give at least one a weight")


def _ready_made(config_path: Path | None) -> list[Path]:
    """Source files beside the config first, then the repository's."""
    folders = [config_path.resolve().parent / "sources"] if config_path else []
    folders.append(REPOSITORY_CONFIGS / "sources")
    return [file for folder in folders for file in sorted(folder.glob("*.toml"))]
