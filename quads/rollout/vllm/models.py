"""The model classes that vLLM runs for this project's two layouts: its own Qwen3-MoE, and one without qk-norm.

Registering the classes themselves also spares a start: vLLM imports a class that it knows by name alone in a process
of its own, to look at it, which takes ten seconds.
"""

# pyright: reportMissingImports=false
# vLLM is an extra.

from typing import Any

from torch import nn
from vllm.model_executor.models.qwen3_moe import Qwen3MoeForCausalLM
from vllm.model_executor.models.registry import ModelRegistry

from quads.model.config import HF_ARCHITECTURE


class QuadsMoeForCausalLM(Qwen3MoeForCausalLM):
    """Qwen3-MoE whose queries and keys are not normalized, as in models made from Llama-like ones."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        for layer in self.model.layers:
            layer.self_attn.q_norm = nn.Identity()
            layer.self_attn.k_norm = nn.Identity()


def register_models() -> None:
    """Make both classes known to vLLM in this process."""
    for has_qk_norm, model_class in ((True, Qwen3MoeForCausalLM), (False, QuadsMoeForCausalLM)):
        ModelRegistry.register_model(HF_ARCHITECTURE[has_qk_norm], model_class)
