"""The trainer's side of the judges: a pool of processes that score answers, each request under a time limit."""

import base64
import json
import os
import pickle
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from quads.errors import UserError
from quads.rl.rewards.isolation import isolation, user_error
from quads.sandbox.helpers import REPOSITORY, Helper, HelperError, HelperPool, default_workers, then
from quads.types import Verdict

BATCH = 50  # gold answers in one request: as many bits as a float has
GRACE_S = 5.0  # beyond the limit before the process that should keep it is killed; a busy machine is slow
# A judge needs the interpreter and its packages, nothing of the user's environment.
KEPT_VARIABLES = ("PATH", "LD_LIBRARY_PATH", "LANG", "TMPDIR", "HOME")


class RewardError(UserError):
    """A reward function did what it must not; found by one process alone, in the middle of a run."""

    anywhere = True


def judge_environment(inherit: bool = False) -> dict[str, str]:
    """Of a judge: one thread, this repository, and the packages that the trainer itself finds through PYTHONPATH.

    inherit: keep all other variables as well, for functions of the user, which may need keys or addresses.
    """
    names = os.environ if inherit else [name for name in KEPT_VARIABLES if name in os.environ]
    folders = [REPOSITORY, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    path = os.pathsep.join(os.path.abspath(folder) for folder in folders)
    threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    return {**{name: os.environ[name] for name in names}, **threads, "PYTHONPATH": path}


class JudgePool:
    """Scores answers, several at once. A judge that hangs is killed: no verdict.

    Args:
        module: its functions make the judges of this pool, such as `quads.rl.rewards.math`.
        confined: whether each answer is judged in a confined fork. If not, as for functions of the user that do not ask
            for it, a judge keeps the user's environment.
        mechanism: gives the one that confines judges, when the first one starts.

    Example: `JudgePool("quads.rl.rewards.math", 2, 5.0).add("make_judge", False).submit("1/2", "so \\\\boxed{0.5}")`
    """

    def __init__(
        self,
        module: str,
        workers: int = 0,
        time_s: float = 5.0,
        confined: bool = True,
        mechanism: Callable[[], str] = isolation,
    ):
        self.module, self.time_s, self.confined, self._mechanism = module, time_s, confined, mechanism
        self.workers = default_workers(workers)
        self._setups: list[tuple[str, tuple[Any, ...]]] = []
        self._started = False
        self._pool = HelperPool(self._helper, self.workers)

    def add(self, maker: str, *setup: Any) -> "Judge":
        """Have every process make one judge, `maker(*setup)` of the module, before it takes requests."""
        assert not self._started, "a judge is added before the first request"
        if (maker, setup) not in self._setups:
            self._setups.append((maker, setup))
        return Judge(self, self._setups.index((maker, setup)))

    def start(self) -> None:
        """Start one process, and wait until its judges are made. UserError with what it printed if they cannot be."""
        try:
            self._pool.submit(lambda helper: b"").result()
        except HelperError as error:
            raise user_error(error) from None

    def submit(self, number: int, arguments: Sequence[Any]) -> "Future[Verdict]":
        """One request to the `number`-th judge."""
        request = pickle.dumps((number, tuple(arguments)))
        return then(self._pool.submit(lambda helper: self._ask(helper, request)), _verdict, user_error)

    def close(self) -> None:
        """Kill the processes."""
        self._pool.close()

    def _ask(self, helper: Helper, request: bytes) -> dict[str, Any]:
        """A judge that died, perhaps while idle, has not answered: ask once more. One that took too long is not."""
        try:
            reply = self._ask_once(helper, request)
        except (EOFError, BrokenPipeError):
            helper.kill()
            helper.start()
            reply = {"none": "died"}
        return self._ask_once(helper, request) if reply.get("none") == "died" else reply

    def _ask_once(self, helper: Helper, request: bytes) -> dict[str, Any]:
        # A confined judge keeps the time itself, and lives on; this is for one that does not.
        return json.loads(helper.ask(request, self.time_s + GRACE_S if self.confined else self.time_s))

    def _helper(self) -> Helper:
        self._started = True
        setups = base64.b64encode(pickle.dumps(self._setups)).decode()
        path = ["-P"] if self.confined else []  # what lies in the current folder is no package of a confined judge
        mechanism = self._mechanism() if self.confined else "own"
        arguments = [self.module, setups, mechanism, str(self.time_s)]
        command = [sys.executable, *path, "-m", "quads.rl.rewards.judge", *arguments]
        return Helper(command, judge_environment(inherit=not self.confined))


@dataclass(frozen=True)
class Judge:
    """One judge of a pool."""

    pool: JudgePool
    number: int

    def submit(self, *arguments: Any) -> "Future[Verdict]":
        """Start judging: the arguments are those of the function that the judge's maker gave."""
        return self.pool.submit(self.number, arguments)


class AnswerCheck:
    """Which gold answers of a data set can be read as mathematics: a row whose answer cannot is worthless.

    Plain numbers are known at sight; the rest goes to a judge, once for each different text.
    """

    def __init__(self, judge: Judge):
        self._judge = judge
        self._known: dict[str, bool] = {}

    def __call__(self, answers: list[str]) -> list[bool]:
        """[number of answers], True where the answer can be read."""
        unknown = [answer for answer in dict.fromkeys(answers) if answer not in self._known and not _plain(answer)]
        batches = [unknown[i : i + BATCH] for i in range(0, len(unknown), BATCH)]
        for batch, future in [(batch, self._judge.submit(batch)) for batch in batches]:
            verdict = future.result()
            bits = int(verdict.reward * 2**BATCH)
            self._known.update({answer: bool(bits >> i & 1) for i, answer in enumerate(batch)})
            if verdict.failed:  # one of them takes for ever, or breaks a judge: it alone cannot be read
                single = [(answer, self._judge.submit([answer])) for answer in batch]
                self._known.update({answer: future.result().reward > 0.0 for answer, future in single})
        return [self._known.get(answer, True) for answer in answers]


def _verdict(reply: tuple[dict[str, Any] | None, float]) -> Verdict:
    found, seconds = reply
    if found is None or "none" in found:
        return Verdict(0.0, seconds, failed=True)
    if "error" in found:
        raise RewardError(found["error"])
    return Verdict(found["reward"], seconds)


def _plain(answer: str) -> bool:
    """An integer or a decimal: nothing to check."""
    return answer.isascii() and len(answer) < 100 and answer.lstrip("+-").replace(".", "", 1).isdigit()
