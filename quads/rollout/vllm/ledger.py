"""Counts what a refit loads into a vLLM model, so that no weight is stale, doubled or lost in silence.

vLLM does not check that a quantized model is complete: a tensor that is missing from a refit simply stays what it
was. Here every parameter announces the pieces it is made of (`q`, `k` and `v` of a fused projection; `w1` of expert
3; None for a parameter that is loaded whole), every loader reports the piece it has written, and the end of a refit
compares the two.

A tensor that vLLM drops (a name it does not know) never reaches a loader. Each tensor therefore carries its name into
vLLM and whoever loads it crosses the name off the list.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor

from quads.errors import UserError

Piece = Any  # "q" | "k" | "v" | shard number | ("w1" | "w2" | "w3", expert) | None
SHOWN = 8  # names spelled out in an error


class LoadLedger:
    """One per engine. `expect` while the model is built; `begin`, `record`..., `finish` once per refit."""

    def __init__(self) -> None:
        self._expected: dict[str, tuple[Piece, ...]] = {}
        self._loaded: dict[str, set[Piece]] = {}
        self._pending: set[str] = set()
        self.latest = ""  # the checkpoint tensor handed out last

    def expect(self, parameter: str, pieces: Iterable[Piece] = (None,)) -> None:
        """`parameter` (vLLM's name) is complete when all of `pieces` have been recorded."""
        self._expected[parameter] = tuple(pieces)

    def begin(self) -> None:
        """Forget what was counted: a new refit starts."""
        self._loaded.clear()
        self._pending.clear()

    def watch(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Passes checkpoint (name, tensor) pairs on and remembers their names until a loader has seen them."""
        for name, tensor in weights:
            self._pending.add(name)
            self.latest = name
            tensor = tensor.detach()  # a fresh object: vLLM and the next line set attributes on it
            tensor.checkpoint_name = name  # type: ignore[attr-defined]
            yield name, tensor

    def found(self, tensor: Tensor) -> None:
        """A tensor that `watch` passed on has reached a loader."""
        self._pending.discard(getattr(tensor, "checkpoint_name", ""))

    def record(self, parameter: str, pieces: Iterable[Piece]) -> None:
        """`pieces` of `parameter` are being written."""
        seen = self._loaded.setdefault(parameter, set())
        for piece in pieces:
            if piece in seen:
                which = "" if piece is None else f" ({piece})"
                raise UserError(f"{parameter}{which} was loaded twice in one refit; ship every tensor once")
            seen.add(piece)

    def missing(self, prefix: str = "") -> list[str]:
        """Pieces not recorded since `begin`, of the parameters whose name starts with `prefix`."""
        return [
            parameter if piece is None else f"{parameter} ({piece})"
            for parameter, pieces in self._expected.items()
            if parameter.startswith(prefix)
            for piece in pieces
            if piece not in self._loaded.get(parameter, ())
        ]

    def finish(self, skipped: Iterable[str] = ()) -> None:
        """Raises UserError unless every piece was loaded and every watched tensor found a place.

        skipped: names that may be left out, such as an lm_head that is tied to the embedding.
        """
        unknown = sorted(self._pending - set(skipped))
        if unknown:
            raise UserError(f"the model has no place for {_listed(unknown)}; the weights are of another model")
        missing = self.missing()
        if missing:
            raise UserError(f"the refit did not bring {_listed(missing)}; every refit must ship the whole model")


def _listed(names: list[str]) -> str:
    rest = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {rest} more" if rest > 0 else "")
