"""What an update needs beside weights and optimizer state: the largest of its three peaks.

    the loss      all activations are there and the logits of a chunk of tokens come on top
    first layer   the backward pass has freed the other layers' activations, and left all gradients but the last ones
    optimizer     all gradients

Counts are numbers of elements in the dtype of the activations; an fp32 tensor beside bf16 counts twice. They list what
autograd saves; tests/unit/test_memory.py holds them against peaks measured on GPUs.

Symbols: H hidden, D heads * head_dim, G key-value heads * head_dim, A experts a token, I expert width, E experts.
"""

from dataclasses import dataclass

import torch

from quads.config.sections import ParallelSettings
from quads.model.config import ModelConfig
from quads.model.logprobs import LOGITS_CHUNK
from quads.quant.recipes import QuantSpec


@dataclass(frozen=True)
class Layer:
    """Elements for one token of one layer."""

    kept: int  # from the forward to the backward pass
    again: int  # computed again when the backward pass reaches the layer
    gradients: int  # of activations, at the same time, where they are largest: in the experts


def layer_activations(config: ModelConfig, checkpointing: str, compiled: bool) -> Layer:
    """What the backward pass of one layer needs for one token.

    Eager: each norm saves its fp32 input and the normed value, and its result is a matmul's input; likewise those of q
    and k. Compiled: a norm saves its input alone and is computed again, as is silu(gate).
    """
    c = config
    h, d, g = c.hidden_size, c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    if compiled:
        attention = 4 * h + 3 * d + 3 * g  # two norms' inputs and results; q and k before their norm; q, k, v, output
        experts = c.top_k * (2 * h + 3 * c.moe_intermediate_size) + 2 * c.num_experts  # x, y, gate and up, w2's input
    else:
        attention = 8 * h + 5 * d + 5 * g
        experts = c.top_k * (2 * h + 4 * c.moe_intermediate_size) + 2 * h + 2 * c.num_experts  # and the fp32 router
    products = 2 * h + 3 * d + c.top_k * (2 * h + 2 * c.moe_intermediate_size)
    everything = attention + experts
    kept = {"none": everything, "moe": attention + h, "selective": products, "full": h}[checkpointing]
    return Layer(
        kept, everything - kept if checkpointing != "none" else 0, c.top_k * (2 * h + 2 * c.moe_intermediate_size)
    )


def layer_parameters(config: ModelConfig) -> tuple[int, int]:
    """(experts, everything else) of one layer."""
    experts = config.num_experts * 3 * config.hidden_size * config.moe_intermediate_size
    norms = 2 * config.hidden_size + (2 * config.head_dim if config.qk_norm else 0)
    attention = config.hidden_size * config.head_dim * 2 * (config.num_heads + config.num_kv_heads)
    return experts, attention + norms + config.num_experts * config.hidden_size


def logits_bytes(config: ModelConfig, tokens: int, dtype: torch.dtype, device_type: str) -> float:
    """The loss's own memory at its peak: a chunk's logits and their gradient, and the head's gradient in fp32.

    On a GPU fused kernels turn fp32 logits into a gradient in the activation dtype. Plain torch holds three fp32
    tensors of that size at a time.
    """
    chunk = min(LOGITS_CHUNK, tokens)
    head = config.vocab_size * config.hidden_size
    fused = device_type == "cuda" and dtype != torch.float64
    return float(chunk * config.vocab_size * (4 + dtype.itemsize if fused else 12) + 4 * head)


def peak(
    config: ModelConfig,
    spec: QuantSpec,
    dtype: torch.dtype,
    parallel: ParallelSettings,
    num_processes: int,
    all_gather: str,
    tokens: int,
    local_parameters: float,
    accumulated: bool,
    device_type: str,
) -> dict[str, float]:
    """Bytes of gradients, weights in the compute dtype, activations and logits at the largest peak of an update.

    accumulated: earlier micro-batches of the update have left gradients of all weights.
    """
    experts, rest = layer_parameters(config)
    head = config.vocab_size * config.hidden_size
    embeddings = head * (1 if config.tie_embeddings else 2)
    sharded = num_processes > 1
    copied = not (dtype == torch.float32 and spec.learner_weights == "bf16")  # else the masters are multiplied
    # Matmuls keep their weight for the backward pass. Where that is not what FSDP gathers (and frees, and gathers
    # again) but a cast of the master or a decoded weight, every layer that is not computed again keeps its own.
    # Experts with one owner are not gathered: it casts or decodes them itself, and keeps them like a single process.
    owned = sharded and num_processes == parallel.ep
    freed = sharded and (spec.learner_weights == "bf16" or (all_gather == "packed" and spec.learner_weights == "nvfp4"))
    own_experts = experts // parallel.ep
    kept_rest, kept_experts = 0 if freed else rest, 0 if freed and not owned else own_experts
    kept = {"full": 0, "moe": kept_rest}.get(parallel.activation_checkpointing, kept_rest + kept_experts)
    kept_weights = config.num_layers * kept if copied else 0
    root = embeddings if sharded else head * copied
    shape = layer_activations(config, parallel.activation_checkpointing, parallel.compile)
    size, all_gradients = dtype.itemsize, 4.0 * local_parameters
    last = (experts + rest + head) / (num_processes // parallel.replicate)  # whose gradients come last
    at_loss = {
        "gradients": all_gradients if accumulated else 0.0,
        "weights in the compute dtype": float(size * (root + kept_weights)),
        "activations": float(tokens * size * config.num_layers * shape.kept),
        "logits": logits_bytes(config, tokens, dtype, device_type),
    }
    layer = own_experts + rest
    ahead = 0 if not sharded else rest if owned else layer  # FSDP has gathered the next layer's, too
    at_first_layer = {
        "gradients": all_gradients if accumulated else all_gradients - 4.0 * last,
        # one layer's weights and gradients; the latter before they are reduced (and in fp32)
        "weights in the compute dtype": float(size * (root + 2 * layer + ahead) + sharded * 4 * layer),
        "activations": float(tokens * size * (shape.kept + shape.again + shape.gradients)),
        "logits": 0.0,
    }
    at_optimizer = {name: 0.0 for name in at_loss} | {"gradients": all_gradients}
    return max(at_loss, at_first_layer, at_optimizer, key=lambda parts: sum(parts.values()))
