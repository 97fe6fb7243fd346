"""Which process of a job the others wait for, and that none outlives torchrun.

Every process writes into the job's store, every few seconds, that it is alive and which phase it is in. The lowest one
that is alive compares: a process that has stopped answering, or has stayed behind in a phase that others have left, is
named after a minute, and again whenever twice the time has passed. Collectives themselves only give up after half an
hour. A process that is alive and stands in the same collective as all others cannot be told from them here.
"""

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from torch.distributed.distributed_c10d import Store

PR_SET_PDEATHSIG = 1  # prctl, Linux


def die_with_parent() -> None:
    """Have the kernel end this process when its parent dies: `kill -9` of torchrun would leave its processes behind,
    with their GPUs. Does nothing where there is no torchrun, or no Linux."""
    if sys.platform == "linux" and "TORCHELASTIC_RUN_ID" in os.environ:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


@dataclass
class _Seen:
    """What one process last wrote, and when that was first seen here, in seconds of this process's clock."""

    beat: str = ""
    phase_count: int = 0
    phase: str = "the start"
    beat_s: float = 0.0
    behind_s: float = 0.0  # since when others are ahead of it
    reported_s: float = 0.0  # how long it had been missing at the last report


class Watch:
    """A thread that says who is waited for.

    Args:
        store: a connection of its own to the store that all processes share: a blocked call would hold up the others.
        patience_s: how long a process may be missing before it is named.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        patience_s: float = 60.0,
        report: Callable[[str], object] | None = None,
    ) -> None:
        self._store, self._rank, self._patience_s = store, rank, patience_s
        self._report = report or (lambda text: print(text, file=sys.stderr, flush=True))
        now = time.monotonic()
        self._seen = {r: _Seen(beat_s=now, behind_s=now) for r in range(size)}
        self._phase = (0, "the start")
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="watch")
        self._thread.start()

    def at(self, phase: str) -> None:
        """This process enters a phase. All processes must enter the same ones in the same order."""
        self._phase = (self._phase[0] + 1, phase)

    def close(self) -> None:
        """Stop watching and being seen."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        beat = 0
        while not self._stop.wait(self._patience_s / 12):
            beat += 1
            count, phase = self._phase
            try:
                self._store.set(f"watch/{self._rank}", f"{beat}|{count}|{phase}")
                self._look()
            except RuntimeError:  # the store has gone: the job is ending
                return

    def _look(self) -> None:
        now, first = time.monotonic(), self._seen[0]
        all_of_them = self._rank == 0 or now - first.beat_s > self._patience_s  # else rank 0 does it for all
        for rank, seen in self._seen.items():
            if rank != 0 and not all_of_them:
                seen.beat_s = seen.behind_s = now
                continue
            key = f"watch/{rank}"
            text = self._store.get(key).decode() if self._store.check([key]) else ""
            if text and text != seen.beat:
                count, seen.phase = text.split("|", 2)[1:]
                seen.beat, seen.beat_s, seen.phase_count = text, now, int(count)
        ahead = max(seen.phase_count for seen in self._seen.values())
        for seen in self._seen.values():
            if seen.phase_count == ahead:
                seen.behind_s = now
        silent = {rank for rank, seen in self._seen.items() if now - seen.beat_s > self._patience_s}
        if self._rank != min(self._seen.keys() - silent, default=self._rank):
            return
        for rank, seen in self._seen.items():
            self._judge(rank, seen, now, rank in silent)

    def _judge(self, rank: int, seen: _Seen, now: float, silent: bool) -> None:
        missing_s = now - (seen.beat_s if silent else seen.behind_s)
        if missing_s <= self._patience_s:
            seen.reported_s = 0.0
        elif missing_s >= 2 * seen.reported_s:
            seen.reported_s = missing_s
            what = "has not answered" if silent else f"is still in '{seen.phase}'"
            where = f", last in '{seen.phase}'" if silent else ""
            self._report(f"waiting for rank {rank}, which {what} for {missing_s:.0f} s{where}")
