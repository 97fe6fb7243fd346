"""The math reward: its verdicts by table, the time each takes, and which gold answers can be read."""

import time

import pytest

from quads.rl.rewards.math import is_readable, math_reward, same_answer
from quads.rl.rewards.math_text import clean, extract_answer
from tests.unit.math_pairs import PAIRS

LIMIT_S = 5.0  # the default of [reward] judge_time_s


def _response(text: str) -> str:
    alone = text and not any(mark in text for mark in ("boxed", "fbox", "nswer", "####", "I count"))
    return f"Some steps.\nTherefore $\\boxed{{{text}}}$." if alone else text


def test_table_has_every_kind_of_pair() -> None:
    assert len(PAIRS) >= 120
    assert sum(right for _, _, right in PAIRS) >= 60
    assert sum(not right for _, _, right in PAIRS) >= 60


@pytest.mark.parametrize(("gold", "response", "right"), PAIRS)
def test_verdict(gold: str, response: str, right: bool) -> None:
    started = time.perf_counter()
    assert math_reward(gold, _response(response)) == float(right)
    assert time.perf_counter() - started < LIMIT_S


def test_percent_as_unit_is_a_choice() -> None:
    assert not same_answer("25", r"25\%")
    assert same_answer("25", r"25\%", percent_as_unit=True)
    assert same_answer("0.25", r"25\%", percent_as_unit=True)
    assert not same_answer("25", r"24\%", percent_as_unit=True)


@pytest.mark.parametrize("gold", [gold for gold, _, right in PAIRS if right])
def test_gold_answers_of_the_table_can_be_read(gold: str) -> None:
    assert is_readable(gold)


@pytest.mark.parametrize(
    "gold",
    [
        "",
        "  ",
        r"\frac{",
        r"\boxed{}",
        "(1, 2",
        "see the proof above, which shows it for all n",
        "x" * 5000,
        "{",
        r"\foo{3}",
    ],
)
def test_unreadable_gold_answers(gold: str) -> None:
    assert not is_readable(gold)


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        (r"\boxed{1} then \boxed{\frac{2}{\sqrt{3}}}", r"\frac{2}{\sqrt{3}}"),
        (r"$\boxed{\left\{ 1 \right\}}$", r"\left\{ 1 \right\}"),
        (r"\boxed {7}", "7"),
        ("The answer is 3.5. Done.", "3.5"),
        ("The final answer is: \\(x^2\\)", "x^2"),
        ("#### 1,234", "1,234"),
        ("<think>The answer is 3</think>\nThe answer is 4", "4"),
        ("I do not know", None),
        ("", None),
        (r"\boxed{}", None),
    ],
)
def test_extraction(response: str, answer: str | None) -> None:
    assert extract_answer(response) == answer


def test_cleaning_twice_changes_nothing() -> None:
    for gold, response, _ in PAIRS:
        for text in (gold, response):
            assert clean(clean(text)) == clean(text)


@pytest.mark.parametrize(
    "answer", ["(" * 500, "{" * 3000, "x^" * 300, r"\frac" * 200, "1/" * 400, "|" * 99, "\\", "\x00", "😀", "9" * 1900]
)
def test_nonsense_is_wrong_and_raises_nothing(answer: str) -> None:
    started = time.perf_counter()
    assert not same_answer("5", answer)
    assert time.perf_counter() - started < LIMIT_S
