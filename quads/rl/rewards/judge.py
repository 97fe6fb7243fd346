"""The process that judges answers; judges.py starts `python -m quads.rl.rewards.judge math`, or `... task`.

It reads pickled requests of the trainer from stdin and writes JSON replies. It imports no torch.

    ("math", gold, response, percent_as_unit)      -> {"reward": 0.0 or 1.0}
    ("readable", gold)                             -> {"reward": 1.0 if the gold answer can be read}
    ("task", dataset, params, entry, text or None) -> {"reward": the data set's own score}
"""

import json
import os
import pickle
import resource
import sys
from typing import Any

from quads.rl.rewards.math import is_readable, math_reward
from quads.rl.rewards.task import make_dataset, score
from quads.sandbox.helpers import HEADER

MEMORY_BYTES = 4 << 30


def main(kind: str) -> None:
    """Serve until stdin closes."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):  # scorers may print, and may read what they should not
        os.dup2(null, fd)
    datasets: dict[str, Any] = {}
    if kind == "math":  # import what the first answer should not wait for
        math_reward(r"\int_0^1 x\,dx", r"\boxed{(0, 1)}")
    else:
        make_dataset("warm-up", "chain_sum", {}, seed=1, size=1)
    _send(replies, b"")  # ready
    while header := requests.read(HEADER.size):
        (size,) = HEADER.unpack(header)
        try:
            reward = _judge(pickle.loads(requests.read(size)), datasets)
        except (Exception, RecursionError, MemoryError):  # whatever a hostile answer makes a parser raise
            reward = 0.0
        _send(replies, json.dumps({"reward": reward}).encode())


def _judge(request: tuple[Any, ...], datasets: dict[str, Any]) -> float:
    kind, *details = request
    if kind == "math":
        gold, response, percent_as_unit = details
        return math_reward(gold, response, percent_as_unit)
    if kind == "readable":
        return float(is_readable(details[0]))
    name, params, entry, text = details
    key = repr((name, params))
    if key not in datasets:
        datasets[key] = make_dataset(f"reasoning-gym {name}", name, params, seed=1, size=64)
    return score(datasets[key], text, entry)


def _send(replies: Any, data: bytes) -> None:
    replies.write(HEADER.pack(len(data)) + data)
    replies.flush()


if __name__ == "__main__":
    sys.setrecursionlimit(3000)
    main(sys.argv[1])
