"""Rollout layers on the Triton kernels: the same names and loads as rollout.py, another storage and matmul.

A kernel keeps its weights in a layout of its own, a fixed permutation of the shipped bytes, so `stored` gives back
exactly what was loaded. Activations are bf16. Quantization, dispatch and both matmuls of the experts happen inside
the kernels.

Shapes: T tokens, A experts a token, K input features, H hidden.
"""

import torch
from torch import Tensor

from quads.errors import UserError
from quads.model.moe import Experts
from quads.quant.matmul import SiteSpec
from quads.quant.recipes import QuantSpec
from quads.quant.rollout import RolloutExperts, RolloutLinear, RolloutWeights
from quads.quant.tensor import QuantizedTensor
from quads.quant.triton import ops


class TritonWeights(RolloutWeights):
    """Weights in the layout of the kernels."""

    def store(self, leaf: str, like: Tensor, site: SiteSpec) -> None:
        if like.dtype != torch.bfloat16:
            raise UserError(
                f'the triton kernels compute in bf16, not {like.dtype}; set model.dtype = "bfloat16", '
                'or rollout.kernel = "reference"'
            )
        path, _ = ops.choose(like.device, site.precision, site.path)
        swiglu = leaf == "gate_up_proj"
        weight = ops.KernelWeight(like.shape, path=path, swiglu=swiglu, device=like.device)
        self.kernel_weights = {**getattr(self, "kernel_weights", {}), leaf: weight}
        self.rule = site.rule("nvfp4")

    def load(self, leaf: str, tensor: Tensor) -> None:
        weight = self.kernel_weights[leaf]
        ours = isinstance(tensor, QuantizedTensor) and tensor.format == "nvfp4"
        if not ours or tensor.shape != weight.shape:
            raise ValueError(f"{leaf} is NVFP4 of shape {list(weight.shape)}, got {tensor!r}")
        device = weight.g.device
        weight.load_(*(part.to(device) for part in (tensor.packed, tensor.block_scale, tensor.global_scale)))

    def stored(self, leaf: str) -> Tensor:
        weight = self.kernel_weights[leaf]
        packed, block_scale, g = weight.to_packed()
        g = g.view(-1, 1, 1) if len(weight.shape) == 3 else g.view(())
        return QuantizedTensor(packed, block_scale, "nvfp4", self.rule, weight.k, torch.bfloat16, g)

    def storage(self, leaf: str) -> list[Tensor]:
        weight = self.kernel_weights[leaf]
        return [weight.words, weight.scales, weight.g]


class TritonLinear(TritonWeights, RolloutLinear):
    """A `RolloutLinear` whose matmul, with the quantization of its input, is one call."""

    def forward(self, x_TK: Tensor, live_T: Tensor | None = None) -> Tensor:
        spec = self.site_spec
        weight = self.kernel_weights["weight"]
        return ops.linear(
            x_TK,
            weight,
            spec.precision,  # pyright: ignore[reportArgumentType]  # `choose_kernel` let none but its own pass
            ratio=spec.ratio,
            selection=spec.selection,
            fold=ops.folds(spec.operand, weight.path),
            live_T=live_T,
        )


class TritonExperts(TritonWeights, RolloutExperts):
    """`RolloutExperts` in one call, dispatch included."""

    def __init__(self, source: Experts, spec: QuantSpec) -> None:
        super().__init__(source, spec)
        self.spec = spec

    def forward(self, x_TH: Tensor, ids_TA: Tensor, gates_TA: Tensor, live_T: Tensor | None = None) -> Tensor:
        spec = self.spec
        w13, w2 = self.kernel_weights["gate_up_proj"], self.kernel_weights["down_proj"]
        return ops.moe(
            x_TH,
            w13,
            w2,
            ids_TA,
            gates_TA,
            spec.rollout,  # pyright: ignore[reportArgumentType]
            residual_sites=spec.residual_sites,
            ratio=spec.ratio,
            selection=spec.selection,
            fold=ops.folds(spec.operand, w13.path),
            live_T=live_T,
        )
