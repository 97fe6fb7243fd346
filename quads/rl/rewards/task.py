"""Procedural tasks of reasoning-gym: any of its data sets by name, with its difficulty settings and its own scorer.

Problems come in chunks of 512, each with a seed of its own drawn from (run seed, source, train or test, chunk). That
makes the training stream endless and position k of it a pure function of k. reasoning-gym itself seeds item i with
`seed + i`, so chunks with neighbouring seeds would share problems; hashed seeds do not.
"""

import ast
import dataclasses
import difflib
import inspect
import re
import sys
from typing import Any

from quads.config.sections import SourceSettings
from quads.data.order import stable_seed
from quads.data.rows import Row
from quads.errors import UserError

CHUNK = 512
NOT_MATHEMATICS = re.compile(r"""["'`{}\[\]:;@=]|__|\.\s*[A-Za-z_]|\b(lambda|eval|exec|open|import)\b""")


class ReasoningGym:
    """One data set: `problem(stream, k)` is its k-th problem of the named stream. UserError on unknown names."""

    def __init__(self, name: str, settings: SourceSettings, seed: int):
        self.name, self.settings, self.seed = name, settings, seed
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
        return Row(place, f"problem {place}", entry["question"], entry)


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


def score(dataset: Any, text: str | None, entry: dict[str, Any]) -> float:
    """The data set's own score of a response, in [0, 1]; 0 where there is no answer.

    Some scorers run the answer as Python with the entry in sight: the response `entry["answer"]` would be its own
    solution. `eval` is narrowed to literals for those, and what sympy parses must look like an expression.
    """
    if not text:
        return 0.0
    source = inspect.getsource(type(dataset).score_answer)
    if "eval(answer)" in source:
        sys.modules[type(dataset).__module__].eval = ast.literal_eval  # type: ignore[attr-defined]
    if "parse_expr(" in source and NOT_MATHEMATICS.search(text):
        return 0.0
    return min(1.0, max(0.0, float(dataset.score_answer(text, entry))))


def _typed(name: str, params: dict[str, Any]) -> dict[str, Any]:
    """TOML values as the data set wants them: `composite` takes objects."""
    if name != "composite" or not isinstance(params.get("datasets"), list):
        return params
    from reasoning_gym.composite import DatasetSpec

    return {**params, "datasets": [DatasetSpec(**{"config": {}, "weight": 1.0, **spec}) for spec in params["datasets"]]}


def _nearest(word: str, known: list[str]) -> str:
    return next(iter(difflib.get_close_matches(word, known, n=1, cutoff=0.0)), "none")
