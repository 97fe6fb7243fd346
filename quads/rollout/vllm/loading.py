"""How checkpoint tensors get into the weights of a vLLM layer, and how it is known that all have come.

Matrices that share a global scale (q, k, v; gate and up of an expert) sit one below the other in one packed matrix.
They can arrive in any order, as full-precision tensors or packed: a group waits until it is complete and is written
at once, so at most one layer's matrices are held back. Under tensor parallelism every rank sees whole tensors: the
scale comes from the whole group, what is stored is the rank's part.

vLLM does not check that a quantized model is complete: a tensor that is missing from a refit simply stays what it
was. So every parameter announces the pieces it is made of to a ledger (`q`, `k` and `v` of a fused projection; `w1` of
expert 3; None for a parameter that is loaded whole), every loader reports the piece it has written, and the end of a
refit compares the two. A tensor that vLLM drops, because it does not know the name, never reaches a loader: each
tensor carries its name into vLLM, and a name that no loader reports is left over at the end.

Shapes: e experts (1 for a linear layer), N rows, K columns.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from quads.errors import UserError, listed
from quads.quant.formats import FORMATS, Scales
from quads.quant.masters import shared_scales
from quads.quant.tensor import QuantizedTensor

Member = str | int  # "q", "w1", shard number, ...
Piece = Any  # "q" | "k" | "v" | shard number | ("w1" | "w2" | "w3", expert) | None
NAME = "quads_checkpoint_name"  # the attribute under which a tensor carries its name through vLLM


@dataclass(frozen=True)
class Part:
    """The part of a checkpoint matrix [N, K] that this rank stores: `row` and `column` of its first element, and its
    size.
    """

    row: int
    column: int
    num_rows: int
    num_columns: int

    def of(self, tensor: Tensor) -> Tensor:
        """This part of a full-precision tensor [..., N, K]."""
        return tensor[..., self.row : self.row + self.num_rows, self.column : self.column + self.num_columns]

    def of_packed(self, tensor: QuantizedTensor) -> tuple[Tensor, Tensor]:
        """(packed, block_scale) of this part, whose columns are whole blocks."""
        block = FORMATS[tensor.format].block
        blocks, first = -(-tensor.num_columns // block), self.column // block
        last = first + -(-self.num_columns // block)
        rows = slice(self.row, self.row + self.num_rows)

        def cut(each: Tensor) -> Tensor:
            width = each.shape[-1] // blocks
            return each[..., rows, first * width : last * width]

        return cut(tensor.packed), cut(tensor.block_scale)


class Sink(Protocol):
    """Where complete groups go: storage of one matmul, overwritten in place for the experts given."""

    def write(self, experts: slice, packed: Tensor, block_scale: Tensor, g: Tensor | None) -> None:
        """Checkpoint bytes of e experts (formats.py), g [e], None in a format without a global scale."""
        ...

    def quantize(self, experts: slice, values: Tensor, scales: Scales | None) -> None:
        """Values bf16 [e, N, K], and their global scales."""
        ...


class GroupLoader:
    """Brings the members of a sharing group into the buffers of a layer."""

    def __init__(
        self,
        name: str,
        parts: dict[Member, Part],
        format: str,
        rule: str,
        sink: Sink,
    ) -> None:
        """name: the parameter, for messages. parts: members in row order. format, rule: of the weights. sink: the
        site."""
        self._name, self._parts, self._format, self._rule, self._sink = name, parts, format, rule, sink
        self._waiting: dict[int, dict[Member, Tensor]] = {}

    def add(self, member: Member, tensor: Tensor, first: int = 0) -> None:
        """One member has arrived: [N, K] or [e, N, K], for the local experts `first` and following."""
        waiting = self._waiting.setdefault(first, {})
        waiting[member] = self._checked(tensor)
        if len(waiting) == len(self._parts):
            del self._waiting[first]
            self._store([waiting[member] for member in self._parts], list(self._parts.values()), first)

    def add_fused(self, tensor: Tensor, parts: list[Part], first: int = 0) -> None:
        """All members have arrived in one tensor [e, N, K]; `parts` are their places in it."""
        self._store([self._checked(tensor)], parts, first)

    def forget(self) -> None:
        """Drop members that wait for the rest of their group: a refit was given up."""
        self._waiting.clear()

    def _checked(self, tensor: Tensor) -> Tensor:
        if isinstance(tensor, QuantizedTensor):
            if tensor.format != self._format:
                raise UserError(f"{self._name}: {tensor.format} weights came, this layer holds {self._format}")
            return tensor
        if tensor.dtype in (torch.bfloat16, torch.float16, torch.float32):
            return tensor
        raise UserError(
            f"{self._name}: a {tensor.dtype} tensor of shape {tuple(tensor.shape)} is neither full precision nor "
            "packed by quads; checkpoints packed in another format are served by vLLM's own quantization methods"
        )

    def _store(self, tensors: list[Tensor], parts: list[Part], first: int) -> None:
        """`tensors` is one a part, or a single one that holds all parts."""
        packed = [t for t in tensors if isinstance(t, QuantizedTensor)]
        if packed and len(packed) < len(tensors):
            raise UserError(f"{self._name}: some matrices of one sharing group are packed, others are not")
        if len(tensors) == 1 and _is_whole(tensors[0], parts):
            parts = [Part(0, 0, *tensors[0].shape[-2:])]  # one pass, and no copies of its parts
        sources = tensors * len(parts) if len(tensors) == 1 else tensors
        pieces = list(zip(parts, sources, strict=True))
        if packed:
            g = self._common_scale(packed)
            codes, scales = zip(*(part.of_packed(tensor) for part, tensor in pieces), strict=True)
            codes, scales = _stack(list(codes)), _stack([scale.view(torch.uint8) for scale in scales])
            experts = slice(first, first + codes.shape[0])
            self._sink.write(experts, codes, scales.view(packed[0].block_scale.dtype), g)
            return
        # What is quantized is the bf16 value of a weight, everywhere.
        shared = shared_scales(tensors, self._format, self._rule)
        if shared is not None and shared[0].dim() == 0:
            shared = shared[0].view(1, 1), shared[1].view(1, 1)
        values = _stack([part.of(tensor).to(torch.bfloat16) for part, tensor in pieces])
        self._sink.quantize(slice(first, first + values.shape[0]), values, shared)

    def _common_scale(self, tensors: list[QuantizedTensor]) -> Tensor | None:
        """g [e] of all of them; None in a format without a global scale."""
        scales = [t.global_scale.reshape(-1) for t in tensors if t.global_scale is not None]
        if not scales:
            return None
        if any(not torch.equal(scales[0], other) for other in scales[1:]):
            raise UserError(f"{self._name}: matrices of one sharing group were packed with different global scales")
        return scales[0]


def _is_whole(tensor: Tensor, parts: list[Part]) -> bool:
    """`parts` are all of `tensor` [..., N, K], in row order: no other rank holds any of it."""
    starts = itertools.accumulate((part.num_rows for part in parts), initial=0)
    in_order = all(part.row == start for part, start in zip(parts, starts, strict=False))
    sizes = sum(part.num_rows for part in parts), parts[0].num_columns
    return in_order and sizes == tuple(tensor.shape[-2:])


def _stack(pieces: list[Tensor]) -> Tensor:
    """[e, N, K] from pieces [(e,) n, K] one below the other."""
    stacked = torch.cat(pieces, dim=-2) if len(pieces) > 1 else pieces[0]
    return stacked.unsqueeze(0) if stacked.dim() == 2 else stacked


class PlainLoader:
    """Brings full-precision matrices into a layer that keeps them; the calls of `GroupLoader`, without waiting."""

    def __init__(self, parts: dict[Member, Part], write: Callable[[slice, slice, Tensor], None]) -> None:
        """parts: members in row order. write(experts, rows, tensor [e, n, K]): of the site."""
        self._parts, self._write = parts, write
        ends = itertools.accumulate(part.num_rows for part in parts.values())
        self._rows = {m: slice(end - part.num_rows, end) for (m, part), end in zip(parts.items(), ends, strict=True)}

    def add(self, member: Member, tensor: Tensor, first: int = 0) -> None:
        tensor = tensor.unsqueeze(0) if tensor.dim() == 2 else tensor
        self._write(slice(first, first + tensor.shape[0]), self._rows[member], self._parts[member].of(tensor))

    def add_fused(self, tensor: Tensor, parts: list[Part], first: int = 0) -> None:
        for rows, part in zip(self._rows.values(), parts, strict=True):
            self._write(slice(first, first + tensor.shape[0]), rows, part.of(tensor))

    def forget(self) -> None:
        """Nothing waits here."""


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
            setattr(tensor, NAME, name)
            yield name, tensor

    def found(self, tensor: Tensor) -> None:
        """A tensor that `watch` passed on has reached a loader. For a tensor that it did not pass on, nothing."""
        self._pending.discard(getattr(tensor, NAME, ""))

    def record(self, parameter: str, pieces: Iterable[Piece], source: Tensor) -> None:
        """`pieces` of `parameter` are being written from the checkpoint tensor `source`, or from a part of it."""
        self.found(source)
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
            raise UserError(f"the model has no place for {listed(unknown)}; the weights are of another model")
        missing = self.missing()
        if missing:
            raise UserError(f"the refit did not bring {listed(missing)}; every refit must ship the whole model")
