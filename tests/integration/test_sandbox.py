"""Hostile programs in the sandbox: none passes, outlives its limit or leaves a file or process. Honest ones pass."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from quads.errors import UserError
from quads.rl.rewards.code import submit_program
from quads.rl.rewards.code_tests import CodeTests, parse_tests
from quads.rl.rewards.isolation import isolation
from quads.sandbox import isolation as isolation_module
from quads.sandbox.confinement import Limits
from quads.sandbox.isolation import MECHANISMS, NoIsolation, find_isolation
from quads.sandbox.pool import Job, Outcome, Sandbox
from tests.integration.hostile_programs import HONEST, HOSTILE

TIME_S = 1.0
# Starting, confining and reporting on a machine with every core busy; a program that got away would take an hour.
SLACK_S = 4.0


LIMITS = Limits(time_s=TIME_S, memory=256 << 20, output=1 << 19, disk=4 << 20, threads=8)


def make(mechanism: str) -> Sandbox:
    return Sandbox(mechanism, LIMITS, total_s=2.5, workers=2)


@pytest.fixture(scope="module", params=MECHANISMS)
def sandbox(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    try:
        sandbox = make(find_isolation(request.param))
    except NoIsolation as reason:
        pytest.skip(str(reason))
    yield sandbox
    sandbox.close()


def test_some_mechanism_works_here() -> None:
    assert find_isolation("auto") in MECHANISMS


def test_the_probe_sees_what_gets_through() -> None:
    """Without isolation nearly every row does."""
    through = isolation_module._try("none").removeprefix("a test run got through: ").split()
    rows = set(
        "read write make list truncate chmod utime remove lock inet datagram fork kill owner nice affinity scheduler "
        "limits allocate memory death_signal".split()
    )
    assert rows <= set(through), through


def test_hostile_programs_beside_honest_ones(sandbox: Sandbox, tmp_path: Path) -> None:
    assert len(HOSTILE) >= 25
    secret = f"secret-{uuid.uuid4().hex}"
    outside = tmp_path / "outside"
    outside.mkdir()
    outside.chmod(0o777)
    canary = outside / "canary"
    canary.write_text(secret)
    canary.chmod(0o666)
    server, told = _teller(secret)
    abstract = f"quads-{uuid.uuid4().hex}"
    hidden, told_hidden = _teller(secret, abstract)
    words = {"SECRET": secret, "CANARY": str(canary), "OUTSIDE": str(outside), "NAME": abstract}
    words["PORT"] = str(server.getsockname()[1])

    honest = list(HONEST.items())
    futures = []
    for i, (name, program) in enumerate(HOSTILE.items()):
        for word, value in words.items():
            program = program.replace(word, value)
        futures.append((name, False, _submit(sandbox, program, "7\n", secret)))
        name, (program, stdin, expected) = honest[i % len(honest)]
        futures.append((name, True, _submit(sandbox, program, stdin, expected)))

    wrong = []
    for name, right, future in futures:
        verdict = future.result(timeout=60)
        if verdict.reward != float(right):
            wrong.append(f"{name}: reward {verdict.reward}")
        if verdict.seconds > TIME_S + SLACK_S:
            wrong.append(f"{name}: took {verdict.seconds:.1f} s")
    server.close()
    hidden.close()
    assert wrong == []
    assert told == told_hidden == []  # nobody got through to the network
    assert canary.read_text() == secret
    assert sorted(path.name for path in outside.iterdir()) == ["canary"]
    assert not Path("/dev/shm/quads-hostile").exists()
    assert bool(sandbox._folder) == (sandbox.mechanism == "landlock")  # the other writes to a memory of its own
    assert [os.listdir(box) for box in Path(sandbox._folder or outside).glob("tmp*")].count([]) == (
        len(_servers()) if sandbox._folder else 0
    )
    # Idle servers are all that is left.
    assert _servers() and _wait_for(lambda: all(_descendants(server) == 0 for server in _servers())), _servers()


def _submit(sandbox: Sandbox, program: str, stdin: str, expected: str):
    return submit_program(sandbox, CodeTests("", (stdin,), (expected,)), f"```python\n{program}\n```")


def outcomes(sandbox: Sandbox, code: str, inputs: tuple[str, ...] = ("",)) -> list[Outcome]:
    run, _ = sandbox.submit(Job(code, inputs), lambda *_: True).result(timeout=30)
    assert run is not None, "the server broke"
    return run[0]


def outcome(sandbox: Sandbox, code: str) -> Outcome:
    return outcomes(sandbox, code)[0]


def _teller(secret: str, abstract: str = "") -> tuple[socket.socket, list[object]]:
    """A local server that tells the secret to anyone who connects: over TCP, or an abstract Unix socket."""
    told: list[object] = []
    if abstract:
        server = socket.socket(socket.AF_UNIX)
        server.bind(f"\0{abstract}")
        server.listen()
    else:
        server = socket.create_server(("127.0.0.1", 0))

    def tell() -> None:
        while True:
            try:
                connection, address = server.accept()
            except OSError:
                return
            told.append(address)
            connection.sendall(secret.encode())
            connection.close()

    threading.Thread(target=tell, daemon=True).start()
    return server, told


def _descendants(pid: int) -> int:
    try:
        children = [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return 0
    return len(children) + sum(map(_descendants, children))


def _servers() -> list[int]:
    """Sandbox servers started by this process, whichever thread did."""
    found = []
    for task in Path("/proc/self/task").iterdir():
        for pid in map(int, (task / "children").read_text().split()):
            if b"quads.sandbox.server" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    return found


def _wait_for(condition, seconds: float = 5.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def test_limits_of_a_program(sandbox: Sandbox) -> None:
    def verdict(code: str) -> str:
        return outcome(sandbox, code).verdict

    assert verdict("print(1)") == "ok"
    assert verdict("raise ValueError") == "failed"
    assert verdict("while True: pass") == "time"
    assert verdict("print('x' * 10 ** 6)") == "output"
    assert verdict("x = bytearray(1 << 30)") == "failed"  # MemoryError
    assert verdict("open('a', 'wb').write(bytes(8 << 20))") in ("failed", "disk")


def test_two_programs_share_nothing(sandbox: Sandbox) -> None:
    """What one test leaves, in its folder or in memory, the next one does not find."""
    leave = "import builtins, os, sys\nopen('left', 'w').write('x')\nos.link('left', 'b')\nbuiltins.left = sys.left = 1"
    look = "import builtins, os, sys\nprint(os.listdir('.'), hasattr(builtins, 'left'), hasattr(sys, 'left'))"
    for _ in range(3):  # more often than there are servers
        outcomes(sandbox, leave, ("", ""))
        assert [found.output for found in outcomes(sandbox, look, ("", ""))] == [b"[] False False\n"] * 2


@pytest.mark.parametrize(
    "code",
    [
        "import os\nos.chmod('.', 0)",
        "import os\nfd = os.open('a', os.O_CREAT | os.O_RDWR)\nos.unlink('a')\n"
        "import time\nfor i in range(100):\n    os.write(fd, bytes(1 << 19)); os.lseek(fd, 0, 2); time.sleep(0.02)",
        "import os\nfor i in range(99): os.posix_fallocate(os.open(f'a{i}', 65), 0, 1 << 20)",
    ],
    ids=["mode of its folder", "removed but open", "allocated"],
)
def test_a_program_that_spoils_its_folder_fails_alone(sandbox: Sandbox, code: str) -> None:
    spoiled = [outcome(sandbox, code).verdict for _ in range(3)]
    assert set(spoiled) <= {"failed", "disk", "ok"} and ("ok" not in spoiled or "chmod" in code)
    assert [outcome(sandbox, "open('a', 'w').write('x'); print(1)").verdict for _ in range(3)] == ["ok"] * 3


TRAINER = """
import sys, time
from quads.sandbox.confinement import Limits
from quads.sandbox.pool import Job, Sandbox
from quads.rl.rewards.judges import JudgePool
sandbox = Sandbox(sys.argv[1], Limits(60.0, 1 << 28, 1 << 16, 1 << 20, 4), workers=2)
code = "import os, time\\nopen('a', 'w').write('x')\\ntime.sleep(3600)"
for _ in range(2): sandbox.submit(Job(code, ("",)), lambda *_: True)
judge = JudgePool("quads.rl.rewards.math", 1, 60.0, mechanism=lambda: sys.argv[1]).add("make_judge", False)
judge.submit("7", "7").result()
judge.submit("1", chr(92) + "boxed{" + chr(92) + "int_0^1 (x^x)^{x^x}" + chr(92) + "sin(x^x) dx}")
time.sleep(1.5)
print(sandbox._folder, flush=True)
time.sleep(3600)
"""


@pytest.mark.parametrize("victim", ["trainer", "supervisor"])
def test_nothing_outlives_the_trainer(sandbox: Sandbox, victim: str) -> None:
    command = [sys.executable, "-c", TRAINER, sandbox.mechanism]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout
        folder = trainer.stdout.readline().strip()
        family = _family(trainer.pid)
        assert len(family) > 6 and bool(folder) == (sandbox.mechanism == "landlock")
        if victim == "supervisor":
            servers = [
                pid for pid in family if b"quads.sandbox.server" in _command(pid) and _parent(pid) == trainer.pid
            ]
            assert len(servers) == 2
            jobs = [pid for pid in family if _parent(pid) in servers]
            below = [pid for job in jobs for pid in _family(job)]
            for pid in jobs:
                os.kill(pid, signal.SIGKILL)
            assert below and _wait_for(lambda: not any(map(_alive, [*jobs, *below])))
        os.kill(trainer.pid, signal.SIGKILL)
    assert _wait_for(lambda: not any(map(_alive, family)), seconds=10), [pid for pid in family if _alive(pid)]
    assert _wait_for(lambda: not os.listdir(folder) if folder and os.path.exists(folder) else True, seconds=10)
    if folder:  # the next start takes away what is left, and nothing that is another's
        make("landlock").close()
        assert not os.path.exists(folder) and os.path.exists(sandbox._folder)


def _family(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in map(int, (task / "children").read_text().split()):
            found += [child, *_family(child)]
    return found


def _command(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_clean_environment(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUADS_TOKEN", "do not tell")
    code = """
import os
open_fds = []
for fd in range(4, 1024):  # 3 is for the value of a called function
    try: os.fstat(fd); open_fds.append(fd)
    except OSError: pass
print(os.environ.get('QUADS_TOKEN'), open_fds)
"""
    assert outcome(sandbox, code).output == b"None []\n"


CALLS = {
    "fn_name": "add",
    "inputs": [[1, 2], [3, 4], ["a", "b"]],
    "outputs": [[3], 7, "ab"],
}


def test_function_calls(sandbox: Sandbox) -> None:
    tests = parse_tests(CALLS, "pairs")

    def reward(code: str, score: str = "all") -> float:
        return submit_program(sandbox, tests, f"```\n{code}\n```", score).result(timeout=30).reward

    assert reward("def add(a, b):\n    return a + b") == 1.0
    assert (
        reward(
            "class Solution:\n    def add(self, a: List[int], b) -> int:\n        print('noise')\n        return a + b"
        )
        == 1.0
    )
    assert reward("def add(a, b):\n    return a - b") == 0.0
    assert reward("def add(a, b):\n    return a + b if type(a) is int else None", "fraction") == pytest.approx(2 / 3)
    assert reward("def sub(a, b):\n    return a + b") == 0.0
    assert reward("def add(a, b):\n    return {1, 2}") == 0.0  # no JSON value
    forged = "import os\ndef add(a, b):\n    os.write(3, b'3'); os._exit(0)"
    assert reward(forged, "fraction") == pytest.approx(
        1 / 3
    )  # a guess is worth what it is worth: the first test's answer


def test_all_or_fraction(sandbox: Sandbox) -> None:
    tests = CodeTests("", ("1", "2", "3", "4"), ("1", "2", "0", "4"))
    code = "```python\nprint(input())\n```"
    assert submit_program(sandbox, tests, code, "all").result(timeout=30).reward == 0.0
    assert submit_program(sandbox, tests, code, "fraction").result(timeout=30).reward == 0.75


def test_total_time_ends_a_slow_program(sandbox: Sandbox) -> None:
    """Ten tests of 0.9 s each: every one is within its limit, all of them are not (2.5 s)."""
    tests = CodeTests("", ("",) * 10, ("1",) * 10)
    verdict = submit_program(sandbox, tests, "```\nimport time\ntime.sleep(0.9)\nprint(1)\n```").result(timeout=30)
    assert verdict.reward == 0.0
    assert verdict.seconds < 2.5 + TIME_S + SLACK_S


def test_refusal_without_isolation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolation_module, "_try", lambda mechanism: "not permitted")
    with pytest.raises(UserError, match=r"cannot be isolated.*namespaces: not permitted.*sandbox = \"none\""):
        isolation()


def test_none_runs_with_limits_only() -> None:
    sandbox = make("none")
    try:
        for program, reward in (("print(int(input()) ** 2)", 1.0), ("while True: pass", 0.0)):
            assert _submit(sandbox, program, "7\n", "49\n").result(timeout=30).reward == reward
        daemon = "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(3600)\nprint(49)"
        assert _submit(sandbox, daemon, "7\n", "49\n").result(timeout=30).reward == 1.0
        assert _wait_for(lambda: all(_descendants(server) == 0 for server in _servers()))
    finally:
        sandbox.close()
