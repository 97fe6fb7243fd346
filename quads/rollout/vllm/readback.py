"""Looks at a live vLLM model: counts the loads of plain parameters, reads everything back in checkpoint layout."""

# pyright: reportMissingImports=false
# vLLM is an extra.

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.linear import (
    LinearBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

from quads.quant.sites import SITES
from quads.quant.tensor import QuantizedTensor
from quads.rollout.sync import checksum
from quads.rollout.vllm.groups import assemble, assemble_rows
from quads.rollout.vllm.linear import linear_parts
from quads.rollout.vllm.loading import LoadLedger, Piece
from quads.rollout.vllm.site import Site


def track_plain_parameters(model: nn.Module, ledger: LoadLedger) -> None:
    """Norms, embeddings, routers, biases and layers left in bf16: their loads are counted too.

    vLLM's own loader of each stays in charge; a call is recorded on the way.
    """
    for name, module, param in _plain_parameters(model):
        pieces: tuple[Piece, ...] = (None,)
        if isinstance(module, QKVParallelLinear):
            pieces = ("q", "k", "v")
        elif isinstance(module, MergedColumnParallelLinear):
            pieces = tuple(range(len(module.output_sizes)))
        ledger.expect(name, pieces)
        param.weight_loader = _recorded(getattr(param, "weight_loader", default_weight_loader), name, pieces, ledger)


def _recorded(loader: Any, name: str, pieces: tuple[Piece, ...], ledger: LoadLedger) -> Any:
    def load(param: nn.Parameter, tensor: Tensor, *shard: Any) -> Any:
        ledger.record(name, shard if shard and shard[0] is not None else pieces, tensor)
        return loader(param, tensor, *shard)

    return load


def forget_waiting(model: nn.Module) -> None:
    """Drop what a refit that was given up has left behind: matrices that wait for the rest of their group."""
    for module in model.modules():
        for site in _sites(module).values():
            site.forget()


def _plain_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Module, nn.Parameter]]:
    """(name, owner, parameter) of what no `Site` owns; a tied parameter once."""
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        ours = {id(p) for site in _sites(module).values() for p in site.parameters().values()}
        for name, param in module.named_parameters(recurse=False):
            if id(param) not in ours and id(param) not in seen:
                seen.add(id(param))
                yield f"{prefix}.{name}", module, param


def _sites(module: nn.Module) -> dict[str, Site]:
    if site := getattr(module, "quads_site", None):
        return {"": site}
    return getattr(module, "quads_sites", {})


def checkpoint_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, tensor or packed tensor) of every weight of the model, experts fused. Collective over the
    ranks of a tensor-parallel group, each of which gets whole tensors.

    Packed matrices are copies or views; what they hold is the bytes that a sync brings.
    """
    for prefix, module in model.named_modules():
        for site_name, site in _sites(module).items():
            name = prefix.removesuffix(".routed_experts")
            name = f"{name}.{SITES[site_name].leaves[0]}" if site_name else f"{name}.weight"
            yield from _split(name, *assemble(site.checkpoint(), site.parts), bool(site_name))
    for name, module, param in _plain_parameters(model):
        param = param.detach()
        if isinstance(module, VocabParallelEmbedding):  # vLLM pads the vocabulary
            yield name, assemble_rows(param)[: module.org_vocab_size]
        elif isinstance(module, LinearBase) and not (param.dim() == 1 and isinstance(module, RowParallelLinear)):
            matrix = param if param.dim() == 2 else param.unsqueeze(1)  # a bias is cut like the rows
            sizes = getattr(module, "output_partition_sizes", [len(param)])
            whole, rows = assemble(matrix, linear_parts(module, sizes, matrix.shape[1]))
            yield from _split(name, whole if param.dim() == 2 else whole.squeeze(1), rows, False)
        else:
            yield name, param


def _split(name: str, tensor: Tensor, rows: list[int], is_experts: bool) -> Iterator[tuple[str, Tensor]]:
    """The matrices of a fused layer under their own names; experts stay fused, as checkpoints of this project have
    them.
    """
    if is_experts or len(rows) == 1:
        yield name, tensor
        return
    site = SITES["qkv" if len(rows) == 3 else "w13"]
    start = 0
    for part, num_rows in zip(site.matrices, rows, strict=True):
        yield name.replace(site.vllm_layer, part), _rows(tensor, start, start + num_rows)
        start += num_rows


def _rows(tensor: Tensor, start: int, end: int) -> Tensor:
    if isinstance(tensor, QuantizedTensor):
        return tensor.with_parts(tensor.packed[start:end], tensor.block_scale[start:end], tensor.global_scale)
    return tensor[start:end]


@torch.no_grad()
def checksums(model: nn.Module) -> dict[str, int]:
    """Name -> checksum of every weight."""
    return {name: checksum(tensor) for name, tensor in checkpoint_tensors(model)}
