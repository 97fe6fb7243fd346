"""The time of one step's updates on one GPU: matrix products, attention, what memory bounds, the exchange of tokens
between experts' owners, and the optimizer.

Rates are of H200s, from one profile of a step (benchmarks/results/learner_h200x2_202611.md: 12 layers on two GPUs, one
part at a time): products at 650 TFLOP/s of the 789 that the hardware reaches, FlashAttention 2, NCCL inside a host, and
a share of the step in which the GPU waits. The network between hosts has not been had; its rate is an assumption.
tests/unit/test_plan_times.py holds the sum against seven other measurements.
"""

from dataclasses import dataclass

from quads.model.config import ModelConfig

MATMUL_FLOPS = 650e12
ATTENTION_FLOPS = 244e12  # useful ones, forward and backward together
REST_S = 0.58e-6 / (8 * 2048)  # a token of a layer, a channel of an expert's input: sorts, norms, router, copies, loss
HOST_BYTES_PER_S = 200e9  # token exchange inside a host, a GPU
NETWORK_BYTES_PER_S = 50e9  # between hosts, a GPU; assumed
READ_BYTES_PER_S = 4.43e12
TRANSFER_BYTES_PER_S = 50e9  # a GPU and its CPU, each way
ADAM_BYTES = 52  # read and written for a parameter: norm and clip of its gradient, then master, gradient, two moments
WAITING = 0.08  # of the rest: the GPU waits for the host or for another GPU


@dataclass(frozen=True)
class LearnShape:
    """What the updates of a step are on one GPU."""

    model: ModelConfig
    checkpointing: str
    ep: int
    gpus_per_host: int
    local_parameters: float
    updates: int
    moments: str = "float32"
    forwards: int = 0  # forward passes of a sequence beside the one of its update: old log-probs, the reference
    epochs: int = 1
    shards: int = 1  # processes over which FSDP shards the weights
    microbatches: int = 1
    gathered_bytes: float = 2.0  # of a weight, by all-gather: 0.5625 where 4-bit bytes travel


def exchange_seconds(shape: LearnShape, tokens: float) -> float:
    """Each token goes to its experts and comes back, forward and backward, once more where experts are recomputed.

    Inside a host and between hosts at once: the slower of the two counts.
    """
    m, ep = shape.model, shape.ep
    if ep == 1:
        return 0.0
    once = 2 * tokens * m.num_layers * m.top_k * m.hidden_size * 2.0  # there and back, bf16
    passes = shape.epochs * (3 if shape.checkpointing in ("full", "moe") else 2) + shape.forwards
    inside = min(ep, shape.gpus_per_host)
    return once * passes * max((inside - 1) / ep / HOST_BYTES_PER_S, (ep - inside) / ep / NETWORK_BYTES_PER_S)


def sharding_seconds(shape: LearnShape) -> float:
    """FSDP's gathers, in the forward and the backward pass, and its reduction of fp32 gradients, in each micro-batch.

    They run beside the computation; that they are counted in full makes this an upper bound.
    """
    p, layers = shape.model.parts(), shape.model.num_layers
    rest = layers * (p.attention + p.norms + p.router)
    experts = layers * shape.model.num_experts * p.expert / shape.ep
    owners = shape.shards / shape.ep  # of an expert
    weights = rest * (1 - 1 / shape.shards) + experts * (1 - 1 / owners)
    rate = NETWORK_BYTES_PER_S if shape.shards > shape.gpus_per_host else HOST_BYTES_PER_S
    return shape.epochs * shape.microbatches * weights * (2 * shape.gathered_bytes + 4) / rate


def learn_seconds(shape: LearnShape, lengths: list[int]) -> dict[str, float]:
    """Seconds by part. lengths: tokens of each sequence that this GPU trains on, prompts too."""
    m, tokens = shape.model, sum(lengths)
    p = m.parts()
    experts = m.num_layers * m.top_k * p.expert
    active = m.num_parameters()[1] - (0 if m.tie_embeddings else p.head)
    again = {"none": 0.0, "selective": 0.0, "moe": experts / active, "full": 1.0}[shape.checkpointing]
    forwards = shape.epochs * (1.0 + again) + shape.forwards
    matmul = 2.0 * active * tokens * (forwards + 2 * shape.epochs)
    pairs = m.num_layers * m.num_heads * m.head_dim * sum(length * length for length in lengths) / 2
    attention_passes = shape.epochs * (3 + (shape.checkpointing == "full")) + shape.forwards  # backward counts twice
    attention = 4 * pairs * attention_passes / ATTENTION_FLOPS
    recomputed = shape.checkpointing != "none"
    rest = REST_S * tokens * m.num_layers * m.top_k * m.hidden_size
    rest *= shape.epochs * (1 + recomputed / 3) + shape.forwards / 3
    adam = shape.updates * shape.local_parameters * ADAM_BYTES / READ_BYTES_PER_S
    if shape.moments == "cpu":
        adam += shape.updates * shape.local_parameters * 16 / TRANSFER_BYTES_PER_S  # both moments, there and back
    parts = {
        "matrix products": matmul / MATMUL_FLOPS,
        "attention": attention,
        "memory-bound rest": rest,
        "token exchange": exchange_seconds(shape, tokens),
        "gathers, reductions": sharding_seconds(shape),
        "optimizer": adam,
    }
    return {**parts, "waiting": WAITING * sum(parts.values())}
