"""Is the final answer of a response equal to the gold answer? Runs inside a judge (judge.py), which may be killed.

Both are parsed and compared exactly (math_parse.py, math_equal.py). What that parser does not know, integrals and sums,
goes to math-verify, under guards: it rounds floats, drops units and is not symmetric, so it must agree in both
directions, and its values to 30 digits. Its grammar takes seconds over nonsense, so it sees nothing else.
"""

import re
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import sympy

from quads.config.sections import SourceSettings
from quads.data.rows import Prompt, text_answer
from quads.rl.rewards.judges import BATCH, AnswerCheck
from quads.rl.rewards.math_equal import equal
from quads.rl.rewards.math_parse import parse_answer
from quads.rl.rewards.math_text import clean, extract_answer, plain_words
from quads.rl.rewards.math_values import Words
from quads.rl.rewards.reward import Graders, Reward
from quads.types import Example, Verdict

MAX_LENGTH = 2_000  # characters of an answer; longer ones are no answers
SPACE = re.compile(r"(?<!\d)\s+|\s+(?!\d)")  # not between two numbers
MAX_GRAMMAR_LENGTH = 300  # characters math-verify is given
GRAMMAR = re.compile(r"\\(?:i*int|oint|sum|prod|lim|limsup|liminf|[pb]?mod|partial|Re|Im|arg|mid)(?![a-zA-Z])")
WORD = re.compile(r"(?<!\\)\b[a-zA-Z]{2,}")
MAX_WORDS = 6  # of a gold answer that is words, not mathematics
# One of each kind, so that what a kind imports is there.
WARM = (
    (r"\int_0^1 x\,dx", "(0, 1)"),
    (r"\int_0^1 x\,dx", r"\int_0^2 x\,dx"),
    ("0.5", r"\frac{1}{2}"),
    (r"1+\sqrt{2}", r"\sqrt{2}+1"),
    ("(x+1)^2", "x^2+2x+1"),
    ("(0, 1]", "[0, 1]"),
    (r"\{1, 2\}", r"\{2, 1\}"),
    (r"\frac{\pi}{3}", r"60^\circ"),
    ("x<-1 or x>1", r"(-\infty,-1)\cup(1,\infty)"),
    (r"\log_2 8", "3"),
    ("5 cm", "0.05 m"),
)


class Math(Reward):
    """1 if the final answer of a response equals the gold answer, else 0. Unreadable gold answers are refused."""

    keys = ("percent_as_unit",)

    def __init__(self, where: str, word: str, settings: SourceSettings, graders: Graders):
        self.columns = (settings.answer_column,)
        self._settings = settings
        self._judge = graders.judge(__name__, "make_judge", settings.percent_as_unit)
        self._readable = AnswerCheck(graders.judge(__name__, "make_readable"))

    def read(self, values: dict[str, Any], prompt: Prompt) -> tuple[Prompt, Any]:
        return prompt, text_answer(values, self._settings)

    def unreadable(self, answers: list[Any]) -> list[str]:
        return ["" if yes else "answer that cannot be read as mathematics" for yes in self._readable(answers)]

    def submit(self, example: Example, answer: Any, text: str) -> "Future[Verdict]":
        return self._judge.submit(answer, text)


# ---- in the judge


def make_judge(percent_as_unit: bool) -> Callable[[str, str], float]:
    """`math_reward` of a source, warmed up: each answer is judged in a fork, which should not wait for imports."""
    for gold, answer in WARM:
        math_reward(gold, rf"\boxed{{{answer}}}")
    return lambda gold, response: math_reward(gold, response, percent_as_unit)


def make_readable() -> Callable[[list[str]], float]:
    """`is_readable` of up to 50 gold answers, for the judge: the i-th is bit i of the number times 2^50."""
    return lambda golds: sum(is_readable(gold) << i for i, gold in enumerate(golds)) / 2**BATCH


def math_reward(gold: str, response: str, percent_as_unit: bool = False) -> float:
    """1.0 if the response's final answer equals `gold`, else 0.0."""
    answer = extract_answer(response)
    return 0.0 if answer is None else float(same_answer(gold, answer, percent_as_unit))


def same_answer(gold: str, answer: str, percent_as_unit: bool = False) -> bool:
    """Are two answers, as LaTeX or plain text, equal?"""
    gold, answer = clean(_unboxed(gold)), clean(answer)
    if not gold or not answer or max(len(gold), len(answer)) > MAX_LENGTH:
        return False
    if SPACE.sub("", gold) == SPACE.sub("", answer):
        return True
    ours, theirs = _parse(gold), _parse(answer)
    if isinstance(ours, Words) or isinstance(theirs, Words):
        return plain_words(gold) == plain_words(answer) != ""
    if ours is not None and theirs is not None:
        return bool(equal(ours, theirs, percent_as_unit))
    return _math_verify_agrees(gold, answer)


def is_readable(gold: str) -> bool:
    """Can this gold answer be compared with anything?"""
    gold = clean(_unboxed(gold))
    if not gold or len(gold) > MAX_LENGTH:
        return False
    if len(WORD.findall(gold)) > MAX_WORDS + gold.count("\\begin{"):
        return False
    return _parse(gold) is not None or bool(_math_verify_values(gold))


def _unboxed(gold: str) -> str:
    """A gold answer may be a whole solution that boxes it."""
    return (extract_answer(gold) or gold) if "\\boxed" in gold else gold


def _parse(text: str) -> Any:
    try:
        return parse_answer(text)
    except Exception:  # besides Unreadable: sympy raises many things on expressions that make no sense
        return None


def _math_verify_values(text: str) -> list[Any]:
    """An expression as a list of one: ours where we can read it, else math-verify's; [] for what neither can."""
    own = _parse(text)
    if isinstance(own, sympy.Expr):
        return [own]
    if len(text) > MAX_GRAMMAR_LENGTH or not GRAMMAR.search(text):
        return []
    from math_verify import parse  # slow, and seldom needed

    return [value for value in parse(f"${text}$", parsing_timeout=0) if not isinstance(value, str)]


def _math_verify_agrees(gold: str, answer: str) -> bool:
    from math_verify import verify

    ours, theirs = _math_verify_values(gold), _math_verify_values(answer)
    if not ours or not theirs:
        return False
    if not all(
        verify(a, b, float_rounding=15, numeric_precision=30, timeout_seconds=0)
        for a, b in ((ours, theirs), (theirs, ours))
    ):
        return False
    a, b = ours[0], theirs[0]
    if isinstance(a, sympy.Expr) and isinstance(b, sympy.Expr) and a.is_number and b.is_number:
        return bool(abs((a - b).evalf(40)) <= sympy.Float(10) ** -30 * (1 + abs(a.evalf(40))))
    return True
