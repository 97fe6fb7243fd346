"""From the plain model to the layers of either side, in place.

convert_learner(model, spec)          targeted layers become quantization-aware: the same Parameters and names
convert_rollout(model, spec, kernel)  targeted layers become rollout layers; their weights hold nothing yet
"""

import torch
from torch import nn

from quads.model.linear import Linear
from quads.model.moe import Experts
from quads.quant.backend import Kernel
from quads.quant.qat import QATExperts, QATLinear, QATModule
from quads.quant.recipes import QuantSpec
from quads.quant.rollout import RolloutExperts, RolloutLinear
from quads.quant.sites import is_targeted, layer_of


def convert_learner(model: nn.Module, spec: QuantSpec) -> None:
    """Replace the targeted layers by quantization-aware ones. Parameters stay the same objects under the same names, so
    an optimizer may exist already. Nothing to do where the learner is bf16 / bf16, or was converted before. With
    several processes: before `parallelize`, and `masters.attach` after it.
    """
    if (spec.learner_weights, spec.learner_activations) != ("bf16", "bf16"):
        _replace(model, spec, QATLinear, QATExperts)


@torch.no_grad()
def convert_rollout(model: nn.Module, spec: QuantSpec, kernel: Kernel = "reference") -> None:
    """Replace the targeted layers by rollout layers; their old weights are freed, the new ones hold zeros.

    kernel: as `backend.choose_kernel` decided. Nothing to do for a bf16 rollout.
    """
    if spec.rollout != "bf16":
        _replace(model, spec, *rollout_classes(kernel))


def rollout_classes(kernel: Kernel) -> tuple[type[RolloutLinear], type[RolloutExperts]]:
    """The layers that serve a kernel."""
    if kernel == "reference":
        return RolloutLinear, RolloutExperts
    from quads.quant.triton.layers import TritonExperts, TritonLinear  # Triton only where it is asked for

    return TritonLinear, TritonExperts


def _replace(
    model: nn.Module,
    spec: QuantSpec,
    linear_class: type[QATLinear] | type[RolloutLinear],
    experts_class: type[QATExperts] | type[RolloutExperts],
) -> None:
    plain = spec.unquantized_layers(model)
    for path, module in list(model.named_modules()):
        if isinstance(module, QATModule) or layer_of(path) in plain:
            continue
        if isinstance(module, Linear) and is_targeted(module.site, spec.targets):
            _put(model, path, linear_class(module, spec))
        elif isinstance(module, Experts) and "experts" in spec.targets:
            _put(model, path, experts_class(module, spec))


def _put(model: nn.Module, path: str, new: nn.Module) -> None:
    """Put `new` where the module at `path` is, in the same mode (train or eval)."""
    parent, _, name = path.rpartition(".")
    new.train(model.get_submodule(path).training)
    setattr(model.get_submodule(parent), name, new)
