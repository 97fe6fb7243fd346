"""The README's tables of training runs say what the published JSON says, digit by digit."""

import json
import re
from typing import Any

import pytest

from tests.helpers import REPOSITORY

TABLES = {  # JSON -> the words of the README above its table
    "docs/evidence/tiny/recipes.json": "What it shows",
    "docs/evidence/smollm2/recipes.json": "Real weights",
}
NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e-?\d+)?")


def rows_after(text: str) -> dict[str, list[str]]:
    """First column -> all numbers of the other columns, of the first table after `text`."""
    lines = (REPOSITORY / "README.md").read_text(encoding="utf-8").partition(text)[2].splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("| --- "))
    rows = {}
    for line in lines[first + 1 :]:
        if not line.startswith("|"):
            break
        name, *cells = (cell.strip(" *`") for cell in line.strip("|").split("|"))
        rows[name] = NUMBER.findall(" ".join(cells))
    return rows


def expected(arm: dict[str, Any]) -> list[float]:
    """In the order of the README's columns."""
    last, score = arm["reward_last"], arm["pass_at_1"]
    spread = [last["mean"], last["low"], last["high"], score["mean"], score["low"], score["high"]]
    return [
        arm["reward_first"]["mean"],
        *spread,
        arm["gap_mean"]["mean"],
        arm["gap_max"]["mean"],
        arm["time_s"]["mean"],
    ]


def agrees(printed: str, value: float) -> bool:
    """`printed` is `value` rounded to the digits that are shown."""
    digits, _, exponent = printed.partition("e")
    unit = 10.0 ** (int(exponent or 0) - len(digits.partition(".")[2]))
    return abs(float(printed) - value) <= 0.5001 * unit


@pytest.mark.parametrize("file", TABLES)
def test_table_of_the_readme(file: str):
    summary = json.loads((REPOSITORY / file).read_text(encoding="utf-8"))["summary"]
    rows = rows_after(TABLES[file])
    assert rows.keys() == summary.keys()
    for name, printed in rows.items():
        values = expected(summary[name])
        assert len(printed) == len(values), (name, printed)
        assert all(map(agrees, printed, values)), (name, printed, values)


def test_rounding():
    assert agrees("0.344", 0.34375) and not agrees("0.344", 0.3432)
    assert agrees("5.8e-7", 5.84e-7) and not agrees("5.8e-7", 5.9e-7) and agrees("80", 79.6)
