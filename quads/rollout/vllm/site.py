"""One matmul of a vLLM layer under `quads`, in plain torch: weights at fixed addresses, loaded in place, any precision.

The arithmetic is that of the native engine's reference path (quads.quant.matmul). On a GPU `site_triton.TritonSite`
takes this place where the kernels serve the precision.

Shapes: E experts, N rows, K columns, T tokens, M the most tokens of any forward; a linear layer is [N, K].
"""

# pyright: reportMissingImports=false
# vLLM is an extra.

from collections.abc import Iterable
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quads.errors import UserError
from quads.model.moe import LocalDispatcher
from quads.quant.formats import FORMATS, Scales
from quads.quant.matmul import SiteSpec, allocate, grouped_linear, linear, quantize_activation, wide_dtype, widen
from quads.quant.tensor import QuantizedTensor
from quads.rollout.vllm.loading import GroupLoader, Member, Part, PlainLoader


class Site(Protocol):
    """What a layer asks of its matmul."""

    name: str
    parts: dict[Member, Part]
    loader: GroupLoader | PlainLoader

    def parameters(self) -> dict[str, nn.Parameter]: ...

    def buffers(self) -> dict[str, Tensor]: ...

    def checkpoint(self) -> Tensor: ...

    def forget(self) -> None: ...

    def start(self, x_TH: Tensor, live_M: Tensor) -> None: ...

    def linear(self, x_TK: Tensor, live_M: Tensor) -> Tensor: ...

    def experts(self, w2: Any, x_TH: Tensor, ids_TA: Tensor, gates_TA: Tensor, live_M: Tensor) -> Tensor: ...


class ReferenceSite:
    """Weights [N, K] or [E, N, K] in the form that `spec` says."""

    def __init__(
        self, name: str, spec: SiteSpec, shape: tuple[int, ...], parts: dict[Member, Part], dtype: torch.dtype
    ) -> None:
        """name: of the vLLM parameter, for messages. parts: the matrices that lie one below the other in N."""
        check_columns(name, spec, shape)
        self.name, self.spec, self.parts = name, spec, parts
        self.stored = allocate(torch.Size(shape), spec, dtype, torch.get_default_device())
        self._wide: Tensor | None = None
        if isinstance(self.stored, QuantizedTensor):
            for part, tensor in self.stored.parts.items():
                setattr(self.stored, part, nn.Parameter(tensor, requires_grad=False))
            self.loader: GroupLoader | PlainLoader = GroupLoader(
                name, parts, self.stored.format, self.stored.rule, self
            )
        else:
            self.stored = nn.Parameter(self.stored, requires_grad=False)
            self.loader = PlainLoader(parts, self.write_plain)

    def parameters(self) -> dict[str, nn.Parameter]:
        """By the suffix of their names in the layer; the one without a suffix is the one vLLM loads."""
        if not isinstance(self.stored, QuantizedTensor):
            return {"": self.stored}  # pyright: ignore[reportReturnType]
        suffixes = {"packed": "", "block_scale": "_scale", "global_scale": "_global_scale"}
        return {suffixes[name]: part for name, part in self.stored.parts.items()}  # pyright: ignore[reportReturnType]

    def buffers(self) -> dict[str, Tensor]:
        """Tensors that no load writes and that must outlive `sleep`: none here."""
        return {}

    def write(self, experts: slice, packed: Tensor, block_scale: Tensor, g: Tensor | None) -> None:
        """Overwrite `experts` in place: checkpoint bytes of e experts, g [e] (e = 1: a linear layer)."""
        stored = self.stored
        assert isinstance(stored, QuantizedTensor)
        if stored.dim() == 2:
            stored.packed.copy_(packed[0])
            stored.block_scale.copy_(block_scale[0])
            if stored.global_scale is not None and g is not None:
                stored.global_scale.copy_(g.reshape(()))
        else:
            stored.packed[experts] = packed
            stored.block_scale.view(torch.uint8)[experts] = block_scale.view(torch.uint8)
            if stored.global_scale is not None and g is not None:
                stored.global_scale[experts] = g.view(-1, 1, 1)
        self._wide = None

    def quantize(self, experts: slice, values: Tensor, scales: Scales | None) -> None:
        """Overwrite `experts` in place with the quantized values bf16 [e, N, K]."""
        assert isinstance(self.stored, QuantizedTensor)
        packed, block_scale = FORMATS[self.stored.format].pack(values, self.stored.rule, scales, False)
        self.write(experts, packed, block_scale, None if scales is None else scales[0])

    def write_plain(self, experts: slice, rows: slice, tensor: Tensor) -> None:
        """Overwrite `rows` of `experts` in place: tensor [e, n, K] (e = 1: a linear layer)."""
        target = self.stored if self.stored.dim() == 3 else self.stored.unsqueeze(0)
        target[experts, rows] = tensor.to(target.dtype)
        self._wide = None

    def forget(self) -> None:
        """Drop matrices that wait for the rest of their group."""
        self.loader.forget()

    def checkpoint(self) -> Tensor:
        """The weights as a checkpoint has them, packed or plain, sharing memory."""
        return self.stored

    def wide(self) -> Tensor:
        """The values that are multiplied; on a CPU decoded once a load, as decoding takes longer than multiplying."""
        if self._wide is None:
            wide = widen(self.stored, wide_dtype(self.stored.device))
            if wide.device.type != "cpu":
                return wide
            self._wide = wide
        return self._wide

    def start(self, x_TH: Tensor, live_M: Tensor) -> None:
        """The input of `experts`, as soon as it is known. Nothing begins early here."""

    def linear(self, x_TK: Tensor, live_M: Tensor) -> Tensor:
        """The whole layer, [T, N]. The first T values of live_M belong to the rows."""
        return linear(quantize_activation(x_TK, self.spec, live_M[: x_TK.shape[0]]), self.wide(), x_TK.dtype)

    def experts(self, w2: "ReferenceSite", x_TH: Tensor, ids_TA: Tensor, gates_TA: Tensor, live_M: Tensor) -> Tensor:
        """The whole layer, [T, H], called on w13: the sum over a token's experts of gate * w2(silu(gate rows) * up
        rows).
        """
        if x_TH.is_cuda:  # both sites are bf16 there
            from vllm.model_executor.layers.fused_moe import fused_experts

            return fused_experts(x_TH, self.stored, w2.stored, gates_TA, ids_TA)
        dispatcher, live_T = LocalDispatcher(), live_M[: x_TH.shape[0]]
        operands = quantize_activation(x_TH, self.spec, live_T)
        rows_R, grouping = dispatcher.dispatch(torch.cat(operands, dim=-1), ids_TA.long(), self.stored.shape[0])
        rows = rows_R.chunk(len(operands), dim=-1)
        gate_up_R2I = grouped_linear(rows, self.wide(), grouping.offsets_E, x_TH.dtype)
        gate_RI, up_RI = gate_up_R2I.chunk(2, dim=-1)
        live_R = dispatcher.live_rows(live_T, grouping, ids_TA.shape[1])
        operands = quantize_activation(F.silu(gate_RI) * up_RI, w2.spec, live_R)
        y_RH = grouped_linear(operands, w2.wide(), grouping.offsets_E, x_TH.dtype)
        return dispatcher.combine(y_RH, gates_TA.to(x_TH.dtype), grouping)


def check_columns(name: str, spec: SiteSpec, shape: Iterable[int]) -> None:
    """Packed rows are cut between ranks and stacked in whole blocks of the format."""
    *_, num_columns = shape
    block = FORMATS[spec.format].block
    if spec.precision != "bf16" and num_columns % block:
        raise UserError(
            f"{name}: {num_columns} columns on this rank are no multiple of {block}; use fewer tensor-parallel "
            "ranks, or take the layer out of the quantization targets"
        )
