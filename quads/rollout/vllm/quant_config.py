"""`QuadsConfig`: what vLLM asks when it builds a model with `quantization="quads"`, and what the layers of one engine
share.

vLLM makes one config an engine, so state that belongs to an engine lives here: the ledger of loads, the mask of rows
that are real tokens, and what was decided for each layer.

Shapes: T tokens of a forward, M the most tokens of any forward.
"""

# pyright: reportMissingImports=false
# vLLM is an extra.

import re
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from quads.errors import UserError
from quads.quant.backend import choose_kernel, describe_kernel
from quads.quant.linear import SiteSpec
from quads.rollout.vllm.experts import Experts
from quads.rollout.vllm.ledger import LoadLedger
from quads.rollout.vllm.linear import PackedLinear, PlainEmbedding, PlainLinear, Router
from quads.rollout.vllm.loading import Member, Part
from quads.rollout.vllm.options import LINEAR_SITES, METHOD, PluginOptions
from quads.rollout.vllm.site import ReferenceSite, Site

LIVE_MULTIPLE = 1024  # a padded forward may exceed the scheduler's limit by a few rows


class QuadsConfig(QuantizationConfig):
    """The quantization config of one engine."""

    def __init__(self, options: PluginOptions | None = None) -> None:
        super().__init__()
        self.options = options or PluginOptions()
        self.ledger = LoadLedger()
        self._decisions: dict[str, str] = {}  # layer or parameter -> precision and kernel
        self._live_M: Tensor | None = None
        self._first_matmuls: WeakValueDictionary[str, Any] = WeakValueDictionary()  # of expert layers, by their name

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
        return cls(PluginOptions.from_dict(config))

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
        if isinstance(layer, RoutedExperts):
            return Experts(self, layer.moe_config)
        if isinstance(layer, LinearBase):
            target, site = LINEAR_SITES.get(prefix.rpartition(".")[2], ("", ""))
            spec = self.options.site(target, site)
            if spec.precision != "bf16":
                return PackedLinear(self, spec)
        elif not isinstance(layer, VocabParallelEmbedding):
            return None
        self._decisions[prefix] = "not quantized"
        parent, _, name = prefix.rpartition(".")
        if name == "gate":
            return Router(self, f"{parent}.experts")
        return PlainLinear() if isinstance(layer, LinearBase) else PlainEmbedding()

    def make_site(
        self, name: str, spec: SiteSpec, shape: tuple[int, ...], parts: dict[Member, Part], dtype: torch.dtype
    ) -> Site:
        """Storage and arithmetic of one matmul, on the kernel that serves its precision on this device."""
        device = torch.get_default_device()
        kernel = choose_kernel("auto", device, spec.precision)
        described = describe_kernel(kernel, spec.precision, device)
        if kernel == "reference" and device.type == "cuda" and spec.precision != "bf16":
            raise UserError(
                f"quantization 'quads': no GPU kernel serves {spec.precision} in vLLM; use w4a16, w4a4 or "
                "w4a4_residual, or rollout.engine = 'native', whose reference path runs everything"
            )
        self._decisions[name] = f"{spec.precision}, {described}" if spec.precision != "bf16" else "not quantized"
        if kernel == "reference":
            return ReferenceSite(name, spec, shape, parts, dtype)
        from quads.rollout.vllm.site_triton import TritonSite

        return TritonSite(name, spec, shape, parts, dtype)

    def quantize_ahead(self, experts: str, site: Site) -> None:
        """When the router of the layer `experts` runs, `site`, its first matmul, may start on its input."""
        if hasattr(site, "start"):
            self._first_matmuls[experts] = site

    def start_experts(self, experts: str, x: Tensor) -> None:
        """Called with the input of the router of the layer `experts`."""
        if site := self._first_matmuls.get(experts):
            site.start(x, self.live_mask())

    def live_mask(self) -> Tensor:
        """bool [M] on the model's device: True for the rows of the current forward that are tokens, False for padding.

        A captured CUDA graph always runs the size it was captured at. The address never changes, so it reads the
        present mask.
        """
        if self._live_M is None:
            most = get_current_vllm_config().scheduler_config.max_num_batched_tokens
            self._live_M = torch.ones(-(-most // LIVE_MULTIPLE) * LIVE_MULTIPLE, dtype=torch.bool)
        return self._live_M

    def set_num_live(self, count: int) -> None:
        """Called before each step of `count` tokens; a step without any runs no forward."""
        if count and self._live_M is not None:
            self._live_M[:count] = True
            self._live_M[count:] = False

    def check_loaded(self, prefix: str) -> None:
        """After vLLM has loaded a checkpoint: the layer `prefix` must be complete. A dummy load brings nothing."""
        if get_current_vllm_config().load_config.load_format == "dummy":
            return
        if missing := self.ledger.missing(prefix):
            raise UserError(f"the checkpoint does not hold {', '.join(missing[:8])}")

    def banner(self) -> str:
        """A line for each kind of layer: how many there are, what they multiply and what serves it."""
        groups: dict[tuple[str, str], int] = {}
        for name, decision in self._decisions.items():
            kind = re.sub(r"\.\d+\.", ".*.", name.removesuffix(".weight")), decision
            groups[kind] = groups.get(kind, 0) + 1
        width = max((len(name) for name, _ in groups), default=0)
        lines = [f"  {name:{width}} x {count}: {decision}" for (name, decision), count in groups.items()]
        return "\n".join(["vLLM layers under quantization 'quads':", *lines])
