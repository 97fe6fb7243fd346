"""The supervisor of one job: runs its tests one after another and reports on each. Standard library only.

It is process 1 of the job's process namespace, or a child of the server where there is none. It reads the job from the
trainer's pipe itself: code, inputs, never an expected output. After each test it sends a frame

    8-byte length | 4-byte length of the head | head: JSON {verdict, seconds, stderr} | stdout or returned value

and waits for `+` before the next one; an empty frame says that it has cleaned up. verdict: ok, failed, or the limit
that was broken: time, output, disk.
"""

import contextlib
import json
import os
import select
import signal
import struct
import tempfile
import time
from typing import Any

from quads.sandbox import linux as linux
from quads.sandbox.boxes import disk_use, remove
from quads.sandbox.confinement import BOX, NOBODY, Confinement, Limits
from quads.sandbox.program import RESULT_FD, become_program
from quads.sandbox.watch import kill_children

FRAME = struct.Struct("<Q")
HEAD = struct.Struct("<I")
STDERR_BYTES = 2000
LOOK_S = 0.05  # how often the clock and, where a folder has no size of its own, the disk is looked at
LOOK_AT_DISK_S = 0.01


def supervise(limits: Limits, confinement: Confinement, folder: str) -> None:
    """Run the tests of one job, sending a frame after each; after a frame the trainer says whether to go on.

    folder: where each program gets a folder of its own, unless it can have a file system of its own.
    """
    (size,) = FRAME.unpack(_read(0, FRAME.size))
    job = json.loads(_read(0, size))
    number = len(job["inputs"])
    for index in range(number):
        box = BOX if confinement.alone else tempfile.mkdtemp(dir=folder)
        if confinement.alone:
            _fresh_memory(limits, confinement, first=index == 0)
        report, output = _run_test(job, index, limits, confinement, box)
        if not confinement.alone:
            remove(box)
        head = json.dumps(report).encode()
        write_all(1, FRAME.pack(HEAD.size + len(head) + len(output)) + HEAD.pack(len(head)) + head + output)
        if index + 1 < number and _read(0, 1) != b"+":
            break
    write_all(1, FRAME.pack(0))


def _run_test(
    job: dict[str, Any], index: int, limits: Limits, confinement: Confinement, box: str
) -> tuple[dict[str, Any], bytes]:
    """-> (what happened, stdout or the JSON of the returned value)."""
    stdin, stdout, stderr, result = (os.pipe() for _ in range(4))
    ours = (stdin[1], stdout[0], stderr[0], result[0])
    started = time.monotonic()
    pid = os.fork()
    if pid == 0:
        os.setsid()
        for source, target in ((stdin[0], 0), (stdout[1], 1), (stderr[1], 2), (result[1], RESULT_FD)):
            # Pipes were made after 0 to 2 were taken, so no source is below its target except result's own.
            os.dup2(source, target)
        os.closerange(RESULT_FD + 1, 1 << 20)
        become_program(job, index, limits, confinement, box)
    for fd in (stdin[0], stdout[1], stderr[1], result[1]):
        os.close(fd)
    for fd in ours:
        os.set_blocking(fd, False)
    text = b"" if job["function"] else job["inputs"][index].encode("utf-8", "surrogateescape")
    kept, verdict = _attend(pid, text, ours, started + limits.time_s, limits, "" if confinement.alone else box)
    seconds = time.monotonic() - started
    usage = _end(pid, confinement)
    for fd in ours[1:]:
        if verdict == "":
            kept[fd] += _drain(fd, limits.output + 1 - len(kept[fd]))
        os.close(fd)
    _, status, resources = usage
    produced = kept[ours[3] if job["function"] else ours[1]]
    if verdict == "" and len(produced) > limits.output:
        verdict = "output"
    if verdict == "" and resources.ru_utime + resources.ru_stime > limits.time_s:
        verdict = "time"
    report = {
        "verdict": verdict or ("ok" if status == 0 else "failed"),
        "seconds": seconds,
        "stderr": bytes(kept[ours[2]][-STDERR_BYTES:]).decode(errors="replace"),
    }
    return report, bytes(produced) if report["verdict"] == "ok" else b""


def _attend(
    pid: int, text: bytes, fds: tuple[int, ...], deadline: float, limits: Limits, box: str
) -> tuple[dict[int, bytearray], str]:
    """Feed stdin and collect output until the program ends or breaks a limit -> (bytes by descriptor, broken limit).

    box: the folder whose size is to be watched; "" for none.
    """
    stdin, *outputs = fds
    kept = {fd: bytearray() for fd in outputs}
    ended = os.pidfd_open(pid)
    poller = select.poll()
    for fd in (ended, *outputs):
        poller.register(fd, select.POLLIN)
    if text:
        poller.register(stdin, select.POLLOUT)
    else:
        os.close(stdin)
    view, verdict = memoryview(text), ""
    try:
        while not verdict:
            left = deadline - time.monotonic()
            if left <= 0:
                verdict = "time"
                break
            events = dict(poller.poll(min(left, LOOK_AT_DISK_S if box else LOOK_S) * 1000))
            if stdin in events:
                view = _feed(stdin, view)
                if not view:
                    poller.unregister(stdin)
                    os.close(stdin)
            for fd in outputs:
                if fd in events and not _collect(fd, kept[fd]):
                    poller.unregister(fd)
            if len(kept[outputs[1]]) > 4 * STDERR_BYTES:
                del kept[outputs[1]][: -2 * STDERR_BYTES]
            if max(len(kept[outputs[0]]), len(kept[outputs[2]])) > limits.output:
                verdict = "output"
            elif box and disk_use(box, pid) > limits.disk:
                verdict = "disk"
            if ended in events:
                break
    finally:
        os.close(ended)
    if view:
        os.close(stdin)
    return kept, verdict


def _feed(fd: int, view: memoryview) -> memoryview:
    try:
        return view[os.write(fd, view[: 1 << 16]) :]
    except BlockingIOError:
        return view
    except BrokenPipeError:  # the program does not read its input
        return view[len(view) :]


def _collect(fd: int, kept: bytearray) -> bool:
    """False at the end of the stream."""
    try:
        data = os.read(fd, 1 << 16)
    except BlockingIOError:
        return True
    kept += data
    return bool(data)


def _drain(fd: int, limit: int) -> bytes:
    """What a program that has ended left in the pipe."""
    data = bytearray()
    while len(data) < limit and _collect(fd, data):
        if not select.select([fd], [], [], 0)[0]:
            break
    return bytes(data)


def _end(pid: int, confinement: Confinement) -> tuple[int, int, Any]:
    """Kill the program and whatever it left, and wait for all of it -> the program's (pid, status, usage)."""
    os.kill(pid, signal.SIGKILL)  # not yet waited for, so the number is still its own
    with contextlib.suppress(ProcessLookupError):
        if confinement.alone:
            os.kill(-1, signal.SIGKILL)  # all of this process namespace but us
        else:
            os.killpg(pid, signal.SIGKILL)
    usage = os.wait4(pid, 0)
    kill_children()  # orphans: only without isolation can there be any
    return usage


def _fresh_memory(limits: Limits, confinement: Confinement, first: bool) -> None:
    """An empty file system in memory for the next test."""
    if not first:
        linux.detach(BOX)
    owner = NOBODY if confinement.drop_uid else 0
    options = f"mode=700,size={limits.disk},nr_inodes=4096,uid={owner},gid={owner}"
    linux.mount("tmpfs", BOX, "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, options)


def _read(fd: int, size: int) -> bytes:
    data = b""
    while len(data) < size:
        chunk = os.read(fd, size - len(data))
        if not chunk:
            os._exit(1)  # the trainer is gone
        data += chunk
    return data


def write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
