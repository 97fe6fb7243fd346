"""Running generated programs where they can do no harm: the trainer's side.

A pool of sandbox servers (server.py), one for each worker, takes jobs: a program and the inputs of its tests.
Outputs come back here and are compared here. How a server shuts programs off is its mechanism (isolation.py).
"""

import json
import os
import struct
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from typing import Any

from quads.sandbox.boxes import make_locked, remove, remove_stale
from quads.sandbox.confinement import Limits
from quads.sandbox.helpers import HEADER, REPOSITORY, Helper, HelperPool, default_workers

GRACE_S = 5.0  # beyond a limit before the server that should keep it is killed; a busy machine is slow
END_S = 2.0  # in which a server kills what it runs and removes its folder
HEAD = struct.Struct("<I")
# A set's order depends on the hash seed; a program's reward must not.
ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",
    "PYTHONPATH": REPOSITORY,
    "PYTHONDONTWRITEBYTECODE": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}


@dataclass(frozen=True)
class Job:
    """A program and what its tests feed it. function: name to call, inputs are then argument lists; "": stdin texts."""

    code: str
    inputs: tuple[Any, ...]
    function: str = ""
    prelude: bool = False  # with the imports that function-call data sets take for granted


@dataclass(frozen=True)
class Outcome:
    """What one test did. verdict: ok, failed (exit status not 0), or the limit it broke: time, output, disk."""

    verdict: str
    seconds: float
    stderr: str
    output: bytes  # stdout, or JSON of the returned value; empty unless verdict is ok


class Sandbox:
    """A pool of servers.

    Args:
        mechanism: namespaces, landlock or none, as `find_isolation` (isolation.py) gives it.
        total_s: seconds that all tests of a job may take.
        workers: programs at once; 0: one for each core.

    Example: `Sandbox("landlock", limits).submit(Job("print(input())", ("7",)), lambda i, outcome: True).result()`
    """

    def __init__(self, mechanism: str, limits: Limits, total_s: float = 60.0, workers: int = 0):
        self.mechanism, self.limits, self.total_s = mechanism, limits, total_s
        self._folder, self._lock = "", -1
        if mechanism != "namespaces":
            remove_stale()
            self._folder, self._lock = make_locked()
        self._pool = HelperPool(self._server, default_workers(workers))

    def submit(
        self, job: Job, go_on: Callable[[int, Outcome], bool]
    ) -> "Future[tuple[tuple[list[Outcome], float] | None, float]]":
        """Run the tests in order. go_on(index, outcome) is asked after each whether to run the next.

        The future holds ((outcomes so far, seconds they took), seconds until the server was free); the pair inside is
        None if the server died or hung.
        """
        return self._pool.submit(lambda server: self._converse(server, job, go_on))

    def run(self, job: Job) -> Outcome:
        """Run a job of one test in a server of its own, now. HelperError, TimeoutError, EOFError, BrokenPipeError."""
        server = self._server()
        try:
            server.start()
            return self._converse(server, job, lambda *_: False)[0][0]
        finally:
            server.kill()

    def close(self) -> None:
        """End all servers with what runs in them, and remove their folders."""
        self._pool.close()
        if self._folder:
            remove(self._folder)
            os.close(self._lock)

    def _converse(self, server: Helper, job: Job, go_on: Callable[[int, Outcome], bool]) -> tuple[list[Outcome], float]:
        started = time.monotonic()
        deadline = started + self.total_s
        request = json.dumps(
            {"code": job.code, "inputs": job.inputs, "function": job.function, "prelude": job.prelude}
        ).encode()
        server.send(HEADER.pack(len(request)) + request, deadline + GRACE_S)
        outcomes = []
        for index in range(len(job.inputs)):
            # One test that hangs is ended by its supervisor; this deadline is for a supervisor that hangs.
            outcomes.append(_outcome(server.receive(time.monotonic() + self.limits.time_s + GRACE_S)))
            if index + 1 == len(job.inputs):
                break
            late = time.monotonic() > deadline
            if late or not go_on(index, outcomes[-1]):
                server.send(b"-", time.monotonic() + GRACE_S)
                break
            server.send(b"+", time.monotonic() + GRACE_S)
        seconds = time.monotonic() - started
        try:
            server.receive(time.monotonic() + GRACE_S)  # it has cleaned up
        except (TimeoutError, EOFError):
            server.kill()  # the next program gets a fresh server
        return outcomes, seconds

    def _server(self) -> Helper:
        arguments = {
            "mechanism": self.mechanism,
            "folder": tempfile.mkdtemp(dir=self._folder) if self._folder else "",
            "packages": _packages(),
            "limits": asdict(self.limits),
        }
        command = [interpreter(), "-S", "-s", "-P", "-m", "quads.sandbox.server", json.dumps(arguments)]
        return Helper(command, ENVIRONMENT, END_S)


def _outcome(frame: bytes) -> Outcome:
    (size,) = HEAD.unpack_from(frame)
    head = json.loads(frame[HEAD.size : HEAD.size + size])
    return Outcome(head["verdict"], head["seconds"], head["stderr"], frame[HEAD.size + size :])


def interpreter() -> str:
    """The interpreter itself, not a virtual environment's link to it."""
    return os.path.realpath(sys.executable)


def _packages() -> list[str]:
    """Folders of the third-party packages that programs may import: numpy, where it is installed."""
    spec = find_spec("numpy")
    if not spec or not spec.submodule_search_locations:
        return []
    numpy = os.path.realpath(next(iter(spec.submodule_search_locations)))
    return [path for path in (numpy, f"{numpy}.libs") if os.path.isdir(path)]
