"""One raw row of a data set -> a checked `Row`: columns found, types checked, answer taken out.

A row that is wrong (missing column, wrong type, empty prompt) is an error of the data, reported with file and row. One
without an answer is merely dropped, and counted. What the answer is, the reward of the source says (`AnswerReader`).
"""

import hashlib
import math
import re
import unicodedata
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Protocol

from quads.config.sections import SourceSettings
from quads.errors import UserError

SHOWN = 10  # bad rows listed in one message

Prompt = str | list[dict[str, str]]  # text, or chat messages


@dataclass
class Row:
    """A prompt as the data set has it (no template yet) with what its scorer needs.

    Example: `Row("gsm8k/12", "line 12 of train.jsonl", "What is 3 + 4?", "7")`
    """

    id: str
    where: str  # for messages
    prompt: Prompt
    answer: Any  # what the reward has read; None: the row has no answer

    @property
    def key(self) -> bytes:
        """Equal for duplicates: the prompt's text; white space at the ends and repeats of it are ignored."""
        return prompt_key(self.prompt)


class BadRow(Exception):
    """Why one row cannot be used."""


class AnswerReader(Protocol):
    """What the data of one source asks of its reward: which columns the answer is in, and what they mean."""

    columns: tuple[str, ...]  # that every row must have, besides the prompt's
    whole_row: bool  # whether `read` is given all columns of a row, not only these

    def read(self, values: dict[str, Any], prompt: Prompt) -> tuple[Prompt, Any]:
        """-> (the prompt, reworded where the answer's form asks for it; the answer, None where the row has none).

        BadRow: what is wrong with the row.
        """
        ...

    def unreadable(self, answers: list[Any]) -> list[str]:
        """For each answer why it can never be given, in words for people; "" where it can."""
        ...

    def gist(self, answer: Any) -> int:
        """Equal for equal answers: one prompt with two of them is a fault of the data."""
        ...

    def unpack(self, answer: Any) -> Any:
        """The answer as scoring takes it. Data sets store tests compressed, and they stay so until they are used."""
        ...


def prompt_key(prompt: Prompt) -> bytes:
    """16 bytes that stand for a prompt, however its accents are spelled in Unicode and its words are spaced."""
    texts = [prompt] if isinstance(prompt, str) else [message["content"] for message in prompt]
    words = "\x1e".join(" ".join(unicodedata.normalize("NFC", text).split()) for text in texts)
    return hashlib.blake2b(words.encode(), digest_size=16).digest()


def needed_columns(settings: SourceSettings, reader: AnswerReader) -> list[str]:
    """Columns that every row must have."""
    paths = [settings.prompt_column, *settings.where, *reader.columns]
    if settings.id_column not in ("", "id"):  # the default name is used only where there is such a column
        paths.append(settings.id_column)
    return list(dict.fromkeys(path.partition(".")[0] for path in paths))


def read_rows(
    name: str,
    settings: SourceSettings,
    reader: AnswerReader,
    raw: Iterable[tuple[int, Any]],
    place: str,
    unit: str,
    counts: dict[str, int],
) -> Iterator[Row]:
    """Checked rows in their order; rows that [sources] `where` filters out are left out and counted.

    Args:
        raw: (row number, the row as a dict, or a `BadRow` met while reading it).
        place, unit: for messages: `line 7 of train.jsonl` is unit "line", place "train.jsonl".

    Raises:
        UserError: after the last row, if any was bad and `bad_rows` is not "drop"; lists the first ten.
    """
    bad: list[tuple[int, str]] = []
    seen_ids: dict[str, int] = {}
    total = 0
    for number, values in raw:
        total += 1
        try:
            if isinstance(values, BadRow):
                raise values
            row = _read_row(name, settings, reader, values, number, f"{unit} {number} of {place}")
            if row is None:
                counts["filtered by `where`"] = counts.get("filtered by `where`", 0) + 1
                continue
            if row.id in seen_ids:
                raise BadRow(f"id {row.id!r} is already that of {unit} {seen_ids[row.id]}")
            seen_ids[row.id] = number
        except BadRow as reason:
            if settings.bad_rows == "drop":
                counts["unusable row"] = counts.get("unusable row", 0) + 1
            else:
                bad.append((number, str(reason)))
            continue
        if not bad:
            yield row
    refuse_bad_rows(f"[sources.{name}] {place}", unit, bad, total)


def refuse_bad_rows(place: str, unit: str, bad: list[tuple[int, str]], total: int) -> None:
    """UserError that lists the first ten of `bad` (row number, reason), if there is any."""
    if not bad:
        return
    lines = [f"  {unit} {number}: {reason}" for number, reason in bad[:SHOWN]]
    if len(bad) > SHOWN:
        lines.append(f"  ... and {len(bad) - SHOWN} more")
    head = f"{place}: {len(bad)} of {total} rows cannot be used; correct or remove them:"
    raise UserError("\n".join([head, *lines]))


def _read_row(
    name: str, settings: SourceSettings, reader: AnswerReader, values: Any, number: int, where: str
) -> Row | None:
    """None when `where` filters the row out."""
    if not isinstance(values, dict):
        raise BadRow(f"a row must be an object of columns, this one is {_kind(values)}")
    for column, wanted in settings.where.items():
        value = column_value(values, column)
        if value not in (wanted if isinstance(wanted, list | tuple) else [wanted]):
            return None
    prompt = _prompt(column_value(values, settings.prompt_column), settings.prompt_column)
    prompt, answer = reader.read(values, prompt)
    return Row(f"{name}/{_row_id(values, settings, number)}", where, prompt, answer)


def column_value(values: dict[str, Any], path: str) -> Any:
    """`a.0.b` -> values["a"][0]["b"]; a column whose own name has dots is found first."""
    if path in values:
        return values[path]
    value: Any = values
    walked: list[str] = []
    for part in path.split("."):
        if isinstance(value, dict) and part in value:
            value = value[part]
        elif isinstance(value, list | tuple) and part.isdigit() and int(part) < len(value):
            value = value[int(part)]
        else:
            inside = f" in {'.'.join(walked)}" if walked else ""
            have = f"; there is: {', '.join(map(str, value)) or 'nothing'}" if isinstance(value, dict) else ""
            raise BadRow(f"no column {part!r}{inside}{have}")
        walked.append(part)
    return value


def _row_id(values: dict[str, Any], settings: SourceSettings, number: int) -> str:
    if settings.id_column == "id" and "id" not in values:  # the default name, and this data set has no ids
        return str(number)
    value = column_value(values, settings.id_column) if settings.id_column else number
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        raise BadRow(f"column {settings.id_column!r} must hold text or an integer, has {_kind(value)}")
    return _utf8(str(value), settings.id_column)


def _prompt(value: Any, column: str) -> Prompt:
    if isinstance(value, str):
        return _usable_text(value, column)
    if isinstance(value, list | tuple) and value:
        messages = []
        for message in value:
            if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
                raise BadRow(f"column {column!r}: a chat message must have role and content, is {_kind(message)}")
            content = message["content"]
            if not isinstance(content, str):
                raise BadRow(f"column {column!r}: the content of a message must be text, is {_kind(content)}")
            messages.append({"role": str(message["role"]), "content": _usable_text(content, column)})
        if messages[-1]["role"] != "user":
            raise BadRow(f"column {column!r}: the last chat message must be the user's, is {messages[-1]['role']!r}'s")
        return messages
    if isinstance(value, list | tuple) or value is None:
        raise BadRow(f"column {column!r} is empty; a prompt must have text")
    raise BadRow(f"column {column!r} must hold text or chat messages, has {_kind(value)}")


def _usable_text(text: str, column: str) -> str:
    if not text.strip():
        raise BadRow(f"column {column!r} is empty; a prompt must have text")
    return _utf8(text, column)


def _utf8(text: str, column: str) -> str:
    """JSON can spell half a character (a lone surrogate), which no file or tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadRow(f"column {column!r} is not valid UTF-8 (character {error.start})") from None
    return text


def text_answer(values: dict[str, Any], settings: SourceSettings) -> str | None:
    """The answer as text; None where it is missing. BadRow if its column holds neither text nor a number."""
    value = column_value(values, settings.answer_column)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, str | int | float | Decimal):
        raise BadRow(f"column {settings.answer_column!r} must hold text or a number, has {_kind(value)}")
    text = _utf8(value, settings.answer_column) if isinstance(value, str) else number_text(value)
    if text is None:
        return None
    if settings.answer_pattern:
        found = re.findall(settings.answer_pattern, text)
        if not found:
            return None
        text = found[-1] if isinstance(found[-1], str) else found[-1][0]
    return text.strip() or None


def number_text(value: int | float | Decimal) -> str | None:
    """A number in its shortest form, a whole one without a point: type inference turns a column of 1 and 0.5 into
    floats. None for NaN and infinities, which JSON and tables hold in place of a missing answer.

    Example: `number_text(4.0)` -> '4'
    """
    if isinstance(value, int):
        return str(value)
    if not math.isfinite(value):
        return None
    if isinstance(value, Decimal):
        digits = format(value, "f")
        return (digits.rstrip("0").rstrip(".") if "." in digits else digits) if value else "0"
    return str(int(value)) if value.is_integer() and abs(value) < 2**53 else repr(value)


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    names = {dict: "an object", list: "a list", str: "text", bool: "a truth value", int: "a number", float: "a number"}
    shown = repr(value)
    return (
        f"{names.get(type(value), f'a {type(value).__name__}')} ({shown if len(shown) <= 40 else shown[:37] + '...'})"
    )
