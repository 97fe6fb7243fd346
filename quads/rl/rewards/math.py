"""Is the final answer of a response equal to the gold answer? Runs inside a judge (judge.py), which may be killed.

A guard around math-verify's LaTeX grammar. What text is the answer (math_text.py), what shape it has, what its words
and units say (math_shapes.py, math_units.py) is decided first: the grammar takes (4, 3) for an empty interval, drops
units, and spends seconds on nonsense. It reads single expressions, from text that the guard wrote (math_expression.py).
Two shapes are compared exactly (math_compare.py); math-verify's own comparison rounds and is not symmetric.
"""

import re
from collections.abc import Callable
from concurrent.futures import Future
from fractions import Fraction
from typing import Any

from quads.config.sections import SourceSettings
from quads.data.rows import Prompt, text_answer
from quads.rl.rewards.judges import BATCH, AnswerCheck
from quads.rl.rewards.math_compare import Comparison
from quads.rl.rewards.math_shapes import Words, read_shape
from quads.rl.rewards.math_text import Unreadable, clean, plain_words
from quads.rl.rewards.reward import Graders, Reward, at_once
from quads.rl.rewards.text import LONGEST
from quads.types import Example, Verdict

SPACE = re.compile(r"(?<!\d)\s+|\s+(?!\d)")  # not between two numbers
CHOICE = re.compile(r"(?:\\text\w*\{\s*)?\(([A-F])\)\s*\}?\s*(?=[-\d$]|\\[fst])")  # \textbf{(C)} 12
RESIDUE = re.compile(r"\(?\s*\\(?:pmod|mod)\s*\{?([^{}()]*)\}?\s*\)?\s*$")  # 204 \pmod{1000}
FINAL_PATTERNS = (
    re.compile(r"####\s*"),
    re.compile(r"final answer[ \t]*(?:is|=|:)+\s*", re.IGNORECASE),
    re.compile(r"(?:answer|result|solution|value|option|choice)\**[ \t]*(?:is|=|:)+\**\s*", re.IGNORECASE),
)
BOX = re.compile(r"\\(?:boxed|fbox)(?![a-zA-Z])\s{0,9}")
BRACE = re.compile(r"\\[{}\\]|[{}]")
# What sympy raises on expressions that make no sense.
FAULTS = (Unreadable, ArithmeticError, AttributeError, NotImplementedError, RecursionError, TypeError, ValueError)
MAX_LENGTH = 2_000  # characters of an answer; longer ones are no answers
# A sentence ends where a full stop is followed by space or the end; a decimal point is not.
SENTENCE_END = re.compile(r"\.(?=\s|$)")
WORD = re.compile(r"(?<!\\)\b[a-zA-Z]{2,}")
NUMBER = re.compile(
    r"(-?)(?:((?:0|[1-9][0-9]{0,17})(?:\.[0-9]{1,18})?)"
    r"|([1-9][0-9]{0,17})/([1-9][0-9]{0,17})|\\[dt]?frac\{([1-9][0-9]{0,17})\}\{([1-9][0-9]{0,17})\})"
)
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
    (r"\frac{n(n+1)}{2}", r"\sum_{k=1}^n k"),
    (r"\frac{-b - \sqrt{b^2-4ac}}{2a}", r"\frac{b + \sqrt{b^2-4ac}}{-2a}"),
    (r"\sin^2 x + e^{-x} + |y|", r"e^{-x} + \sin^2 x + |y|"),
    (r"2^{10^9}+1", r"1+2^{10^9}+0"),
    ("x = 3, y = 4", "(3, 4)"),
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
        reward = at_sight(answer, text)
        return self._judge.submit(answer, text) if reward is None else at_once(reward)


def at_sight(gold: str, response: str) -> float | None:
    """The verdict of `math_reward` where it takes no parser, else None: there is no answer, it is the gold answer's
    text, or both are plain numbers. Runs in the trainer, in linear time, so that most answers need no fork.

    gold: an answer that `is_readable`.

    Example: `at_sight("0.5", "so \\boxed{\\frac{1}{2}}")` -> 1.0
    """
    if len(response) > LONGEST:
        return None
    answer = extract_answer(response)
    if answer is None:
        return 0.0
    ours, theirs = plain_number(gold), plain_number(answer)
    if ours is not None and theirs is not None:
        return float(ours == theirs)
    return 1.0 if gold == answer and len(gold) <= MAX_LENGTH else None


def plain_number(text: str) -> Fraction | None:
    """An integer, a decimal or a fraction of integers, written plainly; None for all else, such as 007 and 1,000.

    Example: `plain_number("-0.50")` -> Fraction(-1, 2)
    """
    found = NUMBER.fullmatch(text) if len(text) <= 64 else None
    if found is None:
        return None
    sign, decimal, *parts = found.groups()
    value = Fraction(decimal) if decimal else Fraction(*(int(part) for part in parts if part))
    return -value if sign else value


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
    if max(len(gold), len(answer)) > MAX_LENGTH:
        return False
    gold, answer = clean(_unboxed(gold)), clean(answer)
    if not gold or not answer:
        return False
    if SPACE.sub("", gold) == SPACE.sub("", answer):
        return True
    choice = CHOICE.match(gold)
    if choice:  # (C) 12: the letter or the value
        return plain_words(answer) == choice[1].lower() or same_answer(gold[choice.end() :], answer, percent_as_unit)
    moduli = RESIDUE.search(gold), RESIDUE.search(answer)
    if all(moduli) and len({found[1].strip() for found in moduli if found}) > 1:
        return False
    ours, theirs = _shape(gold), _shape(answer)
    if isinstance(ours, Words) or isinstance(theirs, Words):
        return plain_words(gold) == plain_words(answer) != ""
    if ours is None or theirs is None:
        return False
    try:
        return Comparison(percent_as_unit).same(ours, theirs)
    except FAULTS:
        return False


def is_readable(gold: str) -> bool:
    """Can this gold answer be compared with anything?"""
    if len(gold) > MAX_LENGTH:
        return False
    gold = clean(_unboxed(gold))
    if not gold or len(WORD.findall(gold)) > MAX_WORDS + gold.count("\\begin{"):
        return False
    return _shape(gold) is not None


def _unboxed(gold: str) -> str:
    """A gold answer may be a whole solution that boxes it."""
    return (extract_answer(gold) or gold) if "\\boxed" in gold else gold


def _shape(text: str) -> Any:
    try:
        return read_shape(RESIDUE.sub("", text))
    except FAULTS:
        return None


# ---- which text is the answer


def extract_answer(response: str) -> str | None:
    """The last boxed answer, else what follows the last `answer is`, else a response that is one bare expression.

    A closed `</think>` block is thinking, not answer. The last attempt counts: a last box that is empty or never closed
    is no answer, whatever was boxed before. None: there is no answer. Linear in time.
    """
    response = response.rpartition("</think>")[2]
    boxes = max(response.rfind("\\boxed"), response.rfind("\\fbox"))
    box = BOX.match(response, boxes) if boxes >= 0 else None
    if box:
        return _boxed(response[box.end() : box.end() + MAX_LENGTH + 2])
    for pattern in FINAL_PATTERNS:
        ends = [found.end() for found in pattern.finditer(response)]
        if ends:
            return _first_statement(response[ends[-1] : ends[-1] + MAX_LENGTH].partition("\n")[0])
    response = response.strip()
    if len(response) > MAX_LENGTH or "\n" in response:
        return None
    words = re.findall(r"(?<!\\)\b[a-zA-Z]{2,}\b", re.sub(r"\\text\{[^}]*\}", "", response))
    return _first_statement(response) if len(words) <= 1 else None


def _boxed(text: str) -> str | None:
    """What is boxed, from right after the command. None for nothing, and for a brace that is never closed."""
    if not text.startswith("{"):  # \\boxed 5
        found = re.match(r"[^\s$.,{}]+", text)
        return found[0] if found else None
    depth = 0
    for brace in BRACE.finditer(text):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return text[1 : brace.start()].strip() or None
    return None


def _first_statement(text: str) -> str | None:
    """The part of a line that is the answer: up to the end of the sentence, without Markdown and delimiters."""
    text = text.replace("**", "").strip()
    delimited = re.match(r"[^$\\]{0,40}?(\$\$?|\\\(|\\\[)(.+?)(\$\$?|\\\)|\\\])", text)
    if delimited and not re.match(r"\$\s*\d[\d,.]*\s*(?:[a-zA-Z.]|$)", text):  # `$5` is money, `$5$` is mathematics
        return delimited[2].strip() or None
    text = SENTENCE_END.split(text)[0].strip()
    return text or None
