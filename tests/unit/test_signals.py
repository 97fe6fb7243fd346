"""SIGTERM becomes a flag, and the handler of before comes back."""

import os
import signal

from quads.signals import StopRequest


def test_sigterm_sets_a_flag_and_the_old_handler_returns() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with StopRequest() as stop:
        assert not stop.requested
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.requested
    assert signal.getsignal(signal.SIGTERM) is before
