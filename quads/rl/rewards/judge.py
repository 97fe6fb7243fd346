"""The process that judges responses; judges.py starts `python -m quads.rl.rewards.judge MODULE SETUPS [--own]`.

SETUPS is a pickled list, in base64, of (name, arguments): functions of the module that make judges. They are called
once, before the process takes requests, and see nothing of a response. A request is pickled (number, arguments) of the
judge that shall be called; the reply is JSON, {"reward": number} or for a fault of a reward function {"error": text}.
No torch is imported here.

--own: the module runs functions of the user. Their own imports decide how much memory a process needs.
"""

import base64
import importlib
import json
import os
import pickle
import resource
import sys
from collections.abc import Callable
from typing import Any

from quads.errors import UserError
from quads.sandbox.helpers import HEADER

MEMORY_BYTES = 4 << 30


def main(module_name: str, setups: str, own: bool) -> None:
    """Serve until stdin closes."""
    if not own:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1):  # scorers may print, and may read what they should not
        os.dup2(null, fd)
    module = importlib.import_module(module_name)
    try:
        judges = [getattr(module, maker)(*setup) for maker, setup in pickle.loads(base64.b64decode(setups))]
    except UserError as error:
        print(error, file=sys.stderr)  # the last line of what a helper that does not start says is its error
        raise SystemExit(2) from None
    os.dup2(null, 2)
    _send(replies, b"")  # ready
    while header := requests.read(HEADER.size):
        (size,) = HEADER.unpack(header)
        _send(replies, json.dumps(_judge(judges, requests.read(size))).encode())


def _judge(judges: list[Callable[..., float]], request: bytes) -> dict[str, Any]:
    number, arguments = pickle.loads(request)
    try:
        return {"reward": judges[number](*arguments)}
    except UserError as error:
        return {"error": str(error)}
    except (Exception, RecursionError, MemoryError):  # whatever a hostile answer makes a parser raise
        return {"reward": 0.0}


def _send(replies: Any, data: bytes) -> None:
    replies.write(HEADER.pack(len(data)) + data)
    replies.flush()


if __name__ == "__main__":
    sys.setrecursionlimit(3000)
    main(sys.argv[1], sys.argv[2], "--own" in sys.argv[3:])
