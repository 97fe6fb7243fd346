"""A master weight in packed form, as the learner keeps it between two updates: whole, or this process's rows of it.

Both forms have three methods: `pack` (after an update), `value` (in the forward), `whole` (what the sync ships). They
give the same bits: rows are quantized independently once the global scale is known, and the bf16 cast comes first.

What FSDP gathers for a sharded weight, `gathers`:

    "bf16"    the cast of the master, 16 bits a weight; every process quantizes the whole weight for itself
    "packed"  codes and block scales, 4.5 bits a weight in NVFP4; every process decodes them. Formats that pack rows
    "none"    nothing: this process owns the experts (ep takes all processes) and decodes its packed weight

The gradient is the straight-through one. "packed" hands the layer the decoded weight in place of the master, so its
gradient goes to the master unchanged.

Shapes: N, K rows and columns of a weight, L experts of one ep rank.
"""

from typing import Any, Literal

import torch
from torch import Tensor, nn

from quads.model.moe import local_experts
from quads.model.parallelize import gather_full, is_gathered, is_sharded, local_tensor, own_rows
from quads.quant import fake_quant
from quads.quant.formats import FORMATS, Scales, pack_rows_into, split_rows, unpack_rows_into
from quads.quant.tensor import QuantizedTensor


class PackedWeight:
    """A weight that one process holds."""

    def __init__(self, format: str, rule: str) -> None:
        self.format, self.rule = format, rule
        self.tensor: QuantizedTensor | None = None  # by `pack`
        self.version = -1  # version counter of the master that it was made from

    def pack(self, master: Tensor, scales: Scales | None) -> None:
        """Quantize bf16(master). scales: of its sharing group, None where the format has no global scale."""
        self.tensor = QuantizedTensor.from_hp(master, self.format, self.rule, scales, cast=True)
        self.version = master._version

    def value(self, master: Tensor, dtype: torch.dtype) -> Tensor:
        """What the matmul multiplies."""
        assert self.tensor is not None
        return fake_quant.straight_through(master, self.tensor.dequantize(dtype))

    def whole(self, master: Tensor) -> QuantizedTensor:
        """The packed bytes themselves."""
        assert self.tensor is not None
        return self.tensor


class PackedShard:
    """This process's rows of a sharded weight, as bytes, and the global scales of the weight that FSDP gathers.

    `bytes`: uint8 [..., N, row_bytes(K)], the codes of each row, then its scales. Allocated once; None for a format
    whose blocks span rows, which is quantized anew from the gathered weight.
    """

    def __init__(self, parameter: Tensor, format: str, rule: str) -> None:
        local = local_tensor(parameter)
        self.format, self.rule = format, rule
        self.num_columns = local.shape[-1]
        self.rows = own_rows(parameter)  # found once: it takes as long as the kernels of a small weight
        self.bytes: Tensor | None = None
        if FORMATS[format].block_bytes is not None:
            row_bytes = FORMATS[format].row_bytes(self.num_columns)
            self.bytes = local.new_empty(*local.shape[:-1], row_bytes, dtype=torch.uint8)
        self.g: Tensor | None = None  # fp32 [] or [L, 1, 1]; by `pack`. None where the format has no global scale
        self.gs: Tensor | None = None
        self.gathers: Literal["bf16", "packed", "none"] = "bf16" if is_gathered(parameter) else "none"
        self.version = -1  # version counter of the master that they were made from

    def pack(self, master: Tensor, scales: Scales | None) -> None:
        """Quantize the local rows of bf16(master) with the scales of the gathered weight."""
        local = local_tensor(master)
        self.version = local._version
        if scales is not None:
            self.g, self.gs = scales
            if self.g.dim():
                scales = scales[0][self.rows], scales[1][self.rows]
        if self.bytes is not None:
            pack_rows_into(self.bytes, FORMATS[self.format], local, self.rule, scales)

    def value(self, gathered: Tensor, dtype: torch.dtype) -> Tensor:
        """What the matmul multiplies, from what FSDP gathered, or from the master of experts with one owner."""
        if self.gathers == "packed":
            return gathered.to(dtype)
        if self.gathers == "none" and self.bytes is not None:
            value = self._decode(self.bytes, dtype)
        else:
            value = fake_quant.qdq(gathered.detach().bfloat16(), self.g, self.gs, self.format, self.rule, dtype)
        return fake_quant.straight_through(gathered, value)

    def whole(self, master: Tensor) -> QuantizedTensor:
        """The full weight, gathered: packed bytes travel where there are any, else the cast. Collective."""
        if self.bytes is None:
            full = gather_full(local_tensor(master).bfloat16(), master)
            return QuantizedTensor.from_hp(full, self.format, self.rule)
        g = self.g
        if g is not None and g.dim():
            g = gather_full(g[self.rows], master)
        packed, block_scale = split_rows(FORMATS[self.format], gather_full(self.bytes, master))
        return QuantizedTensor(packed, block_scale, self.format, self.rule, self.num_columns, torch.bfloat16, g)

    def gather_packed(self, parameter: Tensor) -> None:
        """Make FSDP gather these bytes. It looks for the two names on the shard when it first runs; the parameter
        itself stays a plain tensor."""
        local = local_tensor(parameter)
        local.fsdp_pre_all_gather = self._pre_all_gather  # type: ignore[attr-defined]
        local.fsdp_post_all_gather = self._post_all_gather  # type: ignore[attr-defined]
        self.gathers = "packed"

    def _decode(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """The values of gathered or owned `rows`, [..., N, K]."""
        weight = rows.new_empty(*rows.shape[:-1], self.num_columns, dtype=dtype)
        unpack_rows_into(weight, FORMATS[self.format], rows, self.g)
        return weight

    def _pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: nn.Module, mp_policy: Any
    ) -> tuple[tuple[Tensor], None]:
        """What FSDP gathers in place of the master's cast. One tensor: with a mesh of one process FSDP drops others."""
        assert self.bytes is not None
        return (self.bytes,), None

    @torch.no_grad()
    def _post_all_gather(
        self, outputs: tuple[Tensor, ...], metadata: None, param_dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """The decoded weight, written into `out` from the second time on."""
        rows = outputs[0]
        if out is None:
            weight = self._decode(rows, param_dtype)
            return weight, (weight,)  # FSDP frees and reallocates it with every gather
        out = local_experts(out)
        with torch.autograd._unsafe_preserve_version_counter(out):  # pyright: ignore[reportPrivateImportUsage]
            unpack_rows_into(out, FORMATS[self.format], rows, self.g)
        return None


def pack_form(parameter: Tensor, format: str, rule: str) -> "PackedWeight | PackedShard":
    """The form that a parameter of this process needs, holding nothing yet."""
    return PackedShard(parameter, format, rule) if is_sharded(parameter) else PackedWeight(format, rule)
