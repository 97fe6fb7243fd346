"""The words of the report, for a reader who has not read the paper. What follows is computed from the numbers."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from quads.lab.results import number

ABOUT = """
Where 4-bit reinforcement learning loses its policy, and what brings it back

A language model is trained by reinforcement learning in two halves. A **rollout** engine writes answers as fast as it
can; a **learner** scores the same tokens again and computes the gradient. Both hold the same weights, and the method
assumes that both would give a token the same probability. To be fast, the rollout here multiplies 4-bit numbers (NVFP4:
weights and activations, W4A4). Then the two disagree, and the difference of their log-probabilities for a token, the
**gap**, is an error that goes straight into the gradient: a gap of 0.1 nats is a factor of 1.1 in a ratio that is
clipped at 1.2.

QUADS (arXiv 2607.15810) closes the gap from both sides. The learner computes with the 4-bit **weights** that the
rollout
uses (weight QDQ: quantize, dequantize), so that half of the error is shared. The rollout multiplies the **activation**
channels that lose most a second time, with their rounding error (residual compensation). Activations stay unquantized
in the learner. This page measures each claim on one checkpoint: responses are sampled once, then every precision is
asked for the log-probs of the same tokens.
"""

COLLAPSED = 0.5  # of the best held-out score of the run: what is called a collapse


@dataclass(frozen=True)
class Text:
    """`reading` turns the numbers of the JSON into the sentences under the figure."""

    title: str
    shows: str
    reading: Callable[[dict[str, Any]], str]


def _recipes(data: dict[str, Any]) -> str:
    summary = data["summary"]
    order = sorted(summary, key=lambda name: -summary[name]["pass_at_1"]["mean"])
    scores = ", ".join(f"{name} {summary[name]['pass_at_1']['mean']:.3f}" for name in order)
    gaps = ", ".join(f"{name} {number(summary[name]['gap_mean']['mean'])}" for name in summary)
    text = f"Held-out score at the end, best first: {scores}. Mean gap during training: {gaps}."
    for name, arm in summary.items():
        best, last = (arm.get(key, {}).get("mean") for key in ("pass_at_1_best", "pass_at_1"))
        if best is not None and last < COLLAPSED * best:
            text += f" The score of {name} collapses: from {best:.3f} at its best to {last:.3f} at the end."
    apart = _paired(data.get("paired", {}), "quads")
    if apart:
        shown = ", ".join(f"{name} {value:+.3f}" for name, value in sorted(apart.items(), key=lambda item: -item[1]))
        text += f" Training reward less that of quads, same prompts and seeds, mean over steps: {shown}."
    return text


def _paired(paired: dict[str, list[dict[str, float]]], base: str) -> dict[str, float]:
    """arm -> mean over seeds of its reward less that of `base`; keys of `paired` are "A - B"."""
    result = {}
    for key, entries in paired.items():
        a, b = key.split(" - ")
        if base in (a, b):
            mean = sum(entry["mean"] for entry in entries) / len(entries)
            result[a if b == base else b] = mean if b == base else -mean
    return result


def _scores(data: dict[str, Any]) -> str:
    by_arm: dict[str, dict[str, list[float]]] = {}
    for row in data["rows"]:
        by_arm.setdefault(row["arm"], {}).setdefault(row["rollout"], []).append(row["pass@1"])
    parts = []
    for arm, scores in by_arm.items():
        shown = ", ".join(f"{sum(v) / len(v):.3f} in {rollout}" for rollout, v in scores.items() if rollout != "own")
        own = scores.get("own")
        parts.append(f"{arm} {shown}" + (f" ({sum(own) / len(own):.3f} at its own precision)" if own else ""))
    return f"Held-out pass@1: {'; '.join(parts)}."


def _gap(data: dict[str, Any]) -> str:
    sides, factors = data["sides"], {name: entry["mean"] for name, entry in data["factors"].items()}
    larger, smaller = sorted(("weight", "activation"), key=lambda name: -factors[name])
    weight_qdq, both = sides["w4a4"]["weight QDQ"]["mean"], sides["w4a4"]["both QDQ"]["mean"]
    text = (
        f"Quantizing {larger}s alone moves a token's log-prob by {number(factors[larger])} nats on average, "
        f"{smaller}s by "
        f"{number(factors[smaller])}, both together by {number(factors['total'])}; without any quantization the sides "
        f"differ "
        f"by {number(factors['engine'])}. The parts do not simply add: {data['additivity']['rest_over_total']:.0%} of "
        f"the "
        f"total is left over. A learner with the rollout's weights takes the W4A16 gap from "
        f"{number(sides['w4a16']['no QDQ']['mean'])} to {number(sides['w4a16']['weight QDQ']['mean'])} and the W4A4 "
        f"gap "
        f"from {number(sides['w4a4']['no QDQ']['mean'])} to {number(weight_qdq)}; residual compensation at the "
        f"configured "
        f"sites takes it to {number(sides['w4a4_residual']['weight QDQ']['mean'])}. "
    )
    if both < weight_qdq:
        text += (
            f"Against W4A4 the learner that quantizes activations too comes closest ({number(both)}): here both sides "
            "run the same code and see nearly the same activations, so they round alike. The lower right panel "
            "disturbs the rollout, in the place of an engine with other kernels, and shows how that advantage shrinks."
        )
    else:
        text += f"A learner that quantizes activations too does not help ({number(both)}): each side rounds its own."
    return text


def _layers(data: dict[str, Any]) -> str:
    pairs = {pair["label"]: pair for pair in data["pairs"]}

    def last(label: str) -> str:
        return number(pairs[label]["moe_out"][-1])

    terms = pairs["no QDQ / W4A4"]["terms"]["w13"]
    mean = {name: sum(values) / len(values) for name, values in terms.items()}
    return (
        f"At the last mixture's output the sides are {last('no QDQ / W4A4')} apart without alignment, "
        f"{last('weight QDQ / W4A4')} with the rollout's weights in the learner, {last('weight QDQ / W4A4+res')} with "
        f"residual compensation on top, and {last('plain / plain')} when nothing is quantized. In the experts' first "
        f"matrices the activation term is {number(mean['activation'])} of the output, the weight term "
        f"{number(mean['weight'])}, their product {number(mean['second_order'])}; what arrives from earlier layers is "
        f"{number(mean['drift'])}. The four add up to the measured difference, exactly."
    )


def _channels(data: dict[str, Any]) -> str:
    layers = data["layers"]

    def mean(pick: Callable[[dict[str, Any]], float]) -> float:
        return sum(pick(layer) for layer in layers) / len(layers)

    return (
        f"Half of the channels hold {mean(lambda la: la['shares'][4]):.0%} of the squared error (50 % if all lost "
        f"alike), "
        f"the top eighth {mean(lambda la: la['shares'][2]):.0%}. Between the two halves of the batch "
        f"{mean(lambda la: la['halves']):.0%} of the top eighth are the same, between a single token and the batch "
        f"{mean(lambda la: la['token_and_batch']):.0%} (12.5 % by chance). Choosing half of the channels for the whole "
        f"batch catches {mean(lambda la: la['captured']['batch']):.0%} of the error, in whole blocks of 16 "
        f"{mean(lambda la: la['captured']['block']):.0%}, for each token its own "
        f"{mean(lambda la: la['captured']['token']):.0%}."
    )


def _ratio(data: dict[str, Any]) -> str:
    text = []
    for entry in data["sets"]:
        rows = entry["rows"]
        best = min(rows, key=lambda row: row["mean"])
        half = {row["selection"]: row for row in rows if row["ratio"] == 0.5}
        text.append(
            f"On {', '.join(entry['sites'])}: {number(rows[0]['mean'])} without, at ratio 0.5 "
            f"{number(half['batch']['mean'])} "
            f"(batch) and {number(half['token']['mean'])} (token) for {100 * half['batch']['extra_mma']:.0f} % more "
            f"multiplications; at best {number(best['mean'])}."
        )
    return " ".join(text)


def _decompose(data: dict[str, Any]) -> str:
    rows = {(row["kind"], row["site"], row["format"]): row for row in data["rows"]}
    parts = []
    for site in ("w13", "w2", "qkv", "o"):
        row = rows["activation", site, "nvfp4"]
        parts.append(f"{site} {100 * row['total']:.2g} % ({100 * row['dead_fraction']:.0f} % of values become zero)")
    ratio = rows["activation", "w13", "mxfp4"]["total"] / rows["activation", "w13", "nvfp4"]["total"]
    return (
        f"Error energy of NVFP4 activations: {', '.join(parts)}. At w13, MXFP4 with its power-of-two scales makes "
        f"{ratio:.1f} times that error."
    )


def _drift(data: dict[str, Any]) -> str:
    pair = next(p for p in data["pairs"] if p["sides"] == ["learner", "engine"])
    return (
        f"In {data['batch']['dtype']} the learner and the {data['batch']['engine']} engine differ by "
        f"{number(pair['mean'])} nats on average and by {number(pair['max'])} at most; at the shown layer the "
        f"activations are "
        f"{number(data['map']['relative'])} apart (relative L2). No alignment of quantizers can get below that."
    )


TEXTS = {
    "recipes": Text(
        "Six recipes, one task",
        "The same training run under six precisions: unquantized (bf16), FP8 on both sides, and 4-bit rollouts with a "
        "plain "
        "learner (naive), with weight QDQ (qat), with weights and activations QDQ (symmetric), and with weight QDQ and "
        "residual compensation (quads). Bands run from the lowest to the highest seed.",
        _recipes,
    ),
    "arms": Text(
        "Variants of the recipes",
        "The same training run with one choice changed at a time: which matrix inputs are compensated, how many "
        "channels, how they are chosen, and what the learner quantizes. The Provenance has what each arm overrides.",
        _recipes,
    ),
    "scores": Text(
        "Is the policy bad, or its rollout?",
        "The last weights of each run, asked again under other rollout precisions: own is what the run was trained "
        "with, bf16 quantizes nothing, w4a16 quantizes the weights alone, start is the model before training. A bar at "
        "own far below the others is a good policy with a bad rollout.",
        _scores,
    ),
    "gap": Text(
        "The gap: which side, which operand",
        "W4A16 quantizes the rollout's weights only, W16A4 its activations only, W4A4 both; +res adds compensation. "
        "Each is "
        "met by four learners. Upper left: the mean gap of every pair. Upper right: the share of tokens whose gap "
        "exceeds a "
        "value. Middle: the W4A4 gap in parts, and against the ratio of compensated channels. Below: how often the "
        "sides "
        "choose other experts, and the gap when the rollout's layers are disturbed by relative noise.",
        _gap,
    ),
    "layers": Text(
        "Layer by layer",
        "Relative distance between learner and rollout at the input and output of each mixture of experts, and the "
        "terms of "
        "the error in the experts' first matrices: what earlier layers have changed (drift), what rounding the "
        "activations "
        "adds, what rounding the weights adds, and their product.",
        _layers,
    ),
    "channels": Text(
        "A few channels lose most",
        "Rounding error of the activations that enter the experts. Left: its size, by token and channel. Middle: the "
        "share of "
        "its energy that the worst channels hold. Right: how many of the worst eighth two layers have in common.",
        _channels,
    ),
    "ratio": Text(
        "What compensation buys, and its price",
        "Gap of the compensated rollout against the learner with weight QDQ. The channels are chosen once for the "
        "batch, in "
        "whole blocks of 16, or by each token. Right: the same against the multiplications it adds.",
        _ratio,
    ),
    "decompose": Text(
        "Three ways to be wrong in 4 bits",
        "Scale bias: the block's scale itself is rounded. Dead zone: small values become zero. Grid noise: eight "
        "levels are "
        "few. Energies are relative to the tensor's. Bias and noise partly cancel, so the total (green) lies below "
        "the stack.",
        _decompose,
    ),
    "drift": Text(
        "The floor",
        "Nothing is quantized; only the code differs: the learner's packed forward, the engine's model over whole "
        "sequences "
        "(packed), token by token (decode), and what the engine reported while sampling (engine).",
        _drift,
    ),
}
