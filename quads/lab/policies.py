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

import torch
from torch import Tensor, nn

from quads.lab.subject import Sequences, Subject, as_learner
from quads.model.attention import PackedContext, routing
from quads.model.logprobs import token_logprobs
from quads.model.model import DecoderLayer, MoEDecoder
from quads.quant.backend import choose_kernel
from quads.quant.learner import quantized_weights
from quads.quant.recipes import QuantSpec
from quads.quant.rollout import load_weight
from quads.rl.mismatch import percentile
from quads.rollout.native import build_model

LEARNERS: dict[str, tuple[str, str]] = {  # name -> (weights, activations)
    "no QDQ": ("bf16", "bf16"),
    "weight QDQ": ("nvfp4", "bf16"),
    "activation QDQ": ("bf16", "nvfp4"),
    "both QDQ": ("nvfp4", "nvfp4"),
}


@dataclass
class Evaluation:
    """One side on the fixed tokens."""

    logprobs: Tensor  # float64 [N]
    experts: Tensor  # int16 [T, L, A], each token's expert ids in ascending order


def learner(subject: Subject, weights: str, activations: str) -> MoEDecoder:
    """The learner with these formats: bf16, fp8 or nvfp4."""
    spec = replace(subject.spec, learner_weights=weights, learner_activations=activations, rollout="bf16")
    return as_learner(subject.master, spec)


def rollout(subject: Subject, spec: QuantSpec) -> MoEDecoder:
    """The native engine's model for `spec.rollout`, loaded with what a learner of the same weight format ships."""
    chosen = choose_kernel(subject.cfg.rollout.kernel, subject.device, spec.rollout)
    # On a CPU the engine keeps float64 activations in fp32 runs; see rollout/native.py.
    wide = subject.device.type == "cpu" and subject.dtype == torch.float32
    compute = torch.float64 if wide else subject.dtype
    model = build_model(subject.master.config, spec, chosen, subject.dtype, compute, subject.device)
    for name, tensor in quantized_weights(subject.master, spec):
        load_weight(model, name, tensor)
    return model


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
