"""Calls that parse or run what a stranger wrote: each in a confined fork of a warm process. Standard library only.

    server      loads and makes all that calls need, enters its confinement, then forks for each request
    call        a fork: reads its request, closes every pipe but its own, gives up user, capabilities, files and system
                calls (confinement.py), and writes one number

In namespaces the server is process 1 of its own process namespace. It never reads a request, and a fork ends with its
call: nothing of one request is there when the next one comes. What a call that was taken over can still do is to choose
its own number, within the bounds.
"""

import gc
import json
import math
import os
import resource
import select
import signal
import struct
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from quads.sandbox import linux as linux
from quads.sandbox.confinement import Confinement, Limits, confine, enter, volunteer_for_oom_kill
from quads.sandbox.watch import Watch, kill_children

FRAME = struct.Struct("<Q")
NUMBER = struct.Struct("<d")
READ, VALUE, ERROR = b"r", b"v", b"e"  # what a call writes: that it has read its request, then one of the two
LONGEST = 2000  # bytes of an error
NO_FILES = 0


@dataclass(frozen=True)
class Rules:
    """What calls may do and say. mechanism: namespaces, landlock or none.

    packages: folders to read -> where they are imported from. memory: address space of a call in bytes, beside what its
    server has. low, high: bounds of the number. errors: may a call end
    the run with a message?
    """

    mechanism: str
    packages: dict[str, str]
    time_s: float
    memory: int
    low: float
    high: float
    errors: bool = False


def serve(requests: int, replies: int, rules: Rules, make: Callable[[], Callable[[bytes], float | str]]) -> None:
    """Answer requests until the trainer ends: frames of JSON, {"reward": number}, {"error": text} or {"none": why}.

    make: called once, before this process is confined and before the first request -> a function of a request's bytes
    that gives a number, or the text of an error. It may leave no thread behind.
    """
    watch = Watch(requests)
    volunteer_for_oom_kill()
    null = os.open(os.devnull, os.O_WRONLY)
    answer = make()
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    try:
        confinement = enter(rules.mechanism, rules.packages, hide_others=False)
    except OSError as error:
        print(f"a judge cannot be confined ({error}); what it imports must leave no thread running", file=sys.stderr)
        raise SystemExit(2) from None
    if confinement.alone:
        linux.unshare(linux.CLONE_NEWPID)
        first = os.fork()
        if first:
            os.close(replies)  # so that its end is seen
            if not watch.child(first):
                os.kill(first, signal.SIGKILL)
            _, status = os.waitpid(first, 0)
            os._exit(status and 1)
        linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)
        watch = Watch(requests)
    else:
        linux.prctl(linux.PR_SET_CHILD_SUBREAPER, 1)
    os.dup2(null, 2)
    gc.freeze()  # a collection in a fork would copy what it looks at
    limits = Limits(rules.time_s, taken + rules.memory, output=0, disk=NO_FILES, threads=4)
    _send(replies, b"")  # ready
    while watch.request():
        receive, send = os.pipe()
        call = os.fork()
        if call == 0:
            os.close(receive)
            os.close(replies)
            _call(requests, send, answer, limits, confinement)
        os.close(send)
        said = _listen(receive, time.monotonic() + rules.time_s)
        os.close(receive)
        if confinement.alone:
            os.kill(-1, signal.SIGKILL)  # all of this process namespace but us
        else:
            os.kill(call, signal.SIGKILL)  # not yet waited for, so the number is still its own
        kill_children()
        if said is not None and said[:1] != READ:
            os._exit(1)  # what is left of the request in the pipe cannot be told from the next one
        _send(replies, json.dumps(_verdict(said, rules)).encode())


def _call(requests: int, send: int, answer: Callable[[bytes], float | str], limits: Limits, c: Confinement) -> NoReturn:
    """In the fork: one request, one reply."""
    try:
        (size,) = FRAME.unpack(_read(requests, FRAME.size))
        request = _read(requests, size)
        os.close(requests)
        os.write(send, READ)
        confine(limits, c, "")
        value = answer(request)
        if isinstance(value, str):
            os.write(send, ERROR + value.encode(errors="replace")[:LONGEST])
        else:
            os.write(send, VALUE + NUMBER.pack(value))
    finally:
        os._exit(0)


def _listen(fd: int, deadline: float) -> bytes | None:
    """What a call says until it closes its pipe, or more than it may say; None if it takes too long."""
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    said = b""
    while len(said) <= LONGEST + 8:
        left = deadline - time.monotonic()
        if left <= 0 or not poller.poll(left * 1000):
            return None if said else b""
        chunk = os.read(fd, LONGEST + 16)
        if not chunk:
            break
        said += chunk
        if len(said) == len(READ + VALUE) + NUMBER.size and said.startswith(READ + VALUE):
            break  # no need to wait for its end
    return said


def _verdict(said: bytes | None, rules: Rules) -> dict[str, Any]:
    if said is None:
        return {"none": "time"}
    kind, body = said[1:2], said[2:]
    if kind == VALUE and len(body) == NUMBER.size:
        (number,) = NUMBER.unpack(body)
        if math.isfinite(number) and rules.low <= number <= rules.high:
            return {"reward": number}
    if kind == ERROR and rules.errors:
        return {"error": body[:LONGEST].decode(errors="replace")}
    return {"none": "died"}


def _read(fd: int, size: int) -> bytes:
    chunks = []
    while size:
        chunk = os.read(fd, min(size, 1 << 20))
        if not chunk:
            os._exit(1)  # the trainer is gone
        chunks.append(chunk)
        size -= len(chunk)
    return b"".join(chunks)


def _send(fd: int, data: bytes) -> None:
    view = memoryview(FRAME.pack(len(data)) + data)
    while view:
        view = view[os.write(fd, view) :]
