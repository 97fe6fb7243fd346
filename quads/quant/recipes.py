"""From the [quant] section to the precision of every layer group on both sides.

    recipe      learner weights / activations   rollout          what it is
    bf16        bf16  / bf16                    bf16             the baseline
    fp8         fp8   / fp8                     fp8              FP8 RL: W8A8
    naive       bf16  / bf16                    w4a4             what collapses
    qat         nvfp4 / bf16                    w4a4             the training side alone
    symmetric   nvfp4 / nvfp4                   w4a4             the ablation that makes it worse
    quads       nvfp4 / bf16                    w4a4_residual    both sides

"bf16" stands for "not quantized": the compute dtype, bf16 or fp32. Explicit keys override the recipe.
"""

from dataclasses import dataclass
from typing import Literal

import torch

from quads.config.sections import QuantSettings
from quads.errors import UserError
from quads.quant.backend import choose_kernel, describe_kernel
from quads.quant.nvfp4 import GlobalScaleMode
from quads.quant.residual import Selection
from quads.quant.sites import NEVER, SITES, TARGETS, is_targeted

Format = Literal["bf16", "fp8", "nvfp4"]
Precision = Literal["bf16", "fp8", "w4a16", "w16a4", "w4a4", "w4a4_residual"]

RECIPES: dict[str, tuple[Format, Format, Precision]] = {
    "bf16": ("bf16", "bf16", "bf16"),
    "fp8": ("fp8", "fp8", "fp8"),
    "naive": ("bf16", "bf16", "w4a4"),
    "qat": ("nvfp4", "bf16", "w4a4"),
    "symmetric": ("nvfp4", "nvfp4", "w4a4"),
    "quads": ("nvfp4", "bf16", "w4a4_residual"),
}

# (weights, activations) of a rollout precision
ROLLOUTS: dict[Precision, tuple[Format, Format]] = {
    "bf16": ("bf16", "bf16"),
    "fp8": ("fp8", "fp8"),
    "w4a16": ("nvfp4", "bf16"),
    "w16a4": ("bf16", "nvfp4"),
    "w4a4": ("nvfp4", "nvfp4"),
    "w4a4_residual": ("nvfp4", "nvfp4"),
}

AllGather = Literal["auto", "bf16", "packed"]


@dataclass(frozen=True)
class QuantSpec:
    """The [quant] section with every default filled in.

    Example: `QuantSpec("nvfp4", "bf16", "w4a4_residual")` is the recipe `quads`.
    """

    learner_weights: Format
    learner_activations: Format
    rollout: Precision
    targets: tuple[str, ...] = ("experts", "attention")
    residual_sites: tuple[str, ...] = ("w13",)
    ratio: float = 0.5
    selection: Selection = "batch"
    global_scale: GlobalScaleMode = "pow2"

    def gathers(self, asked: AllGather) -> Literal["bf16", "packed"]:
        """What FSDP gathers if [quant] all_gather = `asked`, given equal shards (see sharded.py)."""
        return asked if asked != "auto" else "packed" if self.learner_weights == "nvfp4" else "bf16"

    def rollout_precision(self, site: str) -> Precision:
        """The precision of one site in the rollout: "bf16" outside the targets, no residual outside residual_sites."""
        if not is_targeted(site, self.targets):
            return "bf16"
        if self.rollout == "w4a4_residual" and site not in self.residual_sites:
            return "w4a4"
        return self.rollout

    def rollout_weights(self, site: str) -> Format:
        """The format in which the weights of a site are shipped and stored."""
        return ROLLOUTS[self.rollout_precision(site)][0]


def resolve(quant: QuantSettings) -> QuantSpec:
    """Fill in what the recipe decides. Raises UserError for values that do not exist or contradict each other."""
    if quant.recipe not in RECIPES:
        raise UserError(f"[quant] recipe = {quant.recipe!r} does not exist; use one of {', '.join(RECIPES)}")
    weights, activations, rollout = RECIPES[quant.recipe]
    spec = QuantSpec(  # the words of the config are checked below
        learner_weights=quant.learner_weights or weights,  # pyright: ignore[reportArgumentType]
        learner_activations=quant.learner_activations or activations,  # pyright: ignore[reportArgumentType]
        rollout=quant.rollout or rollout,  # pyright: ignore[reportArgumentType]
        targets=tuple(quant.targets),
        residual_sites=tuple(quant.residual_sites),
        ratio=quant.residual_ratio,
        selection=quant.residual_selection,  # pyright: ignore[reportArgumentType]
        global_scale=quant.global_scale,  # pyright: ignore[reportArgumentType]
    )
    formats = ("bf16", "fp8", "nvfp4")
    _check("learner_weights", (spec.learner_weights,), formats)
    _check("learner_activations", (spec.learner_activations,), formats)
    _check("rollout", (spec.rollout,), tuple(ROLLOUTS))
    _check("targets", spec.targets, TARGETS)
    _check("residual_sites", spec.residual_sites, tuple(SITES))
    _check("residual_selection", (spec.selection,), ("batch", "block", "token"))
    _check("global_scale", (spec.global_scale,), ("pow2", "amax"))
    if not 0 <= spec.ratio <= 1:
        raise UserError(f"[quant] residual_ratio = {spec.ratio} is outside [0, 1]; it is a fraction of the channels")
    used = {spec.learner_weights, spec.learner_activations, spec.rollout} - {"bf16"}
    if used and not spec.targets:
        raise UserError(
            f"[quant] targets is empty, so nothing can be {', '.join(sorted(used))}; "
            'name "experts" or "attention", or set recipe = "bf16"'
        )
    if spec.rollout == "w4a4_residual":
        if not spec.residual_sites:
            raise UserError('[quant] residual_sites is empty; name a site, or set rollout = "w4a4"')
        outside = [site for site in spec.residual_sites if not is_targeted(site, spec.targets)]
        if outside:
            raise UserError(
                f"[quant] residual_sites has {', '.join(outside)}, which targets = {list(spec.targets)} leaves "
                f'unquantized; add "{SITES[outside[0]].target}" to targets or take the site out'
            )
    return spec


def _check(key: str, values: tuple[str, ...], allowed: tuple[str, ...]) -> None:
    for value in values:
        if value not in allowed:
            raise UserError(f"[quant] {key} = {value!r} does not exist; use {', '.join(allowed)}")


def banner(
    spec: QuantSpec,
    engine: str = "native",
    kernel: str = "auto",
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.bfloat16,
) -> str:
    """A table: effective precision of weights (W) and activations (A) of each layer group, and the kernel that serves
    it.

    engine: "native" or "vllm". kernel: the key rollout.kernel. dtype: the compute dtype. Raises UserError where the
    kernel asked for cannot be had.
    """
    device = torch.device(device)
    plain = {torch.bfloat16: "bf16", torch.float32: "fp32"}.get(dtype, str(dtype).removeprefix("torch."))
    rows = [("layer group", "learner", "rollout", "rollout kernel")]
    for site, names in SITES.items():
        targeted = is_targeted(site, spec.targets)
        learner = (spec.learner_weights, spec.learner_activations) if targeted else ("bf16", "bf16")
        precision = spec.rollout_precision(site)
        rollout = _both(ROLLOUTS[precision], plain)
        if precision == "w4a4_residual":
            rollout += f" + residual of {spec.ratio:.4g} of the channels ({spec.selection})"
        if engine == "native":
            served = describe_kernel(choose_kernel(kernel, device, precision), precision, device)
        else:
            served = f"{engine} engine"
        rows.append((names.title, _both(learner, plain), rollout, served))
    unquantized = _both(("bf16", "bf16"), plain)
    served = describe_kernel("reference", "bf16", device) if engine == "native" else f"{engine} engine"
    rows.append((", ".join(NEVER), unquantized, unquantized, served))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    notes = [
        "nvfp4: 4.5 bits a weight, blocks of 16; activations have one power-of-two scale a token. Router math in fp32."
    ]
    if spec.global_scale == "amax" and "nvfp4" in (spec.learner_weights, *ROLLOUTS[spec.rollout]):
        notes.append('global_scale = "amax": weights are not exact in bf16, the two sides differ by its rounding.')
    return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:], *notes])


def _both(formats: tuple[str, str], plain: str) -> str:
    weights, activations = (plain if name == "bf16" else name for name in formats)
    return f"W {weights} A {activations}"
