"""Reward `task`: the own scorer of a reasoning-gym data set, run in a judge."""

import ast
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

# Modules of reasoning-gym whose scorers call eval on an answer that stands for a list.
EVALUATE_ANSWERS = ("algorithmic.binary_matrix", "algorithmic.spiral_matrix", "algorithmic.string_insertion")
EVALUATE_ANSWERS += ("games.n_queens",)


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
    read_literals()
    return lambda entry, text: score(dataset, text, entry)


def read_literals() -> None:
    """What these modules of reasoning-gym call `eval` reads literals from here on. No wall: it keeps policies from
    learning that `entry["answer"]` is an answer."""
    for name in EVALUATE_ANSWERS:
        sys.modules[f"reasoning_gym.{name}"].eval = ast.literal_eval  # type: ignore[attr-defined]


def score(dataset: Any, text: str, entry: dict[str, Any]) -> float:
    """The data set's own score of an answer, in [0, 1].

    Some scorers run the answer as Python, or hand it to a parser that does: only a confined fork may call this. Such an
    answer can then give itself any score, so `read_literals` narrows the ones that call `eval` by name.
    """
    return min(1.0, max(0.0, float(dataset.score_answer(text, entry))))
