"""Sizes that the vLLM engine gives vLLM, and what it refuses before vLLM would fail."""

# pyright: reportMissingImports=false
# vLLM is an extra.

import torch

from quads.config.sections import RolloutSettings
from quads.errors import UserError
from quads.memory import GIB
from quads.model.config import ModelConfig
from quads.quant.recipes import QuantSpec
from quads.rollout.vllm.options import PluginOptions


def kv_cache_bytes(config: ModelConfig, rollout: RolloutSettings, dtype: torch.dtype) -> int:
    """Bytes of KV cache: rollout.gpu_memory_gib, or room for max_batch sequences of full length."""
    if rollout.gpu_memory_gib > 0:
        return int(rollout.gpu_memory_gib * GIB)
    heads = max(config.num_kv_heads // rollout.tensor_parallel, 1)
    token = 2 * config.num_layers * heads * config.head_dim * dtype.itemsize
    longest = rollout.max_prompt_tokens + rollout.max_new_tokens
    block = 128  # the largest block size vLLM chooses by itself; each sequence may leave one unfinished
    return token * (rollout.max_batch * (-(-longest // block) + 1) + 1) * block


def graph_sizes(max_batch: int) -> list[int]:
    """Batch sizes to capture CUDA graphs for, up to max_batch; a decode step runs the next larger one, and its padding
    rows read no expert weights. vLLM's own list has three times as many, each captured at the start.
    """
    sizes = [1, 2, 4, 8, 16, *range(32, 256, 32), *range(256, max_batch + 256, 128)]
    return [*(size for size in sizes if size < max_batch), max_batch]


def check_settings(spec: QuantSpec, rollout: RolloutSettings, routed_experts: bool, device: torch.device) -> None:
    """Raises UserError for what a config asks of this engine and it cannot do. Needs no vLLM, and no memory."""
    PluginOptions.of(spec)  # refuses fp8
    if rollout.kernel != "auto":
        raise UserError(
            f"[rollout] kernel = {rollout.kernel!r} is of the native engine; leave it \"auto\" with engine = 'vllm', "
            "which takes the kernels that its banner names"
        )
    if routed_experts and device.type == "cpu":
        raise UserError(
            "vLLM returns routed experts only on a GPU; set rl.routing_replay and log.router_agreement to false, or "
            "rollout.engine = 'native'"
        )


def refuse_second_engine(device: torch.device) -> None:
    """vLLM's process groups are global to a process: closing one of two engines would break the other. On a GPU its
    sleeping memory is global too, and a closed engine has been seen to keep some of it (vLLM 0.26).
    """
    from vllm.distributed.parallel_state import model_parallel_is_initialized

    if model_parallel_is_initialized():
        raise RuntimeError("another vLLM engine lives in this process; close() it before making the next")
    if device.type == "cuda":
        from vllm.device_allocator.cumem import CuMemAllocator

        if CuMemAllocator.instance is not None and CuMemAllocator.instance.get_current_usage():
            raise RuntimeError(
                "vLLM still holds GPU memory of an engine that was closed in this process; make the next engine in a "
                "process of its own"
            )


def check_cpu_attention(head_dim: int) -> None:
    """vLLM's attention on a CPU is compiled for some head sizes; a missing one would fail in the first forward."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    sizes = CPUAttentionBackend.get_supported_head_sizes()
    if head_dim not in sizes:
        raise UserError(
            f"vLLM has no CPU attention for head_dim = {head_dim}; it has {', '.join(map(str, sizes))}. "
            "Use rollout.engine = 'native', or a GPU"
        )
