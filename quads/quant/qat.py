"""The learner's layers: they multiply the quantized values of their weights while the optimizer sees fp32 masters.

A layer keeps the packed form of each weight in `packed`, which masters.py fills after every update. A forward before
the first `requantize` is an error. A layer whose weights are not quantized (only its activations are) multiplies its
master's cast to the compute dtype. With several processes the layers are the same: FSDP puts the gathered weight where
the master was, and the packed form knows what was gathered (packed.py).

The backward pass multiplies what the forward pass multiplied: the straight-through pair inside one product. With
[quant] backward = "high_precision" it multiplies the cast of the master and the input before it was quantized; the
forward value is the same, and each product is computed twice.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quads.model.linear import Linear
from quads.model.moe import Experts, ExpertSite, expert_matmul, local_experts, matmul_mode
from quads.quant import fake_quant
from quads.quant.packed import PackedShard, PackedWeight
from quads.quant.recipes import QuantSpec


class QATLinear(Linear):
    """A `Linear` that multiplies the quantized value of its weight, and quantizes its input if the spec says so."""

    def __init__(self, source: Linear, spec: QuantSpec) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.site = source.in_features, source.out_features, source.site
        self.weight = source.weight
        self.weights, self.activations, self.rules = _formats(spec)
        self.high_precision = spec.backward == "high_precision"
        self.packed: dict[str, PackedWeight | PackedShard] = {}  # by parameter

    def forward(self, x_TK: Tensor, live_T: Tensor | None = None) -> Tensor:
        if not self.high_precision:
            return super().forward(x_TK, live_T)
        weights = self.weight.to(x_TK.dtype), self.effective_weight(x_TK.dtype)
        return _product(F.linear, x_TK, self.quantize_input(x_TK), *weights)

    def effective_weight(self, dtype: torch.dtype) -> Tensor:
        return _effective(self, "weight", self.weight, dtype)

    def quantize_input(self, x_TK: Tensor, live_T: Tensor | None = None) -> Tensor:
        return _quantize_input(self, x_TK)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, weights={self.weights}, activations={self.activations}"


class QATExperts(Experts):
    """`Experts` that multiply the quantized values of their weights; one global scale for each expert and matrix."""

    def __init__(self, source: Experts, spec: QuantSpec) -> None:
        nn.Module.__init__(self)
        self.num_experts, self.dispatcher = source.num_experts, source.dispatcher
        self.gate_up_proj, self.down_proj = source.gate_up_proj, source.down_proj
        self.weights, self.activations, self.rules = _formats(spec)
        self.high_precision = spec.backward == "high_precision"
        self.packed: dict[str, PackedWeight | PackedShard] = {}  # by parameter

    def compute(
        self, x_RH: Tensor, w13_E2IH: Tensor, w2_EHI: Tensor, offsets_E: Tensor, live_R: Tensor | None = None
    ) -> Tensor:
        if not self.high_precision:
            return super().compute(x_RH, w13_E2IH, w2_EHI, offsets_E, live_R)

        def product(x: Tensor, w: Tensor) -> Tensor:
            return expert_matmul(x, w, offsets_E, matmul_mode(x, w))

        master13, master2 = (local_experts(p).to(x_RH.dtype) for p in (self.gate_up_proj, self.down_proj))
        gate_RI, up_RI = _product(product, x_RH, _quantize_input(self, x_RH), master13, w13_E2IH).chunk(2, dim=-1)
        h_RI = F.silu(gate_RI) * up_RI
        return _product(product, h_RI, _quantize_input(self, h_RI), master2, w2_EHI)

    def effective_weights(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return (
            _effective(self, "gate_up_proj", local_experts(self.gate_up_proj), dtype),
            _effective(self, "down_proj", local_experts(self.down_proj), dtype),
        )

    def quantize_input(self, site: ExpertSite, x: Tensor, live: Tensor | None = None) -> Tensor:
        # Rows are quantized one by one, so `compute` may do it after the dispatch, where it has both.
        return x if self.high_precision else _quantize_input(self, x)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, weights={self.weights}, activations={self.activations}"


QATModule = QATLinear | QATExperts


def _formats(spec: QuantSpec) -> tuple[str, str, dict[str, str]]:
    """(format of the weights, of the activations, the scale rule of each)."""
    formats = spec.learner_weights, spec.learner_activations
    return *formats, {name: spec.rule(name) for name in formats if name != "bf16"}


def _effective(module: QATModule, leaf: str, master: Tensor, dtype: torch.dtype) -> Tensor:
    if module.weights == "bf16":
        return master.to(dtype)
    if leaf not in module.packed:
        raise RuntimeError("a quantized layer ran before its weights were packed; call requantize(model) first")
    return module.packed[leaf].value(master, dtype)


def _quantize_input(module: QATModule, x: Tensor) -> Tensor:
    name = module.activations
    return x if name == "bf16" else fake_quant.fake_quantize_rows(x, name, module.rules[name])


def _product(
    multiply: Callable[[Tensor, Tensor], Tensor], x: Tensor, x_quantized: Tensor, w: Tensor, w_quantized: Tensor
) -> Tensor:
    """The product of the quantized operands, with the gradients of the product of the others."""
    with torch.no_grad():
        value = multiply(x_quantized, w_quantized)
    return fake_quant.straight_through(multiply(x, w), value)
