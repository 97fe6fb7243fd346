"""Procedural tasks of reasoning-gym: any of its data sets by name, with its difficulty settings.

Problems come in chunks of 512, each with a seed of its own drawn from (run seed, source, train or test, chunk). That
makes the training stream endless and position k of it a pure function of k. reasoning-gym itself seeds item i with
`seed + i`, so chunks with neighbouring seeds would share problems; hashed seeds do not.
"""

import dataclasses
import difflib
from typing import Any

from quads.config.sections import SourceSettings
from quads.data.order import stable_seed
from quads.data.rows import AnswerReader, BadRow, Row
from quads.errors import UserError

CHUNK = 512


class ReasoningGym:
    """One data set: `problem(stream, k)` is its k-th problem of the named stream. UserError on unknown names."""

    def __init__(self, name: str, settings: SourceSettings, reader: AnswerReader, seed: int):
        self.name, self.settings, self.reader, self.seed = name, settings, reader, seed
        self._chunk: tuple[Any, ...] = ()
        self._dataset: Any = None
        make_dataset(f"[sources.{name}]", settings.dataset, settings.params, seed=1, size=CHUNK)

    def problem(self, stream: str, k: int) -> Row:
        """Problem k of a stream ("train", "eval", ...): the same one in every process and run."""
        chunk = (stream, k // CHUNK)
        if chunk != self._chunk:
            seed = stable_seed(self.seed, self.name, *chunk) % 2**31
            where = f"[sources.{self.name}]"
            self._dataset = make_dataset(where, self.settings.dataset, self.settings.params, seed=seed, size=CHUNK)
            self._chunk = chunk
        entry = self._dataset[k % CHUNK]
        place = f"{self.name}/{stream}/{k}"
        try:
            prompt, answer = self.reader.read(entry, entry["question"])
        except BadRow as reason:
            raise UserError(f"[sources.{self.name}] problem {place}: {reason}") from None
        return Row(place, f"problem {place}", prompt, answer)


def make_dataset(where: str, name: str, params: dict[str, Any], **fixed: int) -> Any:
    """reasoning_gym.create_dataset with errors that name the nearest data set or setting."""
    import reasoning_gym  # slow, and only these sources need it
    from reasoning_gym.factory import DATASETS

    if name not in DATASETS:
        raise UserError(
            f"{where} dataset = {name!r} is not in reasoning-gym; nearest: {_nearest(name, list(DATASETS))}"
        )
    known = [f.name for f in dataclasses.fields(DATASETS[name][1]) if f.name not in ("seed", "size")]
    for key in params:
        if key in ("seed", "size"):
            raise UserError(f"{where} params.{key}: seeds come from [train] seed, the number of problems from `size`")
        if key not in known:
            raise UserError(
                f"{where} params.{key} is no setting of {name!r}; nearest: {_nearest(key, known)}; "
                f"all: {', '.join(known) or 'none'}"
            )
    try:
        return reasoning_gym.create_dataset(name, **_typed(name, params), **fixed)
    except (AssertionError, TypeError, ValueError, AttributeError, KeyError) as error:
        raise UserError(f"{where} params {params} do not suit {name!r}: {error}") from None


def _typed(name: str, params: dict[str, Any]) -> dict[str, Any]:
    """TOML values as the data set wants them: `composite` takes objects."""
    if name != "composite" or not isinstance(params.get("datasets"), list):
        return params
    from reasoning_gym.composite import DatasetSpec

    return {**params, "datasets": [DatasetSpec(**{"config": {}, "weight": 1.0, **spec}) for spec in params["datasets"]]}


def _nearest(word: str, known: list[str]) -> str:
    return next(iter(difflib.get_close_matches(word, known, n=1, cutoff=0.0)), "none")
