"""Activations of a model on the fixed tokens: what enters the matrices, and what goes in and out of each mixture.

Shapes: T tokens of all forwards together, H hidden, K inputs of a matrix, L layers, A experts a token, R = T * A rows.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from quads.lab.subject import Sequences
from quads.model.attention import PackedContext, routing
from quads.model.model import DecoderLayer, MoEDecoder


@dataclass
class Captured:
    """By layer. `sites[site][l]`: "qkv", "o" and "w13" [T, K]; "w2" [R, I] (learners only), rows sorted by expert in
    each forward."""

    sites: dict[str, list[Tensor]] = field(default_factory=dict)
    moe_out: list[Tensor] = field(default_factory=list)  # [T, H]
    experts: Tensor = field(default_factory=lambda: torch.empty(0))  # int16 [T, L, A], as chosen

    @property
    def moe_in(self) -> list[Tensor]:
        """The input of a mixture, after the norm, is what its first matrices multiply."""
        return self.sites["w13"]


@torch.no_grad()
def capture(model: MoEDecoder, sequences: Sequences, batch_tokens: int, w2: bool = False) -> Captured:
    """Run the model on all sequences. `w2` needs a learner's model: rollout layers keep that input to themselves."""
    parts: dict[tuple[str, int], list[Tensor]] = {}
    handles: list[Any] = []
    wrapped: list[nn.Module] = []
    layers: list[DecoderLayer] = list(model.model.layers)  # type: ignore[arg-type]
    for index, layer in enumerate(layers):
        inputs = {"qkv": layer.self_attn.q_proj, "o": layer.self_attn.o_proj, "w13": layer.mlp.experts}
        for site, module in inputs.items():
            handles.append(module.register_forward_pre_hook(_keep_input(parts.setdefault((site, index), []))))
        handles.append(layer.mlp.register_forward_hook(_keep_output(parts.setdefault(("moe_out", index), []))))
        if w2:
            _watch_w2(layer.mlp.experts, parts.setdefault(("w2", index), []))
            wrapped.append(layer.mlp.experts)
    experts = []
    try:
        device = next(model.parameters()).device
        for tokens_T, lengths, _ in sequences.chunks(batch_tokens):
            context = PackedContext.build(lengths, device)
            context.record_routing = True
            model(tokens_T.to(device), context)
            experts.append(routing(context).cpu())
    finally:
        for handle in handles:
            handle.remove()
        for module in wrapped:
            del module.quantize_input  # type: ignore[operator]  # the method of the class shows again

    def joined(name: str) -> list[Tensor]:
        return [torch.cat(parts[name, index]) for index in range(len(layers))]

    sites = {site: joined(site) for site in ("qkv", "o", "w13", *(["w2"] if w2 else []))}
    return Captured(sites, joined("moe_out"), torch.cat(experts))


def _keep_input(store: list[Tensor]) -> Callable[[nn.Module, tuple[Any, ...]], None]:
    return lambda module, args: store.append(args[0].detach().cpu())


def _keep_output(store: list[Tensor]) -> Callable[[nn.Module, Any, Any], None]:
    return lambda module, args, output: store.append(output[0].detach().cpu())


def _watch_w2(experts: nn.Module, store: list[Tensor]) -> None:
    """Shadow the seam of this one module, so that it passes on what it sees."""
    original: Any = experts.quantize_input

    def watching(site: str, x: Tensor, live: Tensor | None = None) -> Tensor:
        if site == "w2":
            store.append(x.detach().cpu())
        return original(site, x, live)

    experts.quantize_input = watching  # type: ignore[assignment]
