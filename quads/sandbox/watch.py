"""What a helper process waits for: a request, a child, or the end of the trainer. Standard library only.

The trainer's end closes the pipe of requests. A copy of that pipe in another process would hide it, so the parent is
looked at as well, each second.
"""

import os
import select
import signal
import time
from pathlib import Path

LOOK_S = 1.0


class Watch:
    """Made first of all, while the parent is known to be the trainer. Requests come through descriptor `requests`."""

    def __init__(self, requests: int = 0):
        self._requests, self._trainer = requests, os.getppid()

    def request(self) -> bool:
        """Wait for a request. False when the trainer has ended."""
        poller = select.poll()
        poller.register(self._requests, select.POLLIN)
        while not self._gone():
            for _, events in poller.poll(LOOK_S * 1000):
                return bool(events & select.POLLIN)
        return False

    def child(self, pid: int) -> bool:
        """Wait for the end of a child, without reaping it. False when the trainer has ended first."""
        ended = os.pidfd_open(pid)
        poller = select.poll()
        poller.register(ended, select.POLLIN)
        poller.register(self._requests, 0)  # told of its end, not of what it brings
        try:
            while not self._gone():
                events = dict(poller.poll(LOOK_S * 1000))
                if events:
                    return ended in events
            return False
        finally:
            os.close(ended)

    def _gone(self) -> bool:
        return os.getppid() != self._trainer


def kill_children() -> None:
    """Kill every child of this process, and theirs that come to it, until none is left."""
    me = os.getpid()
    while True:
        try:
            child, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if child == 0:
            try:
                found = [int(word) for word in Path(f"/proc/{me}/task/{me}/children").read_text().split()]
            except OSError:
                found = []
            for pid in found:
                os.kill(pid, signal.SIGKILL)
            time.sleep(0.001)
