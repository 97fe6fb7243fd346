"""The quantization method `quads` as vLLM sees it: `register`, and the config that vLLM asks about every layer.

vLLM finds `register` through the entry point `vllm.general_plugins`, in every process it starts; the engine of this
project calls it by itself, so it does not depend on how the package was installed.
"""

# pyright: reportMissingImports=false
# vLLM is an extra.

from typing import Any

import torch
from torch import nn
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS, register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from quads.errors import UserError
from quads.quant.recipes import QuantSpec
from quads.rollout.vllm import patches
from quads.rollout.vllm.experts import Experts
from quads.rollout.vllm.linear import PackedLinear, PlainEmbedding, PlainLinear, Router
from quads.rollout.vllm.options import LINEAR_SITES, METHOD, in_layer, read_options, site_spec
from quads.rollout.vllm.state import EngineState


def register() -> None:
    """Make `quantization="quads"` known to vLLM in this process. Any number of calls does the same as one."""
    if METHOD not in QUANTIZATION_METHODS:
        register_quantization_config(METHOD)(QuadsConfig)


class QuadsConfig(QuantizationConfig):
    """What a model is to be quantized like, and what its layers share.

    vLLM makes the config where the model is asked for and pickles it into the process that builds the model, if that
    is another one. Only `spec` travels: `state` begins in the process where it is first looked at.
    """

    def __init__(self, spec: QuantSpec | None = None) -> None:
        super().__init__()
        self.spec = read_options({}) if spec is None else spec
        self._state: EngineState | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_state": None}

    @property
    def state(self) -> EngineState:
        """What the layers of the one model that was built with this config share."""
        if self._state is None:
            patches.call_before_forward(_count_live_rows)
            self._state = EngineState(self.spec)
        return self._state

    def banner(self) -> str:
        """A line for each kind of layer: how many there are, what they multiply and what serves it."""
        return self.state.banner()

    def get_name(self) -> str:
        return METHOD

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        return 80

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []  # without a quantization_config in config.json the defaults hold

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "QuadsConfig":
        return cls(read_options(config))

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: dict[str, Any], user_quant: str | None, hf_config: Any = None
    ) -> None:
        """Asked about every checkpoint that is quantized already; without an objection vLLM would replace `quads`."""
        packed_by = hf_quant_cfg.get("quant_method")
        if user_quant == METHOD and packed_by != METHOD:
            raise UserError(
                f"the checkpoint is packed by {packed_by!r}: serve it without quantization='quads', or give 'quads' "
                "the bf16 checkpoint"
            )

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """vLLM's question for each layer. Attention gets None; a linear layer may not."""
        config = get_current_vllm_config().model_config.hf_text_config
        here = in_layer(self.spec, prefix, config.num_hidden_layers)
        if isinstance(layer, RoutedExperts):
            return Experts(self.state, layer.moe_config, here)
        if isinstance(layer, LinearBase):
            target, site = LINEAR_SITES.get(prefix.rpartition(".")[2], ("", ""))
            spec = site_spec(here, target, site)
            if spec.precision != "bf16":
                return PackedLinear(self.state, spec)
        elif not isinstance(layer, VocabParallelEmbedding):
            return None
        self.state.leave(prefix)
        parent, _, name = prefix.rpartition(".")
        if name == "gate":
            return Router(self.state, f"{parent}.experts")
        return PlainLinear() if isinstance(layer, LinearBase) else PlainEmbedding()


def _count_live_rows(vllm_config: Any, num_tokens: int) -> None:
    """Before each forward: a graph replay pads the batch with rows of garbage, which channel selection leaves out."""
    config = vllm_config.quant_config
    if isinstance(config, QuadsConfig):
        with torch.inference_mode():
            config.state.set_num_live(num_tokens)
