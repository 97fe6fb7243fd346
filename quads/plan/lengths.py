"""How long responses are: what the time of a rollout depends on most.

A step ends with its slowest response, and a batch with one response left reads all weights for it, so a mean says
little. Without a run to learn from, lengths are lognormal: nothing is known of a model before it has answered, and the
spread is an assumption that the plan prints.
"""

import json
import math
import random
from pathlib import Path
from statistics import NormalDist

from quads.errors import UserError
from quads.run.folder import read_rows

SPREAD = 0.8  # standard deviation of log(length); an assumption, as long answers of reasoning models are spread


def lognormal_lengths(count: int, mean: float, spread: float, longest: int, seed: int = 0) -> list[int]:
    """`count` lengths in tokens with this mean before they are cut at `longest`: equally likely quantiles in a shuffled
    order, so that a plan does not depend on luck. spread: standard deviation of log(length); 0 makes all equal."""
    location = math.log(mean) - spread * spread / 2
    normal = NormalDist()
    lengths = [math.exp(location + spread * normal.inv_cdf((i + 0.5) / count)) for i in range(count)]
    random.Random(seed).shuffle(lengths)
    return [min(max(round(length), 1), longest) for length in lengths]


def lengths_of_run(run: Path) -> list[int]:
    """Lengths in tokens of every response in a run's samples.jsonl.

    Raises:
        UserError: the file is not there, or holds no response.
    """
    path = run / "samples.jsonl"
    try:
        rows = read_rows(path)
    except (OSError, json.JSONDecodeError) as error:
        raise UserError(f"no samples of a run in {path} ({error}); give the folder of a run") from None
    lengths = [int(response["tokens"]) for row in rows for response in row["responses"]]
    if not lengths:
        raise UserError(f"{path} holds no response; give the folder of a run with [log] samples_every > 0")
    return lengths


def drawn_from(lengths: list[int], count: int, seed: int = 0) -> list[int]:
    """`count` of these lengths: their quantiles in a shuffled order, so that both ends are there."""
    ordered = sorted(lengths)
    drawn = [ordered[int((i + 0.5) / count * len(ordered))] for i in range(count)]
    random.Random(seed).shuffle(drawn)
    return drawn
