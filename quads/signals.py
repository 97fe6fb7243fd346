"""Stopping on request: SIGTERM ends a run after the step it is in."""

import signal
from types import FrameType, TracebackType

from quads.distributed import agree


class StopRequest:
    """Within `with StopRequest() as stop:` SIGTERM only sets a flag; the loop saves and leaves with exit code 0.

    torchrun passes the signal on, and kills its processes after 30 s (or TORCH_ELASTIC_SHUTDOWN_TIMEOUT seconds). They
    exit with 0; torchrun itself reports the signal with a traceback of its own and exits with 1.
    """

    def __init__(self) -> None:
        self._received = False

    @property
    def requested(self) -> bool:
        """Agreed over all processes, which get the signal at different moments: all must ask at the same point."""
        return agree(self._received)

    def __enter__(self) -> "StopRequest":
        self._previous = signal.signal(signal.SIGTERM, self._receive)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.signal(signal.SIGTERM, self._previous)

    def _receive(self, signum: int, frame: FrameType | None) -> None:
        self._received = True
