"""Which mechanism holds on this machine: each is tried with a program that does what must not work.

    namespaces  user, mount, process, network and IPC namespaces of our own, plus seccomp; the strongest, tried first
    landlock    Landlock for files, seccomp for processes, network and signals; needs no privilege at all
    none        limits only: a program can read, write and connect like the user

`auto` takes the first that holds. If none does, nothing is run.
"""

import os
import socket
import sys
import tempfile
from pathlib import Path

from quads.sandbox.confinement import Limits
from quads.sandbox.helpers import HelperError
from quads.sandbox.pool import Job, Sandbox

MECHANISMS = ("namespaces", "landlock")
# What a mechanism in force cannot prevent, beside holes of the kernel.
LEFT = {
    "namespaces": "",
    "landlock": "your files' names, sizes and times can be seen, not what is in them; the disk is measured every 10 ms",
    "none": "programs and answers can do what you can",
}

# Each line must fail in a sandbox worth its name. Values are such that a call that gets through changes nothing.
PROBE = """
import fcntl, os, resource, signal, socket, sys
canary, folder, path, pid = {canary!r}, {folder!r}, {socket!r}, {pid}
pair = socket.socketpair
def own(command, value):
    a, b = pair()
    fcntl.fcntl(a, command, value)
calls = dict(
    read=lambda: open(canary).read(),
    write=lambda: open(canary, "a"),
    make=lambda: open(canary + ".new", "w"),
    list=lambda: os.listdir(folder),
    truncate=lambda: os.truncate(canary, 6),
    chmod=lambda: os.chmod(canary, 0o600),
    utime=lambda: os.utime(canary),
    setxattr=lambda: os.setxattr(canary, "user.quads", b"x"),
    link=lambda: os.link(canary, "link"),
    remove=lambda: os.remove(canary),
    lock=lambda: fcntl.flock(os.open(os.__file__, os.O_RDONLY), fcntl.LOCK_SH | fcntl.LOCK_NB),
    inet=lambda: socket.socket(socket.AF_INET),
    unix=lambda: socket.socket(socket.AF_UNIX).connect(path),
    datagram=lambda: pair(socket.AF_UNIX, socket.SOCK_DGRAM)[0].sendto(b"x", path),
    stream_to_path=lambda: pair()[0].sendto(b"x", path),
    message=lambda: pair()[0].sendmsg([b"x"], [], 0, path),
    fork=lambda: os.fork() or os._exit(0),
    kill=lambda: os.kill(pid, 0),
    owner=lambda: own(fcntl.F_SETOWN, pid),
    signal=lambda: own(10, signal.SIGURG),
    nice=lambda: os.setpriority(os.PRIO_PROCESS, pid, 0),
    affinity=lambda: os.sched_setaffinity(pid, {affinity!r}),
    scheduler=lambda: os.sched_setscheduler(pid, os.SCHED_OTHER, os.sched_param(0)),
    limits=lambda: resource.prlimit(pid, resource.RLIMIT_CORE),
    allocate=lambda: fallocate(),
    session=os.setsid,
    memory=lambda: os.memfd_create("x"),
    death_signal=lambda: raise_if(libc.prctl(1, 0, 0, 0, 0)),
    trace=lambda: raise_if(libc.ptrace(0x4206, pid, 0, 0)),  # seize: unlike attach it stops nobody
    execute=lambda: os.execv("/bin/true", ["true"]),  # the last one: nothing comes after it
)
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
def raise_if(result):
    if result < 0:
        raise OSError(ctypes.get_errno(), "refused")
def fallocate():
    fd = os.open("here", os.O_CREAT | os.O_WRONLY)
    raise_if(libc.fallocate(fd, 1, ctypes.c_long(0), ctypes.c_long(4096)))
held = True
for name, call in calls.items():
    try:
        call()
    except OSError:
        continue
    held = False
    print(name, flush=True)
open("here", "w").write("x")
if held:
    print("held")
"""


class NoIsolation(Exception):
    """No mechanism holds here; the message says why."""


def find_isolation(wanted: str) -> str:
    """`auto` or the name of a mechanism -> the first that holds, `none` only where it is wanted. NoIsolation."""
    if wanted == "none":
        return wanted
    reasons = []
    for mechanism in MECHANISMS if wanted == "auto" else (wanted,):
        reason = _try(mechanism)
        if not reason:
            return mechanism
        reasons.append(f"{mechanism}: {reason}")
    raise NoIsolation("; ".join(reasons))


def _try(mechanism: str) -> str:
    """Does the mechanism hold? "" or why not."""
    if not sys.platform.startswith("linux"):
        return "needs Linux"
    with (
        tempfile.TemporaryDirectory(prefix="quads-probe-") as folder,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as s,
    ):
        canary, path = f"{folder}/canary", f"{folder}/socket"
        Path(canary).write_text("secret")
        s.bind(path)
        code = PROBE.format(
            canary=canary,
            folder=folder,
            socket=path,
            pid=os.getpid(),
            affinity=os.sched_getaffinity(0),
        )
        sandbox = Sandbox(mechanism, Limits(time_s=10.0, memory=1 << 30, output=1 << 16, disk=1 << 20, threads=4))
        try:
            outcome = sandbox.run(Job(code, ("",)))
        except HelperError as error:
            return str(error)
        except (TimeoutError, EOFError, BrokenPipeError):
            return "a test run did not come back"
        finally:
            sandbox.close()
        if outcome.output.strip() == b"held":
            return ""
        return f"a test run got through: {' '.join(outcome.output.decode(errors='replace').split()) or outcome.stderr}"
