"""Scorers of reasoning-gym as they come: an answer that they run does run. What holds it then is the confinement."""

from collections.abc import Callable
from typing import Any

from quads.data.reasoning import make_dataset
from quads.rl.rewards import task


def make_judge(name: str, params: dict[str, Any]) -> Callable[[dict[str, Any], str], float]:
    dataset = make_dataset(f"reasoning-gym {name}", name, params, seed=1, size=64)
    dataset[0]
    return lambda entry, text: task.score(dataset, text, entry)
