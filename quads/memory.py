"""Memory of one process, estimated from shapes alone, so that a run that cannot fit stops before it allocates.

What FSDP shards is divided by the number of shards; what a layer gathers to run is counted for the two layers that
exist at the same time (one computes while the next arrives). Activations are those that the backward of one micro-batch
needs.
"""

from dataclasses import dataclass

import torch

from quads.config_sections import ParallelSettings, RLSettings, RolloutSettings
from quads.errors import UserError
from quads.model.config import ModelConfig
from quads.quant.recipes import QuantSpec

GIB = 2**30
NVFP4_BYTES = 0.5625  # 4 bits a weight and one E4M3 scale for 16
FP8_BYTES = 1.0 + 4 / (128 * 128)
MOMENT_BYTES = {"float32": 8.0, "8bit": 2.0 + 8 / 256, "cpu": 0.0}  # both moments of a parameter, on a GPU
LOGITS_CHUNK = 2048  # tokens
LOGITS_BYTES = 4 * 3  # fp32 logits, log-softmax and its gradient, for one chunk of tokens


@dataclass(frozen=True)
class MemoryEstimate:
    """GiB on one device, by what holds them."""

    parts: dict[str, float]

    @property
    def total(self) -> float:
        return sum(self.parts.values())


def targeted_parameters(config: ModelConfig, targets: tuple[str, ...]) -> int:
    """Parameters in quantized matrices."""
    attention = config.hidden_size * config.head_dim * 2 * (config.num_heads + config.num_kv_heads)
    experts = config.num_experts * 3 * config.hidden_size * config.moe_intermediate_size
    return config.num_layers * (("attention" in targets) * attention + ("experts" in targets) * experts)


def kv_cache_bytes(config: ModelConfig, slots: int, max_len: int, element_bytes: int) -> int:
    """Keys and values of every slot."""
    return 2 * config.num_layers * slots * max_len * config.num_kv_heads * config.head_dim * element_bytes


def layer_parameters(config: ModelConfig) -> tuple[int, int]:
    """(experts, everything else) of one layer."""
    experts = config.num_experts * 3 * config.hidden_size * config.moe_intermediate_size
    norms = 2 * config.hidden_size + (2 * config.head_dim if config.qk_norm else 0)
    attention = config.hidden_size * config.head_dim * 2 * (config.num_heads + config.num_kv_heads)
    return experts, attention + norms + config.num_experts * config.hidden_size


def activation_elements(config: ModelConfig, checkpointing: str) -> int:
    """Elements of the compute dtype that the backward of one token needs, all layers.

    A layer keeps about 12 hidden-wide tensors and 4 of all heads, and for each dispatched row the hidden input and
    output and 4 expert-wide tensors. What is computed again exists for one layer at a time.
    """
    c = config
    heads = c.num_heads * c.head_dim
    attention, experts = 12 * c.hidden_size + 4 * heads, c.top_k * (2 * c.hidden_size + 4 * c.moe_intermediate_size)
    kept_products = 2 * c.hidden_size + 3 * heads + c.top_k * (2 * c.hidden_size + 2 * c.moe_intermediate_size)
    kept, again = {
        "none": (attention + experts, 0),
        "moe": (attention + c.hidden_size, experts),
        "selective": (kept_products, attention + experts - kept_products),
        "full": (c.hidden_size, attention + experts),
    }[checkpointing]
    return c.num_layers * kept + again


def estimate_memory(
    config: ModelConfig,
    spec: QuantSpec,
    rollout: RolloutSettings,
    rl: RLSettings,
    dtype: torch.dtype,
    parallel: ParallelSettings | None = None,
    num_processes: int = 1,
    all_gather: str = "bf16",
    device_type: str = "cuda",
    moments: str = "float32",
    local_parameters: int | None = None,
) -> MemoryEstimate:
    """The learner (fp32 master, gradients, two Adam moments, its quantized weights), what a forward and backward
    need, the engine and its KV cache, for one of `num_processes` processes. On a CPU the engine keeps the values of
    quantized weights in float64 as well, and in fp32 runs its keys and values.

    moments: [optim] moments. local_parameters: how many this process holds; by default an equal share.
    """
    parallel = parallel or ParallelSettings()
    shards = num_processes // parallel.replicate
    total, targeted = config.num_parameters()[0], targeted_parameters(config, spec.targets)
    local = total / shards if local_parameters is None else local_parameters
    compute = dtype.itemsize
    per_weight = {"bf16": float(compute), "fp8": FP8_BYTES, "nvfp4": NVFP4_BYTES}
    engine_weight = (
        per_weight["nvfp4"] if spec.rollout.startswith("w4") else per_weight[spec.rollout.replace("w16a4", "bf16")]
    )
    cached = compute
    if device_type == "cpu":
        engine_weight += 8.0 * (spec.rollout != "bf16")
        cached = 8 if dtype == torch.float32 else compute
    learner_copy = 0.0 if spec.learner_weights == "bf16" else per_weight[spec.learner_weights]
    tokens = rl.microbatch_tokens
    slot_length = rollout.max_prompt_tokens + rollout.max_new_tokens
    sizes = {
        "master weights": 4.0 * local,
        "gradients": 4.0 * local,
        "Adam moments": (8.0 if device_type == "cpu" else MOMENT_BYTES[moments]) * local,
        "learner's quantized weights": learner_copy * targeted / shards,
        "weights in the compute dtype": float(
            compute * computed_weights(config, spec, dtype, parallel, num_processes, all_gather)
        ),
        "activations": float(tokens * compute * activation_elements(config, parallel.activation_checkpointing)),
        "logits": float(min(LOGITS_CHUNK, tokens) * config.vocab_size * LOGITS_BYTES),
        "engine weights": (engine_weight * targeted + compute * (total - targeted)) / rollout.tensor_parallel,
        "KV cache": float(kv_cache_bytes(config, rollout.max_batch, slot_length, cached)) / rollout.tensor_parallel,
    }
    if rollout.engine == "vllm" and rollout.gpu_memory_gib:
        sizes["KV cache"] = rollout.gpu_memory_gib * GIB
    if rl.kl_coef > 0:
        sizes["reference model"] = (4.0 * total + learner_copy * targeted) / shards
    return MemoryEstimate({name: size / GIB for name, size in sizes.items()})


def computed_weights(
    config: ModelConfig,
    spec: QuantSpec,
    dtype: torch.dtype,
    parallel: ParallelSettings,
    num_processes: int,
    all_gather: str,
) -> int:
    """Weights (numbers of them) that exist in the compute dtype at the peak.

    Sharded: two gathered layers and the root (embeddings and head, and their gradients). Matmuls keep their weight for
    the backward; where that is not what FSDP gathers or holds (a cast of the master, a decoded quantized weight) and
    layers are not computed again, it stays for every layer.
    """
    experts, rest = layer_parameters(config)
    layer = experts // parallel.ep + rest
    embeddings = config.vocab_size * config.hidden_size * (1 if config.tie_embeddings else 2)
    gathered_is_used = spec.learner_weights == "bf16" or (all_gather == "packed" and spec.learner_weights == "nvfp4")
    if num_processes > 1:
        kept = 0 if gathered_is_used else _kept_layers(config, parallel.activation_checkpointing, layer, rest)
        return 2 * layer + 2 * embeddings + kept
    if dtype == torch.float32 and spec.learner_weights == "bf16":
        return 0  # the master itself is multiplied
    return embeddings + _kept_layers(config, parallel.activation_checkpointing, layer, rest)


def _kept_layers(config: ModelConfig, checkpointing: str, layer: int, attention: int) -> int:
    if checkpointing == "full":
        return layer
    return layer + (config.num_layers - 1) * (attention if checkpointing == "moe" else layer)


def available_gib(device: torch.device) -> float:
    """Free memory of the GPU, or what Linux says a new process can have."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] / GIB
    with open("/proc/meminfo") as lines:
        fields = dict(line.split(":", 1) for line in lines)
    return int(fields["MemAvailable"].split()[0]) * 1024 / GIB


def format_estimate(estimate: MemoryEstimate) -> str:
    parts = ", ".join(f"{name} {gib:.2f}" for name, gib in estimate.parts.items())
    return f"memory estimate {estimate.total:.2f} GiB: {parts}"


def check_memory(estimate: MemoryEstimate, device: torch.device, processes_here: int = 1) -> None:
    """Raises UserError when the estimate is more than what is free, naming the largest parts and what shrinks them.

    `processes_here` share the memory of a CPU; a GPU belongs to one process.
    """
    free = available_gib(device) / (1 if device.type == "cuda" else processes_here)
    if estimate.total <= free:
        return
    largest = sorted(estimate.parts.items(), key=lambda item: -item[1])[:3]
    raise UserError(
        f"the run needs about {estimate.total:.1f} GiB on {device} but {free:.1f} GiB are free; largest: "
        + ", ".join(f"{name} {gib:.1f}" for name, gib in largest)
        + ". Lower rollout.max_batch or max_new_tokens (KV cache), rl.microbatch_tokens (activations), "
        "or use more processes (torchrun --nproc_per_node=N)"
    )
