"""What the layers of one model share: how each multiplies, what a load has brought, which rows are tokens.

The quantization config makes one for the model that vLLM builds with it (plugin.py); every layer holds it.

Shapes: T tokens of a forward, M the most tokens of any forward.
"""

# pyright: reportMissingImports=false
# vLLM is an extra.

import re
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config

from quads.errors import UserError
from quads.quant.backend import choose_kernel, describe_kernel
from quads.quant.matmul import SiteSpec
from quads.quant.recipes import QuantSpec
from quads.rollout.vllm.loading import LoadLedger, Member, Part
from quads.rollout.vllm.site import ReferenceSite, Site

LIVE_MULTIPLE = 1024  # a padded forward may exceed the scheduler's limit by a few rows
UNQUANTIZED = "not quantized"


class EngineState:
    """The state of one engine; it lives in the process that runs the model."""

    def __init__(self, spec: QuantSpec) -> None:
        """spec: as `options.read_options` gives it."""
        self.spec = spec
        self.ledger = LoadLedger()
        self._decisions: dict[str, str] = {}  # layer or parameter -> precision and kernel
        self._live_M: Tensor | None = None
        self._first_matmuls: WeakValueDictionary[str, Site] = WeakValueDictionary()  # of expert layers, by their name

    def leave(self, name: str) -> None:
        """Note for the banner that the layer `name` stays as it is."""
        self._decisions[name] = UNQUANTIZED

    def make_site(
        self, name: str, spec: SiteSpec, shape: tuple[int, ...], parts: dict[Member, Part], dtype: torch.dtype
    ) -> Site:
        """Storage and arithmetic of one matmul, on the kernel that serves its precision on this device."""
        device = torch.get_default_device()
        kernel = choose_kernel("auto", device, spec.precision, spec.format, spec.residual_scale)
        described = describe_kernel(kernel, spec.precision, spec.format, device, spec.operand)
        if kernel == "reference" and device.type == "cuda" and spec.precision != "bf16":
            raise UserError(
                f"quantization 'quads': no GPU kernel serves {spec.precision} in {spec.format} with "
                f"residual_scale = {spec.residual_scale:g}; use w4a16, w4a4 or "
                "w4a4_residual in nvfp4, or rollout.engine = 'native', whose reference path runs everything"
            )
        word = spec.precision if spec.format == "nvfp4" else f"{spec.precision} in {spec.format}"
        self._decisions[name] = f"{word}, {described}" if spec.precision != "bf16" else UNQUANTIZED
        if kernel == "reference":
            return ReferenceSite(name, spec, shape, parts, dtype)
        from quads.rollout.vllm.site_triton import TritonSite

        return TritonSite(name, spec, shape, parts, dtype)

    def start_ahead(self, experts: str, site: Site) -> None:
        """`site` is the first matmul of the layer `experts`: it is told its input when the router of the layer runs."""
        self._first_matmuls[experts] = site

    def router_runs(self, experts: str, x: Tensor) -> None:
        """x is the input of the router of the layer `experts`, and the experts' own."""
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
