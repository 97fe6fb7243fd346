"""Expert layers of vLLM under `quads`: two sites, w13 (gate rows, then up rows) and w2, of all experts of a layer.

vLLM routes and hands over tokens, expert ids and gates; `apply` returns the weighted sum. Checkpoints name experts
one by one (`experts.3.gate_proj.weight`) or hold all of them in one tensor (`experts.gate_up_proj` [E, 2I, H]); the
second form is what a sync ships, and it is loaded in one go.

Shapes: E experts, I expert width on this rank, H hidden, T tokens, A experts a token.
"""

# pyright: reportMissingImports=false
# vLLM is an extra.

from collections.abc import Iterable, Iterator
from dataclasses import replace
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase

from quads.errors import UserError
from quads.quant.recipes import QuantSpec
from quads.quant.sites import EXPERT_SITES, SITES
from quads.rollout.vllm.loading import Part
from quads.rollout.vllm.options import site_spec
from quads.rollout.vllm.patches import load_experts_with
from quads.rollout.vllm.state import EngineState

SITE_OF_MEMBER = {member: site for site in EXPERT_SITES.values() for member in SITES[site].vllm_members}


class Experts(FusedMoEMethodBase):
    """The quantization method of an expert layer, at any precision."""

    def __init__(self, state: EngineState, moe: Any, spec: QuantSpec) -> None:
        """spec: of this layer."""
        super().__init__(moe)
        self.state, self.spec = state, spec

    def create_weights(
        self,
        layer: nn.Module,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra: Any,
    ) -> None:
        _refuse_unsupported(layer)
        width, rank = intermediate_size_per_partition, self.moe.moe_parallel_config.tp_rank
        rows = Part(rank * width, 0, width, hidden_size)
        geometry = {
            "w13": (2 * width, hidden_size, {"w1": rows, "w3": rows}),
            "w2": (hidden_size, width, {"w2": Part(0, rank * width, hidden_size, width)}),
        }
        layer.quads_sites = {}
        for site_name, (num_rows, num_columns, parts) in geometry.items():
            name, shape = f"{layer.layer_name}.{site_name}_weight", (num_experts, num_rows, num_columns)
            spec = site_spec(self.spec, "experts", site_name)
            site = self.state.make_site(name, spec, shape, parts, params_dtype)
            for suffix, param in site.parameters().items():
                layer.register_parameter(f"{site_name}_weight{suffix}", param)
            for suffix, buffer in site.buffers().items():
                layer.register_buffer(f"{site_name}_weight{suffix}", buffer, persistent=False)
            getattr(layer, f"{site_name}_weight").weight_loader = MethodType(_load_expert, layer)
            layer.quads_sites[site_name] = site
            self.state.ledger.expect(name, ((shard, e) for e in range(num_experts) for shard in parts))
        self.state.start_ahead(layer.layer_name, layer.quads_sites["w13"])
        layer.register_buffer("quads_live", self.state.live_mask(), persistent=False)
        load_experts_with(layer, _load_weights)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        self.state.check_loaded(layer.layer_name)

    def get_fused_moe_quant_config(self, layer: nn.Module) -> None:
        return None

    def apply(
        self,
        layer: nn.Module,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_experts: Any = None,
        shared_experts_input: Tensor | None = None,
    ) -> Tensor:
        """x [T, H], gates fp32 [T, A], expert ids [T, A] -> [T, H]."""
        w13, w2 = layer.quads_sites["w13"], layer.quads_sites["w2"]
        return w13.experts(w2, x, topk_ids, topk_weights, layer.quads_live)


def _load_expert(
    layer: nn.Module,
    param: nn.Parameter,
    loaded_weight: Tensor,
    weight_name: str,
    shard_id: str,
    expert_id: int,
    return_success: bool = False,
) -> bool:
    """The weight loader, in the form vLLM's expert layers call it: one matrix of one expert."""
    site = layer.quads_sites[SITE_OF_MEMBER[shard_id]]
    layer.quant_method.state.ledger.record(site.name, ((shard_id, expert_id),), loaded_weight)
    site.loader.add(shard_id, loaded_weight, expert_id)
    return True


def _load_weights(layer: nn.Module, weights: Iterable[tuple[str, Tensor]]) -> Iterator[str]:
    """Takes tensors that hold all experts in one go; leaves those of one expert to vLLM, which knows their names."""
    ledger = layer.quant_method.state.ledger
    for name, tensor in weights:
        site_name = EXPERT_SITES.get(name.removesuffix(".weight"))
        if site_name is None or tensor.dim() != 3:
            loaded = list(type(layer).load_weights(layer, [(name, tensor)]))
            if loaded:
                ledger.found(tensor)
            yield from loaded
            continue
        site = layer.quads_sites[site_name]
        ledger.record(site.name, ((shard, e) for e in range(tensor.shape[0]) for shard in site.parts), tensor)
        height = tensor.shape[1] // len(site.parts)
        parts = [replace(part, row=part.row + i * height) for i, part in enumerate(site.parts.values())]
        site.loader.add_fused(tensor, parts)
        yield f"{site_name}_weight"


def _refuse_unsupported(layer: nn.Module) -> None:
    activation = getattr(layer.activation, "value", layer.activation)
    problems = {
        "expert parallelism": layer.use_ep,
        f"activation {activation}": activation != "silu",
        "gates applied to the input": layer.apply_router_weight_on_input,
        "experts without a gate": not layer.moe_config.is_act_and_mul,
    }
    for problem, there in problems.items():
        if there:
            raise UserError(f"{layer.layer_name}: quantization 'quads' does not compute {problem}")
