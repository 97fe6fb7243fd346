"""`python -m quads.lab decompose --config CONFIG`: scale bias, dead zone and grid noise of every site, exactly.

What each part means, by two definitions, is in error_parts.py: "stored" asks what becomes of the values that the
format sends to zero, "published" what an ideal scale would still lose (2605.20402). Weights and activations of every
quantized site, over all layers, under NVFP4 (as this project quantizes: bf16 weights with shared global scales, one
global scale a token), MXFP4 with OCP's scale (floor), MXFP4 with a scale that never saturates (ceil) and HiF4. Numbers
are shares of the tensor's energy; the parts and the cross term add up to the total.
"""

from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

from quads.lab import style
from quads.lab.capture import capture
from quads.lab.error_parts import COMPARED, summarize
from quads.lab.layers import SiteWeights
from quads.lab.policies import learner
from quads.lab.results import markdown, number, provenance, write_result
from quads.lab.subject import Subject, build_subject, subject_parser
from quads.quant.sites import SITES

HELP = "4-bit error split into scale bias, dead zone and grid noise, by site and format"

PARTS = ("scale_bias", "dead_zone", "grid_noise", "cross", "total", "dead_fraction")  # as stored
PUBLISHED = ("published_scale_bias", "published_dead_zone", "published_grid_noise", "published_cosine")


def measure(subject: Subject, batch_tokens: int) -> dict[str, Any]:
    captured = capture(learner(subject, "bf16", "bf16"), subject.sequences, batch_tokens, w2=True)
    weights, device = SiteWeights(subject), subject.device
    num_layers = subject.master.config.num_layers
    rows = []
    for site in SITES:
        inputs = captured.sites[site]
        for name in COMPARED:  # float64: a GPU takes seconds where two cores take minutes
            of_layers = [flat(summarize(x.to(device), name)) for x in inputs]
            rows.append(_row("activation", site, name, of_layers))
        for name in COMPARED:
            of_layers = [_weight_parts(weights, layer, site, name, device) for layer in range(num_layers)]
            rows.append(_row("weight", site, name, of_layers))
    return {"batch": subject.facts, "rows": rows}


def _weight_parts(weights: SiteWeights, layer: int, site: str, name: str, device: torch.device) -> dict[str, float]:
    master = weights.get(layer, site, quantized=False).to(device).bfloat16().float()
    known: Tensor | None = None  # else a row of the weight would get a scale of its own
    if COMPARED[name] == weights.stored_as:
        known = weights.get(layer, site, quantized=True).to(device)
    return flat(summarize(master, name, known))


def flat(found: dict[str, Any]) -> dict[str, float]:
    """One level: the parts of "stored" under their own names, those of "published" with that word before them."""
    published = {f"published_{part}": value for part, value in found["published"].items()}
    return {"total": found["total"], "dead_fraction": found["dead_fraction"], **found["stored"], **published}


def _row(kind: str, site: str, name: str, layers: list[dict[str, float]]) -> dict[str, Any]:
    """Means over layers, and the dead zone of each (activations)."""
    means = {part: sum(layer[part] for layer in layers) / len(layers) for part in (*PARTS, *PUBLISHED)}
    return {
        "kind": kind,
        "site": site,
        "format": name,
        **means,
        "by_layer": {p: [layer[p] for layer in layers] for p in PARTS},
    }


def figure(data: dict[str, Any]) -> Figure:
    """Stacked parts by site and format, for activations and for weights."""
    fig, axes = style.new_figure(columns=2, width=5.6)
    for ax, kind in zip(axes, ("activation", "weight"), strict=True):
        rows = [row for row in data["rows"] if row["kind"] == kind]
        names = [f"{row['site']} {row['format'].replace('_', ' ')}" for row in rows]
        bottom = [0.0] * len(rows)
        for part, colour in zip(PARTS[:3], (style.BLUE, style.RED, style.GREY), strict=True):
            values = [100 * row[part] for row in rows]
            ax.bar(names, values, 0.7, bottom=bottom, color=colour, label=part.replace("_", " "))
            bottom = [b + v for b, v in zip(bottom, values, strict=True)]
        totals = [100 * row["total"] for row in rows]
        ax.plot(names, totals, "_", ms=16, mew=2, color=style.GREEN, label="total (with cross term)")
        style.finish(ax, f"{kind.capitalize()}s: parts of the 4-bit error", "", "share of the tensor's energy (%)")
        ax.set_xticks(range(len(names)), names, rotation=45, ha="right", fontsize=8)
        ax.grid(axis="x", alpha=0)
    style.legend_below(fig, axes[0], 4)
    return fig


def tables(data: dict[str, Any]) -> str:
    """Markdown."""
    header = ["tensor", "site", "format", "scale bias", "dead zone", "grid noise", "cross", "total", "values that die"]
    rows = [
        [
            row["kind"],
            row["site"],
            row["format"],
            *(number(row[p]) for p in PARTS[:5]),
            f"{100 * row['dead_fraction']:.1f} %",
        ]
        for row in data["rows"]
    ]
    published = [
        [row["kind"], row["site"], row["format"], *(number(row[part]) for part in PUBLISHED)] for row in data["rows"]
    ]
    header_published = ["tensor", "site", "format", "scale bias", "dead zone", "grid noise", "cosine of bias and noise"]
    return (
        "Shares of the tensor's energy, mean over layers; dead is what the format stores as 0:\n\n"
        + markdown(header, rows)
        + "\n\nThe same errors by the published definition; dead is what an ideal scale sends to 0:\n\n"
        + markdown(header_published, published)
    )


def main(argv: list[str]) -> None:
    args, overrides = subject_parser("decompose", HELP).parse_known_args(argv)
    subject = build_subject(args, overrides)
    data = measure(subject, args.batch_tokens)
    path = write_result(
        args.out, "decompose", provenance("decompose", argv, subject.cfg, [subject.cfg.train.seed]), data
    )
    style.save(figure(data), path.with_suffix(".png"))
    print(tables(data))
    print(f"\nwrote {path} and decompose.png")
