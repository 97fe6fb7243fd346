"""Quantization-aware training when the master weights are sharded: same functions as learner.py, same bits.

    convert_learner(model, spec, SHARDED)  before parallelize: the same layers, in their sharded form
    attach(model, all_gather)              after parallelize and to_empty, before the first forward
    requantize(model)                      as in learner.py; one process or many
    quantized_weights(model, spec)         as in learner.py; full tensors, one at a time, on every process

A global scale needs the amax over whole matrices, which no process has. `requantize` takes the amax of all sharing
groups over its own rows, and one all-reduce(MAX) over the FSDP shards makes them global: one for the attention groups,
one for the experts (never over ep: experts do not share). Then every process packs its own rows, once a step.

`all_gather` says what FSDP moves when a layer is about to run:

    "bf16"    the cast of the master, 16 bits a weight; every process quantizes the whole weight for itself
    "packed"  codes and block scales, 4.5 bits a weight; every process decodes them. NVFP4 only, equal shards
    "auto"    "packed" where it can be had

Experts with one owner (ep takes all processes) are not gathered at all: the owner decodes its packed weight.

All give the same bits: rows are quantized independently once the global scale is known, and the bf16 cast comes
first on either path. The gradient is the straight-through one: "packed" hands the layer the decoded weight in place of
the master, so its gradient goes to the master unchanged.

Shapes: L experts of one ep rank. What a process keeps of one weight: packed_shard.py.
"""

from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn

from quads.errors import UserError
from quads.model.moe import local_experts
from quads.model.parallelize import (
    fsdp_modules,
    gather_full,
    gathered_rows,
    local_tensor,
    max_over_shards,
    own_rows,
    reshard,
)
from quads.quant import fake_quant, learner, nvfp4
from quads.quant.learner import Group, QATExperts, QATLinear, sharing_groups
from quads.quant.nvfp4 import GlobalScaleMode
from quads.quant.packed_shard import PackedShard
from quads.quant.recipes import AllGather, QuantSpec
from quads.quant.sites import TARGETS
from quads.quant.tensor import Float8BlockTensor, NVFP4Tensor
from quads.quant.weights import qdq, weight_amax


class ShardedLinear(QATLinear):
    """A `QATLinear` whose master is sharded. `shards` is filled by `attach`."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.shards: dict[str, PackedShard] = {}

    def effective_weight(self, dtype: torch.dtype) -> Tensor:
        return _effective(self, "weight", self.weight, dtype)


class ShardedExperts(QATExperts):
    """`QATExperts` whose masters are sharded. `shards` is filled by `attach`."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.shards: dict[str, PackedShard] = {}

    def effective_weights(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return (
            _effective(self, "gate_up_proj", local_experts(self.gate_up_proj), dtype),
            _effective(self, "down_proj", local_experts(self.down_proj), dtype),
        )


ShardedModule = ShardedLinear | ShardedExperts
SHARDED = (ShardedLinear, ShardedExperts)  # for `convert_learner`


def _effective(module: ShardedModule, leaf: str, gathered: Tensor, dtype: torch.dtype) -> Tensor:
    """What the matmul multiplies, from what FSDP gathered, or from the master of experts with one owner."""
    if module.weights == "bf16":
        return gathered.to(dtype)
    if module.weights == "fp8":
        return fake_quant.fake_quantize_weight_fp8(gathered, dtype, module.mode)
    if leaf not in module.shards:
        raise RuntimeError("a sharded quantized layer ran before `attach` and `requantize`")
    shard = module.shards[leaf]
    if shard.gathered:
        return gathered.to(dtype)
    if shard.owned:
        value = shard.decode(shard.bytes, dtype)
    else:
        value = qdq(gathered.detach().bfloat16(), shard.g, module.mode, shard.gs, dtype)
    return fake_quant.straight_through(gathered, value)


def attach(model: nn.Module, asked: AllGather, spec: QuantSpec) -> Literal["bf16", "packed"]:
    """Give every sharded NVFP4 weight its packed bytes, and FSDP what to gather, which is returned. Follow with
    `requantize`.

    Raises:
        UserError: "packed" was asked for and cannot be had.
    """
    all_gather = spec.gathers(asked)
    if all_gather == "packed" and spec.learner_weights != "nvfp4":
        raise UserError(
            f"[quant] all_gather = 'packed' is for NVFP4 weights, but the learner has {spec.learner_weights}; use bf16"
        )
    weights = [
        (path, module, leaf, parameter)
        for path, module in model.named_modules()
        if isinstance(module, ShardedModule) and module.weights == "nvfp4"
        for leaf, parameter in module.named_parameters(recurse=False)
    ]
    uneven = [f"{path}.{leaf}" for path, _, leaf, parameter in weights if not _equal_shards(parameter)]
    if uneven and asked == "packed":
        raise UserError(
            f"[quant] all_gather = 'packed' needs equal shards, but the rows of {uneven[0]} do not divide over FSDP; "
            "use all_gather = 'auto' or 'bf16', or another [parallel] fsdp"
        )
    if uneven:
        all_gather = "bf16"
    for _, module, leaf, parameter in weights:
        shard = module.shards[leaf] = PackedShard(parameter, module.mode)
        if all_gather == "packed" and not shard.owned:
            local = local_tensor(parameter)
            # FSDP looks for these names on the shard when it first runs; the parameter itself stays a plain tensor.
            local.fsdp_pre_all_gather = shard.pre_all_gather  # type: ignore[attr-defined]
            local.fsdp_post_all_gather = shard.post_all_gather  # type: ignore[attr-defined]
            shard.gathered = True
    return all_gather


def _equal_shards(parameter: Tensor) -> bool:
    rows = local_tensor(parameter).shape[0]
    return rows > 0 and gathered_rows(parameter) % rows == 0


@torch.no_grad()
def requantize(model: nn.Module) -> None:
    """Pack the local rows of every sharded NVFP4 weight; one process: `learner.requantize`. Collective."""
    if not fsdp_modules(model):
        learner.requantize(model)
        return
    reshard(model)
    groups = [group for group in sharing_groups(model, TARGETS) if _own_shards(group)]
    if not groups:
        return
    mode = next(iter(_own_shards(groups[0]).values())).mode
    for group, (g, gs) in zip(groups, group_scales(groups, mode), strict=True):
        shards = _own_shards(group)
        for name, parameter in group.parameters():
            shards[name].pack(parameter, g, gs)


def group_scales(groups: list[Group], mode: GlobalScaleMode) -> list[tuple[Tensor, Tensor]]:
    """(g, gs) of each sharing group, over all shards: [] for linears, [L, 1, 1] for experts. Two collectives in all."""
    scales: dict[int, tuple[Tensor, Tensor]] = {}
    for experts in (False, True):
        chosen = [i for i, group in enumerate(groups) if (group.site in ("w13", "w2")) == experts]
        if not chosen:
            continue
        amaxes = torch.stack([_local_amax(groups[i]) for i in chosen])
        _, representative = next(groups[chosen[0]].parameters())
        max_over_shards(amaxes, representative)
        g, gs = nvfp4.global_scale(amaxes, mode)  # of all groups at once: a launch for each would keep a GPU waiting
        scales |= dict(zip(chosen, zip(g.unbind(0), gs.unbind(0), strict=True), strict=True))
    return [scales[i] for i in range(len(groups))]


@torch.no_grad()
def quantized_weights(model: nn.Module, spec: QuantSpec) -> Iterator[tuple[str, Tensor]]:
    """Full tensors in model order, as `learner.quantized_weights` yields them; each is gathered when it is asked for.

    What travels is what is shipped: packed bytes for NVFP4, else the cast. Every process must take every tensor.
    """
    if not fsdp_modules(model):
        yield from learner.quantized_weights(model, spec)
        return
    reshard(model)
    dtype = getattr(model, "dtype", torch.float32)
    dtype = torch.float32 if dtype == torch.float64 else dtype
    groups = {name: group for group in sharing_groups(model, spec.targets) for name in group.members}
    shards: dict[str, PackedShard] = {}
    for name, parameter in model.named_parameters():
        group = groups.get(name)
        weights = "bf16" if group is None else spec.rollout_weights(group.site)
        if group is None or weights == "bf16":
            yield name, gather_full(local_tensor(parameter).to(dtype), parameter)
        elif weights == "fp8":
            yield name, Float8BlockTensor.from_hp(_full_bf16(parameter), spec.global_scale)
        else:
            if name not in shards:
                shards |= _packed_group(group, spec.global_scale)
            yield name, _full_tensor(shards.pop(name), parameter)


def _packed_group(group: Group, mode: GlobalScaleMode) -> dict[str, PackedShard]:
    """The packed rows of each member: the learner's own where it quantizes the same way."""
    own = _own_shards(group)
    if own and all(shard.mode == mode for shard in own.values()):
        for name, parameter in group.parameters():
            if own[name].version != local_tensor(parameter)._version:
                raise RuntimeError(f"{name} changed after it was packed; call requantize(model) first")
        return own
    ((g, gs),) = group_scales([group], mode)
    made = {}
    for name, parameter in group.parameters():
        made[name] = PackedShard(parameter, mode)
        made[name].pack(parameter, g, gs)
    return made


def _full_tensor(shard: PackedShard, parameter: Tensor) -> NVFP4Tensor:
    rows = gather_full(shard.bytes, parameter)
    g = gather_full(shard.g[shard.rows], parameter) if shard.g.dim() else shard.g
    return shard.tensor(rows, g, torch.bfloat16)


def _full_bf16(parameter: Tensor) -> Tensor:
    return gather_full(local_tensor(parameter).bfloat16(), parameter)


def _own_shards(group: Group) -> dict[str, PackedShard]:
    """The packed bytes that the learner keeps of each member; none where it does not quantize to NVFP4."""
    return {
        name: module.shards[leaf]
        for name, (module, leaf) in group.members.items()
        if isinstance(module, ShardedModule) and module.weights == "nvfp4"
    }


def _local_amax(group: Group) -> Tensor:
    """Over this process's rows: fp32 [], or [L, 1, 1] with zeros for the experts of other shards."""
    found, shards = [], _own_shards(group)
    for name, parameter in group.parameters():
        local = local_tensor(parameter)
        if local.dim() == 2:
            found.append(weight_amax(local, cast=True))
            continue
        amax_L11 = local.new_zeros(gathered_rows(parameter), 1, 1, dtype=torch.float32)
        rows = shards[name].rows if name in shards else own_rows(parameter)
        amax_L11[rows] = weight_amax(local, cast=True)
        found.append(amax_L11)
    return torch.stack(found).amax(0)
