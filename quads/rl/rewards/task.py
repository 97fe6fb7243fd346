"""Reward `task`: the own scorer of a reasoning-gym data set, run in a judge."""

import ast
import inspect
import re
import sys
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from quads.config.sections import SourceSettings
from quads.data.reasoning import make_dataset
from quads.data.rows import Prompt
from quads.errors import UserError
from quads.rl.rewards.reward import Graders, Reward
from quads.rl.rewards.text import tagged
from quads.types import Example, Verdict

NOT_MATHEMATICS = re.compile(r"""["'`{}\[\]:;@=]|__|\.\s*[A-Za-z_]|\b(lambda|eval|exec|open|import)\b""")


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
        return self._judge.submit(answer, tagged(text, self._tag))


# ---- in the judge


def make_judge(name: str, params: dict[str, Any]) -> Callable[[dict[str, Any], str | None], float]:
    """Scores answers to problems of one data set."""
    dataset = make_dataset(f"reasoning-gym {name}", name, params, seed=1, size=64)
    return lambda entry, text: score(dataset, text, entry)


def score(dataset: Any, text: str | None, entry: dict[str, Any]) -> float:
    """The data set's own score of a response, in [0, 1]; 0 where there is no answer.

    Some scorers run the answer as Python with the entry in sight: the response `entry["answer"]` would be its own
    solution. `eval` is narrowed to literals for those, and what sympy parses must look like an expression.
    """
    if not text:
        return 0.0
    source = inspect.getsource(type(dataset).score_answer)
    if "eval(answer)" in source:
        sys.modules[type(dataset).__module__].eval = ast.literal_eval  # type: ignore[attr-defined]
    if "parse_expr(" in source and NOT_MATHEMATICS.search(text):
        return 0.0
    return min(1.0, max(0.0, float(dataset.score_answer(text, entry))))
