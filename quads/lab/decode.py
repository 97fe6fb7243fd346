"""A rollout model driven over fixed responses as an engine drives it: prompts prefilled, then one token at a time.

All sequences decode in step, so a forward holds the t-th response token of every response that has one: the batch that
shares residual channels in a real rollout whose responses started together. `policies.evaluate` runs the same model
over whole sequences instead, which is faster.

Shapes: N response tokens, T tokens, S sequences, B of them still decoding, L layers, A experts a token.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from quads.lab.policies import Evaluation
from quads.lab.subject import Sequences
from quads.model.attention import DecodeContext, PrefillContext, routing
from quads.model.logprobs import token_logprobs
from quads.model.model import MoEDecoder
from quads.rollout.native.kv_cache import allocate


@dataclass
class Steps:
    """Where a forward's rows belong. `places[i]`: row i among the T packed tokens of all sequences."""

    places: Tensor  # int64
    hidden: Tensor  # [rows, H], after the final norm
    experts: Tensor  # int16 [rows, L, A]


@torch.no_grad()
def decode(model: MoEDecoder, sequences: Sequences) -> Evaluation:
    """Log-probs of all response tokens and expert choices of all tokens, in the order of `policies.evaluate`."""
    num_tokens = sequences.num_tokens
    # A response token's log-prob comes from the row before it; its place among the N is the rank of that row.
    predicting = torch.cat([rows for _, _, rows in sequences.chunks(num_tokens)])
    rank = predicting.long().cumsum(0) - 1
    config = model.config
    logprobs = torch.empty(int(predicting.sum()), dtype=torch.float64)
    experts = torch.empty(num_tokens, config.num_layers, config.top_k, dtype=torch.int16)
    for steps in _forwards(model, sequences, sequences.starts):
        experts[steps.places] = steps.experts.sort(dim=-1).values
        rows = predicting[steps.places]
        at = rank[steps.places[rows]]
        values, _ = token_logprobs(
            steps.hidden[rows.to(steps.hidden.device)],
            model.output_weight(),
            sequences.targets[at].to(steps.hidden.device),
            sequences.temperature,
        )
        logprobs[at] = values.double().cpu()
    return Evaluation(logprobs, experts)


@torch.no_grad()
def decoded_inputs(model: MoEDecoder, sequences: Sequences, layer: int) -> Tensor:
    """What enters the mixture of one layer, [T, H], in the order of the packed tokens."""
    kept: list[Tensor] = []
    experts = model.model.layers[layer].mlp.experts  # type: ignore[union-attr]
    handle = experts.register_forward_pre_hook(lambda module, args: kept.append(args[0].detach().cpu()))  # type: ignore[union-attr]
    try:
        places = [steps.places for steps in _forwards(model, sequences, sequences.starts)]
    finally:
        handle.remove()
    return torch.cat(kept)[torch.cat(places).argsort()]


def _forwards(model: MoEDecoder, sequences: Sequences, starts: list[int]) -> Iterator[Steps]:
    """The prefill of all prompts, then one decoding step after the other."""
    device = next(model.parameters()).device
    order = sorted(range(len(starts)), key=lambda i: -len(sequences.responses[i]))  # who lives longest has slot 0
    prompts, responses = [sequences.prompts[i] for i in order], [sequences.responses[i] for i in order]
    first = torch.tensor([starts[i] for i in order])
    lengths = [len(prompt) for prompt in prompts]
    longest = max(len(p) + len(r) for p, r in zip(prompts, responses, strict=True))
    cache = allocate(model.config, len(order), longest, model.dtype, device)
    slots = list(range(len(order)))
    context = PrefillContext.build_for_slots(lengths, slots, slots, cache)
    context.record_routing = True
    hidden = model(torch.tensor([token for prompt in prompts for token in prompt], device=device), context)
    places = torch.cat([torch.arange(length) + start for length, start in zip(lengths, first.tolist(), strict=True)])
    yield Steps(places, hidden, routing(context).cpu())
    for t in range(len(responses[0]) - 1):
        alive = sum(len(response) > t + 1 for response in responses)
        positions = torch.tensor(lengths[:alive]) + t
        step = DecodeContext(cache, positions.to(device), window=int(positions.max()) + 1)
        step.record_routing = True
        tokens = torch.tensor([response[t] for response in responses[:alive]], device=device)
        hidden = model(tokens, step)
        yield Steps(first[:alive] + positions, hidden, routing(step).cpu())
