"""The rollout's side: layers that hold packed weights and multiply at the precision of their site.

    load_weight(model, name, tensor)      writes one tensor of `quantized_weights` into the storage that is there
    named_weights(model)                  everything that was loaded, by the same names: what a checksum runs over

Storage is allocated once and written in place: addresses never change, so captured CUDA graphs stay valid, and
nothing is quantized here. The layers have the names of the parameters they replace: `...q_proj.weight`,
`...experts.gate_up_proj`.

Each layer also keeps the values of its quantized weights in the dtype of the product (see matmul.py), written by the
same load: decoding them for each token would take longer than the matmul. Layers of a kernel (triton/layers.py) do not.

Shapes: T tokens, A experts a token, R = T * A dispatched rows, H hidden, I expert width, E experts.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quads.model.linear import Linear
from quads.model.moe import Experts
from quads.quant.matmul import SiteSpec, allocate, grouped_linear, linear, product, quantize_activation, widen
from quads.quant.recipes import QuantSpec
from quads.quant.tensor import QuantizedTensor


class RolloutWeights(nn.Module):
    """Weights by name, written in place. A kernel with a layout of its own overrides `store`, `load`, `stored`."""

    leaves: tuple[str, ...]

    def store(self, leaf: str, like: Tensor, site: SiteSpec) -> None:
        """Allocate the storage of `leaf`, for a weight shaped like `like`; called once, at construction."""
        self.products = {**getattr(self, "products", {}), leaf: product(site, like.dtype, like.device)}
        self.register_buffer(leaf, allocate(like.shape, site, like.dtype, like.device))
        self.register_buffer(f"{leaf}_wide", None, persistent=False)

    def load(self, leaf: str, tensor: Tensor) -> None:
        """Write a tensor of the same kind and shape into the storage. Raises ValueError if it is of another."""
        stored = getattr(self, leaf)
        if stored.shape != tensor.shape:
            raise ValueError(f"{leaf} has shape {list(stored.shape)}, got {list(tensor.shape)}")
        stored.copy_(tensor)
        if isinstance(stored, QuantizedTensor) or stored.device.type == "cpu":
            kept, values = getattr(self, f"{leaf}_wide"), widen(stored, *self.products[leaf])
            if kept is None:
                setattr(self, f"{leaf}_wide", values)
            else:
                kept.copy_(values)  # in place: captured graphs read it

    def wide(self, leaf: str) -> Tensor:
        """The values that the reference path multiplies."""
        kept = getattr(self, f"{leaf}_wide")
        return widen(getattr(self, leaf), *self.products[leaf]) if kept is None else kept

    def stored(self, leaf: str) -> Tensor:
        """The weight as it was loaded: a QuantizedTensor or a plain tensor."""
        return getattr(self, leaf)

    def storage(self, leaf: str) -> list[Tensor]:
        """The plain tensors that hold it; `load` writes into them and they never move."""
        stored = getattr(self, leaf)
        return list(stored.parts.values()) if isinstance(stored, QuantizedTensor) else [stored]


class RolloutLinear(RolloutWeights, Linear):
    """A `Linear` of the rollout; `weight` is packed storage, not a Parameter."""

    leaves = ("weight",)

    def __init__(self, source: Linear, spec: QuantSpec) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.site = source.in_features, source.out_features, source.site
        self.site_spec = SiteSpec.of(spec, source.site)
        self.store("weight", source.weight, self.site_spec)

    def forward(self, x_TK: Tensor, live_T: Tensor | None = None) -> Tensor:
        return linear(quantize_activation(x_TK, self.site_spec, live_T), self.wide("weight"), x_TK.dtype)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.site_spec.precision}"


class RolloutExperts(RolloutWeights, Experts):
    """`Experts` of the rollout. "w13" quantizes the tokens before dispatch, each once, with one selection of channels
    for all of them; "w2" quantizes the dispatched rows."""

    leaves = ("gate_up_proj", "down_proj")

    def __init__(self, source: Experts, spec: QuantSpec) -> None:
        nn.Module.__init__(self)
        self.num_experts, self.dispatcher = source.num_experts, source.dispatcher
        self.w13_spec, self.w2_spec = SiteSpec.of(spec, "w13"), SiteSpec.of(spec, "w2")
        for leaf, site_spec in zip(self.leaves, (self.w13_spec, self.w2_spec), strict=True):
            self.store(leaf, getattr(source, leaf), site_spec)

    def forward(self, x_TH: Tensor, ids_TA: Tensor, gates_TA: Tensor, live_T: Tensor | None = None) -> Tensor:
        operands = quantize_activation(x_TH, self.w13_spec, live_T)
        # The operands of a token travel side by side, so that there is one dispatch.
        rows_R, grouping = self.dispatcher.dispatch(torch.cat(operands, dim=-1), ids_TA, self.num_experts)
        live_R = self.dispatcher.live_rows(live_T, grouping, ids_TA.shape[1])
        rows = rows_R.chunk(len(operands), dim=-1)
        gate_up_R2I = grouped_linear(rows, self.wide("gate_up_proj"), grouping.offsets_E, x_TH.dtype)
        gate_RI, up_RI = gate_up_R2I.chunk(2, dim=-1)
        h_RI = F.silu(gate_RI) * up_RI
        operands = quantize_activation(h_RI, self.w2_spec, live_R)
        y_RH = grouped_linear(operands, self.wide("down_proj"), grouping.offsets_E, x_TH.dtype)
        return self.dispatcher.combine(y_RH, gates_TA, grouping)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, w13={self.w13_spec.precision}, w2={self.w2_spec.precision}"


@torch.no_grad()
def load_weight(model: nn.Module, name: str, tensor: Tensor) -> None:
    """Write `tensor` in place into the weight called `name`. Raises KeyError for a name that the model does not have,
    ValueError for another shape or kind; plain tensors are cast to the dtype that is stored."""
    path, _, leaf = name.rpartition(".")
    try:
        module = model.get_submodule(path)
        if isinstance(module, RolloutWeights) and leaf in module.leaves:
            module.load(leaf, tensor)
            return
        stored = module.get_parameter(leaf)
    except AttributeError:
        raise KeyError(f"the rollout model has no weight {name}") from None
    if stored.shape != tensor.shape:
        raise ValueError(f"{name} has shape {list(stored.shape)}, got {list(tensor.shape)}")
    stored.copy_(tensor)


def weight_storage(model: nn.Module) -> Iterator[tuple[str, list[Tensor]]]:
    """(name, the plain tensors that hold it) of every weight, in model order."""
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        if isinstance(module, RolloutWeights):
            for leaf in module.leaves:
                yield prefix + leaf, module.storage(leaf)
        for leaf, parameter in module.named_parameters(recurse=False):
            yield prefix + leaf, [parameter.detach()]


def named_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(name, stored tensor) of every weight, in model order: the names of `quantized_weights`."""
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        if isinstance(module, RolloutWeights):
            for leaf in module.leaves:
                yield prefix + leaf, module.stored(leaf)
        for leaf, parameter in module.named_parameters(recurse=False):
            yield prefix + leaf, parameter.detach()
