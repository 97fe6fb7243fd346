"""Stopping on request: SIGTERM or Ctrl-C ends a run after the step it is in."""

import os
import signal
from types import FrameType, TracebackType

from quads.distributed import agree

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopRequest:
    """Within `with StopRequest() as stop:` SIGTERM and SIGINT set a flag; the loop saves and leaves with exit code 0.

    A second SIGINT raises KeyboardInterrupt, for who does not want to wait. A signal that the parent has set to be
    ignored (nohup, `&` in a script) stays ignored.

    torchrun passes either on, once, and kills its processes after 30 s (or TORCH_ELASTIC_SHUTDOWN_TIMEOUT seconds).
    They exit with 0; torchrun itself reports the signal with a traceback of its own and exits with 1.
    """

    def __init__(self) -> None:
        self._received = False

    @property
    def requested(self) -> bool:
        """Agreed over all processes, which get the signal at different moments: all must ask at the same point."""
        return agree(self._received)

    def __enter__(self) -> "StopRequest":
        self._previous = {number: signal.getsignal(number) for number in SIGNALS}
        for number, handler in self._previous.items():
            if handler is not signal.SIG_IGN:
                signal.signal(number, self._receive)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            if handler is not None:  # None: not set by Python, which cannot set it again
                signal.signal(number, handler)

    def _receive(self, signum: int, frame: FrameType | None) -> None:
        if self._received and signum == signal.SIGINT:
            raise KeyboardInterrupt
        self._received = True
        if os.environ.get("RANK", "0") == "0":
            # Not print: a signal may arrive within another print, and buffered writers refuse to be entered twice.
            text = f"{signal.Signals(signum).name}: stopping after this step"
            hint = "; Ctrl-C again leaves at once" if signum == signal.SIGINT else ""
            os.write(2, f"{text}{hint}\n".encode())
