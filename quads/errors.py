"""Errors that are the user's to fix: one clear message that names the fix, exit code 2, no traceback."""

import functools
import os
import sys
from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

INTERRUPTED = 130  # 128 + SIGINT, as a shell reports it


class UserError(Exception):
    """Bad input (config, data, paths, hardware). The message says what is wrong and what would fix it."""

    anywhere = False  # whether it may come up in one process alone, which then has to report it itself


def listed(names: Sequence[str], shown: int = 8) -> str:
    """The first `shown` names for a message, and how many more there are.

    Example: `listed(["a", "b", "c"], 2)` -> "a, b and 1 more"
    """
    more = len(names) - shown
    return ", ".join(names[:shown]) + (f" and {more} more" if more > 0 else "")


def main_guard(main: Callable[P, R]) -> Callable[P, R]:
    """Wrap a command-line entry point: `UserError` becomes `error: ...` on stderr and exit code 2, Ctrl-C code 130.

    Under torchrun, where all processes read the same bad input, the first of each machine reports for all; an error
    that comes up in one process alone (`anywhere`) is reported by that one.
    """

    @functools.wraps(main)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return main(*args, **kwargs)
        except UserError as error:
            if error.anywhere or os.environ.get("LOCAL_RANK", "0") == "0":
                print(f"error: {error}", file=sys.stderr, flush=True)
            raise SystemExit(2) from None
        except KeyboardInterrupt:
            if os.environ.get("LOCAL_RANK", "0") == "0":
                print("interrupted", file=sys.stderr, flush=True)
            raise SystemExit(INTERRUPTED) from None

    return guarded
