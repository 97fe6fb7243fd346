"""Rewards of responses, computed in other processes: a pool that takes them one by one (grading.py has a batch).

`exact` compares text here; `math` and `task` go to judges (judges.py), `code` to sandboxes (sandbox/pool.py). What
cannot be judged in time is worth 0.
"""

import re
from collections.abc import Mapping
from concurrent.futures import Future

from quads.config.sections import RewardSettings, SourceSettings
from quads.rl.rewards.code import submit_program
from quads.rl.rewards.judges import JudgePool
from quads.sandbox.helpers import Verdict
from quads.sandbox.pool import Sandbox
from quads.types import Example


class RewardPool:
    """Scores responses. Processes start with the first response that needs them; `close` ends them.

    Example: `RewardPool(RewardSettings()).submit(example, "The answer is 7.").result().reward` -> 1.0
    """

    def __init__(self, settings: RewardSettings | None = None):
        self.settings = settings or RewardSettings()
        self._judges: dict[str, JudgePool] = {}
        self._sandbox: Sandbox | None = None

    def submit(self, example: Example, text: str) -> "Future[Verdict]":
        """Start scoring one response."""
        kind = example.meta["reward"]
        if kind == "math":
            return self.judges("math").submit("math", example.answer, text, example.meta.get("percent_as_unit", False))
        if kind == "code":
            return submit_program(self.sandbox, example.answer, text, example.meta.get("code_score", "all"))
        answer = tagged(text, example.meta.get("answer_tag", ""))
        if kind == "task":
            return self.judges("task").submit(
                "task", example.meta["dataset"], example.meta["params"], example.answer, answer
            )
        verdict: Future[Verdict] = Future()
        verdict.set_result(Verdict(float(answer is not None and answer == example.answer), 0.0))
        return verdict

    def judges(self, kind: str) -> JudgePool:
        if kind not in self._judges:
            self._judges[kind] = JudgePool(kind, self.settings.workers, self.settings.judge_time_s)
        return self._judges[kind]

    @property
    def sandbox(self) -> Sandbox:
        if self._sandbox is None:
            self._sandbox = Sandbox(self.settings)
        return self._sandbox

    def close(self) -> None:
        """Kill the processes and what runs in them."""
        for pool in (*self._judges.values(), self._sandbox):
            if pool:
                pool.close()


def find_isolation(settings: RewardSettings, sources: Mapping[str, SourceSettings]) -> str:
    """The mechanism that isolates generated programs, "" if no source has any.

    Raises:
        UserError: they cannot be isolated here; better said now than after the first rollout.
    """
    if not any(source.reward == "code" for source in sources.values()):
        return ""
    sandbox = Sandbox(settings)
    sandbox.close()
    return sandbox.mechanism


def tagged(text: str, tag: str) -> str | None:
    """What stands in the last <tag>...</tag>, or without a tag the whole text; None where the tag is missing."""
    if not tag:
        return text.strip()
    found = re.findall(rf"<{re.escape(tag)}>(.*?)</{re.escape(tag)}>", text, re.DOTALL)
    return found[-1].strip() if found else None
