"""The learner's side: layers that compute with quantized weights while the optimizer sees fp32 masters.

    convert_learner(model, spec)    once: targeted layers become quantization-aware, with the same Parameters and names
    requantize(model)               after every optimizer step and every load
    quantized_weights(model, spec)  what the sync ships: (name, tensor) in model order

What is quantized is bf16(master), packed once by `requantize`. Those bytes serve the learner's forward (dequantized,
with a straight-through estimator) and the rollout, so the two multiply the same numbers. A forward before the first
`requantize` is an error, and so is shipping weights that changed after the last one.

Sharing groups have one global scale, from the amax over the whole group: {q, k, v} of a layer; {gate, up} of one
expert, which is its slice of gate_up_proj; o_proj and each expert's down_proj alone.

A targeted layer with unquantized weights (only its activations are) keeps its master's cast to the compute dtype.

Shapes: N, K rows and columns of a weight, E experts, I expert width, H hidden.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from quads.model.linear import Linear
from quads.model.moe import Experts, ExpertSite
from quads.quant import fake_quant, nvfp4
from quads.quant.recipes import QuantSpec
from quads.quant.sites import EXPERT_SITES, TARGETS, is_targeted
from quads.quant.tensor import Float8BlockTensor, NVFP4Tensor, QuantizedTensor
from quads.quant.weights import quantize, weight_amax


class QATLinear(Linear):
    """A `Linear` that multiplies the quantized value of its weight, and quantizes its input if `activations` says
    so."""

    def __init__(self, source: Linear, weights: str, activations: str, mode: nvfp4.GlobalScaleMode) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.site = source.in_features, source.out_features, source.site
        self.weight = source.weight
        self.weights, self.activations = weights, activations
        self.mode: nvfp4.GlobalScaleMode = mode
        self.packed: dict[str, QuantizedTensor] = {}  # by parameter; written by `requantize`
        self.packed_versions: dict[str, int] = {}  # version counters of the masters they were made from

    def effective_weight(self, dtype: torch.dtype) -> Tensor:
        return _effective(self, "weight", self.weight, dtype)

    def quantize_input(self, x_TK: Tensor, live_T: Tensor | None = None) -> Tensor:
        return _quantize_input(self, x_TK)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, weights={self.weights}, activations={self.activations}"


class QATExperts(Experts):
    """`Experts` that multiply the quantized values of their weights; one global scale for each expert and matrix."""

    def __init__(self, source: Experts, weights: str, activations: str, mode: nvfp4.GlobalScaleMode) -> None:
        nn.Module.__init__(self)
        self.num_experts, self.dispatcher = source.num_experts, source.dispatcher
        self.gate_up_proj, self.down_proj = source.gate_up_proj, source.down_proj
        self.weights, self.activations = weights, activations
        self.mode: nvfp4.GlobalScaleMode = mode
        self.packed: dict[str, QuantizedTensor] = {}  # by parameter; written by `requantize`
        self.packed_versions: dict[str, int] = {}  # version counters of the masters they were made from

    def effective_weights(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return (
            _effective(self, "gate_up_proj", self.gate_up_proj, dtype),
            _effective(self, "down_proj", self.down_proj, dtype),
        )

    def quantize_input(self, site: ExpertSite, x: Tensor, live: Tensor | None = None) -> Tensor:
        return _quantize_input(self, x)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, weights={self.weights}, activations={self.activations}"


QATModule = QATLinear | QATExperts


def _effective(module: QATModule, leaf: str, master: Tensor, dtype: torch.dtype) -> Tensor:
    if module.weights == "bf16":
        return master.to(dtype)
    if leaf not in module.packed:
        raise RuntimeError("a quantized layer ran before its weights were packed; call requantize(model) first")
    return fake_quant.straight_through(master, module.packed[leaf].dequantize(dtype))


def _quantize_input(module: QATModule, x: Tensor) -> Tensor:
    if module.activations == "nvfp4":
        return fake_quant.fake_quantize_rows(x)
    if module.activations == "fp8":
        return fake_quant.fake_quantize_rows_fp8(x, module.mode)
    return x


def convert_learner(
    model: nn.Module,
    spec: QuantSpec,
    classes: tuple[type[QATLinear], type[QATExperts]] = (QATLinear, QATExperts),
) -> None:
    """Replace the targeted layers by quantization-aware ones, in place. Parameters stay the same objects under the same
    names, so an optimizer may exist already. Nothing to do where the learner is bf16 / bf16, or was converted before.
    """
    if (spec.learner_weights, spec.learner_activations) == ("bf16", "bf16"):
        return
    settings = (spec.learner_weights, spec.learner_activations, spec.global_scale)
    linear_class, experts_class = classes
    for path, module in list(model.named_modules()):
        if isinstance(module, QATModule):
            continue
        if isinstance(module, Linear) and is_targeted(module.site, spec.targets):
            replace_module(model, path, linear_class(module, *settings))
        elif isinstance(module, Experts) and "experts" in spec.targets:
            replace_module(model, path, experts_class(module, *settings))


def replace_module(model: nn.Module, path: str, new: nn.Module) -> None:
    """Put `new` where the module at `path` is, in the same mode (train or eval)."""
    parent, _, name = path.rpartition(".")
    new.train(model.get_submodule(path).training)
    setattr(model.get_submodule(parent), name, new)


@dataclass
class Group:
    """Weights that share global scales. Example: the q, k and v projections of one layer."""

    site: str
    members: dict[str, tuple[nn.Module, str]] = field(default_factory=dict)  # parameter name -> (module, leaf)

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """(name, master weight) of each member."""
        for name, (module, leaf) in self.members.items():
            yield name, getattr(module, leaf)


def sharing_groups(model: nn.Module, targets: tuple[str, ...]) -> list[Group]:
    """The weights of the targets, in groups that share global scales, in model order."""
    groups: dict[str, Group] = {}
    for path, module in model.named_modules():
        if isinstance(module, Linear) and is_targeted(module.site, targets):
            key = path.rpartition(".")[0] + ".qkv" if module.site == "qkv" else path
            groups.setdefault(key, Group(module.site)).members[f"{path}.weight"] = (module, "weight")
        elif isinstance(module, Experts) and "experts" in targets:
            for leaf, site in EXPERT_SITES.items():
                groups[f"{path}.{leaf}"] = Group(site, {f"{path}.{leaf}": (module, leaf)})
    return list(groups.values())


Scales = tuple[Tensor, Tensor]  # (g, gs): [] for linears, [E, 1, 1] for experts


def group_scales(groups: list[Group], mode: nvfp4.GlobalScaleMode) -> list[Scales]:
    """The NVFP4 global scales of each group, those of equal shape made at once: one by one, launches take longest."""
    amaxes = [
        torch.stack([weight_amax(master.detach(), cast=True) for _, master in group.parameters()]).amax(0)
        for group in groups
    ]
    scales: dict[int, Scales] = {}
    for shape in {amax.shape for amax in amaxes}:
        chosen = [i for i, amax in enumerate(amaxes) if amax.shape == shape]
        g, gs = nvfp4.global_scale(torch.stack([amaxes[i] for i in chosen]), mode)
        scales |= dict(zip(chosen, zip(g.unbind(0), gs.unbind(0), strict=True), strict=True))
    return [scales[i] for i in range(len(groups))]


def pack_group(
    group: Group, weights: str, mode: nvfp4.GlobalScaleMode, scales: Scales | None = None
) -> Iterator[tuple[str, QuantizedTensor]]:
    """(name, quantized bf16(master)) of each member. `weights`: "nvfp4" or "fp8" (which shares nothing). scales: from
    `group_scales`, where they are known."""
    if weights == "fp8":
        for name, master in group.parameters():
            yield name, Float8BlockTensor.from_hp(master.detach().bfloat16(), mode)
        return
    g, gs = scales or group_scales([group], mode)[0]
    for name, master in group.parameters():
        packed, block_scale, _ = quantize(master.detach(), g, mode, gs, cast=True)
        yield name, NVFP4Tensor(packed, block_scale, g, master.shape[-1], torch.bfloat16, mode)


@torch.no_grad()
def requantize(model: nn.Module) -> None:
    """Pack the weights of every quantization-aware layer, once. Call after each optimizer step and each load."""
    modules = [module for module in model.modules() if isinstance(module, QATModule) and module.weights != "bf16"]
    if not modules:
        return
    weights, mode = modules[0].weights, modules[0].mode  # `convert_learner` gives all the same
    groups = [g for g in sharing_groups(model, TARGETS) if isinstance(next(iter(g.members.values()))[0], QATModule)]
    scales = group_scales(groups, mode) if weights == "nvfp4" else [None] * len(groups)
    for group, known in zip(groups, scales, strict=True):
        for name, packed in pack_group(group, weights, mode, known):
            owner, leaf = group.members[name]
            assert isinstance(owner, QATModule)
            owner.packed[leaf] = packed
            owner.packed_versions[leaf] = getattr(owner, leaf)._version


@torch.no_grad()
def quantized_weights(model: nn.Module, spec: QuantSpec) -> Iterator[tuple[str, Tensor]]:
    """What the rollout runs, as (parameter name, tensor) in model order.

    NVFP4Tensor or Float8BlockTensor for the targets where `spec.rollout` has quantized weights, else plain tensors in
    the model's compute dtype (the parameter itself if it has that dtype already). The learner's own packed bytes
    where it quantizes the same way; made from bf16(master) on the fly where it does not.

    Raises RuntimeError if a master changed after the last `requantize`.
    """
    dtype = getattr(model, "dtype", torch.float32)
    dtype = torch.float32 if dtype == torch.float64 else dtype
    groups = {name: group for group in sharing_groups(model, spec.targets) for name in group.members}
    ready: dict[str, QuantizedTensor] = {}
    for name, parameter in model.named_parameters():
        group = groups.get(name)
        weights = "bf16" if group is None else spec.rollout_weights(group.site)
        if group is None or weights == "bf16":
            yield name, parameter.detach().to(dtype)
            continue
        module, leaf = group.members[name]
        if isinstance(module, QATModule) and (module.weights, module.mode) == (weights, spec.global_scale):
            if module.packed_versions.get(leaf) != parameter._version:
                raise RuntimeError(f"{name} changed after it was packed; call requantize(model) first")
            yield name, module.packed[leaf]
            continue
        if name not in ready:
            ready.update(pack_group(group, weights, spec.global_scale))
        yield name, ready.pop(name)
