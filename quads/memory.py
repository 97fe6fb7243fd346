"""Memory of one process, estimated from shapes alone, so that a run that cannot fit stops before it allocates.

What FSDP shards is divided by the number of shards. What comes and goes within an update is counted at the largest of
its peaks (memory_learner.py).
"""

from dataclasses import dataclass

import torch

from quads.config.sections import ParallelSettings, RLSettings, RolloutSettings
from quads.errors import UserError
from quads.memory_learner import peak
from quads.model.config import ModelConfig
from quads.quant.recipes import QuantSpec

GIB = 2**30
NVFP4_BYTES = 0.5625  # 4 bits a weight and one E4M3 scale for 16
FP8_BYTES = 1.0 + 4 / (128 * 128)
MOMENT_BYTES = {"float32": 8.0, "8bit": 2.0 + 8 / 256, "cpu": 0.0}  # both moments of a parameter, on a GPU


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
    accumulated: bool = True,
) -> MemoryEstimate:
    """The learner (fp32 master, gradients, two Adam moments, its quantized weights), what a forward and backward
    need, the engine and its KV cache, for one of `num_processes` processes. On a CPU the engine keeps the values of
    quantized weights in float64 as well, and in fp32 runs its keys and values.

    moments: [optim] moments. local_parameters: how many this process holds; by default an equal share. accumulated:
    False if one micro-batch makes an update, so that activations and gradients never peak together.
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
    slot_length = rollout.max_prompt_tokens + rollout.max_new_tokens
    sizes = {
        "master weights": 4.0 * local,
        "Adam moments": (8.0 if device_type == "cpu" else MOMENT_BYTES[moments]) * local,
        "learner's quantized weights": learner_copy * targeted / shards,
        **peak(
            config,
            spec,
            dtype,
            parallel,
            num_processes,
            all_gather,
            rl.microbatch_tokens,
            local,
            accumulated,
            device_type,
        ),
        "engine weights": (engine_weight * targeted + compute * (total - targeted)) / rollout.tensor_parallel,
        "KV cache": float(kv_cache_bytes(config, rollout.max_batch, slot_length, cached)) / rollout.tensor_parallel,
    }
    if rollout.engine == "vllm" and rollout.gpu_memory_gib:
        sizes["KV cache"] = rollout.gpu_memory_gib * GIB
    if rl.kl_coef > 0:
        sizes["reference model"] = (4.0 * total + learner_copy * targeted) / shards
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
