"""The process that judges responses: `python -m quads.rl.rewards.judge MODULE SETUPS MECHANISM TIME_S` (judges.py).

SETUPS is a pickled list, in base64, of (name, arguments): functions of the module that make judges. They are called
once, before the process takes requests, and see nothing of a response. A request is pickled (number, arguments) of the
judge that shall be called; the reply is JSON, {"reward": number}, {"none": why} or for a fault of a reward function
{"error": text}. No torch is imported here.

A judge parses a response or runs it, so it is confined as programs are (sandbox/calls.py). MECHANISM `own` is for
functions of the user that do not ask for this: they keep the process, its environment and all the memory there is.
"""

import base64
import importlib
import json
import os
import pickle
import sys
from collections.abc import Callable

from quads.errors import UserError
from quads.rl.rewards import function
from quads.sandbox.calls import Rules, serve
from quads.sandbox.helpers import HEADER, REPOSITORY

MEMORY_BYTES = 4 << 30


def main(module_name: str, setups: str, mechanism: str, time_s: float) -> None:
    """Serve until stdin closes."""
    requests, replies = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1):  # scorers may print, and may read what they should not
        os.dup2(null, fd)

    def make() -> Callable[[bytes], float | str]:
        module = importlib.import_module(module_name)
        try:
            judges = [getattr(module, maker)(*setup) for maker, setup in pickle.loads(base64.b64decode(setups))]
        except UserError as error:
            print(error, file=sys.stderr)  # the last line of what a helper that does not start says is its error
            raise SystemExit(2) from None
        return lambda request: _judge(judges, request)

    if mechanism == "own":
        answer = make()
        os.dup2(null, 2)
        _serve_here(requests, replies, answer)
    else:
        users = module_name == function.__name__  # any number is a reward, and a fault ends the run
        low, high = (-function.LARGEST, function.LARGEST) if users else (0.0, 1.0)
        # Found before the user's file is imported: its folder is no package.
        serve(requests, replies, Rules(mechanism, _packages(), time_s, MEMORY_BYTES, low, high, errors=users), make)


def _judge(judges: list[Callable[..., float]], request: bytes) -> float | str:
    number, arguments = pickle.loads(request)
    try:
        return judges[number](*arguments)
    except UserError as error:
        return str(error)
    except ImportError:
        raise  # what the judge itself lacks is no fault of the answer: no verdict
    except (Exception, RecursionError, MemoryError):  # whatever a hostile answer makes a parser raise
        return 0.0


def _serve_here(requests: int, replies: int, answer: Callable[[bytes], float | str]) -> None:
    incoming, outgoing = os.fdopen(requests, "rb"), os.fdopen(replies, "wb")
    outgoing.write(HEADER.pack(0))  # ready
    outgoing.flush()
    while header := incoming.read(HEADER.size):
        value = answer(incoming.read(*HEADER.unpack(header)))
        reply = json.dumps({"error": value} if isinstance(value, str) else {"reward": value}).encode()
        outgoing.write(HEADER.pack(len(reply)) + reply)
        outgoing.flush()


def _packages() -> dict[str, str]:
    """Folders that this interpreter imports from, as they lie on disk -> as it names them.

    Of the repository only the package: runs and data sets lie beside it.
    """
    folders = [f"{folder}/quads" if folder == REPOSITORY else folder for folder in map(os.path.abspath, sys.path)]
    return {os.path.realpath(folder): folder for folder in folders if os.path.isdir(folder)}


if __name__ == "__main__":
    sys.setrecursionlimit(3000)
    main(sys.argv[1], sys.argv[2], sys.argv[3], float(sys.argv[4]))
