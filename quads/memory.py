"""Memory of a run on one device, estimated from shapes alone, so that a run that cannot fit stops before it allocates."""

from dataclasses import dataclass

import torch

from quads.config_sections import RLSettings, RolloutSettings
from quads.errors import UserError
from quads.model.config import ModelConfig
from quads.quant.recipes import QuantSpec

GIB = 2**30
NVFP4_BYTES = 0.5625  # 4 bits a weight and one E4M3 scale for 16
FP8_BYTES = 1.0 + 4 / (128 * 128)
LOGITS_BYTES = 4 * 3  # fp32 logits, log-softmax and its gradient, for one chunk of tokens


@dataclass(frozen=True)
class MemoryEstimate:
    """GiB on the device, by what holds them. Weights of the learner are counted whole (one process)."""

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


def estimate_memory(
    config: ModelConfig, spec: QuantSpec, rollout: RolloutSettings, rl: RLSettings, dtype: torch.dtype
) -> MemoryEstimate:
    """Learner (fp32 master, gradients, two Adam moments, its quantized weights), activations, engine and KV cache."""
    total, targeted = config.num_parameters()[0], targeted_parameters(config, spec.targets)
    compute = dtype.itemsize
    per_weight = {"bf16": float(compute), "fp8": FP8_BYTES, "nvfp4": NVFP4_BYTES}
    engine_weight = (
        per_weight["nvfp4"] if spec.rollout.startswith("w4") else per_weight[spec.rollout.replace("w16a4", "bf16")]
    )
    learner_copy = 0.0 if spec.learner_weights == "bf16" else per_weight[spec.learner_weights]
    c = config
    # Saved for the backward of one layer: about 12 hidden-wide tensors, the attention heads, and the dispatched rows
    # (top_k copies of the hidden input and output, three expert-wide intermediates).
    token_floats = 12 * c.hidden_size + 4 * c.num_heads * c.head_dim
    token_floats += c.top_k * (2 * c.hidden_size + 4 * c.moe_intermediate_size)
    activations = rl.microbatch_tokens * c.num_layers * token_floats * compute
    logits = min(2048, rl.microbatch_tokens) * c.vocab_size * LOGITS_BYTES
    slot_length = rollout.max_prompt_tokens + rollout.max_new_tokens
    sizes = {
        "master weights": 4.0 * total,
        "gradients": 4.0 * total,
        "Adam moments": 8.0 * total,
        "learner's quantized weights": learner_copy * targeted,
        "activations": float(activations),
        "logits": float(logits),
        "engine weights": engine_weight * targeted + compute * (total - targeted),
        "KV cache": float(kv_cache_bytes(config, rollout.max_batch, slot_length, compute)),
    }
    return MemoryEstimate({name: size / GIB for name, size in sizes.items()})


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


def check_memory(estimate: MemoryEstimate, device: torch.device) -> None:
    """Raises UserError when the estimate is more than what is free, naming the largest parts and what shrinks them."""
    free = available_gib(device)
    if estimate.total <= free:
        return
    largest = sorted(estimate.parts.items(), key=lambda item: -item[1])[:3]
    raise UserError(
        f"the run needs about {estimate.total:.1f} GiB on {device} but {free:.1f} GiB are free; largest: "
        + ", ".join(f"{name} {gib:.1f}" for name, gib in largest)
        + ". Lower rollout.max_batch or max_new_tokens (KV cache), rl.microbatch_tokens (activations), "
        "or use more processes (torchrun --nproc_per_node=N)"
    )
