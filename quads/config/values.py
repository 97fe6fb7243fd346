"""One config value: checked against its key's type and range, parsed from the command line, put as TOML."""

import dataclasses
import difflib
import json
import math
import tomllib
import typing
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from quads.errors import UserError

T = TypeVar("T")


def check_table(cls: type[T], where: str, table: dict[str, Any]) -> T:
    """Build a section from its table; `where` is how errors name it, such as `[train]`."""
    known = [f.name for f in dataclasses.fields(cls)]  # type: ignore[arg-type]
    for name in table:
        if name not in known:
            raise UserError(f"unknown key {cut(repr(name))} in {where}; nearest valid one: {nearest(name, known)}")
    return cls(**{name: check_value(cls, where, name, value) for name, value in table.items()})


def check_value(cls: type, where: str, name: str, value: Any) -> Any:
    """`value` in the key's type (a list as a tuple, an int as a float where one is declared), or a UserError."""
    key = _declared(cls, name)
    if key.shape == "table":
        if not isinstance(value, dict):
            _refuse(cls, where, name, value)
        return dict(value)
    if key.shape == "word":
        return _check_word(cls, where, name, value, value, key)
    if not isinstance(value, list | tuple) or len(value) != key.limits.get("length", len(value)):
        _refuse(cls, where, name, value)
    if key.shape == "tables":
        if not all(isinstance(table, dict | key.type) for table in value):
            _refuse(cls, where, name, value)
        tables = [table if isinstance(table, dict) else dataclasses.asdict(table) for table in value]
        return tuple(check_table(key.type, f"{where} {name}[{i}]", table) for i, table in enumerate(tables))
    words = tuple(_check_word(cls, where, name, value, item, key) for item in value)
    if key.type is str and len(set(words)) != len(words):
        raise UserError(f"{where} {name} = {_show(value)}: the same word twice")
    return words


def is_key(cls: type, name: str) -> bool:
    """Whether `name` is a key of the section, or `table.entry` with a key whose value is a table."""
    head, dot, _ = name.partition(".")
    known = {f.name for f in dataclasses.fields(cls)}
    return head in known and (not dot or _declared(cls, head).shape == "table")


def set_text(cls: type, where: str, table: dict[str, Any], name: str, text: str) -> None:
    """Put a command-line word, typed as its key, into a section's table. `name`: a key, or `key.entry` of a table."""
    if not is_key(cls, name):
        check_table(cls, where, {name: text})
    head, dot, entry = name.partition(".")
    if dot:  # entries of tables have no declared type: TOML syntax, else plain text
        try:
            value = parse_toml(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            value = text
        table[head] = {**table.get(head, {}), entry: value}
    else:
        table[name] = _parse(cls, where, name, text)


def _parse(cls: type, where: str, name: str, text: str) -> Any:
    """A word that does not parse as the key's type is a UserError."""
    key = _declared(cls, name)
    value: Any = text
    try:
        if key.shape == "table":
            value = json.loads(text) if text.startswith('{"') else parse_toml(f"value = {text}")["value"]
        elif key.shape == "tables" or (key.shape == "list" and text.strip().startswith("[")):
            value = parse_toml(f"value = {text}")["value"]
        elif key.shape == "list":
            value = [key.type(word.strip()) for word in text.split(",") if word.strip()]
        elif key.type is bool:
            value = {"true": True, "false": False}.get(text.lower(), text)
        elif key.type in (int, float):
            value = key.type(text)
    except (ValueError, RecursionError):  # also the base of JSON and TOML decode errors
        _refuse(cls, where, name, text)
    return check_value(cls, where, name, value)


def describe_range(cls: type, name: str) -> str:
    """What a key takes, in words: `an integer >= 1`, `one of bf16, fp8`, `a list of numbers > 0`."""
    key = _declared(cls, name)
    if key.shape == "table":
        return "a table"
    if key.shape == "tables":
        return f"a list of tables of {', '.join(f.name for f in dataclasses.fields(key.type))}"
    if key.choices:
        words = ", ".join(choice or '""' for choice in key.choices)
        return f"a list of words out of {words}" if key.shape == "list" else f"one of {words}"
    kind = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}[key.type]
    if key.shape == "list":
        length = f"{key.limits['length']} " if "length" in key.limits else ""
        kind = f"a list of {length}{kind.split()[-1]}s"
    signs = {"low": ">=", "above": ">", "high": "<="}
    limits = [(sign, key.limits[limit]) for limit, sign in signs.items() if limit in key.limits]
    bounds = [f"{sign} {limit}" if isinstance(limit, int) else f"{sign} {limit:g}" for sign, limit in limits]
    return f"{kind} {' and '.join(bounds)}".strip()


def nearest(name: str, valid: list[str]) -> str:
    """The valid name most like `name`; there is always one."""
    return difflib.get_close_matches(cut(name), valid, n=1, cutoff=0.0)[0]


def cut(text: str, most: int = 80) -> str:
    """A text for a message: one line of at most so many characters, with a mark where some are left out.

    Example: `cut("x" * 100, 8)` -> `'xxxxx...'`
    """
    text = " ".join(text.split())
    return text if len(text) <= most else text[: most - 3] + "..."


def parse_toml(text: str) -> dict[str, Any]:
    """tomllib.loads, whose every failure is a TOMLDecodeError: it lets others out for numbers of thousands of digits
    and for values nested thousands of levels deep."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        raise
    except RecursionError:
        raise tomllib.TOMLDecodeError("a value is nested too deeply") from None
    except ValueError:
        raise tomllib.TOMLDecodeError("a number has too many digits") from None


def toml_table(name: str, values: dict[str, Any]) -> str:
    """A TOML table with its sub-tables below it."""
    plain = {key: value for key, value in values.items() if not isinstance(value, dict)}
    lines = [f"[{name}]", *(f"{toml_key(key)} = {_toml_value(value)}" for key, value in plain.items()), ""]
    return "\n".join(lines) + "".join(
        "\n" + toml_table(f"{name}.{toml_key(k)}", v) for k, v in values.items() if k not in plain
    )


@dataclass(frozen=True)
class _Key:
    """A declared key: one word, a list of words, a table of anything, or a list of tables with keys of their own."""

    shape: Literal["word", "list", "table", "tables"]
    type: Any  # of a word: bool, int, float or str; of tables: their dataclass
    choices: tuple[str, ...]  # () where any word will do
    limits: dict[str, Any]


def _declared(cls: type, name: str) -> _Key:
    declared = typing.get_type_hints(cls)[name]
    limits = dict(next(f.metadata for f in dataclasses.fields(cls) if f.name == name))
    if typing.get_origin(declared) is dict:
        return _Key("table", dict, (), limits)
    is_list = typing.get_origin(declared) is tuple
    word = typing.get_args(declared)[0] if is_list else declared
    if dataclasses.is_dataclass(word):
        return _Key("tables", word, (), limits)
    choices = typing.get_args(word) if typing.get_origin(word) is Literal else ()
    return _Key("list" if is_list else "word", str if choices else word, choices, limits)


def _check_word(cls: type, where: str, name: str, whole: Any, word: Any, key: _Key) -> Any:
    """`whole` is the value that an error shows: the list that `word` is in."""
    if key.type is float and isinstance(word, int) and not isinstance(word, bool):
        word = float(word) if abs(word) < 2**1000 else math.inf  # a larger one is no float
    good = isinstance(word, key.type) and (key.type is bool or not isinstance(word, bool))
    if good and key.type in (int, float):
        limits = key.limits
        good = math.isfinite(word) and limits.get("low", word) <= word <= limits.get("high", word)
        good = good and limits.get("above", -math.inf) < word
    if not good or (key.choices and word not in key.choices):
        _refuse(cls, where, name, whole)
    return word


def _refuse(cls: type, where: str, name: str, value: Any) -> typing.NoReturn:
    raise UserError(f"{where} {name} = {_show(value)}: must be {describe_range(cls, name)}")


def _show(value: Any) -> str:
    """A value for a message, cut to a line. Of a number of thousands of digits Python refuses to make a text."""
    try:
        return cut(repr(list(value) if isinstance(value, tuple) else value))
    except ValueError:
        return "a number of thousands of digits"


def toml_key(name: str) -> str:
    """A table or key name, quoted where TOML asks for it."""
    bare = name.isascii() and name.replace("_", "").replace("-", "").isalnum()
    return name if bare else _toml_value(name)


def _toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # JSON leaves DEL bare, TOML forbids it
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_toml_value(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{toml_key(key)} = {_toml_value(item)}" for key, item in value.items()) + "}"
    if isinstance(value, int | float):
        return repr(value)
    return value.isoformat()  # TOML's dates and times
