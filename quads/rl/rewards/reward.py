"""What a reward is. Each is one file: what it reads of a row, how it judges a response.

A word of `REWARDS` (config/sections.py) is the file of that name and the class in it; FILE.py:FUNCTION is function.py.
Several weighted ones of a source are themselves a reward (weighted.py). A new reward is a file here and a line there.
"""

from concurrent.futures import Future
from typing import Any, Protocol

from quads.config.sections import SourceSettings
from quads.data.rows import AnswerReader, Prompt
from quads.rl.rewards.judges import Judge
from quads.sandbox.pool import Sandbox
from quads.types import Example, Verdict


class Graders(Protocol):
    """The other processes that rewards may judge in (pool.py). They start with the first response."""

    def judge(self, module: str, maker: str, *setup: Any, confined: bool = True) -> Judge:
        """`maker(*setup)` of a module of this folder, in judges. Called while a reward is built."""
        ...

    def need_sandbox(self) -> None:
        """Say, while a reward is built, that generated programs will be run."""
        ...

    @property
    def sandbox(self) -> Sandbox: ...


class Reward(AnswerReader, Protocol):
    """How responses to the prompts of one source are scored.

    Built as Reward(where, word, settings, graders): `where` names the source in errors, `word` is its word or
    FILE.py:FUNCTION. UserError for settings that do not suit it.
    """

    keys: tuple[str, ...] = ()  # of SourceSettings that only it and its like read
    columns: tuple[str, ...] = ()
    whole_row: bool = False

    def __init__(self, where: str, word: str, settings: SourceSettings, graders: Graders): ...

    def read(self, values: dict[str, Any], prompt: Prompt) -> tuple[Prompt, Any]: ...

    def unreadable(self, answers: list[Any]) -> list[str]:
        return [""] * len(answers)

    def gist(self, answer: Any) -> int:
        return hash(repr(answer))

    def unpack(self, answer: Any) -> Any:
        return answer

    def submit(self, example: Example, answer: Any, text: str) -> "Future[Verdict]":
        """Start scoring one response. answer: what `read` and `unpack` have made of the row."""
        ...


def at_once(reward: float) -> "Future[Verdict]":
    """The verdict that needs no other process."""
    verdict: Future[Verdict] = Future()
    verdict.set_result(Verdict(reward, 0.0))
    return verdict
