"""The one door from master weights to packed ones, for one process and for many. Nothing else quantizes weights.

    attach(model, all_gather, spec)   several processes: once, after parallelize and to_empty, before the first forward
    requantize(model)                 after every optimizer step and every load
    quantized_weights(model, spec)    what the sync ships: (name, tensor) in model order
    pack_group, shared_scales         the same for weights that are in no model: export, vLLM's loader

What is quantized is bf16(master), packed once by `requantize`. Those bytes serve the learner's forward (dequantized,
with a straight-through estimator) and the rollout, so the two multiply the same numbers. Shipping weights that changed
after the last `requantize` is an error.

A global scale needs the amax over a whole sharing group, which no process has where masters are sharded. Each takes the
amax of all groups over its own rows, and one all-reduce(MAX) over the FSDP shards makes them global: one for the
attention groups, one for the experts (never over ep: experts do not share). Then every process packs its own rows.

Shapes: N, K rows and columns of a weight, E experts, L experts of one ep rank.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

from quads.errors import UserError
from quads.model.linear import Linear
from quads.model.moe import Experts
from quads.model.parallelize import (
    gather_full,
    gathered_rows,
    is_sharded,
    local_tensor,
    max_over_shards,
    own_rows,
    reshard,
)
from quads.quant.device import weight_amax
from quads.quant.formats import FORMATS, Scales
from quads.quant.packed import PackedShard, PackedWeight, pack_form
from quads.quant.qat import QATModule
from quads.quant.recipes import AllGather, QuantSpec
from quads.quant.sites import EXPERT_SITES, TARGETS, is_targeted, layer_of
from quads.quant.tensor import QuantizedTensor


@dataclass
class Group:
    """Weights that share global scales. Example: the q, k and v projections of one layer."""

    site: str
    members: dict[str, tuple[nn.Module, str]] = field(default_factory=dict)  # parameter name -> (module, leaf)

    def parameters(self) -> dict[str, nn.Parameter]:
        """The master weight of each member, by name."""
        return {name: getattr(module, leaf) for name, (module, leaf) in self.members.items()}


def sharing_groups(model: nn.Module, targets: tuple[str, ...], plain: frozenset[int] = frozenset()) -> list[Group]:
    """The weights of the targets, in groups that share global scales, in model order. plain: layers to leave out."""
    groups: dict[str, Group] = {}
    for path, module in model.named_modules():
        if layer_of(path) in plain:
            continue
        if isinstance(module, Linear) and is_targeted(module.site, targets):
            key = path.rpartition(".")[0] + ".qkv" if module.site == "qkv" else path
            groups.setdefault(key, Group(module.site)).members[f"{path}.weight"] = (module, "weight")
        elif isinstance(module, Experts) and "experts" in targets:
            for leaf, site in EXPERT_SITES.items():
                groups[f"{path}.{leaf}"] = Group(site, {f"{path}.{leaf}": (module, leaf)})
    return list(groups.values())


def shared_scales(tensors: list[Tensor], format: str, rule: str) -> Scales | None:
    """The global scales of whole weights that share them, from the amax over bf16 of all of them: [] for [N, K],
    [E, 1, 1] for [E, N, K]. None for a format without a global scale."""
    make = FORMATS[format].global_scale
    if make is None:
        return None
    return make(torch.stack([weight_amax(tensor.detach(), cast=True) for tensor in tensors]).amax(0), rule)


def pack_group(tensors: dict[str, Tensor], format: str, rule: str) -> dict[str, QuantizedTensor]:
    """bf16 of whole weights that share global scales, packed: what `requantize` would make of them as masters."""
    scales = shared_scales(list(tensors.values()), format, rule)
    return {name: QuantizedTensor.from_hp(tensor, format, rule, scales, cast=True) for name, tensor in tensors.items()}


def group_scales(groups: list[Group], format: str, rule: str) -> list[Scales | None]:
    """The global scales of each group over all shards: [] for linears, [L, 1, 1] for experts. Those of equal shape are
    made at once, and with one collective: one by one, launches take longest. Collective where masters are sharded."""
    make = FORMATS[format].global_scale
    if make is None:
        return [None] * len(groups)
    amaxes = [_local_amax(group) for group in groups]
    scales: dict[int, Scales | None] = {}
    for shape in dict.fromkeys(amax.shape for amax in amaxes):  # in model order: the same on every process
        chosen = [i for i, amax in enumerate(amaxes) if amax.shape == shape]
        together = torch.stack([amaxes[i] for i in chosen])
        max_over_shards(together, next(iter(groups[chosen[0]].parameters().values())))
        g, gs = make(together, rule)
        scales |= dict(zip(chosen, zip(g.unbind(0), gs.unbind(0), strict=True), strict=True))
    return [scales[i] for i in range(len(groups))]


def _local_amax(group: Group) -> Tensor:
    """Over this process's rows: fp32 [], or [L, 1, 1] with zeros for the experts of other shards."""
    found = []
    for name, parameter in group.parameters().items():
        local = local_tensor(parameter).detach()
        amax = weight_amax(local, cast=True)
        if local.dim() == 3 and local.shape[0] != gathered_rows(parameter):
            module, leaf = group.members[name]
            packed = module.packed.get(leaf) if isinstance(module, QATModule) else None
            rows = packed.rows if isinstance(packed, PackedShard) else own_rows(parameter)
            amax_L11 = local.new_zeros(gathered_rows(parameter), 1, 1, dtype=torch.float32)
            amax_L11[rows] = amax
            amax = amax_L11
        found.append(amax)
    return torch.stack(found).amax(0)


@torch.no_grad()
def requantize(model: nn.Module) -> None:
    """Pack the weights of every quantization-aware layer, once. Call after each optimizer step and each load.
    Collective where masters are sharded."""
    reshard(model)
    groups = [group for group in sharing_groups(model, TARGETS) if _qat_modules(group)]
    if not groups:
        return
    first = _qat_modules(groups[0])[0]
    format, rule = first.weights, first.rules[first.weights]  # `convert_learner` gives all the same
    for group, scales in zip(groups, group_scales(groups, format, rule), strict=True):
        for name, parameter in group.parameters().items():
            module, leaf = group.members[name]
            assert isinstance(module, QATModule)
            if leaf not in module.packed:
                if is_sharded(parameter):
                    raise RuntimeError("a sharded model was not attached; call attach(model, all_gather, spec) first")
                module.packed[leaf] = pack_form(parameter, format, rule)
            module.packed[leaf].pack(parameter, scales)


def _qat_modules(group: Group) -> list[QATModule]:
    """Those of a group's layers that quantize their weights: all or none."""
    modules = [module for module, _ in group.members.values()]
    return [module for module in modules if isinstance(module, QATModule) and module.weights != "bf16"]


def attach(model: nn.Module, asked: AllGather, spec: QuantSpec) -> Literal["bf16", "packed"]:
    """Give every weight of a sharded learner its packed form, and FSDP what to gather, which is returned. Follow with
    `requantize`.

    Raises:
        UserError: "packed" was asked for and cannot be had.
    """
    all_gather = spec.gathers(asked)
    if all_gather == "packed" and spec.gathers("auto") != "packed":
        raise UserError(
            "[quant] all_gather = 'packed' is for weights in a format that packs rows, but the learner has "
            f"{spec.learner_weights}; use bf16"
        )
    weights = [
        (path, module, leaf, parameter)
        for path, module in model.named_modules()
        if isinstance(module, QATModule) and module.weights != "bf16"
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
        shard = PackedShard(parameter, module.weights, module.rules[module.weights])
        module.packed[leaf] = shard
        if all_gather == "packed" and shard.gathers == "bf16":
            shard.gather_packed(parameter)
    return all_gather


def _equal_shards(parameter: Tensor) -> bool:
    rows = local_tensor(parameter).shape[0]
    return rows > 0 and gathered_rows(parameter) % rows == 0


@torch.no_grad()
def quantized_weights(model: nn.Module, spec: QuantSpec) -> Iterator[tuple[str, Tensor]]:
    """What the rollout runs, as (parameter name, full tensor) in model order.

    A QuantizedTensor for the targets where `spec.rollout` has quantized weights, else plain tensors in the model's
    compute dtype (the parameter itself if it has that dtype already). The learner's own packed bytes where it
    quantizes the same way; made from bf16(master) on the fly where it does not. Where masters are sharded each tensor
    is gathered when it is asked for, as the bytes that are shipped, and every process must take every tensor.

    Raises RuntimeError if a master changed after the last `requantize`.
    """
    reshard(model)
    dtype = getattr(model, "dtype", torch.float32)
    dtype = torch.float32 if dtype == torch.float64 else dtype
    plain = spec.unquantized_layers(model)
    groups = {name: group for group in sharing_groups(model, spec.targets, plain) for name in group.members}
    ready: dict[str, PackedWeight | PackedShard] = {}
    for name, parameter in model.named_parameters():
        group = groups.get(name)
        format = "bf16" if group is None else spec.rollout_weights(group.site)
        if group is None or format == "bf16":
            yield name, gather_full(local_tensor(parameter).detach().to(dtype), parameter)
            continue
        if name not in ready:
            ready |= _packed_group(group, format, spec.rule(format))
        yield name, ready.pop(name).whole(parameter)


def _packed_group(group: Group, format: str, rule: str) -> dict[str, PackedWeight | PackedShard]:
    """The packed form of each member: the learner's own where it quantizes the same way."""
    masters = group.parameters()
    own = [(module.weights, module.rules[module.weights]) for module in _qat_modules(group)]
    if own and set(own) == {(format, rule)}:
        forms = {}
        for name, (module, leaf) in group.members.items():
            assert isinstance(module, QATModule)
            form = module.packed.get(leaf)
            if form is None or form.version != local_tensor(masters[name])._version:
                raise RuntimeError(f"{name} changed after it was packed; call requantize(model) first")
            forms[name] = form
        return forms
    made = {name: pack_form(master, format, rule) for name, master in masters.items()}
    (scales,) = group_scales([group], format, rule)
    for name, form in made.items():
        form.pack(masters[name].detach(), scales)
    return made
