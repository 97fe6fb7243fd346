"""What the vLLM engine makes and checks before there is an engine: a folder to open, model classes, sizes, refusals.

Nothing here imports vLLM before it is called: a config is checked where vLLM is not installed.
"""

# pyright: reportMissingImports=false
# vLLM is an extra.

import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quads.config.sections import RolloutSettings
from quads.errors import UserError
from quads.memory import GIB
from quads.model.config import HF_ARCHITECTURE, HF_MODEL_TYPE, ModelConfig
from quads.quant.backend import kernels_of
from quads.quant.recipes import QuantSpec


def check_settings(spec: QuantSpec, rollout: RolloutSettings, routed_experts: bool, device: torch.device) -> None:
    """Raises UserError for what a config asks of this engine and it cannot do. Needs no vLLM, and no memory."""
    if spec.rollout == "fp8":
        raise UserError(
            "engine = 'vllm' has no fp8 that matches the learner's; use rollout.engine = 'native' or another "
            "quant.rollout"
        )
    served = kernels_of(spec.format, spec.residual_scale)
    if device.type == "cuda" and spec.rollout != "bf16" and spec.rollout not in served:
        what = f"{spec.rollout} in {spec.format}: on a GPU it has kernels for {', '.join(served) or 'nothing'}"
        raise UserError(f"engine = 'vllm' does not serve {what}; use rollout.engine = 'native', which runs everything")
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


def cache_root() -> Path:
    """Where the folders of `model_folder` lie: beside vLLM's compilation cache (VLLM_CACHE_ROOT)."""
    import vllm.envs as envs

    return Path(envs.VLLM_CACHE_ROOT) / "quads_models"


def model_folder(root: Path, config: ModelConfig, quantization: dict[str, Any]) -> Path:
    """A folder below `root` with nothing but config.json: all that vLLM needs with `load_format="dummy"`, where the
    weights come from the learner and not from disk.

    Its name follows from the model and from how it is quantized. vLLM's compilation cache counts the path of the model
    among what it depends on, so a path that changed with every start would compile the same model every time.

    A model without qk_norm keeps the architecture that `register_models` registers, under the model type whose config
    class transformers knows.
    """
    text = json.dumps(config.to_hf() | {"model_type": HF_MODEL_TYPE[True]}, indent=2, sort_keys=True)
    key = text + json.dumps(quantization, sort_keys=True)
    folder = root / hashlib.sha256(key.encode()).hexdigest()[:16]
    if not (folder / "config.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=folder, delete=False) as file:
            file.write(text)
        os.replace(file.name, folder / "config.json")  # another rank may write the same
    return folder


def register_models() -> None:
    """Make vLLM know the classes of this project's two layouts in this process: its own Qwen3-MoE, and one without
    qk-norm.

    Registering the classes themselves also spares a start: vLLM imports a class that it knows by name alone in a
    process of its own, to look at it, which takes ten seconds.
    """
    from vllm.model_executor.models.qwen3_moe import Qwen3MoeForCausalLM
    from vllm.model_executor.models.registry import ModelRegistry

    class QuadsMoeForCausalLM(Qwen3MoeForCausalLM):
        """Qwen3-MoE whose queries and keys are not normalized, as in models made from Llama-like ones."""

        def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
            super().__init__(vllm_config=vllm_config, prefix=prefix)
            for layer in self.model.layers:
                layer.self_attn.q_norm = nn.Identity()
                layer.self_attn.k_norm = nn.Identity()

    for has_qk_norm, model_class in ((True, Qwen3MoeForCausalLM), (False, QuadsMoeForCausalLM)):
        ModelRegistry.register_model(HF_ARCHITECTURE[has_qk_norm], model_class)


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
