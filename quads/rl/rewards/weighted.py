"""Several weighted rewards of one source, as one: the total is their weighted sum."""

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from quads.data.rows import Prompt
from quads.rl.rewards.reward import Reward
from quads.sandbox.helpers import then
from quads.types import Example, Verdict


class Weighted(Reward):
    """members: (name in metrics, weight, reward), in the order of the config.

    Its answer is the list of theirs; a row without an answer for one of them has none.
    """

    def __init__(self, members: Sequence[tuple[str, float, Reward]]):
        self._names = [name for name, _, _ in members]
        self._weights = [weight for _, weight, _ in members]
        self._rewards = [reward for _, _, reward in members]
        self.columns = tuple(dict.fromkeys(column for reward in self._rewards for column in reward.columns))
        self.whole_row = any(reward.whole_row for reward in self._rewards)

    def read(self, values: dict[str, Any], prompt: Prompt) -> tuple[Prompt, Any]:
        answers = []
        for reward in self._rewards:
            prompt, answer = reward.read(values, prompt)
            answers.append(answer)
        return prompt, None if any(answer is None for answer in answers) else answers

    def unreadable(self, answers: list[Any]) -> list[str]:
        of_each = [r.unreadable([parts[i] for parts in answers]) for i, r in enumerate(self._rewards)]
        return [next(filter(None, reasons), "") for reasons in zip(*of_each, strict=True)]

    def gist(self, answer: Any) -> int:
        return hash(tuple(reward.gist(part) for reward, part in zip(self._rewards, answer, strict=True)))

    def unpack(self, answer: Any) -> Any:
        return [reward.unpack(part) for reward, part in zip(self._rewards, answer, strict=True)]

    def submit(self, example: Example, answer: Any, text: str) -> "Future[Verdict]":
        """One that gives no verdict leaves the whole response without one."""
        futures = [reward.submit(example, part, text) for reward, part in zip(self._rewards, answer, strict=True)]
        return then(_all(futures), self._sum)

    def _sum(self, verdicts: list[Verdict]) -> Verdict:
        parts = {name: verdict.reward for name, verdict in zip(self._names, verdicts, strict=True)}
        total = sum(weight * part for weight, part in zip(self._weights, parts.values(), strict=True))
        seconds = max(verdict.seconds for verdict in verdicts)
        if any(verdict.failed for verdict in verdicts):
            return Verdict(0.0, seconds, failed=True)
        return Verdict(total, seconds, parts=parts)


def _all(futures: "list[Future[Verdict]]") -> "Future[list[Verdict]]":
    """A future of the results of all; no thread waits for it. The first error in their order passes on."""
    gathered: Future[list[Verdict]] = Future()
    lock, left = threading.Lock(), len(futures)

    def done(_: "Future[Verdict]") -> None:
        nonlocal left
        with lock:
            left -= 1
            last = left == 0
        if last:
            try:
                gathered.set_result([future.result() for future in futures])
            except BaseException as error:
                gathered.set_exception(error)

    for future in futures:
        future.add_done_callback(done)
    return gathered
