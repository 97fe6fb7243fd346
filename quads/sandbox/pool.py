"""Running generated programs where they can do no harm: the trainer's side.

A pool of sandbox servers (server.py), one for each worker, takes jobs: a program and the inputs of its tests.
Outputs come back here and are compared here. How a server shuts programs off is its mechanism:

    namespaces  user, mount, process, network and IPC namespaces of our own, plus seccomp; the strongest, tried first
    bubblewrap  the same through `bwrap`, for systems that let only it make namespaces
    landlock    Landlock for files, seccomp for processes, network and signals; needs no privilege at all
    none        limits only: a program can read, write and connect like the user

`auto` takes the first that holds in a test run here. If none does, nothing is run.
"""

import json
import os
import shutil
import struct
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from quads.config.sections import RewardSettings
from quads.errors import UserError
from quads.sandbox.helpers import HEADER, REPOSITORY, Helper, HelperError, HelperPool, default_workers

MECHANISMS = ("namespaces", "bubblewrap", "landlock")
GRACE_S = 5.0  # beyond a limit before the server that should keep it is killed; a busy machine is slow
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

# Each line must fail in a sandbox worth its name. Run once before a mechanism is trusted.
PROBE = """
import os, socket, sys
def fails(action):
    try:
        action()
    except OSError:
        return True
    return False
held = [
    fails(lambda: open({canary!r}).read()),
    fails(lambda: open({canary!r} + ".new", "w")),
    fails(lambda: socket.socket(socket.AF_INET)),
    fails(os.fork),
    fails(lambda: os.execv("/bin/true", ["true"])),
    fails(lambda: os.kill({pid}, 0)),
    not os.path.exists({canary!r}) or not os.access({canary!r}, os.R_OK) or fails(lambda: os.listdir({folder!r})),
]
open("here", "w").write("x")
print("held" if all(held) else held)
"""


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
    """A pool of servers with one mechanism. UserError if there is no isolation and settings.sandbox is not `none`.

    Example: `Sandbox(RewardSettings()).submit(Job("print(input())", ("7",)), lambda i, outcome: True).result()`
    """

    def __init__(self, settings: RewardSettings):
        self.settings = settings
        self._boxes: list[str] = []
        self.mechanism = settings.sandbox if settings.sandbox == "none" else self._choose()
        self._pool = HelperPool(lambda: self._server(self.mechanism), default_workers(settings.workers))

    def submit(
        self, job: Job, go_on: Callable[[int, Outcome], bool]
    ) -> "Future[tuple[tuple[list[Outcome], float] | None, float]]":
        """Run the tests in order. go_on(index, outcome) is asked after each whether to run the next.

        The future holds ((outcomes so far, seconds they took), seconds until the server was free); the pair inside is
        None if the server died or hung.
        """
        return self._pool.submit(lambda server: self._converse(server, job, go_on))

    def close(self) -> None:
        """Kill all servers with what runs in them, and remove their folders."""
        self._pool.close()
        for box in self._boxes:
            shutil.rmtree(box, ignore_errors=True)

    def _converse(self, server: Helper, job: Job, go_on: Callable[[int, Outcome], bool]) -> tuple[list[Outcome], float]:
        started = time.monotonic()
        deadline = started + self.settings.code_total_s
        request = json.dumps(
            {"code": job.code, "inputs": job.inputs, "function": job.function, "prelude": job.prelude}
        ).encode()
        server.send(HEADER.pack(len(request)) + request, deadline + GRACE_S)
        outcomes = []
        for index in range(len(job.inputs)):
            # One test that hangs is ended by its supervisor; this deadline is for a supervisor that hangs.
            outcomes.append(_outcome(server.receive(time.monotonic() + self.settings.code_time_s + GRACE_S)))
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

    # ---- choosing a mechanism

    def _choose(self) -> str:
        wanted = MECHANISMS if self.settings.sandbox == "auto" else (self.settings.sandbox,)
        reasons = []
        for mechanism in wanted:
            reason = self._try(mechanism)
            if not reason:
                return mechanism
            reasons.append(f"{mechanism}: {reason}")
        raise UserError(
            f"generated programs cannot be isolated here ({'; '.join(reasons)}). Allow user namespaces or Landlock, or "
            'set [reward] sandbox = "none" to run them with limits only, on a machine that may be harmed'
        )

    def _try(self, mechanism: str) -> str:
        """Does the mechanism hold? "" or why not."""
        if os.name != "posix" or not sys.platform.startswith("linux"):
            return "needs Linux"
        if mechanism == "bubblewrap" and not shutil.which("bwrap"):
            return "bwrap is not installed"
        with tempfile.TemporaryDirectory(prefix="quads-probe-") as folder:
            canary = f"{folder}/canary"
            Path(canary).write_text("secret")
            server = self._server(mechanism)
            code = PROBE.format(canary=canary, folder=folder, pid=os.getpid())
            try:
                server.start()
                outcome = self._converse(server, Job(code, ("",)), lambda *_: False)[0][0]
            except HelperError as error:
                return str(error)
            except (TimeoutError, EOFError, BrokenPipeError):
                return "a test run did not come back"
            finally:
                server.kill()
            if outcome.output.strip() == b"held":
                return ""
            return f"a test run got through: {outcome.output.decode(errors='replace').strip() or outcome.stderr}"

    def _server(self, mechanism: str) -> Helper:
        s = self.settings
        box = ""
        if mechanism in ("landlock", "none"):
            box = tempfile.mkdtemp(prefix="quads-box-")
            self._boxes.append(box)
        arguments = {
            "mechanism": mechanism,
            "box": box,
            "packages": _packages(),
            "limits": {
                "time_s": s.code_time_s,
                "memory": s.code_memory_mib << 20,
                "output": int(s.code_output_mib * (1 << 20)),
                "disk": s.code_disk_mib << 20,
                "threads": s.code_threads,
            },
        }
        command = [_interpreter(), "-S", "-s", "-P", "-m", "quads.sandbox.server", json.dumps(arguments)]
        if mechanism == "bubblewrap":
            command = _bubblewrap(s.code_disk_mib << 20) + command
        return Helper(command, ENVIRONMENT)


def _outcome(frame: bytes) -> Outcome:
    (size,) = HEAD.unpack_from(frame)
    head = json.loads(frame[HEAD.size : HEAD.size + size])
    return Outcome(head["verdict"], head["seconds"], head["stderr"], frame[HEAD.size + size :])


def _interpreter() -> str:
    """The interpreter itself, not a virtual environment's link to it."""
    return os.path.realpath(sys.executable)


def _packages() -> list[str]:
    """Folders of the third-party packages that programs may import: numpy, where it is installed."""
    spec = find_spec("numpy")
    if not spec or not spec.submodule_search_locations:
        return []
    numpy = os.path.realpath(next(iter(spec.submodule_search_locations)))
    return [path for path in (numpy, f"{numpy}.libs") if os.path.isdir(path)]


def _bubblewrap(disk: int) -> list[str]:
    """bwrap with the same root folder that the server builds for itself."""
    stdlib = os.path.dirname(os.path.realpath(os.__file__))
    folders = [stdlib, os.path.realpath(sysconfig.get_config_var("LIBDIR") or stdlib), os.path.dirname(_interpreter())]
    words = ["bwrap", "--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL", "--clearenv"]
    for name, value in ENVIRONMENT.items():
        words += ["--setenv", name, value]
    for path in ("/usr/lib", "/usr/lib64", "/lib", "/lib64"):
        if os.path.islink(path):
            words += ["--symlink", os.readlink(path), path]
        elif os.path.isdir(path):
            words += ["--ro-bind", path, path]
    for path in dict.fromkeys(folders):
        words += ["--ro-bind", path, path]
    code = str(Path(__file__).resolve().parent)
    for name in (
        "server",
        "supervisor",
        "program",
        "linux",
        "seccomp",
        "__init__",
    ):
        words += ["--ro-bind", f"{code}/{name}.py", f"{code}/{name}.py"]
    words += ["--ro-bind", f"{REPOSITORY}/quads/__init__.py", f"{REPOSITORY}/quads/__init__.py"]
    for package in _packages():
        words += ["--ro-bind", package, f"/packages/{os.path.basename(package)}"]
    return [*words, "--dev", "/dev", "--size", str(disk), "--tmpfs", "/box", "--chdir", "/"]
