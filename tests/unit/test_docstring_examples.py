"""The examples in docstrings: "Example: `CODE`" runs, and "Example: `CODE` -> `VALUE`" gives that value."""

import ast
import importlib
import re
from pathlib import Path

import pytest

from tests.helpers import REPOSITORY

EXAMPLE = re.compile(r"Example: `([^`]+)`(?: -> `([^`]+)`)?")
# Examples of statements, of processes, and of what the reader has: a helper, an example, a tokenizer's folder.
NEED_MORE = ("with ", "HelperPool(", "JudgePool(", "RewardPool(", "Sandbox(", "Tokenizer(", "weight.", "timers.")


def docstrings(file: Path) -> list[str]:
    nodes = ast.walk(ast.parse(file.read_text(encoding="utf-8")))
    documented = [n for n in nodes if isinstance(n, ast.Module | ast.ClassDef | ast.FunctionDef)]
    return [text for text in map(ast.get_docstring, documented) if text]


FOUND = [
    pytest.param(str(file.relative_to(REPOSITORY).with_suffix("")).replace("/", "."), match[1], match[2], id=match[1])
    for file in sorted((REPOSITORY / "quads").rglob("*.py"))
    if "vllm" not in file.name
    for text in docstrings(file)
    for match in EXAMPLE.finditer(text)
    if not match[1].startswith(NEED_MORE)
]


@pytest.mark.parametrize(("module", "code", "value"), FOUND)
def test_example(module: str, code: str, value: str | None) -> None:
    names = dict(vars(importlib.import_module(module)))
    result = eval(" ".join(code.split()), names)
    if value is not None:
        assert repr(result) == value


def test_there_are_examples() -> None:
    assert len(FOUND) > 15 and sum(param.values[2] is not None for param in FOUND) >= 2
