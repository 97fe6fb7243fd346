"""The table that a run prints before anything else: what each layer group multiplies, and what serves it."""

import torch

from quads.quant.backend import choose_kernel, describe_kernel, operand_in_force
from quads.quant.formats import FORMATS, is_exact
from quads.quant.recipes import QuantSpec, precision
from quads.quant.sites import NEVER, SITES, is_targeted


def banner(
    spec: QuantSpec,
    engine: str = "native",
    kernel: str = "auto",
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.bfloat16,
) -> str:
    """A table: effective precision of weights (W) and activations (A) of each layer group, and the kernel that serves
    it; below it a line for each format in use.

    engine: "native" or "vllm". kernel: the key rollout.kernel. dtype: the compute dtype. Raises UserError where the
    kernel asked for cannot be had.
    """
    device = torch.device(device)
    plain = {torch.bfloat16: "bf16", torch.float32: "fp32"}.get(dtype, str(dtype).removeprefix("torch."))
    rows = [("layer group", "learner", "rollout", "rollout kernel")]
    for site, names in SITES.items():
        learner = (spec.learner_weights, spec.learner_activations)
        learner = learner if is_targeted(site, spec.targets) else ("bf16", "bf16")
        word = spec.rollout_precision(site)
        weights, activations, residual = precision(word, spec.format)
        rollout = _both(weights, activations, plain)
        if residual:
            asked = "auto" if engine == "vllm" else kernel
            operand = operand_in_force(spec.operand, asked, device, spec.format, spec.residual_scale)
            how = f"{spec.selection}, {'folded' if operand == 'folded' else 'two operands'}"
            share = "" if spec.residual_scale == 1.0 else f"{spec.residual_scale:.4g} x "
            rollout += f" + {share}residual of {spec.ratio:.4g} of the channels ({how})"
        served = _served(engine, kernel, device, word, spec.format, spec.operand, spec.residual_scale)
        rows.append((names.title, _both(*learner, plain), rollout, served))
    unquantized = _both("bf16", "bf16", plain)
    rows.append((", ".join(NEVER), unquantized, unquantized, _served(engine, "reference", device, "bf16", spec.format)))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:], *_notes(spec)])


def _served(
    engine: str,
    kernel: str,
    device: torch.device,
    word: str,
    format: str,
    operand: str = "auto",
    residual_scale: float = 1.0,
) -> str:
    if engine == "native":
        chosen = choose_kernel(kernel, device, word, format, residual_scale)
        return describe_kernel(chosen, word, format, device, operand)
    if word == "bf16" or FORMATS[format].kernels:
        return f"{engine} engine"
    return f"{engine} engine, reference path ({format} has no kernel: widened to bf16 values)"


def _notes(spec: QuantSpec) -> list[str]:
    notes = []
    if spec.bf16_layers != "none":
        notes.append(f"Unquantized on both sides: layers {spec.bf16_layers}.")
    if spec.norm_noise:
        ends = f"{spec.norm_noise:g} to {spec.norm_noise_end:g} in {spec.norm_noise_stages} stages"
        notes.append(f"Noise on the rollout's norms, fresh at each sync: {ends}; none in evaluations.")
    if spec.backward == "high_precision":
        notes.append("The learner's backward pass multiplies weights and activations before they were quantized.")
    for name in spec.formats():
        row, rule = FORMATS[name], spec.rule(name)
        block = row.block if row.block_bytes else f"{row.block} x {row.block}"
        scales = f", scale rule {rule}" if rule not in ("pow2", "amax") else ""
        notes.append(f"{name}: {row.bits_per_weight:.4g} bits a weight, blocks of {block}{scales}{row.note}.")
        if not is_exact(rule):
            notes.append(
                f'global_scale = "amax": {name} weights are not exact in bf16, the two sides differ by its rounding.'
            )
    return [*notes, "Router math in fp32."]


def _both(weights: str, activations: str, plain: str) -> str:
    weights, activations = (plain if name == "bf16" else name for name in (weights, activations))
    return f"W {weights} A {activations}"
