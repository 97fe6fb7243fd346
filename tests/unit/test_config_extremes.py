"""Every key under values that nobody means: a clear message or a config, never a traceback, never a long wait."""

import dataclasses
import math
import time
import typing
from pathlib import Path
from typing import Any

import pytest

from quads.config import SECTIONS, load_config
from quads.config.sections import SourceSettings
from quads.errors import UserError

DEEP = "[" * 2000 + "]" * 2000
EXTREMES = {
    "zero": "0",
    "minus one": "-1",
    "huge integer": "1000000000000000000",
    "beyond 64 bits": "-99999999999999999999999999",
    "5000 digits": "9" * 5000,
    "tiny float": "1e-320",
    "huge float": "1e308",
    "overflow": "1e999",
    "nan": "nan",
    "infinity": "-inf",
    "empty text": '""',
    "text": '"no such word"',
    "long text": '"' + "x" * 100_000 + '"',
    "nul and newline": '"a\\u0000b\\nc"',
    "braces": '"{0} {prompt} {nothing} }{"',
    "true": "true",
    "date": "1979-05-27T07:32:00Z",
    "empty list": "[]",
    "nested lists": "[[1, [2]], [[]]]",
    "mixed list": '[1, "a", {b = 2}]',
    "list of tables": "[{a = 1}, {a = 2}]",
    "table": "{a = {b = {c = 1}}}",
    "list of one word": '["no such word"]',
    "same twice": '["experts", "experts"]',
}
BASE = {
    "model": {"path": '"somewhere"'},
    "task": {"train": '["a"]'},
    "sources.a": {"kind": '"jsonl"', "path": '"rows.jsonl"', "reward": '"exact"'},
}
BASE_WORDS = [
    "--model.path",
    "somewhere",
    "--task.train",
    "a",
    "--sources.a.kind",
    "jsonl",
    "--sources.a.path",
    "r.jsonl",
]
KEYS = [f"{name}.{f.name}" for name, cls in SECTIONS.items() for f in dataclasses.fields(cls)]
KEYS += [f"sources.a.{f.name}" for f in dataclasses.fields(SourceSettings)]
LONGEST = 600  # characters of a message: a line or two that can be read


def load(tmp_path: Path, key: str, value: str) -> Any:
    section, _, name = key.rpartition(".")
    tables = {table: dict(keys) for table, keys in BASE.items()}
    tables.setdefault(section, {})[name] = value
    text = "".join(f"[{table}]\n" + "".join(f"{k} = {v}\n" for k, v in keys.items()) for table, keys in tables.items())
    path = tmp_path / "config.toml"
    path.write_text(text, encoding="utf-8")
    return load_config(["--config", str(path)])


@pytest.mark.parametrize("key", KEYS)
def test_no_value_gives_a_traceback(tmp_path: Path, key: str) -> None:
    start = time.monotonic()
    for name, value in EXTREMES.items():
        try:
            load(tmp_path, key, value)
        except UserError as error:
            text = str(error)
            assert len(text.replace(str(tmp_path), "")) <= LONGEST and "\n" not in text, (name, text[:200])
            assert key.rpartition(".")[2] in text or "TOML" in text or "names the source" in text, (name, text[:200])
    assert time.monotonic() - start < 10


@pytest.mark.parametrize("key", KEYS)
def test_the_same_on_the_command_line(key: str) -> None:
    for value in EXTREMES.values():
        try:
            load_config([*BASE_WORDS, "--sources.a.reward", "exact", f"--{key}", value])
        except UserError as error:
            assert len(str(error)) <= LONGEST and "\n" not in str(error)


@pytest.mark.parametrize(
    "text", [DEEP, "a = " + DEEP, "[rl]\ngroup_size = " + "9" * 100_000, "\x00", "[" * 50_000, "x" * 10**6]
)
def test_files_that_are_no_toml(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UserError) as refused:
        load_config(["--config", str(path)])
    assert len(str(refused.value).replace(str(tmp_path), "")) <= LONGEST


def numbers() -> list[tuple[str, type, dict[str, Any]]]:
    """(key, type, metadata) of every key that is a number, or a list of them."""
    found = []
    for section, cls in {**SECTIONS, "sources.a": SourceSettings}.items():
        hints = typing.get_type_hints(cls)
        for f in dataclasses.fields(cls):
            kinds = {hints[f.name], *typing.get_args(hints[f.name])}
            if kinds & {int, float}:
                found.append((f"{section}.{f.name}", float if float in kinds else int, dict(f.metadata)))
    return found


@pytest.mark.parametrize(("key", "kind", "limits"), numbers())
def test_numbers_have_limits_on_both_sides(tmp_path: Path, key: str, kind: type, limits: dict[str, Any]) -> None:
    """What no run can mean is refused when the config is read, not by a run that never ends."""
    assert ("low" in limits or "above" in limits) and "high" in limits, key
    listed = "[%s, %s]" if limits.get("length") == 2 else "[%s]" if "tuple" in str(type_of(key)) else "%s"
    for bound, beyond in ((limits["high"], 1), (limits.get("low", limits.get("above")), -1)):
        value = bound + beyond * (1 if kind is int else max(1.0, abs(bound)))
        if not math.isfinite(value):
            continue
        text = listed.replace("%s", repr(kind(value)))
        with pytest.raises(UserError, match=key.rpartition(".")[2]):
            load(tmp_path, key, text)


def type_of(key: str) -> Any:
    section, _, name = key.rpartition(".")
    cls = SourceSettings if section == "sources.a" else SECTIONS[section]
    return typing.get_type_hints(cls)[name]


@pytest.mark.parametrize(
    ("key", "value"),
    [("where", "{a = 1}"), ("prompt_column", '"q"'), ("answer_pattern", '"x"'), ("split", '"test"'), ("path", '"x"')],
)
def test_a_key_that_reasoning_gym_does_not_read_is_refused(tmp_path: Path, key: str, value: str) -> None:
    path = tmp_path / "config.toml"
    path.write_text(
        '[model]\npath = "m"\n[task]\ntrain = ["a"]\n'
        f'[sources.a]\nkind = "reasoning_gym"\ndataset = "chain_sum"\n{key} = {value}\n'
    )
    with pytest.raises(UserError, match=f"{key} is for kind = .*'reasoning_gym' does not read it"):
        load_config(["--config", str(path)])


@pytest.mark.parametrize("template", ["{prompt} {question}", "{answer} {prompt}"])
def test_a_name_in_braces_that_nothing_fills_in_is_refused(tmp_path: Path, template: str) -> None:
    for key in ("task.prompt_template", "sources.a.prompt_template"):
        with pytest.raises(UserError, match="which nothing fills in"):
            load(tmp_path, key, f'"{template}"')


def test_braces_of_latex_are_text(tmp_path: Path) -> None:
    for template in (r"{prompt} \\boxed{answer}", r"{prompt} \\boxed{}", "{prompt} {1, 2}", "x_{i} {prompt}"):
        assert "{prompt}" in load(tmp_path, "task.prompt_template", f'"{template}"').task.prompt_template
