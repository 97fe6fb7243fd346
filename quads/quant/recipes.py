"""From the [quant] section to the precision of every layer group on both sides.

    recipe      learner weights / activations   rollout          what it is
    bf16        bf16  / bf16                    bf16             the baseline
    fp8         fp8   / fp8                     fp8              FP8 RL: W8A8
    naive       bf16  / bf16                    w4a4             what collapses
    qat         4     / bf16                    w4a4             the training side alone
    symmetric   4     / 4                       w4a4             the ablation that makes it worse
    quads       4     / bf16                    w4a4_residual    both sides
    resq        4     / 4                       w4a4_residual    symmetric, and half of the residual in the rollout
    4bitter     4     / 4                       w4a4             symmetric, routed experts of most layers alone
    qarl        4     / bf16                    w4a16            the learner's own forward in the rollout
    qerl        4     / bf16                    w4a16            the same, with noise on the rollout's norms

Sources and what was measured: docs/recipes.md. "4" is the 4-bit format of [quant] format, NVFP4 by default. "bf16"
stands for "not quantized": the compute dtype, bf16 or fp32. Explicit keys override the recipe.
"""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from quads.config.sections import QuantSettings
from quads.errors import UserError
from quads.quant.formats import FORMATS, FOUR_BITS, find_rule
from quads.quant.residual import OPERANDS, SELECTIONS, OperandWord, Selection
from quads.quant.sites import SITES, TARGETS, bf16_layers, is_targeted, read_bf16_layers

AllGather = Literal["auto", "bf16", "packed"]


class Precision(NamedTuple):
    """What a rollout multiplies: formats of weights and activations ("bf16": not quantized), and whether the error of
    the activations is quantized as well and subtracted."""

    weights: str
    activations: str
    residual: bool = False


PRECISIONS = {  # the words of [quant] rollout; "4" stands for [quant] format
    "bf16": Precision("bf16", "bf16"),
    "fp8": Precision("fp8", "fp8"),
    "w4a16": Precision("4", "bf16"),
    "w4a8": Precision("4", "fp8"),  # activations in E4M3 with a scale for each row and 128 channels (fp8.py)
    "w16a4": Precision("bf16", "4"),
    "w4a4": Precision("4", "4"),
    "w4a4_residual": Precision("4", "4", residual=True),
}


@dataclass(frozen=True)
class Recipe:
    """What a word of [quant] recipe sets, each unless the key of that name says otherwise."""

    learner_weights: str
    learner_activations: str
    rollout: str
    targets: tuple[str, ...] = TARGETS
    bf16_layers: str = "none"
    residual_sites: tuple[str, ...] = ("w13",)
    residual_selection: Selection = "batch"
    four_over_six: str = "none"  # where the format is NVFP4
    norm_noise: float = 0.0


RECIPES = {
    "bf16": Recipe("bf16", "bf16", "bf16"),
    "fp8": Recipe("fp8", "fp8", "fp8"),
    "naive": Recipe("bf16", "bf16", "w4a4"),
    "qat": Recipe("4", "bf16", "w4a4"),
    "symmetric": Recipe("4", "4", "w4a4"),
    "quads": Recipe("4", "bf16", "w4a4_residual"),
    # Rollout-ResQ (2607.26515): every linear layer, two of each four neighbouring channels by magnitude.
    "resq": Recipe("4", "4", "w4a4_residual", residual_sites=tuple(SITES), residual_selection="2:4"),
    # Both-sides NVFP4 of Miles, NeMo-RL and prime-rl: routed experts, four over six, the last layers in bf16.
    "4bitter": Recipe("4", "4", "w4a4", targets=("experts",), bf16_layers="last 15%", four_over_six="mse"),
    # QaRL (2604.07853): the learner multiplies what the W4A16 rollout multiplies. Its loss is rl.surrogate = "tbpo".
    "qarl": Recipe("4", "bf16", "w4a16"),
    # QeRL (2510.11696): noise explores. There the 4-bit weights are frozen and LoRA learns; here all weights learn.
    "qerl": Recipe("4", "bf16", "w4a16", norm_noise=0.01),
}


def precision(word: str, format: str) -> Precision:
    """What a word of `PRECISIONS` says where "4" is `format`. UserError for another word."""
    _check("rollout", (word,), tuple(PRECISIONS))
    weights, activations, residual = PRECISIONS[word]
    return Precision(four(weights, format), four(activations, format), residual)


def four(word: str, format: str) -> str:
    """`format` for "4", any other word as it is."""
    return format if word == "4" else word


@dataclass(frozen=True)
class QuantSpec:
    """The [quant] section with every default filled in.

    Example: `QuantSpec("nvfp4", "bf16", "w4a4_residual")` is the recipe `quads`.
    """

    learner_weights: str  # "bf16" or a name of `FORMATS`
    learner_activations: str
    rollout: str  # a word of `PRECISIONS`
    targets: tuple[str, ...] = TARGETS
    residual_sites: tuple[str, ...] = ("w13",)
    ratio: float = 0.5
    selection: Selection = "batch"
    global_scale: str = "pow2"
    format: str = "nvfp4"
    scale_rule: str = ""
    operand: OperandWord = "auto"
    bf16_layers: str = "none"  # as `sites.bf16_layers` reads it
    backward: str = "quantized"
    residual_scale: float = 1.0
    norm_noise: float = 0.0  # rollout/noise.py
    norm_noise_end: float = 1e-4
    norm_noise_stages: int = 10

    def gathers(self, asked: AllGather) -> Literal["bf16", "packed"]:
        """What FSDP gathers if [quant] all_gather = `asked`, given equal shards (see packed.py)."""
        format = FORMATS.get(self.learner_weights)
        can = format is not None and format.block_bytes is not None and self.backward == "quantized"
        return asked if asked != "auto" else "packed" if can else "bf16"

    def unquantized_layers(self, model: Any) -> frozenset[int]:
        """The numbers of the layers of a decoder (with a `config`) that stay unquantized. UserError: bf16_layers does
        not fit it."""
        return frozenset() if self.bf16_layers == "none" else bf16_layers(self.bf16_layers, model.config.num_layers)

    def rollout_precision(self, site: str) -> str:
        """The word for one site in the rollout: "bf16" outside the targets, no residual outside residual_sites."""
        if not is_targeted(site, self.targets):
            return "bf16"
        if self.rollout == "w4a4_residual" and site not in self.residual_sites:
            return "w4a4"
        return self.rollout

    def rollout_weights(self, site: str) -> str:
        """The format in which the weights of a site are shipped and stored, or "bf16"."""
        return precision(self.rollout_precision(site), self.format).weights

    def rule(self, name: str) -> str:
        """The scale rule of a format. UserError for a rule that it does not have."""
        return find_rule(name, self.global_scale, self.scale_rule if name == self.format else "")

    def formats(self) -> tuple[str, ...]:
        """The formats in use on either side, in the order of `FORMATS`."""
        rollout = precision(self.rollout, self.format)
        used = {self.learner_weights, self.learner_activations, rollout.weights, rollout.activations}
        return tuple(name for name in FORMATS if name in used)


def resolve(quant: QuantSettings) -> QuantSpec:
    """Fill in what the recipe decides. Raises UserError for values that do not exist or contradict each other."""
    if quant.recipe not in RECIPES:
        raise UserError(f"[quant] recipe = {quant.recipe!r} does not exist; use one of {', '.join(RECIPES)}")
    recipe = RECIPES[quant.recipe]
    format, scale_rule = _with_four_over_six(quant, recipe)
    selection = quant.residual_selection or recipe.residual_selection
    spec = QuantSpec(
        learner_weights=quant.learner_weights or four(recipe.learner_weights, format),
        learner_activations=quant.learner_activations or four(recipe.learner_activations, format),
        rollout=quant.rollout or recipe.rollout,
        targets=tuple(quant.targets) or recipe.targets,
        residual_sites=tuple(quant.residual_sites) or recipe.residual_sites,
        ratio=1.0 if selection == "all" else quant.residual_ratio,
        selection=selection,
        global_scale=quant.global_scale,
        format=format,
        scale_rule=scale_rule,
        operand=quant.residual_operand,
        bf16_layers=quant.bf16_layers or recipe.bf16_layers,
        backward=quant.backward,
        residual_scale=quant.residual_scale,
        norm_noise=recipe.norm_noise if quant.norm_noise == -1.0 else quant.norm_noise,
        norm_noise_end=quant.norm_noise_end,
        norm_noise_stages=quant.norm_noise_stages,
    )
    read_bf16_layers(spec.bf16_layers)
    _check("format", (spec.format,), FOUR_BITS)
    _check("learner_weights", (spec.learner_weights,), ("bf16", *FORMATS))
    _check("learner_activations", (spec.learner_activations,), ("bf16", *FORMATS))
    _check("rollout", (spec.rollout,), tuple(PRECISIONS))
    _check("targets", spec.targets, TARGETS)
    _check("residual_sites", spec.residual_sites, tuple(SITES))
    _check("residual_selection", (spec.selection,), SELECTIONS)
    _check("residual_operand", (spec.operand,), OPERANDS)
    _check("global_scale", (spec.global_scale,), ("pow2", "amax"))
    find_rule(spec.format, spec.global_scale, spec.scale_rule)
    if spec.norm_noise < 0:
        raise UserError(f"[quant] norm_noise = {quant.norm_noise} is negative; -1 alone means the recipe's")
    if not 0 < spec.residual_scale <= 1:
        raise UserError(f"[quant] residual_scale = {spec.residual_scale} is outside (0, 1]; 1 subtracts all of it")
    if not 0 <= spec.ratio <= 1:
        raise UserError(f"[quant] residual_ratio = {spec.ratio} is outside [0, 1]; it is a fraction of the channels")
    if spec.operand == "folded" and spec.rollout == "w4a4_residual" and FORMATS[spec.format].row_scale is None:
        raise UserError(
            f'[quant] residual_operand = "folded" needs a scale of each row, which {spec.format} has not; use "two"'
        )
    if spec.selection == "2:4" and spec.ratio != 0.5:
        raise UserError(
            f'[quant] residual_selection = "2:4" keeps half of the channels; residual_ratio = {spec.ratio} must be 0.5'
        )
    _check_global_scale(spec)
    _check_targets(spec)
    return spec


def _with_four_over_six(quant: QuantSettings, recipe: Recipe) -> tuple[str, str]:
    """(format, scale rule) with [quant] four_over_six, which is a format of its own in `FORMATS`: NVFP4's bytes under
    other rules, which no kernel quantizes activations by."""
    if not quant.four_over_six and quant.format == "nvfp4" and not quant.scale_rule and recipe.four_over_six != "none":
        return "nvfp4_46", recipe.four_over_six
    if quant.four_over_six in ("", "none"):
        return quant.format, quant.scale_rule
    if quant.format not in ("nvfp4", "nvfp4_46") or quant.scale_rule not in ("", quant.four_over_six):
        raise UserError(
            f"[quant] four_over_six = {quant.four_over_six!r} is a rule of nvfp4; with format = {quant.format!r} and "
            f'scale_rule = {quant.scale_rule!r} leave it "none"'
        )
    return "nvfp4_46", quant.four_over_six


def _check_global_scale(spec: QuantSpec) -> None:
    """global_scale = "amax" where no format in use has such a scale would be without effect."""
    used = spec.formats()
    if spec.global_scale == "amax" and used and not any(FORMATS[name].has_global_choice for name in used):
        raise UserError(
            f"[quant] global_scale = 'amax' is of formats with a shared scale, which {', '.join(used)} has not; "
            'leave it "pow2", or choose among its own rules with scale_rule'
        )


def _check_targets(spec: QuantSpec) -> None:
    if spec.backward == "high_precision" and (spec.learner_weights, spec.learner_activations) == ("bf16", "bf16"):
        raise UserError(
            '[quant] backward = "high_precision" has no effect: this learner quantizes nothing; leave it "quantized"'
        )
    if spec.rollout == "w4a4_residual":
        outside = [site for site in spec.residual_sites if not is_targeted(site, spec.targets)]
        if outside:
            raise UserError(
                f"[quant] residual_sites has {', '.join(outside)}, which targets = {list(spec.targets)} leaves "
                f'unquantized; add "{SITES[outside[0]].target}" to targets or take the site out'
            )


def _check(key: str, values: tuple[str, ...], allowed: tuple[str, ...]) -> None:
    for value in values:
        if value not in allowed:
            raise UserError(f"[quant] {key} = {value!r} does not exist; use {', '.join(allowed)}")
