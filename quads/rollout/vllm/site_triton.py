"""One matmul of a vLLM layer under `quads`, on the Triton kernels.

A kernel keeps its weights in a layout of its own, a fixed permutation of the checkpoint bytes that the load writes in
place: a captured CUDA graph reads the new weights at the old addresses. vLLM traces linear layers with Dynamo, so
they call a custom op with a fake implementation; expert layers sit inside vLLM's own opaque op already.

The activations of an expert layer do not depend on its routing, so they are quantized while the router runs: `start`,
called with the input of the router, forks a second stream, and `experts` joins it. A CUDA graph captures the fork.

Shapes: E experts, N rows, K columns, T tokens, M the most tokens of any forward.
"""

# pyright: reportMissingImports=false
# vLLM is an extra.

import copy
import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from vllm.utils.torch_utils import direct_register_custom_op

from quads.errors import UserError
from quads.quant.formats import Scales
from quads.quant.matmul import SiteSpec
from quads.quant.tensor import QuantizedTensor
from quads.quant.triton import ops as kernels
from quads.quant.triton.activations import Operand
from quads.quant.triton.ops import KernelWeight
from quads.rollout.vllm.loading import GroupLoader, Member, Part
from quads.rollout.vllm.site import check_columns


@dataclass(frozen=True)
class Started:
    """What the side stream makes of the router's input, until `experts` takes it."""

    x_TH: Tensor
    operand: Operand

    def is_made_of(self, x_TH: Tensor) -> bool:
        """vLLM hands the router's input on to the experts, but not always as the same tensor object."""
        return (self.x_TH.data_ptr(), self.x_TH.shape) == (x_TH.data_ptr(), x_TH.shape)


class TritonSite:
    """Weights [N, K] or [E, N, K] in the layout of the kernels; the same calls as `ReferenceSite`."""

    def __init__(
        self,
        name: str,
        spec: SiteSpec,
        shape: tuple[int, ...],
        parts: dict[Member, Part],
        dtype: torch.dtype,
    ) -> None:
        """Arguments as in `ReferenceSite`; the rows of two parts in an expert layer are gate and up."""
        check_columns(name, spec, shape)
        if dtype != torch.bfloat16:
            raise UserError(f"the triton kernels compute in bfloat16, not {dtype}; set model.dtype = 'bfloat16'")
        self.name, self.spec, self.parts = name, spec, parts
        device = torch.get_default_device()
        path, _ = kernels.choose(device, spec.precision, spec.path)
        self.weight = KernelWeight(shape, path=path, swiglu=len(shape) == 3 and len(parts) == 2, device=device)
        for buffer in ("words", "scales", "g"):
            setattr(self.weight, buffer, nn.Parameter(getattr(self.weight, buffer), requires_grad=False))
        self.loader = GroupLoader(name, parts, "nvfp4", spec.rule("nvfp4"), self)
        self._staged: tuple[QuantizedTensor, set[int]] | None = None
        self._started: Started | None = None
        if not hasattr(torch.ops.vllm, "quads_linear"):
            direct_register_custom_op("quads_linear", _linear, mutates_args=[], fake_impl=_linear_shape)

    def parameters(self) -> dict[str, nn.Parameter]:
        weight = self.weight
        return {"": weight.words, "_scale": weight.scales, "_global_scale": weight.g}  # pyright: ignore

    def buffers(self) -> dict[str, Tensor]:
        """Tensors that no load writes. vLLM drops all memory of a sleeping model but what a module holds as buffer."""
        order = getattr(self.weight, "order", None)
        return {} if order is None else {"_order": order}

    def write(self, experts: slice, packed: Tensor, block_scale: Tensor, g: Tensor | None) -> None:
        """Overwrite `experts` in place: packed [e, N, K/2], block_scale [e, N, K/16], g [e].

        The kernels take a layer at once. Experts that arrive one by one wait, packed, until all are there.
        """
        assert g is not None
        g = g.reshape(-1)
        if packed.shape[0] == self.weight.experts:
            self.weight.load_(packed.view(*self.weight.shape[:-1], -1), block_scale, g)
            return
        if self._staged is None:
            device = packed.device
            self._staged = (
                QuantizedTensor.empty(self.weight.shape, torch.bfloat16, "nvfp4", self.spec.rule("nvfp4"), device),
                set(),
            )
        staged, there = self._staged
        staged.packed[experts] = packed
        staged.block_scale.view(torch.uint8)[experts] = block_scale.view(torch.uint8)
        staged.global_scale[experts] = g.view(-1, 1, 1)
        there.update(range(experts.start, experts.stop))
        if len(there) == self.weight.experts:
            self.weight.load_(staged.packed, staged.block_scale, staged.global_scale)
            self._staged = None

    def quantize(self, experts: slice, values: Tensor, scales: Scales | None) -> None:
        """Overwrite `experts` in place with the quantized values bf16 [e, N, K]: one kernel, into its own layout."""
        assert scales is not None
        # vLLM's own loaders read checkpoints into CPU memory; the kernel wants them where it runs.
        device = next(iter(self.parameters().values())).device
        g, gs = (scale.to(device) for scale in scales)
        values = (values if len(self.weight.shape) == 3 else values[0]).to(device)
        self.weight.quantize_(values, g, self.spec.rule("nvfp4"), gs=gs, expert=experts.start)

    def forget(self) -> None:
        """Drop matrices that wait for the rest of their group or layer."""
        self.loader.forget()
        self._staged = None

    def checkpoint(self) -> Tensor:
        """The weights as a checkpoint has them: a copy, bit for bit what was loaded."""
        packed, block_scale, g = self.weight.to_packed()
        g = g.view(-1, 1, 1) if packed.dim() == 3 else g.view(())
        return QuantizedTensor(packed, block_scale, "nvfp4", self.spec.rule("nvfp4"), self.weight.k, torch.bfloat16, g)

    def linear(self, x_TK: Tensor, live_M: Tensor) -> Tensor:
        """The whole layer, [T, N]. The first T values of live_M belong to the rows."""
        weight, spec = self.weight, self.spec
        return torch.ops.vllm.quads_linear(
            x_TK,
            weight.words,
            weight.scales,
            weight.g,
            live_M,
            weight.n,
            weight.k,
            weight.path,
            spec.precision,
            spec.ratio,
            spec.selection,
            kernels.folds(spec.operand, weight.path),
        )

    def start(self, x_TH: Tensor, live_M: Tensor) -> None:
        """Begin to quantize the input of `experts`, which must follow, beside what the current stream does next."""
        side, spec = side_stream(x_TH.device), self.spec
        side.wait_stream(torch.cuda.current_stream(x_TH.device))
        with torch.cuda.stream(side):
            operand = kernels.quantize_ahead(
                x_TH,
                self.weight,
                spec.precision,  # pyright: ignore[reportArgumentType]
                ratio=spec.ratio,
                selection=spec.selection,
                fold=kernels.folds(spec.operand, self.weight.path),
                live_T=live_M[: x_TH.shape[0]],
            )
        self._started = Started(x_TH, operand)

    def _join(self, x_TH: Tensor) -> Operand | None:
        """What `start` made of x; None if it was not called, or with another tensor.

        The allocator may reuse the operand's memory on the side stream as soon as it is dropped: what comes there next
        waits for the current stream first.
        """
        started, self._started = self._started, None
        if started is None:
            return None
        torch.cuda.current_stream(x_TH.device).wait_stream(side_stream(x_TH.device))
        return started.operand if started.is_made_of(x_TH) else None

    def experts(self, w2: "TritonSite", x_TH: Tensor, ids_TA: Tensor, gates_TA: Tensor, live_M: Tensor) -> Tensor:
        """The whole layer, [T, H], called on w13. Rows that are not live give 0 and read no weights."""
        specs = {"w13": self.spec, "w2": w2.spec}
        residual = tuple(site for site, spec in specs.items() if spec.precision == "w4a4_residual")
        return kernels.moe(
            x_TH,
            self.weight,
            w2.weight,
            ids_TA,
            gates_TA,
            "w4a4_residual" if residual else self.spec.precision,  # pyright: ignore[reportArgumentType]
            residual_sites=residual,
            ratio=self.spec.ratio,
            selection=self.spec.selection,
            fold=kernels.folds(self.spec.operand, self.weight.path),
            live_T=live_M[: x_TH.shape[0]],
            quantized=self._join(x_TH),
        )


@functools.cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    """The one stream beside the current one on a GPU."""
    return torch.cuda.Stream(device)


@functools.cache
def _shell(n: int, k: int, path: str) -> KernelWeight:
    return KernelWeight((n, k), path=path, device="meta")


def _linear(
    x_TK: Tensor,
    words: Tensor,
    scales: Tensor,
    g: Tensor,
    live_M: Tensor,
    n: int,
    k: int,
    path: str,
    precision: str,
    ratio: float,
    selection: str,
    fold: bool,
) -> Tensor:
    """The custom op: torch reads its schema from these parameters."""
    weight = copy.copy(_shell(n, k, path))
    weight.words, weight.scales, weight.g = words, scales, g
    live_T = live_M[: x_TK.shape[0]]
    return kernels.linear(
        x_TK,
        weight,
        precision,  # pyright: ignore[reportArgumentType]
        ratio=ratio,
        selection=selection,  # pyright: ignore[reportArgumentType]
        fold=fold,
        live_T=live_T,
    )


def _linear_shape(x_TK: Tensor, words: Tensor, scales: Tensor, g: Tensor, live_M: Tensor, n: int, *rest: Any) -> Tensor:
    """The shape of what `_linear` gives for the same arguments."""
    return x_TK.new_empty(x_TK.shape[0], n)
