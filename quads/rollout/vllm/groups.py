"""Tensor-parallel rollout groups: neighbouring ranks that hold one copy of the rollout's weights between them.

vLLM builds the groups over the trainer's processes: ranks 0..N-1, N..2N-1 and so on. Every rank of a group runs an
engine of its own on the same requests, in the same order and with the same seeds, so all of them draw the same tokens;
vLLM exchanges activations and logits inside the forward. The loop knows nothing of this: each rank brings its own
prompts, the group generates all of them, and each rank takes its own responses home.

Reading back (verify_sync): every rank holds a part of each matrix; the group puts the whole together on every rank.
"""

# pyright: reportMissingImports=false
# vLLM is an extra.

from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from vllm.distributed.parallel_state import get_tp_group

from quads.quant.tensor import QuantizedTensor
from quads.rollout.vllm.loading import Member, Part
from quads.types import Sampling

T = TypeVar("T")


def gather(value: T) -> list[T]:
    """`value` of every rank of this rank's group, in rank order."""
    group = get_tp_group()
    values: list[Any] = [value] * group.world_size
    dist.all_gather_object(values, value, group=group.cpu_group)
    return values


def gather_requests(
    prompts: list[list[int]], n: int, sampling: Sampling, seeds: list[int]
) -> tuple[list[list[int]], list[int], range]:
    """(prompts, seeds) of the whole group, and which of the prompts are this rank's. Collective over the group.

    Raises ValueError if the ranks do not ask for the same n and sampling.
    """
    asked = gather((prompts, n, sampling, seeds))
    if any(other[1:3] != (n, sampling) for other in asked):
        raise ValueError("the ranks of a tensor-parallel group must ask for the same n and sampling")
    first = sum(len(other[0]) for other in asked[: get_tp_group().rank_in_group])
    everything = [prompt for other in asked for prompt in other[0]]
    return everything, [seed for other in asked for seed in other[3]], range(first, first + len(prompts))


def assemble(tensor: Tensor, parts: dict[Member, Part]) -> tuple[Tensor, list[int]]:
    """(whole matrix [..., N, K], rows of each of its members) from what each rank of the group holds of it. Collective.

    parts: where the rows of this rank's tensor come from, in row order.
    """
    if get_tp_group().world_size == 1:
        return tensor, [part.num_rows for part in parts.values()]
    placed = gather(parts)
    heights = [max(other[m].row + other[m].num_rows for other in placed) for m in parts]
    if not isinstance(tensor, QuantizedTensor):
        return _place(tensor, placed, heights, tensor.shape[-1]), heights
    scale, columns = tensor.block_scale.view(torch.uint8), tensor.num_columns
    packed = _place(tensor.packed, placed, heights, columns)
    block_scale = _place(scale, placed, heights, columns).view(tensor.block_scale.dtype)
    columns = _width(placed)
    return tensor.with_parts(packed, block_scale, tensor.global_scale, columns), heights


def assemble_rows(tensor: Tensor) -> Tensor:
    """The whole of a tensor whose rows the ranks hold in rank order: embeddings. Collective."""
    return tensor if get_tp_group().world_size == 1 else torch.cat(_gather_tensors(tensor))


def _gather_tensors(tensor: Tensor) -> list[Tensor]:
    """Every rank's tensor of one shape and dtype."""
    group = get_tp_group()
    pieces = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(group.world_size)]
    dist.all_gather(pieces, tensor.contiguous(), group=group.device_group)
    return pieces


def _width(placed: list[dict[Member, Part]]) -> int:
    """K of the whole matrix."""
    return max(part.column + part.num_columns for parts in placed for part in parts.values())


def _place(tensor: Tensor, placed: list[dict[Member, Part]], heights: list[int], num_columns: int) -> Tensor:
    """Whole tensor [..., N, W] from the ranks' tensors, by the parts that each of them holds.

    num_columns: of the weight that `tensor` is of, which may be wider or narrower: codes, scales of blocks.
    """
    width = tensor.shape[-1]
    whole = tensor.new_empty(*tensor.shape[:-2], sum(heights), _width(placed) * width // num_columns)
    for parts, piece in zip(placed, _gather_tensors(tensor), strict=True):
        top = start = 0
        for part, height in zip(parts.values(), heights, strict=True):
            rows = slice(top + part.row, top + part.row + part.num_rows)
            start_column, end_column = part.column, part.column + part.num_columns
            columns = slice(start_column * width // num_columns, end_column * width // num_columns)
            whole[..., rows, columns] = piece[..., start : start + part.num_rows, :]
            top, start = top + height, start + part.num_rows
    return whole
