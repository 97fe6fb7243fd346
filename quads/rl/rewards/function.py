"""Reward FILE.py:FUNCTION: a Python function of the user, score(prompt, response, answer, row) -> number.

It runs in judges, which time out and are killed like the others; its file is imported there once for each process,
never in the trainer. What it raises, or returns that is no number, ends the run with a message: a fault in a reward
must not look like a wrong response.

A function that parses or evaluates responses asks for confinement by `confined = true` in its source. It then judges
each response in a fork like those of `math` and `task`, after its file has been imported: no files, no network, no
environment of the user.
"""

import importlib.util
import inspect
import math
import numbers
import os
import sys
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from decimal import Decimal
from typing import Any

from quads.config.sections import SourceSettings
from quads.config.sources import split_function
from quads.data.rows import Prompt, column_value, text_answer
from quads.errors import UserError
from quads.rl.rewards.reward import Graders, Reward
from quads.types import Example, Verdict

PARAMETERS = "(prompt, response, answer, row)"
LARGEST = 1e6  # beyond it the variance of a group loses digits in float32
SHOWN = 80  # characters of a wrong value in a message


class Function(Reward):
    """Its answer is (the answer column, the whole row); the column may be left out by answer_column = ""."""

    whole_row = True
    keys = ("confined",)

    def __init__(self, where: str, word: str, settings: SourceSettings, graders: Graders):
        file, function = split_function(word)
        if not os.path.isfile(file):
            raise UserError(f"{where} reward {word}: there is no file {os.path.abspath(file)}")
        self.columns = (settings.answer_column,) if settings.answer_column else ()
        self._settings = settings
        setup = os.path.abspath(file), function, f"{where} reward {word}"
        self._judge = graders.judge(__name__, "make_judge", *setup, confined=settings.confined)

    def read(self, values: dict[str, Any], prompt: Prompt) -> tuple[Prompt, Any]:
        if not self._settings.answer_column:
            return prompt, (None, values)
        answer = column_value(values, self._settings.answer_column)
        if isinstance(answer, str | int | float | Decimal) and not isinstance(answer, bool):
            answer = text_answer(values, self._settings)
        return prompt, None if answer is None else (answer, values)

    def gist(self, answer: Any) -> int:
        return hash(repr(answer[0]))  # rows differ in their ids at least

    def submit(self, example: Example, answer: Any, text: str) -> "Future[Verdict]":
        return self._judge.submit(example.id, example.prompt, text, *answer)


# ---- in the judge


def make_judge(path: str, name: str, where: str) -> Callable[..., float]:
    """Import the file and find the function. UserError that starts with `where` says why it cannot be used."""
    function = getattr(_load(path, where), name, None)
    if not callable(function):
        raise UserError(f"{where}: {path} has no function {name!r}")
    if inspect.iscoroutinefunction(function):
        raise UserError(f"{where}: {name} is async; it must be a plain function {PARAMETERS}")
    try:
        inspect.signature(function).bind("", "", "", {})
    except TypeError:
        has = inspect.signature(function)
        raise UserError(f"{where}: {name} must take {PARAMETERS}, in this order; it is {name}{has}") from None
    except ValueError:
        pass  # a built-in function does not say what it takes

    def judge(row_id: str, prompt: Prompt, response: str, answer: Any, row: dict[str, Any]) -> float:
        try:
            value = function(prompt, response, answer, row)
        except Exception as error:
            raise UserError(f"{where} raised {_place(error)}, for a response to {row_id}") from None
        return _number(value, f"{where} returned {_short(value)} for a response to {row_id}")

    return judge


def _load(path: str, where: str) -> Any:
    """The file as a module. Its folder is searched first, so that it may import its neighbours."""
    sys.path.insert(0, os.path.dirname(path))
    spec = importlib.util.spec_from_file_location(os.path.basename(path).removesuffix(".py"), path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle look a module up by its name
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        raise UserError(f"{where}: {error.filename} line {error.lineno}: {error.msg}") from None
    except (Exception, SystemExit) as error:
        raise UserError(f"{where}: importing it raised {_place(error)}") from None
    return module


def _number(value: Any, what: str) -> float:
    """True and False are 1 and 0; numpy's and torch's numbers will do as well."""
    if type(value).__module__.partition(".")[0] in ("numpy", "torch") and getattr(value, "ndim", 1) == 0:
        value = value.item()
    if not isinstance(value, numbers.Real):
        raise UserError(f"{what}; it must return a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not abs(number) <= LARGEST:
        raise UserError(f"{what}; it must return a finite number between {-LARGEST:.0f} and {LARGEST:.0f}")
    return number


def _place(error: BaseException) -> str:
    """`ValueError: ... (file.py line 7)`, all in one line: the innermost place, which may be in a library."""
    frames = traceback.extract_tb(error.__traceback__)
    at = f" ({frames[-1].filename} line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {_short(str(error), quote=False)}{at}"


def _short(value: Any, quote: bool = True) -> str:
    try:
        text = repr(value) if quote else " ".join(value.split())
    except Exception:
        text = f"a {type(value).__name__}"
    text = " ".join(text.split())
    return text if len(text) <= SHOWN else text[: SHOWN - 3] + "..."
