"""Linear and embedding layers of vLLM under `quads`: packed where the options say so, plain everywhere else.

vLLM calls `create_weights` while it builds a layer, the loaders of the parameters made there for each checkpoint
tensor, and `apply` in the forward. Loaders are bound to their layer (`MethodType`): vLLM keeps copies of a
parameter's attributes and knows how to let go of a layer only in that form.

The plain layers differ from vLLM's own in one thing: they leave the weight where it is. On a CPU vLLM packs it into a
buffer of its own after the first load, and later loads never reach that.

Shapes: T tokens, N rows, K columns.
"""

# pyright: reportMissingImports=false
# vLLM is an extra.

from collections.abc import Iterable, Iterator
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearMethodBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
)
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

from quads.errors import UserError
from quads.quant.matmul import SiteSpec
from quads.rollout.vllm.loading import Member, Part
from quads.rollout.vllm.state import EngineState

WHOLE = "whole"  # the one member of a layer that holds a single matrix


class PlainLinear(UnquantizedLinearMethod):
    """vLLM's own method, with the weight left in place."""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        pass

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.linear(x, layer.weight, bias)


class Router(PlainLinear):
    """The router of an expert layer. vLLM calls it inside the opaque op of that layer where it can (Qwen3-MoE); the
    experts' activations are then quantized beside it. Where Dynamo traces the router (Mixtral), it is a plain layer.
    """

    def __init__(self, state: EngineState, experts: str) -> None:
        """experts: name of the layer that the router is for."""
        super().__init__()
        self.state, self.experts = state, experts

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        if x.is_cuda and not torch.compiler.is_compiling():
            self.state.router_runs(self.experts, x)
        return super().apply(layer, x, bias)


class PlainEmbedding(UnquantizedEmbeddingMethod):
    """Embedding and lm_head, with the weight left in place."""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        pass

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.linear(x, layer.weight, bias)


class PackedLinear(LinearMethodBase):
    """A linear layer with 4-bit weights, 4-bit activations, or both."""

    def __init__(self, state: EngineState, spec: SiteSpec) -> None:
        self.state, self.spec = state, spec

    def create_weights(
        self,
        layer: nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra: Any,
    ) -> None:
        name = f"{layer.prefix}.weight"
        parts = linear_parts(layer, output_partition_sizes, input_size_per_partition)
        shape = sum(output_partition_sizes), input_size_per_partition
        layer.quads_site = self.state.make_site(name, self.spec, shape, parts, params_dtype)
        for suffix, param in layer.quads_site.parameters().items():
            layer.register_parameter("weight" + suffix, param)
        for suffix, buffer in layer.quads_site.buffers().items():
            layer.register_buffer("weight" + suffix, buffer, persistent=False)
        layer.register_buffer("quads_live", self.state.live_mask(), persistent=False)
        layer.weight.weight_loader = MethodType(_load_weight, layer)
        layer.load_weights = MethodType(_load_weights, layer)
        self.state.ledger.expect(name, parts)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        self.state.check_loaded(layer.prefix)

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        x_TK = x.reshape(-1, x.shape[-1])
        y = layer.quads_site.linear(x_TK, layer.quads_live)
        y = y.view(*x.shape[:-1], y.shape[-1])
        return y if bias is None else y + bias


def linear_parts(layer: nn.Module, row_sizes: list[int], num_columns: int) -> dict[Member, Part]:
    """The checkpoint matrices of a layer, in row order, and what this rank stores of each."""
    rank = layer.tp_rank
    if isinstance(layer, QKVParallelLinear):
        kv_rank = rank // layer.num_kv_head_replicas
        ranks = rank, kv_rank, kv_rank
        return {m: Part(r * n, 0, n, num_columns) for m, r, n in zip("qkv", ranks, row_sizes, strict=True)}
    if isinstance(layer, MergedColumnParallelLinear):
        return {i: Part(rank * n, 0, n, num_columns) for i, n in enumerate(row_sizes)}
    (num_rows,) = row_sizes
    row = rank * num_rows if isinstance(layer, ColumnParallelLinear) else 0
    column = rank * num_columns if isinstance(layer, RowParallelLinear) else 0
    return {WHOLE: Part(row, column, num_rows, num_columns)}


def _load_weight(layer: nn.Module, param: nn.Parameter, tensor: Tensor, member: Member | None = None) -> None:
    """The weight loader: one checkpoint matrix."""
    site, name = layer.quads_site, f"{layer.prefix}.weight"
    if member is None:
        if WHOLE not in site.parts:
            raise UserError(
                f"{name}: the checkpoint fuses {', '.join(map(str, site.parts))} in one matrix; ship them apart"
            )
        member = WHOLE
    layer.quant_method.state.ledger.record(name, (member,), tensor)
    site.loader.add(member, tensor)


def _load_weights(layer: nn.Module, weights: Iterable[tuple[str, Tensor]]) -> Iterator[str]:
    """What vLLM calls on a module that has it; calling the loader from here spares a warning about dtypes."""
    for name, tensor in weights:
        param = getattr(layer, name, None)
        if not isinstance(param, nn.Parameter):
            raise UserError(f"{layer.prefix} has no parameter {name!r} under quantization 'quads'")
        shard = getattr(tensor, "shard_id", None)
        arguments = (param, tensor) if shard is None else (param, tensor, shard)
        getattr(param, "weight_loader", default_weight_loader)(*arguments)
        yield name
