"""JSON objects from files that others wrote, read strictly: every fault is one message that names the file."""

import json
from pathlib import Path
from typing import Any

from quads.errors import UserError

SHOWN_CHARACTERS = 80  # of a value in a message


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object that is the whole of a file. A key that stands there twice must have the same value twice.

    Raises:
        UserError: the file cannot be read, is not JSON, holds no object, or holds one key with two values.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_without_contradictions)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}; save or copy it again") from None
    except _Contradiction as error:
        raise UserError(f"{path}: {error}; keep one of them") from None
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, a number of thousands of digits, too deep
        reason = "nested too deep" if isinstance(error, RecursionError) else str(error).partition(";")[0]
        raise UserError(f"{path} is not valid JSON ({reason}); save or copy it again") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} does not hold a JSON object, but {show(value)}; save or copy it again")
    return value


def show(value: Any) -> str:
    """A JSON value as it would stand in the file, cut to what fits a line."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= SHOWN_CHARACTERS else text[: SHOWN_CHARACTERS - 3] + "..."


class _Contradiction(Exception):
    pass


def _without_contradictions(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found and not _same(found[name], value):
            raise _Contradiction(f"the key {show(name)} has two values, {show(found[name])} and {show(value)}")
        found[name] = value
    return found


def _same(a: Any, b: Any) -> bool:
    return json.dumps(a) == json.dumps(b)  # `==` takes 1, 1.0 and true for equal
