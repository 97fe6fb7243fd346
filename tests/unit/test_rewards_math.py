"""The math reward: its verdicts by table, the time each takes, and which gold answers can be read."""

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
import sympy.parsing.sympy_parser

from quads.rl.rewards.math import at_sight, extract_answer, is_readable, math_reward, same_answer
from quads.rl.rewards.math_expression import read_expression
from quads.rl.rewards.math_text import COMMANDS, Unreadable, clean, restricted
from tests.helpers import REPOSITORY
from tests.unit.math_pairs import PAIRS

GOLDEN = REPOSITORY / "tests" / "golden"
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


def test_what_is_decided_at_sight_is_what_a_judge_would_decide() -> None:
    numbers = ["0", "-0", "7", "-7", "42", "007", "+7", "1,000", "1e2", "0.0", "0.5", "0.50", "-0.5", "1/2", "-1/2"]
    numbers += [r"\frac{1}{2}", r"\dfrac{2}{4}", r"-\tfrac{1}{2}", "14/2", "3.0", "3", "1.10", "1.1", "0.333", "1/3"]
    numbers += ["123456789012345678", "123456789012345678.000000000000000001", "1/0", r"\frac12", "1 1/2", "9" * 19]
    decided = 0
    for gold in numbers:
        for answer in numbers:
            verdict = at_sight(gold, rf"so \boxed{{{answer}}}")
            if verdict is not None:
                assert verdict == math_reward(gold, rf"so \boxed{{{answer}}}"), (gold, answer)
                decided += 1
    plain = len(numbers) - len(["007", "+7", "1,000", "1e2", "1/0", r"\frac12", "1 1/2", "9" * 19])
    assert decided == plain**2 + len(numbers) - plain  # and the others where they are the same text
    decided = 0
    for gold, response, right in PAIRS:
        verdict = at_sight(gold, _response(response))
        decided += verdict is not None
        assert verdict in (None, float(right)), (gold, response)
    assert decided > 30


def test_what_is_not_decided_at_sight() -> None:
    assert at_sight("5", "no answer\nat all") == 0.0
    assert at_sight(r"\frac{x}{2}", r"\boxed{\frac{x}{2}}") == 1.0
    assert at_sight(r"so \boxed{4}", r"so \boxed{4}") is None  # a gold answer that is a solution
    assert at_sight("4", r"\boxed{2+2}") is None
    assert at_sight("4", " " * (1 << 20) + r"\boxed{4}") is None


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
        (r"\boxed 5", "5"),
        (r"\boxed{\boxed{42}}", "42"),
        ("The answer is 3.5. Done.", "3.5"),
        ("The final answer is: \\(x^2\\)", "x^2"),
        ("The answer is\n$$7$$", "7"),
        ("The correct option is (D).", "(D)"),
        ("#### 1,234", "1,234"),
        ("<think>The answer is 3</think>\nThe answer is 4", "4"),
        ("I do not know", None),
        ("", None),
        # the last attempt counts
        (r"\boxed{}", None),
        (r"\boxed{ }", None),
        (r"\boxed", None),
        (r"\boxed{3} but \boxed{", None),
        (r"\boxed{3} but \boxed{4", None),
        (r"\boxed{3} but \boxed{}", None),
        ("The answer is 3. No, the answer is", None),
        ("The answer is 3. No, the answer is 4.", "4"),
        ("#### 3\n####", None),
    ],
)
def test_extraction(response: str, answer: str | None) -> None:
    assert extract_answer(response) == answer


@pytest.mark.parametrize(
    "response",
    [
        "{" * 131_000,
        r"\boxed{" * 18_700,
        r"\boxed{" + "{" * 131_000,
        r"\boxed{" + "{}" * 65_000,
        r"\boxed{" + "\\" * 131_000,
        r"\boxed" + " " * 131_000,
        "answer is " * 13_100,
        "answer" + "*" * 131_000,
        "#" * 131_000,
        r"\text{" * 21_800,
        "answer is $" + "\\" * 131_000,
    ],
)
def test_extraction_is_linear_in_time(response: str) -> None:
    fastest = float("inf")
    for _ in range(3):  # the fastest of three: other processes may hold the core
        started = time.perf_counter()
        extract_answer(response)
        fastest = min(fastest, time.perf_counter() - started)
    # 10 to 35 ms on an idle core; a busy one may take several times as long, a quadratic scan of these takes minutes.
    assert fastest <= 0.5


def test_golden_answers() -> None:
    """All 45 hard answers get the verdict that is expected; none is given up."""
    rows = [json.loads(line) for line in (GOLDEN / "math_answers.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len(rows) == 45
    assert {row["id"]: math_reward(row["answer"], row["response"]) for row in rows} == {
        row["id"]: float(row["expect"]) for row in rows
    }


def test_cleaning_twice_changes_nothing() -> None:
    for gold, response, _ in PAIRS:
        for text in (gold, response):
            assert clean(clean(text)) == clean(text)


@pytest.mark.parametrize(
    "answer",
    [
        *("(" * 500, "{" * 3000, "x^" * 300, r"\frac" * 200, "1/" * 400, "|" * 99, "\\", "\x00", "😀", "9" * 1900),
        *(
            "(" * 7 + "x" + ")" * 7,
            "|x|" * 40,
            "x^" * 100 + "x",
            r"\sin" * 50 + " x",
            "1_" * 100,
            "(((((((x!)!)!)!)!)!)!)",
        ),
        *(r"\sum_{k=1}^{10^9}\sin k", r"\sum_{k=1}^{100000} k^k", r"\prod_{k=1}^{10^8} k", r"\sqrt{2^{99999}+1}"),
        *(r"\binom{10^9}{5000}", "e^{e^{e^{10}}}", r"\sin x > x^2", "⟦" * 10, r"\text{" * 300, r"\pm" * 50 + "1"),
    ],
)
def test_nonsense_is_wrong_and_raises_nothing(answer: str) -> None:
    started = time.perf_counter()
    assert not same_answer("5", answer)
    assert time.perf_counter() - started < LIMIT_S


# ---- text of a response is never run


HOSTILE = (
    '__import__("os").mkdir("FOLDER")',
    r"\text{__import__('os').mkdir('FOLDER')}",
    r"\operatorname{rows}(__import__('os').mkdir('FOLDER'))",
    r"\max(__import__('os').mkdir('FOLDER'), 2)",
    r"f(__import__('os').mkdir('FOLDER'))",
    r"x_{__import__('os').mkdir('FOLDER')}",
    r"\{__import__('os').mkdir('FOLDER'), 1\}",
    r"5 \text{ __import__('os').mkdir('FOLDER')}",
    r"\mathrm{__import__('os').mkdir('FOLDER')} = 5",
    r"\frac{d}{dx}__import__('os').mkdir('FOLDER')",
)


def test_text_is_never_parsed_as_python(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """sympy's `sympify` of a string runs it. Neither the table nor hostile text reaches that."""
    runs: list[str] = []
    math_reward("(0,1)", _response(r"0 < x < \frac{1}{2}"))  # sympy runs text of its own when it is imported
    real = sympy.parsing.sympy_parser.eval_expr

    def eval_expr(code: str, *rest: Any) -> Any:
        runs.append(code)
        return real(code, *rest)

    monkeypatch.setattr(sympy.parsing.sympy_parser, "eval_expr", eval_expr)
    assert sympy.sympify("2 + 3") == 5
    assert runs, "sympify goes another way: this test sees nothing"
    runs.clear()
    for text in HOSTILE:
        text = text.replace("FOLDER", str(tmp_path / "made"))
        math_reward("5", _response(text))
        math_reward(text, _response("5"))
    for gold, response, _ in PAIRS:
        math_reward(gold, _response(response))
    assert runs == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", [*HOSTILE, *(text for pair in PAIRS for text in pair[:2])])
def test_the_grammar_sees_the_fixed_alphabet_alone(text: str) -> None:
    try:
        written, _ = restricted(clean(text))
    except Unreadable:
        return
    commands = set(re.findall(r"\\([a-zA-Z]+)", written))
    assert commands <= COMMANDS
    assert re.fullmatch(r"[a-zA-Z+\-*/^_(){}\[\]|!,= ]*", re.sub(r"\\[a-zA-Z]+", "", written))


# ---- expressions


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (".5", "1/2"),
        (r"-\frac{3}{6}", "-1/2"),
        (r"3\frac{1}{2}", "7/2"),
        (r"0.1\overline{6}", "1/6"),
        ("1.5e3", "1500"),
        ("1011_2", "11"),
        (r"\sqrt[3]{-8}", "-2"),
        (r"10^{10^{10}} \bmod 9", "1"),
        (r"2(\frac{1}{2})", "1"),  # a product, no mixed number
        ("3(2)", "6"),
        ("(2)(3)(4)", "24"),
        (r"\log_2 8", "3"),
        (r"\log_{2}(8)", "3"),
        (r"\binom{5}{2}", "10"),
    ],
)
def test_values_of_expressions(text: str, value: str) -> None:
    assert read_expression(text).value == sympy.Rational(value)


@pytest.mark.parametrize(
    "text", ["2 3", "x''y'(", "1/0", r"\foo", "5 5", "(" * 9 + "1" + ")" * 9, "1+" * 200 + "1", "_"]
)
def test_what_is_no_expression(text: str) -> None:
    with pytest.raises(Unreadable):
        read_expression(text)


def test_numbers_too_large_are_not_written_out() -> None:
    started = time.perf_counter()
    assert read_expression("10^{10^{10}}").value is None
    assert same_answer("10^{10^{10}}", r"100^{5 \cdot 10^9}")
    assert not same_answer("10^{10^{10}}", r"100^{5 \cdot 10^9}+1")
    assert time.perf_counter() - started < LIMIT_S


def test_percentages_on_both_sides_are_compared_as_such() -> None:
    assert same_answer(r"50\%", r"50\%", percent_as_unit=True)
    assert not same_answer(r"50\%", r"0.5\%", percent_as_unit=True)
    assert not same_answer(r"50\%", r"5000\%", percent_as_unit=True)
