"""Reward `exact`: the response, or what stands in its last tag, is the answer letter for letter."""

from concurrent.futures import Future
from typing import Any

from quads.config.sections import SourceSettings
from quads.data.rows import Prompt, text_answer
from quads.rl.rewards.reward import Graders, Reward, at_once
from quads.rl.rewards.text import tagged
from quads.types import Example, Verdict


class Exact(Reward):
    """1 if the texts are equal, white space at their ends aside, else 0. Needs no other process."""

    keys = ("answer_tag",)

    def __init__(self, where: str, word: str, settings: SourceSettings, graders: Graders):
        self.columns = (settings.answer_column,)
        self._settings = settings

    def read(self, values: dict[str, Any], prompt: Prompt) -> tuple[Prompt, Any]:
        return prompt, text_answer(values, self._settings)

    def submit(self, example: Example, answer: Any, text: str) -> "Future[Verdict]":
        return at_once(float(tagged(text, self._settings.answer_tag) == answer))
