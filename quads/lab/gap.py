"""`python -m quads.lab gap --config CONFIG`: where the log-prob gap between learner and rollout comes from.

One checkpoint, one batch of responses, sampled once. Three tables:

    sides     |gap| of W4A16, W16A4, W4A4 (and plain, and compensated) rollouts against learners that fake-quantize
              nothing, weights, activations, or both (paper, Table 1 and Fig. 2)
    factors   gap = weight + activation + engine + rest (paper, Eq. 3), for the W4A4 rollout and the plain learner:
                  engine      plain learner - plain rollout        weight   plain rollout - W4A16
                  activation  plain rollout - W16A4                rest     what the three leave over
              The rest is exact, so the four add up; its size says how additive the error is.
    ratios    |gap| of the compensated rollout against residual ratio and selection, weight-QDQ learner (Table 3)

    drift     the same with a rollout whose layers are disturbed by a relative noise, in the place of an engine with
              other kernels: whether quantizing the learner's activations helps (paper, Section 3.2) depends on it

The rollout runs over whole sequences, or token by token as an engine does with `--forward decode`: then the batch that
shares residual channels is one decoding step, as in a real rollout.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

from quads.config.options import real
from quads.lab import style
from quads.lab.decode import decode
from quads.lab.policies import LEARNERS, Evaluation, engine_drift, evaluate, gap_statistics, learner, rollout
from quads.lab.policies import routing_flips as flips
from quads.lab.ratio import measure_ratios, ratio_panel, ratio_table
from quads.lab.results import markdown, number, progress, provenance, write_result
from quads.lab.subject import Subject, build_subject, subject_parser
from quads.model.model import MoEDecoder

HELP = "log-prob gap of every pair of learner and rollout precision, its weight, activation and engine parts"

ROLLOUTS = ("bf16", "w4a16", "w16a4", "w4a4", "w4a4_residual")
DRIFTS = "0.0005,0.002,0.008,0.03"
DRIFT_PAIRS = {"bf16": ("no QDQ",), "w4a4": ("weight QDQ", "both QDQ"), "w4a4_residual": ("weight QDQ",)}
DRIFT_LABELS = {
    "bf16/no QDQ": "plain rollout, no QDQ",
    "w4a4/weight QDQ": "W4A4, weight QDQ",
    "w4a4/both QDQ": "W4A4, both QDQ",
    "w4a4_residual/weight QDQ": "W4A4+res, weight QDQ",
}
QUANTILES = 60  # points of a distribution kept in the JSON


Runner = Callable[[MoEDecoder], Evaluation]


def runner(subject: Subject, forward: str, batch_tokens: int) -> Runner:
    """How a rollout model is evaluated: "packed" in whole sequences, "decode" token by token."""
    if forward == "decode":
        return lambda model: decode(model, subject.sequences)
    return lambda model: evaluate(model, subject.sequences, batch_tokens)


def evaluate_rollouts(subject: Subject, run: Runner) -> dict[str, Evaluation]:
    """Every rollout precision on the fixed tokens."""
    result: dict[str, Evaluation] = {}
    model = None
    for precision in sorted(ROLLOUTS, key=lambda name: name.startswith("w4")):  # those with 4-bit weights together
        progress(f"rollout {precision}")
        model = rollout(subject, replace(subject.spec, rollout=precision), reuse=model)
        result[precision] = run(model)
    return {precision: result[precision] for precision in ROLLOUTS}


def evaluate_learners(subject: Subject, batch_tokens: int) -> dict[str, Evaluation]:
    """Every learner variant on the fixed tokens."""
    result = {}
    for name, formats in LEARNERS.items():
        progress(f"learner {name}")
        result[name] = evaluate(learner(subject, *formats), subject.sequences, batch_tokens)
    return result


def factors(plain_learner: Tensor, rollouts: dict[str, Tensor]) -> dict[str, Tensor]:
    """Per-token terms of Eq. 3 for the W4A4 rollout: engine + weight + activation + rest = total."""
    terms = {
        "engine": plain_learner - rollouts["bf16"],
        "weight": rollouts["bf16"] - rollouts["w4a16"],
        "activation": rollouts["bf16"] - rollouts["w16a4"],
    }
    total = plain_learner - rollouts["w4a4"]
    return {**terms, "rest": total - sum(terms.values()), "total": total}


def additivity(terms: dict[str, Tensor]) -> dict[str, float]:
    """How well engine + weight + activation tells the total: relative size of the rest, and their correlation."""
    predicted, total = terms["total"] - terms["rest"], terms["total"]
    return {
        "rest_over_total": float(terms["rest"].abs().mean() / total.abs().mean()),
        "correlation": float(torch.corrcoef(torch.stack([predicted, total]))[0, 1]),
    }


def measure(subject: Subject, batch_tokens: int, drifts: list[float], forward: str = "packed") -> dict[str, Any]:
    run = runner(subject, forward, batch_tokens)
    learners = evaluate_learners(subject, batch_tokens)
    rollouts = evaluate_rollouts(subject, run)
    gaps = {r: {name: learners[name].logprobs - rollouts[r].logprobs for name in learners} for r in rollouts}
    terms = factors(learners["no QDQ"].logprobs, {r: evaluation.logprobs for r, evaluation in rollouts.items()})
    decoded = learners["no QDQ"].logprobs - subject.sequences.sampled_logprobs
    return {
        "batch": {**subject.facts, "forward": forward},
        "sides": {r: {name: gap_statistics(gap) for name, gap in of.items()} for r, of in gaps.items()},
        "routing_flips": {r: {name: flips(learners[name], rollouts[r]) for name in learners} for r in rollouts},
        "decoded_engine_gap": {"precision": subject.facts["sampler"], **gap_statistics(decoded)},
        "factors": {name: gap_statistics(term) for name, term in terms.items()},
        "additivity": additivity(terms),
        "distribution": {r: _quantiles(gaps[r]["no QDQ"]) for r in gaps},
        "distribution_weight_qdq": {r: _quantiles(gaps[r]["weight QDQ"]) for r in gaps},
        "ratios": measure_ratios(subject, learners["weight QDQ"], run),
        "drift": [measure_drift(subject, learners, run, size) for size in drifts],
    }


def measure_drift(subject: Subject, learners: dict[str, Evaluation], run: Runner, size: float) -> dict[str, Any]:
    """Mean |gap| of disturbed rollouts: plain against plain; W4A4 against the asymmetric and the symmetric learner."""
    result: dict[str, Any] = {"size": size}
    progress(f"drift {size:g}")
    for precision, names in DRIFT_PAIRS.items():
        model = rollout(subject, replace(subject.spec, rollout=precision))
        with engine_drift(model, size):
            logprobs = run(model).logprobs
        for name in names:
            result[f"{precision}/{name}"] = gap_statistics(learners[name].logprobs - logprobs)["mean"]
    return result


def _quantiles(gap: Tensor) -> list[float]:
    """|gap| at QUANTILES + 1 equal steps of the share of tokens that lie above, from all to none."""
    ordered = gap.abs().sort().values
    places = torch.linspace(0, len(ordered) - 1, QUANTILES + 1).round().long()
    return ordered[places].tolist()


def figure(data: dict[str, Any]) -> Figure:
    """Sides as bars, distributions, factors, ratios."""
    fig, axes = style.new_figure(columns=2, rows=3, width=5.2)
    shown = [r for r in ROLLOUTS if r != "bf16"]
    series = {name: [data["sides"][r][name]["mean"] for r in shown] for name in LEARNERS}
    style.grouped_bars(axes[0], [_label(r) for r in shown], series, style.SEQUENCE)
    axes[0].set_yscale("log")
    axes[0].set_ylim(top=40 * max(max(values) for values in series.values()))  # room for the legend
    style.finish(axes[0], "Gap by rollout and learner", "rollout", "mean |gap| (nats)", legend=True, columns=2)
    share = [1 - i / QUANTILES for i in range(QUANTILES + 1)]
    for precision, colour in zip(ROLLOUTS, (style.GREY, style.BLUE, style.ORANGE, style.RED, style.GREEN), strict=True):
        values = [max(v, 1e-9) for v in data["distribution"][precision]]
        axes[1].plot(values, share, color=colour, lw=1.8, label=_label(precision))
    axes[1].set_xscale("log")
    style.finish(
        axes[1], "How many tokens exceed a gap (plain learner)", "|gap| (nats)", "share of tokens", legend=True
    )
    names = ["weight", "activation", "engine", "rest", "total"]
    colours = [style.BLUE, style.ORANGE, style.GREY, style.PURPLE, style.RED]
    axes[2].bar(names, [data["factors"][name]["mean"] for name in names], 0.6, color=colours)
    style.finish(axes[2], "Parts of the W4A4 gap (Eq. 3)", "", "mean |part| (nats)")
    ratio_panel(axes[3], data["ratios"], "mean")
    series = {name: [100 * data["routing_flips"][r][name] for r in shown] for name in LEARNERS}
    style.grouped_bars(axes[4], [_label(r) for r in shown], series, style.SEQUENCE)
    style.finish(axes[4], "Experts that differ between the sides", "rollout", "tokens x layers (%)")
    if data["drift"]:
        _drift_panel(axes[5], data["drift"])
    axes[5].set_visible(bool(data["drift"]))
    return fig


def _drift_panel(ax: Any, rows: list[dict[str, Any]]) -> None:
    sizes = [row["size"] for row in rows]
    colours = (style.GREY, style.ORANGE, style.RED, style.GREEN)
    for (key, label), colour in zip(DRIFT_LABELS.items(), colours, strict=True):
        ax.plot(sizes, [row[key] for row in rows], marker="o", ms=4, lw=1.8, color=colour, label=label)
    ax.set_xscale("log")
    ax.set_yscale("log")
    style.finish(ax, "Gap under engine drift", "relative noise a layer", "mean |gap| (nats)", legend=True)


def _label(precision: str) -> str:
    return {"bf16": "plain", "w4a4_residual": "W4A4+res"}.get(precision, precision.upper())


def tables(data: dict[str, Any]) -> str:
    """Markdown."""
    header = ["rollout \\ learner", *LEARNERS]
    rows = [
        [_label(r), *(f"{number(s['mean'])} (max {number(s['max'])})" for s in of.values())]
        for r, of in data["sides"].items()
    ]
    parts = [
        [name, number(s["mean"]), number(s["rms"]), number(s["p99"]), number(s["max"])]
        for name, s in data["factors"].items()
    ]
    add = data["additivity"]
    text = [
        "Mean |gap| in nats, largest in brackets:\n",
        markdown(header, rows),
        "\nParts of the W4A4 gap against the plain learner:\n",
        markdown(["part", "mean", "rms", "p99", "max"], parts),
        f"\nThe rest is {add['rest_over_total']:.0%} of the total; weight + activation + engine correlate with it at "
        f"{add['correlation']:.3f}.",
        "\nResidual compensation, weight-QDQ learner, mean |gap| (largest):\n",
        ratio_table(data["ratios"]),
    ]
    if data["drift"]:
        drift = [[number(row["size"]), *(number(row[key]) for key in DRIFT_LABELS)] for row in data["drift"]]
        text += ["\nWith a disturbed rollout:\n", markdown(["relative noise a layer", *DRIFT_LABELS.values()], drift)]
    return "\n".join(text)


def sizes(text: str) -> list[float]:
    """A list of numbers of at least 0, as an argparse type; it may be empty."""
    return [real(low=0.0)(size) for size in text.split(",") if size]


def main(argv: list[str]) -> None:
    parser = subject_parser("gap", HELP)
    parser.add_argument(
        "--drift", type=sizes, default=DRIFTS, help=f"relative noise of rollout layers, list (default: {DRIFTS})"
    )
    parser.add_argument("--forward", choices=("packed", "decode"), default="packed", help="how the rollout is run")
    args, overrides = parser.parse_known_args(argv)
    subject = build_subject(args, overrides)
    data = measure(subject, args.batch_tokens, args.drift, args.forward)
    path = write_result(args.out, "gap", provenance("gap", argv, subject.cfg, [subject.cfg.train.seed]), data)
    style.save(figure(data), path.with_suffix(".png"))
    print(tables(data))
    print(f"\nwrote {path} and gap.png")
