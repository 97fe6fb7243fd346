"""How checkpoint tensors get into the weights of a vLLM layer.

Matrices that share a global scale (q, k, v; gate and up of an expert) sit one below the other in one packed matrix.
They can arrive in any order, as full-precision tensors or packed: a group waits until it is complete and is written
at once, so at most one layer's matrices are held back. Under tensor parallelism every rank sees whole tensors: the
scale comes from the whole group, what is stored is the rank's part.

Shapes: e experts (1 for a linear layer), N rows, K columns.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from quads.errors import UserError
from quads.quant import nvfp4
from quads.quant.backend import load_kernels
from quads.quant.tensor import NVFP4Tensor

Member = str | int  # "q", "w1", shard number, ...


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

    def of_packed(self, tensor: NVFP4Tensor) -> tuple[Tensor, Tensor]:
        """(packed, block_scale) of this part."""
        start, end = self.column, self.column + self.num_columns
        rows = slice(self.row, self.row + self.num_rows)
        return tensor.packed[..., rows, start // 2 : end // 2], tensor.block_scale[..., rows, start // 16 : end // 16]


class GroupLoader:
    """Brings the members of a sharing group into the buffers of a layer."""

    def __init__(
        self,
        name: str,
        parts: dict[Member, Part],
        mode: nvfp4.GlobalScaleMode,
        write: Callable[[slice, Tensor, Tensor, Tensor], None],
    ) -> None:
        """name: the parameter, for messages. parts: members in row order. write: of the site."""
        self._name, self._parts, self._mode, self._write = name, parts, mode, write
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
        if isinstance(tensor, NVFP4Tensor) or tensor.dtype in (torch.bfloat16, torch.float16, torch.float32):
            return tensor
        raise UserError(
            f"{self._name}: a {tensor.dtype} tensor of shape {tuple(tensor.shape)} is neither full precision nor "
            "packed by quads; checkpoints packed in another format are served by vLLM's own quantization methods"
        )

    def _store(self, tensors: list[Tensor], parts: list[Part], first: int) -> None:
        """`tensors` is one a part, or a single one that holds all parts."""
        packed = [t for t in tensors if isinstance(t, NVFP4Tensor)]
        if packed and len(packed) < len(tensors):
            raise UserError(f"{self._name}: some matrices of one sharing group are packed, others are not")
        if len(tensors) == 1 and _is_whole(tensors[0], parts):
            parts = [Part(0, 0, *tensors[0].shape[-2:])]  # one pass, and no copies of its parts
        sources = tensors * len(parts) if len(tensors) == 1 else tensors
        pieces = list(zip(parts, sources, strict=True))
        if packed:
            g = self._common_scale(packed)
            quantized = [part.of_packed(tensor) for part, tensor in pieces]
        else:
            # What is quantized is the bf16 value of a weight, everywhere.
            g, gs = nvfp4.global_scale(torch.stack([_amax(t.to(torch.bfloat16)) for t in tensors]).amax(0), self._mode)
            operators = _operators(tensors[0].device)
            quantized = [
                operators.quantize(part.of(t).to(torch.bfloat16), g, self._mode, gs=gs)[:2] for part, t in pieces
            ]
        codes = torch.cat([codes for codes, _ in quantized], dim=-2) if len(quantized) > 1 else quantized[0][0]
        scales = [scales.view(torch.uint8) for _, scales in quantized]
        scales = torch.cat(scales, dim=-2) if len(scales) > 1 else scales[0]
        if codes.dim() == 2:
            codes, scales = codes.unsqueeze(0), scales.unsqueeze(0)
        self._write(slice(first, first + codes.shape[0]), codes, scales.view(torch.float8_e4m3fn), g.reshape(-1))

    def _common_scale(self, tensors: list[NVFP4Tensor]) -> Tensor:
        scales = [t.global_scale.reshape(-1) for t in tensors]
        if any(not torch.equal(scales[0], other) for other in scales[1:]):
            raise UserError(f"{self._name}: matrices of one sharing group were packed with different global scales")
        return scales[0]


def _is_whole(tensor: Tensor, parts: list[Part]) -> bool:
    """`parts` are all of `tensor` [..., N, K], in row order: no other rank holds any of it."""
    starts = itertools.accumulate((part.num_rows for part in parts), initial=0)
    in_order = all(part.row == start for part, start in zip(parts, starts, strict=False))
    sizes = sum(part.num_rows for part in parts), parts[0].num_columns
    return in_order and sizes == tuple(tensor.shape[-2:])


def _operators(device: torch.device) -> ModuleType:
    """Where `quantize` comes from: the specification, or the same operator as a kernel."""
    return load_kernels() if device.type == "cuda" else nvfp4


def _amax(tensor: Tensor) -> Tensor:
    """Finite amax of each matrix of [N, K] or [e, N, K]: [1, 1] or [e, 1, 1]."""
    if tensor.is_cuda:
        from quads.quant.kernels_pack import weight_amax

        return weight_amax(tensor).view((-1, 1, 1) if tensor.dim() == 3 else (1, 1))
    return nvfp4.finite_amax(tensor, dim=(-2, -1))


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
