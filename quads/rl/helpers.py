"""Helper processes that do one request at a time and can be killed at any moment, and a pool of them.

Answers to mathematics and generated programs are judged outside the trainer: a judge that hangs or eats memory is
killed, the request counts as failed, and the next one gets a fresh process. Helpers are plain subprocesses that speak
frames (8-byte length, bytes) over pipes: no fork of a process that holds CUDA, threads or the data set.
"""

import contextlib
import os
import queue
import select
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

HEADER = struct.Struct("<Q")
START_S = 120.0  # a helper that is not ready by then will never be
REPOSITORY = str(Path(__file__).resolve().parents[2])


class HelperError(Exception):
    """A helper could not start or broke off; the message says what it printed."""


class Helper:
    """One subprocess. It is started by the first `ask`, and again after a kill.

    Args:
        command: after the interpreter: `["-m", "quads.rl.judge"]`. It must send an empty frame when it is ready.
        environment: the whole environment of the process.
    """

    def __init__(self, command: list[str], environment: dict[str, str]):
        self.command, self.environment = command, environment
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, request: bytes, time_s: float) -> bytes | None:
        """The reply, or None if there was none after time_s seconds or the process died: then it is gone."""
        process = self._process or self._start()
        deadline = time.monotonic() + time_s
        try:
            _write(process, HEADER.pack(len(request)) + request, deadline)
            return _read_frame(process, deadline)
        except (TimeoutError, EOFError, BrokenPipeError):
            self.kill()
            return None
        except BaseException:
            self.kill()
            raise

    def kill(self) -> None:
        """End the process and everything in its session."""
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # start_new_session made it a group leader
        process.wait()
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe:
                pipe.close()

    def _start(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, *self.command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=self.environment,
            bufsize=0,
            start_new_session=True,
        )
        assert process.stdin and process.stdout and process.stderr
        for pipe in (process.stdin, process.stdout, process.stderr):
            os.set_blocking(pipe.fileno(), False)
        self._process = process
        try:
            _read_frame(process, time.monotonic() + START_S)
        except (TimeoutError, EOFError):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(1)
            printed = (process.stderr.read() or b"").decode(errors="replace").strip()
            self.kill()
            raise HelperError(printed or f"{self.command} did not start") from None
        return process


class HelperPool:
    """Several helpers; requests wait for a free one.

    Example: `HelperPool(make, 8).run([b"1", b"2"], time_s=5.0)` -> the two replies in order, None where one failed.
    """

    def __init__(self, make: Callable[[], Helper], workers: int):
        self.workers = workers
        self._make = make
        self._idle: queue.LifoQueue[Helper] = queue.LifoQueue()
        self._helpers: list[Helper] = []
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="helper")

    def submit(self, request: bytes, time_s: float) -> "Future[bytes | None]":
        """Ask some helper; the future holds its reply or None. HelperError if helpers cannot start."""
        return self._threads.submit(self._ask, request, time_s)

    def run(self, requests: Iterable[bytes], time_s: float) -> list[bytes | None]:
        """`submit` each and wait for all."""
        return [future.result() for future in [self.submit(request, time_s) for request in requests]]

    def close(self) -> None:
        """Kill all helpers and drop what waits."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            for helper in self._helpers:
                helper.kill()
        self._threads.shutdown(wait=True)

    def _ask(self, request: bytes, time_s: float) -> bytes | None:
        try:
            helper = self._idle.get_nowait()
        except queue.Empty:
            helper = self._make()
            with self._lock:
                self._helpers.append(helper)
        try:
            return helper.ask(request, time_s)
        finally:
            self._idle.put(helper)


def default_workers(wanted: int) -> int:
    """`wanted`, or for 0 one for each core this process may use, at most 64."""
    return wanted or min(64, len(os.sched_getaffinity(0)))


def _wait(fd: int, event: int, deadline: float) -> None:
    poller = select.poll()  # select() cannot watch descriptors beyond 1023
    poller.register(fd, event)
    left = deadline - time.monotonic()
    if left <= 0 or not poller.poll(left * 1000):
        raise TimeoutError


def _write(process: subprocess.Popen[bytes], data: bytes, deadline: float) -> None:
    assert process.stdin
    view = memoryview(data)
    while view:
        _wait(process.stdin.fileno(), select.POLLOUT, deadline)
        with contextlib.suppress(BlockingIOError):
            view = view[os.write(process.stdin.fileno(), view) :]


def _read(process: subprocess.Popen[bytes], size: int, deadline: float) -> bytes:
    assert process.stdout
    chunks = []
    while size:
        _wait(process.stdout.fileno(), select.POLLIN, deadline)
        chunk = os.read(process.stdout.fileno(), min(size, 1 << 20))
        if not chunk:
            raise EOFError
        chunks.append(chunk)
        size -= len(chunk)
    return b"".join(chunks)


def _read_frame(process: subprocess.Popen[bytes], deadline: float) -> bytes:
    (size,) = HEADER.unpack(_read(process, HEADER.size, deadline))
    return _read(process, size, deadline)
