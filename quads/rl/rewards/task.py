"""Reward `task`: the own scorer of a reasoning-gym data set, run in a judge.

Some scorers run an answer as Python, by `eval` or by sympy's parser. The fork that a judge is confined to keeps it from
the trainer; but code that runs there could choose its own verdict. So what these scorers call reads literals and
formulas alone here: a syntax tree of numbers, symbols, operators and functions of FUNCTIONS.
"""

import ast
import builtins
import sys
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from quads.config.sections import SourceSettings
from quads.data.reasoning import make_dataset
from quads.data.rows import Prompt
from quads.errors import UserError
from quads.rl.rewards.reward import Graders, Reward, at_once
from quads.rl.rewards.text import tagged
from quads.types import Example, Verdict

# Modules of reasoning-gym whose scorers call eval on an answer that stands for a list, and
EVALUATE_ANSWERS = ("algorithmic.binary_matrix", "algorithmic.spiral_matrix", "algorithmic.string_insertion")
EVALUATE_ANSWERS += ("games.n_queens",)
# those that import sympy's parser by name; others call sympy.parse_expr.
PARSE_ANSWERS = ("games.countdown", "games.puzzle24")
FUNCTIONS = ("sin", "cos", "tan", "cot", "sec", "csc", "asin", "acos", "atan", "sinh", "cosh", "tanh", "asinh", "acosh")
FUNCTIONS += ("atanh", "exp", "log", "ln", "sqrt", "Abs", "abs")
FUNCTIONS += ("Integral",)  # stands in answers of reasoning-gym's own
NODES = (ast.Expression, ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop, ast.Load)


class Task(Reward):
    """The answer is the whole entry of the data set; the scorer sees it all."""

    keys = ("answer_tag",)

    def __init__(self, where: str, word: str, settings: SourceSettings, graders: Graders):
        if settings.kind != "reasoning_gym":
            others = "exact, math, code or FILE.py:FUNCTION"
            raise UserError(f"{where} reward = 'task' is for reasoning_gym; with {settings.kind!r} use {others}")
        self._tag = settings.answer_tag
        self._judge = graders.judge(__name__, "make_judge", settings.dataset, settings.params)

    def read(self, values: dict[str, Any], prompt: Prompt) -> tuple[Prompt, Any]:
        return prompt, values

    def gist(self, answer: Any) -> int:
        return 0  # a problem that comes again may show another of several right answers

    def submit(self, example: Example, answer: Any, text: str) -> "Future[Verdict]":
        found = tagged(text, self._tag)
        return self._judge.submit(answer, found) if found else at_once(0.0)


# ---- in the judge


def make_judge(name: str, params: dict[str, Any]) -> Callable[[dict[str, Any], str], float]:
    """Scores answers to problems of one data set."""
    dataset = make_dataset(f"reasoning-gym {name}", name, params, seed=1, size=64)
    dataset[0]  # what the first problem imports, forks need not
    narrow_scorers()
    return lambda entry, text: score(dataset, text, entry)


def narrow_scorers() -> None:
    """From here on scorers of reasoning-gym read literals and formulas, and run nothing. No wall around the trainer:
    it keeps policies from learning that `entry["answer"]` is an answer."""
    import sympy

    for name in EVALUATE_ANSWERS:
        sys.modules[f"reasoning_gym.{name}"].eval = ast.literal_eval  # type: ignore[attr-defined]
    for name in PARSE_ANSWERS:
        sys.modules[f"reasoning_gym.{name}"].parse_expr = read_formula  # type: ignore[attr-defined]
    sympy.parse_expr = read_formula


def read_formula(text: str, local_dict: dict[str, Any] | None = None) -> Any:
    """sympy's `parse_expr` of a text that is a formula and nothing else. ValueError or SyntaxError for any other."""
    from sympy.parsing.sympy_parser import parse_expr

    if not text.isascii():
        raise ValueError("letters that Python and sympy may read differently")
    for node in ast.walk(ast.parse(text.strip(), mode="eval")):
        if isinstance(node, ast.Call):
            fine = isinstance(node.func, ast.Name) and node.func.id in FUNCTIONS
        elif isinstance(node, ast.Name):
            fine = node.id in FUNCTIONS or _is_symbol(node.id)
        else:
            fine = isinstance(node, NODES) or (isinstance(node, ast.Constant) and type(node.value) in (int, float))
        if not fine:
            raise ValueError(f"{type(node).__name__} in a formula")
    return parse_expr(text, local_dict)


def _is_symbol(name: str) -> bool:
    """Does sympy's parser take a name for a symbol or a constant, nothing of its own or of Python?"""
    import sympy

    return len(name) == 1 or name == "pi" or not (hasattr(sympy, name) or hasattr(builtins, name))


def score(dataset: Any, text: str, entry: dict[str, Any]) -> float:
    """The data set's own score of an answer, in [0, 1].

    Some scorers run the answer as Python, or hand it to a parser that does, unless `narrow_scorers` was called. Only a
    confined fork may call this.
    """
    return min(1.0, max(0.0, float(dataset.score_answer(text, entry))))
