"""The two sides at any precision, evaluated on the same fixed tokens.

A learner is the packed forward with fake-quantized weights and/or activations. A rollout is the forward of the rollout
layers, with the packed weights that the learner would ship. Both give the log-prob of each response token; their
difference, learner minus rollout, is the per-token gap (paper, Eq. 2).

The rollout is evaluated in whole sequences, not token by token: what differs from decoding is the order of sums, and
the batch that shares one set of residual channels under "batch" and "block" selection (all tokens of one forward).

Shapes: N response tokens, T tokens of a forward, L layers, A experts a token.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from quads.lab.subject import Sequences, Subject, as_learner
from quads.model.attention import PackedContext, routing
from quads.model.logprobs import token_logprobs
from quads.model.model import DecoderLayer, MoEDecoder
from quads.quant.backend import choose_kernel
from quads.quant.masters import quantized_weights
from quads.quant.matmul import SiteSpec, product
from quads.quant.recipes import QuantSpec, four
from quads.quant.rollout import RolloutExperts, RolloutLinear, RolloutWeights, load_weight
from quads.rl.mismatch import percentile
from quads.rollout.native.engine import build_rollout_model

LEARNERS: dict[str, tuple[str, str]] = {  # name -> (weights, activations)
    "no QDQ": ("bf16", "bf16"),
    "weight QDQ": ("4", "bf16"),
    "activation QDQ": ("bf16", "4"),
    "both QDQ": ("4", "4"),
}


@dataclass
class Evaluation:
    """One side on the fixed tokens."""

    logprobs: Tensor  # float64 [N]
    experts: Tensor  # int16 [T, L, A], each token's expert ids in ascending order


def learner(subject: Subject, weights: str, activations: str) -> MoEDecoder:
    """The learner with these formats: names, or "4" for [quant] format."""
    weights, activations = four(weights, subject.spec.format), four(activations, subject.spec.format)
    spec = replace(subject.spec, learner_weights=weights, learner_activations=activations, rollout="bf16")
    return as_learner(subject.master, spec)


def rollout(subject: Subject, spec: QuantSpec, reuse: MoEDecoder | None = None) -> MoEDecoder:
    """The native engine's model for `spec.rollout`, loaded with what a learner of the same weight format ships.

    `reuse`: a model of an earlier call that is not needed any more. If it holds the same weights it is switched to the
    new precision in place, which saves quantizing them again.
    """
    if reuse is not None and _switch(reuse, spec):
        return reuse
    kernel = subject.cfg.rollout.kernel
    chosen = choose_kernel(kernel, subject.device, spec.rollout, spec.format, spec.residual_scale)
    # On a CPU the engine keeps float64 activations in fp32 runs; see rollout/native/engine.py.
    wide = subject.device.type == "cpu" and subject.dtype == torch.float32
    compute = torch.float64 if wide else subject.dtype
    model = build_rollout_model(subject.master.config, spec, chosen, subject.dtype, compute, subject.device)
    for name, tensor in quantized_weights(subject.master, spec):
        load_weight(model, name, tensor)
    return model


def _switch(model: MoEDecoder, spec: QuantSpec) -> bool:
    """Give the model's layers the precisions of `spec`, if all are reference layers whose weights stay as they are."""
    sites = [
        (module, name, site)
        for module in model.modules()
        if isinstance(module, RolloutWeights)
        for name, site in _site_specs(module)
    ]
    changes = [(module, name, getattr(module, name), SiteSpec.of(spec, site)) for module, name, site in sites]

    stored = next(model.parameters())

    def same_weights(old: SiteSpec, new: SiteSpec) -> bool:
        name = old.formats.weights
        same = name == new.formats.weights and (name == "bf16" or old.rule(name) == new.rule(name))
        return same and len({product(site, stored.dtype, stored.device) for site in (old, new)}) == 1

    layer: Any = model.model.layers[0]
    held = {"attention": layer.self_attn.q_proj, "experts": layer.mlp.experts}
    fits = all(isinstance(held[target], RolloutWeights) for target in spec.targets)
    fits = fits and all(type(module) in (RolloutLinear, RolloutExperts) for module, _, _ in sites)
    if not fits or not all(same_weights(old, new) for _, _, old, new in changes):
        return False
    for module, name, _, new in changes:
        setattr(module, name, new)
    return True


def _site_specs(module: RolloutWeights) -> list[tuple[str, str]]:
    """(attribute, site) of the precisions that a rollout layer holds."""
    if isinstance(module, RolloutExperts):
        return [("w13_spec", "w13"), ("w2_spec", "w2")]
    assert isinstance(module, RolloutLinear)
    return [("site_spec", module.site)]


@torch.no_grad()
def evaluate(model: MoEDecoder, sequences: Sequences, batch_tokens: int) -> Evaluation:
    """Log-probs of all response tokens and the expert choices of all tokens."""
    device = next(model.parameters()).device
    targets = sequences.targets.to(device)
    logprobs, experts, done = [], [], 0
    for tokens_T, lengths, response_T in sequences.chunks(batch_tokens):
        context = PackedContext.build(lengths, device)
        context.record_routing = True
        hidden_TH = model(tokens_T.to(device), context)[response_T.to(device)]
        count = hidden_TH.shape[0]
        values, _ = token_logprobs(
            hidden_TH, model.output_weight(), targets[done : done + count], sequences.temperature
        )
        logprobs.append(values.double().cpu())
        experts.append(routing(context).sort(dim=-1).values.cpu())
        done += count
    return Evaluation(torch.cat(logprobs), torch.cat(experts))


def gap_statistics(gap: Tensor) -> dict[str, float]:
    """mean, rms, p99 and max of |gap|, in nats."""
    size = gap.abs()
    return {
        "mean": float(size.mean()),
        "rms": float(size.square().mean().sqrt()),
        "p99": percentile(size, 0.99),
        "max": float(size.max()),
    }


def routing_flips(a: Evaluation, b: Evaluation) -> float:
    """Fraction of (token, layer) pairs whose set of experts differs."""
    return float((a.experts != b.experts).any(-1).double().mean())


@contextmanager
def engine_drift(model: MoEDecoder, size: float, seed: int = 0) -> Iterator[None]:
    """While open, every layer's output is disturbed: Gaussian noise of `size` times the row's root mean square.

    It stands for an engine whose kernels round in other places than the learner's. bf16 rounding itself is about
    2**-9 = 0.002 of a value.
    """
    handles = []
    if size:
        for index, layer in enumerate(model.model.layers):
            handles.append(layer.register_forward_hook(_disturb(size, seed * 1000 + index)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _disturb(size: float, seed: int) -> Callable[[nn.Module, object, Tensor], Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def hook(module: nn.Module, inputs: object, h_TH: Tensor) -> Tensor:
        assert isinstance(module, DecoderLayer)
        noise = torch.randn(h_TH.shape, generator=generator, dtype=torch.float32).to(h_TH.device, h_TH.dtype)
        return h_TH + size * h_TH.square().mean(-1, keepdim=True).sqrt() * noise

    return hook
