"""The trainer's side of the judges: a pool of processes that score answers, each request under a time limit."""

import json
import os
import pickle
import sys
from concurrent.futures import Future
from typing import Any

from quads.sandbox.helpers import REPOSITORY, Helper, HelperPool, Verdict, default_workers, then

FEW = 32
# A judge needs the interpreter and its packages, nothing of the user's environment.
KEPT_VARIABLES = ("PATH", "LD_LIBRARY_PATH", "LANG", "TMPDIR", "HOME")


def judge_environment() -> dict[str, str]:
    """Of a judge: one thread, this repository, and the packages that the trainer itself finds through PYTHONPATH."""
    kept = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}
    folders = [REPOSITORY, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    path = os.pathsep.join(os.path.abspath(folder) for folder in folders)
    return {**kept, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


class JudgePool:
    """Scores answers, several at once. A judge that hangs is killed: reward 0.

    kind: "math", or "task" for reasoning-gym's own scorers; a pool takes requests of its kind.

    Example: `JudgePool("math", 2, 5.0).submit("math", "1/2", "so \\\\boxed{0.5}", False).result().reward` -> 1.0
    """

    def __init__(self, kind: str, workers: int = 0, time_s: float = 5.0):
        self.time_s = time_s
        environment = judge_environment()
        self._pool = HelperPool(
            lambda: Helper([sys.executable, "-m", "quads.rl.rewards.judge", kind], environment),
            default_workers(workers),
        )

    def submit(self, *request: Any) -> "Future[Verdict]":
        """One request of `quads.rl.rewards.judge`."""
        data = pickle.dumps(request)
        asked = self._pool.submit(lambda judge: judge.ask(data, self.time_s))

        def verdict(reply: tuple[bytes | None, float]) -> Verdict:
            answer, seconds = reply
            return Verdict(json.loads(answer)["reward"], seconds) if answer else Verdict(0.0, seconds, failed=True)

        return then(asked, verdict)

    def close(self) -> None:
        self._pool.close()


class AnswerCheck:
    """Which gold answers of a data set can be read as mathematics: a row whose answer cannot is worthless.

    Plain numbers are known at sight; the rest goes to judges, once for each different text.
    """

    def __init__(self, workers: int = 0):
        self.workers = workers
        self._known: dict[str, bool] = {}
        self._pools: dict[int, JudgePool] = {}

    def __call__(self, answers: list[str]) -> list[bool]:
        """[number of answers], True where the answer can be read."""
        unknown = [answer for answer in dict.fromkeys(answers) if answer not in self._known and not _plain(answer)]
        if unknown:
            futures = [self._judges(len(unknown)).submit("readable", answer) for answer in unknown]
            self._known.update({a: future.result().reward == 1.0 for a, future in zip(unknown, futures, strict=True)})
        return [self._known.get(answer, True) for answer in answers]

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()

    def _judges(self, unknown: int) -> JudgePool:
        """One judge for a few answers, as it takes longer to start than to read them; all of them for many."""
        if unknown <= FEW and self._pools:
            return next(reversed(self._pools.values()))
        workers = 1 if unknown <= FEW else default_workers(self.workers)
        if workers not in self._pools:
            self._pools[workers] = JudgePool("math", workers)
        return self._pools[workers]


def _plain(answer: str) -> bool:
    """An integer or a decimal: nothing to check."""
    return answer.isascii() and len(answer) < 100 and answer.lstrip("+-").replace(".", "", 1).isdigit()
