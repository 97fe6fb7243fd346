"""`python -m quads.lab ratio --config CONFIG`: what residual compensation buys, and what it costs.

The gap of the compensated rollout against the weight-QDQ learner, for residual ratios from 0 to 100 % under the three
selections (paper, Table 3). Cost, beside it: `extra MMA` is the second pass as a share of the multiplications of all
quantized layers that a token meets, if a kernel skips channels that are not selected; the time is that of the
plain-torch reference or of the Triton kernel, whichever served (named in the JSON).

`--sites w13;w13,w2,qkv,o` compares sets of sites; `--cost 0.14` does so at equal cost: each set at the one ratio whose
second pass is that share of the multiplications (a set of small matrices that cannot cost so much: at ratio 1), and
writes ratio_cost.json.
"""

import functools
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from quads.config.options import real
from quads.errors import UserError
from quads.lab import style
from quads.lab.policies import Evaluation, evaluate, gap_statistics, learner, rollout
from quads.lab.results import markdown, number, progress, provenance, write_result
from quads.lab.subject import Subject, build_subject, subject_parser
from quads.model.config import ModelConfig
from quads.model.model import MoEDecoder
from quads.quant.backend import choose_kernel
from quads.quant.recipes import QuantSpec
from quads.quant.sites import SITES, is_targeted

HELP = "gap against residual ratio, selection and sites, with the added cost"

RATIOS = (0.125, 0.25, 0.5, 0.75, 1.0)
SELECTIONS = ("batch", "block", "token")


def site_macs(config: ModelConfig) -> dict[str, int]:
    """Multiplications of one token in one layer, by site."""
    counts = config.parts()
    return {"w13": counts.w13 * config.top_k, "w2": counts.w2 * config.top_k, "qkv": counts.qkv, "o": counts.o}


def extra_mma(config: ModelConfig, spec: QuantSpec, ratio: float) -> float:
    """Multiplications of the residual pass over those of all quantized layers."""
    macs = {site: count for site, count in site_macs(config).items() if is_targeted(site, spec.targets)}
    return ratio * sum(macs[site] for site in spec.residual_sites) / sum(macs.values())


def ratio_at(config: ModelConfig, spec: QuantSpec, cost: float) -> float:
    """The residual ratio that adds `cost` of the multiplications on spec's sites; 1 where all channels cost less."""
    return min(1.0, cost / extra_mma(config, spec, 1.0))


def measure_ratios(
    subject: Subject, reference: Evaluation, run: Callable[[MoEDecoder], Evaluation], ratios: tuple[float, ...] = RATIOS
) -> list[dict[str, Any]]:
    """One row for W4A4 without residual (ratio 0) and one for each ratio and selection."""
    spec = replace(subject.spec, rollout="w4a4")
    model = rollout(subject, spec)
    rows = [_measure(subject, model, spec, 0.0, reference, run)]
    for selection in SELECTIONS:
        for ratio in ratios:
            spec = replace(subject.spec, rollout="w4a4_residual", ratio=ratio, selection=selection)
            model = rollout(subject, spec, reuse=model)
            rows.append(_measure(subject, model, spec, ratio, reference, run))
    return rows


def _measure(
    subject: Subject,
    model: MoEDecoder,
    spec: QuantSpec,
    ratio: float,
    reference: Evaluation,
    run: Callable[[MoEDecoder], Evaluation],
) -> dict[str, Any]:
    selection = spec.selection if ratio else "none"
    progress(f"ratio {ratio:.3g} {selection} {','.join(spec.residual_sites)}")
    started = time.perf_counter()
    logprobs = run(model).logprobs
    return {
        "ratio": ratio,
        "selection": selection,
        "sites": list(spec.residual_sites) if ratio else [],
        "extra_mma": extra_mma(subject.master.config, spec, ratio),
        "forward_s": time.perf_counter() - started,
        **gap_statistics(reference.logprobs - logprobs),
    }


def ratio_table(rows: list[dict[str, Any]]) -> str:
    """Markdown: a line for each ratio, a column for each selection."""
    plain = rows[0]
    lines = [["0 % (W4A4)", *[f"{number(plain['mean'])} ({number(plain['max'])})"] * len(SELECTIONS)]]
    for ratio in dict.fromkeys(row["ratio"] for row in rows[1:]):
        of_ratio = {row["selection"]: row for row in rows[1:] if row["ratio"] == ratio}
        cells = [f"{number(row['mean'])} ({number(row['max'])})" for row in (of_ratio[s] for s in SELECTIONS)]
        lines.append([f"{100 * ratio:.3g} %", *cells])
    return markdown(["residual ratio", *SELECTIONS], lines)


def ratio_panel(ax: Axes, rows: list[dict[str, Any]], quantity: str) -> None:
    """Gap against ratio, one curve a selection."""
    for selection, colour in zip(SELECTIONS, (style.BLUE, style.ORANGE, style.GREEN), strict=True):
        points = [rows[0], *(row for row in rows[1:] if row["selection"] == selection)]
        x, y = [100 * row["ratio"] for row in points], [row[quantity] for row in points]
        ax.plot(x, y, marker="o", ms=4, lw=1.8, color=colour, label=selection)
    ax.set_ylim(bottom=0)
    title = "Gap against residual ratio" if quantity == "mean" else "Largest gap against residual ratio"
    style.finish(ax, title, "channels in the residual pass (%)", f"{quantity} |gap| (nats)", legend=True)


def figure(data: dict[str, Any]) -> Figure:
    """Mean gap for each set of sites, and gap against cost."""
    sets = data["sets"]
    fig, axes = style.new_figure(columns=len(sets) + 1, width=4.6)
    for ax, entry in zip(axes, sets, strict=False):
        ratio_panel(ax, entry["rows"], "mean")
        ax.set_title(f"Residual on {', '.join(entry['sites'])}", loc="left", fontsize=10.5, fontweight="bold")
    for entry, colour in zip(sets, style.SEQUENCE, strict=False):
        for selection, dash in (("batch", "--"), ("token", "-")):
            points = [entry["rows"][0], *(row for row in entry["rows"][1:] if row["selection"] == selection)]
            label = f"{', '.join(entry['sites'])} ({selection})"
            x, y = [100 * row["extra_mma"] for row in points], [row["mean"] for row in points]
            axes[-1].plot(x, y, dash, marker="o", ms=4, lw=1.8, color=colour, label=label)
    axes[-1].set_ylim(bottom=0)
    style.finish(axes[-1], "Gap against cost", "extra multiplications (%)", "mean |gap| (nats)", legend=True)
    return fig


def tables(data: dict[str, Any]) -> str:
    """Markdown."""
    parts = []
    for entry in data["sets"]:
        costs = {row["ratio"]: row["extra_mma"] for row in entry["rows"][1:]}
        cost = ", ".join(f"{100 * ratio:.3g} % -> {100 * share:.1f} %" for ratio, share in costs.items())
        base = entry["rows"][0]["forward_s"]
        slowest = max(row["forward_s"] for row in entry["rows"])
        times = f"{base:.2f} s without, up to {slowest:.2f} s with"
        parts.append(
            f"Residual on {', '.join(entry['sites'])}: mean |gap| (largest), weight-QDQ learner. "
            f"Extra multiplications: {cost}. Forward with the {data['kernel']} kernel: {times}.\n\n"
            + ratio_table(entry["rows"])
        )
    return "\n\n".join(parts)


def main(argv: list[str]) -> None:
    parser = subject_parser("ratio", HELP)
    parser.add_argument("--sites", default="w13;w13,w2,qkv,o", help="sets of residual sites, separated by ;")
    parser.add_argument(
        "--cost", type=real(low=0.0, high=1.0), default=0.0, help="one ratio a set, of this cost (default: all ratios)"
    )
    args, overrides = parser.parse_known_args(argv)
    sets_of_sites = [tuple(sites.split(",")) for sites in args.sites.split(";")]
    if not {site for sites in sets_of_sites for site in sites} <= SITES.keys():
        raise UserError(f"--sites {args.sites}: sites are {', '.join(SITES)}; commas within a set, ; between sets")
    subject = build_subject(args, overrides)
    reference = evaluate(learner(subject, "4", "bf16"), subject.sequences, args.batch_tokens)
    run = functools.partial(evaluate, sequences=subject.sequences, batch_tokens=args.batch_tokens)
    sets = []
    for sites in sets_of_sites:
        subject.spec = replace(subject.spec, residual_sites=sites)
        ratios = (ratio_at(subject.master.config, subject.spec, args.cost),) if args.cost else RATIOS
        sets.append({"sites": list(sites), "rows": measure_ratios(subject, reference, run, ratios)})
    kernel = choose_kernel(subject.cfg.rollout.kernel, subject.device, "w4a4_residual", subject.spec.format)
    data = {"batch": subject.facts, "kernel": kernel, "sets": sets}
    name = "ratio_cost" if args.cost else "ratio"
    path = write_result(args.out, name, provenance("ratio", argv, subject.cfg, [subject.cfg.train.seed]), data)
    style.save(figure(data), path.with_suffix(".png"))
    print(tables(data))
    print(f"\nwrote {path} and {name}.png")
