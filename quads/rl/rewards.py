"""Rewards of a batch of responses, computed in other processes beside the rollout.

`exact` compares text here; `math` and `task` go to judges (judges.py). What cannot be judged in time is worth 0.
"""

import re
from concurrent.futures import Future
from typing import Any

from quads.config_sections import RewardSettings
from quads.rl.judges import JudgePool
from quads.types import Example


class RewardPool:
    """Scores responses. Processes start with the first response that needs them; `close` ends them.

    Example: `RewardPool(RewardSettings()).score_batch([(example, "The answer is 7.")])` -> [1.0]
    """

    def __init__(self, settings: RewardSettings | None = None):
        self.settings = settings or RewardSettings()
        self._judges: JudgePool | None = None

    def submit(self, example: Example, text: str) -> "Future[float]":
        """Start scoring one response; the future holds its reward in [0, 1]."""
        kind = example.meta["reward"]
        if kind == "math":
            return self.judges.submit("math", example.answer, text, example.meta.get("percent_as_unit", False))
        answer = tagged(text, example.meta.get("answer_tag", ""))
        if kind == "task":
            return self.judges.submit("task", example.meta["dataset"], example.meta["params"], example.answer, answer)
        return _done(float(answer is not None and answer == example.answer))

    def score_batch(self, batch: list[tuple[Example, str]]) -> list[float]:
        """Rewards of (example, response text) pairs, in order."""
        return [future.result() for future in [self.submit(example, text) for example, text in batch]]

    @property
    def judges(self) -> JudgePool:
        if self._judges is None:
            self._judges = JudgePool(self.settings.workers, self.settings.judge_time_s)
        return self._judges

    def close(self) -> None:
        """Kill the processes."""
        if self._judges:
            self._judges.close()


def tagged(text: str, tag: str) -> str | None:
    """What stands in the last <tag>...</tag>, or without a tag the whole text; None where the tag is missing."""
    if not tag:
        return text.strip()
    found = re.findall(rf"<{re.escape(tag)}>(.*?)</{re.escape(tag)}>", text, re.DOTALL)
    return found[-1].strip() if found else None


def _done(value: Any) -> "Future[Any]":
    future: Future[Any] = Future()
    future.set_result(value)
    return future
