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
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
U = TypeVar("U")
HEADER = struct.Struct("<Q")
START_S = 120.0  # a helper that is not ready by then will never be
REPOSITORY = str(Path(__file__).resolve().parents[2])


class HelperError(Exception):
    """A helper process could not start; the message says what it printed last."""


class Helper:
    """One subprocess. It is started by the first `send`, and again after a kill.

    Args:
        command: program and arguments; it must send an empty frame when it is ready.
        environment: the whole environment of the process.
        end_s: how long it may take to end by itself once its stdin is closed, before it is killed.
    """

    def __init__(self, command: list[str], environment: dict[str, str], end_s: float = 0.0):
        self.command, self.environment, self.end_s = command, environment, end_s
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the process if it is not there. HelperError if it does not get ready."""
        if self._process is None:
            self._process = self._start()

    def send(self, data: bytes, deadline: float) -> None:
        """Write bytes as they are. TimeoutError after the deadline (time.monotonic), BrokenPipeError if it has died."""
        assert self._process and self._process.stdin
        fd = self._process.stdin.fileno()
        view = memoryview(data)
        while view:
            _wait(fd, select.POLLOUT, deadline)
            with contextlib.suppress(BlockingIOError):
                view = view[os.write(fd, view) :]

    def receive(self, deadline: float) -> bytes:
        """The next frame. TimeoutError after the deadline, EOFError if it has died."""
        (size,) = HEADER.unpack(self._read(HEADER.size, deadline))
        return self._read(size, deadline)

    def ask(self, request: bytes, time_s: float) -> bytes:
        """Send one frame, get one frame."""
        deadline = time.monotonic() + time_s
        self.send(HEADER.pack(len(request)) + request, deadline)
        return self.receive(deadline)

    def kill(self) -> None:
        """End the process and everything in its session."""
        process, self._process = self._process, None
        if process is None:
            return
        if self.end_s and process.stdin:
            process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(self.end_s)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # start_new_session made it a group leader
        process.wait()
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe:
                pipe.close()

    def _start(self) -> subprocess.Popen[bytes]:
        try:
            self._process = process = subprocess.Popen(
                self.command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=self.environment,
                bufsize=0,
                start_new_session=True,
            )
        except OSError as error:
            raise HelperError(f"{self.command[0]}: {error.strerror}") from None
        assert process.stdin and process.stdout and process.stderr
        for pipe in (process.stdin, process.stdout, process.stderr):
            os.set_blocking(pipe.fileno(), False)
        try:
            self.receive(time.monotonic() + START_S)
        except (TimeoutError, EOFError):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(1)
            printed = (process.stderr.read() or b"").decode(errors="replace").strip()
            self.kill()
            raise HelperError(printed.splitlines()[-1] if printed else "it did not start") from None
        return process

    def _read(self, size: int, deadline: float) -> bytes:
        assert self._process and self._process.stdout
        fd = self._process.stdout.fileno()
        chunks = []
        while size:
            _wait(fd, select.POLLIN, deadline)
            chunk = os.read(fd, min(size, 1 << 20))
            if not chunk:
                raise EOFError
            chunks.append(chunk)
            size -= len(chunk)
        return b"".join(chunks)


class HelperPool:
    """Several helpers; work waits for a free one.

    Example: `HelperPool(make, 8).submit(lambda helper: helper.ask(b"1", 5.0))` -> a future of the reply.
    """

    def __init__(self, make: Callable[[], Helper], workers: int):
        self.workers = workers
        self._make = make
        self._idle: queue.LifoQueue[Helper] = queue.LifoQueue()
        self._helpers: list[Helper] = []
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="helper")

    def submit(self, work: Callable[[Helper], T]) -> "Future[tuple[T | None, float]]":
        """Do `work` with some helper -> a future of (its result, the seconds it took).

        The result is None if the helper ran out of time (it is killed) or died.
        """
        return self._threads.submit(self._do, work)

    def close(self) -> None:
        """Kill all helpers and drop what waits."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            for helper in self._helpers:
                helper.kill()
        self._threads.shutdown(wait=True)

    def _do(self, work: Callable[[Helper], T]) -> tuple[T | None, float]:
        try:
            helper = self._idle.get_nowait()
        except queue.Empty:
            helper = self._make()
            with self._lock:
                self._helpers.append(helper)
        started = time.monotonic()
        try:
            helper.start()
            started = time.monotonic()
            result = work(helper)
        except (TimeoutError, EOFError, BrokenPipeError):
            helper.kill()
            result = None
        except BaseException:
            helper.kill()
            raise
        finally:
            self._idle.put(helper)
        return result, time.monotonic() - started


def then(
    future: "Future[T]", change: Callable[[T], U], error: Callable[[BaseException], BaseException] = lambda error: error
) -> "Future[U]":
    """A future of `change(result)`; errors, as `error` makes them, and cancellation pass on."""
    changed: Future[U] = Future()

    def done(finished: "Future[T]") -> None:
        if finished.cancelled():
            changed.cancel()
        elif failed := finished.exception():
            changed.set_exception(error(failed))
        else:
            try:
                changed.set_result(change(finished.result()))
            except BaseException as failure:
                changed.set_exception(failure)

    future.add_done_callback(done)
    return changed


def default_workers(wanted: int) -> int:
    """`wanted`, or for 0 one for each core this process may use, at most 64."""
    return wanted or min(64, len(os.sched_getaffinity(0)))


def _wait(fd: int, event: int, deadline: float) -> None:
    poller = select.poll()  # select() cannot watch descriptors beyond 1023
    poller.register(fd, event)
    left = deadline - time.monotonic()
    if left <= 0 or not poller.poll(left * 1000):
        raise TimeoutError
