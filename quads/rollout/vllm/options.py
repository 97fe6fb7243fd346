"""What the vLLM quantization method `quads` can be told: the part of [quant] that a rollout needs, in vLLM's form.

The options travel as the dictionary `quantization_config` of a Hugging Face config: in the checkpoint's config.json,
or through `LLM(..., hf_overrides={"quantization_config": {"quant_method": "quads", "precision": "w4a4", ...}})`.
Without one the defaults hold: W4A4 in every linear layer that vLLM has a site for, with the residual of every channel.
Of what recipe `quads` can be this has the smallest gap (docs/evidence) and costs least on a GPU (benchmarks/results),
and no answer depends on who else is in the batch.

Inside they are a `QuantSpec`, checked as the [quant] section is checked. Its `targets` know one word more here: `mlp`
are the feed-forward layers that are not routed, dense ones and shared experts, whose inputs are the sites w13 and w2.
"""

from dataclasses import replace
from typing import Any

from quads.config.sections import QuantSettings
from quads.config.values import check_table
from quads.errors import UserError
from quads.quant.matmul import SiteSpec
from quads.quant.recipes import RECIPES, QuantSpec, resolve
from quads.quant.sites import SITES, TARGETS, bf16_layers, layer_of

METHOD = "quads"
MLP = "mlp"

# The key in a quantization_config -> the key of [quant] that says the same.
KEYS = {
    "precision": "rollout",
    "targets": "targets",
    "residual_sites": "residual_sites",
    "residual_ratio": "residual_ratio",
    "residual_selection": "residual_selection",
    "residual_operand": "residual_operand",
    "global_scale": "global_scale",
    "format": "format",
    "scale_rule": "scale_rule",
    "bf16_layers": "bf16_layers",
    "residual_scale": "residual_scale",
}

# The last part of a vLLM module name -> (target, site). Every other layer stays in the model's dtype.
# Routed experts are no linear layers there: one with the name of theirs is of a dense feed-forward layer.
LINEAR_SITES = {
    site.vllm_layer: (site.target if site.target == "attention" else MLP, name) for name, site in SITES.items()
}


def read_options(raw: dict[str, Any]) -> QuantSpec:
    """The spec that a `quantization_config` asks for; only its rollout half means anything. {}: the defaults.

    Raises UserError for an unknown key or value, and for fp8, which is vLLM's own.
    """
    given = {key: value for key, value in raw.items() if key != "quant_method"}
    if unknown := sorted(given.keys() - KEYS.keys()):
        raise UserError(f"quantization_config: unknown {', '.join(unknown)}; known: {', '.join(sorted(KEYS))}")
    table: dict[str, Any] = {"rollout": RECIPES["quads"].rollout, "targets": [*TARGETS, MLP]}
    table |= {KEYS[key]: value for key, value in given.items()}
    if "residual_ratio" in given and "residual_selection" not in given:
        raise UserError(
            "quantization_config: residual_ratio chooses among channels, and all of them are the default; give "
            "residual_selection as well"
        )
    table.setdefault("residual_selection", "all")
    targets = table["targets"]
    for key in ("targets", "residual_sites"):
        if KEYS[key] in table and not table[KEYS[key]]:
            raise UserError(f"quantization_config: {key} is empty; name some, or leave quantization='quads' away")
    if isinstance(targets, list | tuple):  # to [quant], dense layers are what experts are
        table["targets"] = list(dict.fromkeys("experts" if target == MLP else target for target in targets))
        table.setdefault("residual_sites", [name for name, site in SITES.items() if site.target in table["targets"]])
    try:
        spec = resolve(check_table(QuantSettings, "[quant]", {"recipe": "bf16", **table}))
    except UserError as error:
        reason = str(error).replace("[quant] rollout", "precision").replace("[quant] ", "")
        raise UserError(f"quantization_config: {reason}") from None
    if spec.rollout == "fp8":
        raise UserError("quantization 'quads' has no fp8; vLLM has its own: quantization='fp8'")
    return replace(spec, targets=tuple(targets))


def write_options(spec: QuantSpec) -> dict[str, Any]:
    """The `quantization_config` that makes vLLM's layers multiply as `spec` says a rollout does; JSON holds it."""
    return {
        "quant_method": METHOD,
        "precision": spec.rollout,
        "targets": list(spec.targets),
        "residual_sites": list(spec.residual_sites),
        "residual_ratio": spec.ratio,
        "residual_selection": spec.selection,
        "residual_operand": spec.operand,
        "global_scale": spec.global_scale,
        "format": spec.format,
        "scale_rule": spec.scale_rule,
        "bf16_layers": spec.bf16_layers,
        "residual_scale": spec.residual_scale,
    }


def in_layer(spec: QuantSpec, prefix: str, num_layers: int) -> QuantSpec:
    """The spec for the vLLM module at `prefix`, such as model.layers.3.mlp.experts: no targets in a layer that stays
    unquantized. UserError: bf16_layers does not fit the model."""
    plain = layer_of(prefix) in bf16_layers(spec.bf16_layers, num_layers)
    return replace(spec, targets=()) if plain else spec


def site_spec(spec: QuantSpec, target: str, site: str) -> SiteSpec:
    """What happens at one matrix input of a layer of `target` ("experts", "attention", "mlp"; "" is none of them)."""
    if target == MLP:
        spec = replace(spec, targets=("experts",) if MLP in spec.targets else ())
    return SiteSpec.of(spec, site)
