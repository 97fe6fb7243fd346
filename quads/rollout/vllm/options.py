"""What the vLLM quantization method `quads` can be told, and which layers of a vLLM model each option is about.

The options travel as the dictionary `quantization_config` of a Hugging Face config: in the checkpoint's config.json,
or through `LLM(..., hf_overrides={"quantization_config": {"quant_method": "quads", "precision": "w4a4", ...}})`.
Without one the defaults hold.
"""

from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

from quads.errors import UserError
from quads.quant.linear import SiteSpec
from quads.quant.nvfp4 import GlobalScaleMode
from quads.quant.residual import Selection
from quads.quant.sites import SITES

if TYPE_CHECKING:
    from quads.quant.recipes import QuantSpec

METHOD = "quads"
CHOICES = {
    "precision": ("bf16", "w4a16", "w16a4", "w4a4", "w4a4_residual"),
    "targets": ("experts", "attention", "mlp"),
    "residual_sites": ("w13", "w2", "qkv", "o"),
    "residual_selection": ("batch", "block", "token"),
    "global_scale": ("pow2", "amax"),
}

# The last part of a vLLM module name -> (target, site). Every other layer stays in the model's dtype.
# Routed experts are no linear layers there: one with the name of theirs is of a dense feed-forward layer.
LINEAR_SITES = {
    site.vllm_layer: (site.target if site.target == "attention" else "mlp", name) for name, site in SITES.items()
}


@dataclass(frozen=True)
class PluginOptions:
    """The options with their defaults; `mlp` are the feed-forward layers that are not routed: dense ones and shared
    experts.

    Example: `PluginOptions(precision="w4a16", targets=("experts",))`
    """

    precision: str = "w4a4_residual"
    targets: tuple[str, ...] = ("experts", "attention", "mlp")
    residual_sites: tuple[str, ...] = ("w13",)
    residual_ratio: float = 0.5
    residual_selection: Selection = "batch"
    global_scale: GlobalScaleMode = "pow2"

    def __post_init__(self) -> None:
        if self.precision == "fp8":
            raise UserError("quantization 'quads' has no fp8; vLLM has its own: quantization='fp8'")
        for key, allowed in CHOICES.items():
            value = getattr(self, key)
            for word in value if isinstance(value, tuple) else (value,):
                if word not in allowed:
                    raise UserError(f"quantization_config: {key} = {word!r} is not one of {', '.join(allowed)}")
        if not 0 <= self.residual_ratio <= 1:
            raise UserError(f"quantization_config: residual_ratio = {self.residual_ratio} must lie in [0, 1]")

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> "PluginOptions":
        """From a `quantization_config`. Raises UserError for an unknown key or value."""
        known = {field.name for field in fields(cls)}
        given = {key: value for key, value in raw.items() if key != "quant_method"}
        if unknown := sorted(given.keys() - known):
            raise UserError(f"quantization_config: unknown {', '.join(unknown)}; known: {', '.join(sorted(known))}")
        return cls(**{key: tuple(value) if isinstance(value, list) else value for key, value in given.items()})

    @classmethod
    def of(cls, spec: "QuantSpec") -> "PluginOptions":
        """The options that make vLLM's layers multiply as `spec` says a rollout does. Raises UserError for fp8."""
        if spec.rollout == "fp8":
            raise UserError(
                "engine = 'vllm' has no fp8 that matches the learner's; use rollout.engine = 'native' or another "
                "quant.rollout"
            )
        return cls(spec.rollout, spec.targets, spec.residual_sites, spec.ratio, spec.selection, spec.global_scale)

    def to_dict(self) -> dict[str, Any]:
        """The `quantization_config` that `from_dict` reads."""
        raw = {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()}
        return {"quant_method": METHOD, **raw}

    def site(self, target: str, site: str) -> SiteSpec:
        """What happens at one matrix input: precision "bf16" outside the targets, a residual only at residual_sites."""
        precision = self.precision if target in self.targets else "bf16"
        if precision == "w4a4_residual" and site not in self.residual_sites:
            precision = "w4a4"
        return SiteSpec(precision, self.residual_ratio, self.residual_selection, self.global_scale)
