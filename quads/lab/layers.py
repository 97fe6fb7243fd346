"""`python -m quads.lab layers --config CONFIG`: where in the model learner and rollout part, and by which error.

Two views of the same forwards on the fixed tokens:

    mixtures  relative L2 distance between the sides at the input and at the output of every mixture of experts, for
              pairs of learner and rollout precision (paper, Figs. 4b and 7)
    terms     for every quantized matrix, Y_infer - Y_train split as in Eq. 11:

        Y_infer - Y_train = W eta  +  W dX  +  dW X  +  dW (eta + dX)
                            drift     activation weight  second order

              W, X are what the learner multiplies, eta = X_infer - X_train before quantization, dX what quantization
              changes on top, dW = W_infer - W_train. Norms are relative to ||W X||. With weight QDQ in the learner dW
              is zero; with activation QDQ dX becomes Q(X_infer) - Q(X_train) - eta (Eqs. 14 to 19). Experts are those
              that the learner chose.

Terms are taken over at most TERM_TOKENS tokens. `eta` here is not only rounding: it is everything that earlier layers
have done to the activations. That is why the term that looks like engine drift grows with depth under every 4-bit
rollout.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor

from quads.config import load_config
from quads.errors import UserError
from quads.lab import style
from quads.lab.capture import Captured, capture
from quads.lab.policies import learner, rollout
from quads.lab.results import config_argv, markdown, number, progress, provenance, write_result
from quads.lab.subject import Subject, build_subject, subject_parser
from quads.quant import residual
from quads.quant.formats import FORMATS
from quads.quant.masters import quantized_weights
from quads.quant.recipes import QuantSpec, four, precision, resolve
from quads.quant.sites import is_targeted
from quads.quant.tensor import QuantizedTensor

HELP = "per-layer mismatch of mixtures of experts, and the error terms of every matrix (Eq. 11)"


@dataclass(frozen=True)
class Pair:
    """A learner and a rollout that are compared. "4" is [quant] format."""

    label: str
    weights: str
    activations: str
    rollout: str


PAIRS = (
    Pair("plain / plain", "bf16", "bf16", "bf16"),
    Pair("no QDQ / W4A4", "bf16", "bf16", "w4a4"),
    Pair("weight QDQ / W4A4", "4", "bf16", "w4a4"),
    Pair("weight QDQ / W4A4+res", "4", "bf16", "w4a4_residual"),
    Pair("both QDQ / W4A4", "4", "4", "w4a4"),
    Pair("no QDQ / W4A16", "bf16", "bf16", "w4a16"),
    Pair("weight QDQ / W4A16", "4", "bf16", "w4a16"),
    Pair("no QDQ / W16A4", "bf16", "bf16", "w16a4"),
    Pair("activation QDQ / W16A4", "bf16", "4", "w16a4"),
)
DRAWN = 5  # of the pairs
TERM_TOKENS = 96  # at most so many tokens, evenly spaced, enter the terms; distances take all
TERMS = ("drift", "activation", "weight", "second_order")


def relative_distances(train: list[Tensor], infer: list[Tensor]) -> list[float]:
    """||infer - train|| / ||train|| of every layer."""
    return [float((b.double() - a.double()).norm() / a.double().norm()) for a, b in zip(train, infer, strict=True)]


def error_terms(w_train: Tensor, w_infer: Tensor, x_train: Tensor, x_infer: Tensor, eta: Tensor) -> dict[str, Tensor]:
    """The four terms of Eq. 11 and their sum, float64 [T, N].

    w_*: [N, K] or, one for each row, [T, N, K]. x_*: [T, K] as multiplied; eta [T, K] before quantization.
    """
    dw = w_infer - w_train
    activation_error = x_infer - x_train

    def times(w: Tensor, x: Tensor) -> Tensor:
        return torch.einsum("tnk,tk->tn", w, x) if w.dim() == 3 else x @ w.T

    terms = {
        "drift": times(w_train, eta),
        "activation": times(w_train, activation_error - eta),
        "weight": times(dw, x_train),
        "second_order": times(dw, activation_error),
    }
    return {**terms, "total": times(w_infer, x_infer) - times(w_train, x_train)}


class SiteWeights:
    """What each side multiplies at the sites of a layer, float64, from the master and from the shipped bytes."""

    def __init__(self, subject: Subject) -> None:
        self.master = {name: p.detach() for name, p in subject.master.named_parameters()}
        shipped = quantized_weights(subject.master, replace(subject.spec, rollout="w4a4"))
        self.quantized = {name: t for name, t in shipped if isinstance(t, QuantizedTensor)}
        self.stored_as = subject.spec.format, subject.spec.rule(subject.spec.format)  # (format, scale rule)

    def get(self, layer: int, site: str, quantized: bool) -> Tensor:
        """[N, K], or [E, N, K] for experts. Sites outside the targets are never quantized."""
        prefix = f"model.layers.{layer}."
        names = {
            "qkv": [f"self_attn.{p}_proj.weight" for p in "qkv"],
            "o": ["self_attn.o_proj.weight"],
            "w13": ["mlp.experts.gate_up_proj"],
            "w2": ["mlp.experts.down_proj"],
        }[site]
        return torch.cat([self._one(prefix + name, quantized) for name in names])

    def _one(self, name: str, quantized: bool) -> Tensor:
        if quantized and name in self.quantized:
            return self.quantized[name].dequantize(torch.float64).cpu()
        return self.master[name].double().cpu()


def multiplied(x: Tensor, activations: str, spec: QuantSpec, site: str = "") -> Tensor:
    """What a side multiplies for the input x: itself, its quantized value, or the compensated one. With a site it is
    what the rollout of `spec` multiplies there."""
    compensated = False
    if site:
        _, activations, compensated = precision(spec.rollout_precision(site), spec.format)
    name = four(activations, spec.format)
    if name == "bf16":
        return x.double()
    if compensated:
        arguments = x.float(), spec.ratio, spec.selection, None, name, spec.rule(name), spec.residual_scale
        if spec.operand == "folded":
            operand, scale = residual.compensate_folded(*arguments)
            return operand.double() * scale.double()
        main, rest = residual.compensate(*arguments)
        return main.double() - rest.double()
    return FORMATS[name].qdq_rows(x, spec.rule(name), torch.float32).double()


def pair_terms(
    pair: Pair, spec: QuantSpec, weights: SiteWeights, train: Captured, infer: Captured, layer: int
) -> dict[str, dict[str, float]]:
    """site -> norms of the terms relative to ||W X||, and how far their sum is from the total."""
    result = {}
    quantized_rollout = precision(spec.rollout, spec.format).weights != "bf16"
    for site in ("qkv", "o", "w13"):
        targeted = is_targeted(site, spec.targets)
        rows = slice(None, None, -(-len(train.sites[site][layer]) // TERM_TOKENS))  # evenly spaced tokens
        w_train = weights.get(layer, site, pair.weights == "4")
        w_infer = weights.get(layer, site, quantized_rollout)
        x_train, x_infer = train.sites[site][layer], infer.sites[site][layer]
        x_t = multiplied(x_train, pair.activations if targeted else "bf16", spec)[rows]
        x_i = multiplied(x_infer, "", spec, site)[rows]
        eta = (x_infer.double() - x_train.double())[rows]
        if site == "w13":
            norms, h_train, h_infer = _expert_terms(w_train, w_infer, x_t, x_i, eta, train.experts[rows, layer].long())
            result[site] = norms
            ids = train.experts[rows, layer].long().flatten()
            ht = multiplied(h_train, pair.activations if targeted else "bf16", spec)
            hi = multiplied(h_infer, "", spec, "w2")
            w2_train = weights.get(layer, "w2", pair.weights == "4")
            w2_infer = weights.get(layer, "w2", quantized_rollout)
            result["w2"] = _summed(_by_expert(w2_train, w2_infer, ht, hi, h_infer - h_train, ids))[0]
        else:
            result[site] = _summed([error_terms(w_train, w_infer, x_t, x_i, eta) | {"y": x_t @ w_train.T}])[0]
    return result


def _expert_terms(
    w_train: Tensor, w_infer: Tensor, x_t: Tensor, x_i: Tensor, eta: Tensor, ids_TA: Tensor
) -> tuple[dict[str, float], Tensor, Tensor]:
    """Terms of w13 on all (token, expert) rows, and the inner activations [T * A, I] of both sides."""
    top_k = ids_TA.shape[1]
    x_t, x_i, eta = (x.repeat_interleave(top_k, dim=0) for x in (x_t, x_i, eta))
    parts = _by_expert(w_train, w_infer, x_t, x_i, eta, ids_TA.flatten())
    norms, y_train, y_infer = _summed(parts, order=ids_TA.flatten())

    def inner(y: Tensor) -> Tensor:
        gate, up = y.chunk(2, dim=-1)
        return F.silu(gate) * up

    return norms, inner(y_train), inner(y_infer)


def _by_expert(
    w_train: Tensor, w_infer: Tensor, x_t: Tensor, x_i: Tensor, eta: Tensor, ids: Tensor
) -> list[dict[str, Tensor]]:
    """`error_terms` of each expert's rows, in expert order."""
    parts = []
    for expert in range(w_train.shape[0]):
        mine = ids == expert
        terms = error_terms(w_train[expert], w_infer[expert], x_t[mine], x_i[mine], eta[mine])
        parts.append(terms | {"y": x_t[mine] @ w_train[expert].T})
    return parts


def _summed(parts: list[dict[str, Tensor]], order: Tensor | None = None) -> tuple[dict[str, float], Tensor, Tensor]:
    """Relative norms over all parts; and Y_train, Y_infer, put back in row order if `order` has the rows' experts."""
    whole = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    scale = float(whole["y"].norm()) or 1.0
    norms = {name: float(whole[name].norm()) / scale for name in (*TERMS, "total")}
    norms["sum_error"] = float((sum(whole[name] for name in TERMS) - whole["total"]).norm()) / scale  # type: ignore[union-attr]
    y_train, y_infer = whole["y"], whole["y"] + whole["total"]
    if order is not None:
        places = order.argsort(stable=True)
        y_train, y_infer = (torch.empty_like(y).index_copy_(0, places, y) for y in (y_train, y_infer))
    return norms, y_train, y_infer


def measure(subject: Subject, batch_tokens: int) -> dict[str, Any]:
    weights = SiteWeights(subject)
    rollouts: dict[str, Captured] = {}
    learners: dict[tuple[str, str], Captured] = {}
    pairs = []
    for pair in PAIRS:
        progress(pair.label)
        formats, spec = (pair.weights, pair.activations), replace(subject.spec, rollout=pair.rollout)
        if pair.rollout not in rollouts:
            rollouts[pair.rollout] = capture(rollout(subject, spec), subject.sequences, batch_tokens)
        if formats not in learners:
            learners[formats] = capture(learner(subject, *formats), subject.sequences, batch_tokens)
        train, infer = learners[formats], rollouts[pair.rollout]
        num_layers = len(train.moe_out)
        terms = [pair_terms(pair, spec, weights, train, infer, layer) for layer in range(num_layers)]
        pairs.append(
            {
                "label": pair.label,
                "moe_in": relative_distances(train.moe_in, infer.moe_in),
                "moe_out": relative_distances(train.moe_out, infer.moe_out),
                "terms": {site: {t: [layer[site][t] for layer in terms] for t in terms[0][site]} for site in terms[0]},
            }
        )
    return {"batch": {**subject.facts, "tokens_in_terms": TERM_TOKENS}, "pairs": pairs}


def figure(data: dict[str, Any]) -> Figure:
    """Mixture inputs and outputs by layer; terms of the experts' first matrices."""
    fig, axes = style.new_figure(columns=3, width=4.6)
    colours = (style.GREY, style.RED, style.PURPLE, style.GREEN, style.ORANGE)
    for ax, key, title in ((axes[0], "moe_in", "MoE input"), (axes[1], "moe_out", "MoE output")):
        for pair, colour in zip(data["pairs"][:DRAWN], colours, strict=True):
            values = [max(v, 1e-9) for v in pair[key]]
            ax.plot(range(1, len(values) + 1), values, marker="o", ms=3, lw=1.6, color=colour, label=pair["label"])
        ax.set_yscale("log")
        style.finish(ax, f"{title}: distance between the sides", "layer", "relative L2")
        style.whole_numbers(ax.xaxis)
    style.legend_below(fig, axes[0], DRAWN)
    worst = next(pair for pair in data["pairs"] if pair["label"] == "no QDQ / W4A4")["terms"]["w13"]
    for term, colour in zip(TERMS, (style.GREY, style.ORANGE, style.BLUE, style.PURPLE), strict=True):
        values = worst[term]
        axes[2].plot(
            range(1, len(values) + 1), values, marker="o", ms=3, lw=1.6, color=colour, label=term.replace("_", " ")
        )
    style.finish(axes[2], "Eq. 11 at w13, no QDQ / W4A4", "layer", "norm relative to ||W X||", legend=True)
    style.whole_numbers(axes[2].xaxis)
    axes[2].set_ylim(0, 1.4 * max(max(worst[term]) for term in TERMS))  # room for the legend
    return fig


def tables(data: dict[str, Any]) -> str:
    """Markdown."""

    def last_and_mean(values: list[float]) -> str:
        return f"{number(sum(values) / len(values))} ({number(values[-1])})"

    rows = [[p["label"], last_and_mean(p["moe_in"]), last_and_mean(p["moe_out"])] for p in data["pairs"]]
    term_rows = []
    for pair in data["pairs"]:
        for site, terms in pair["terms"].items():
            means = [sum(terms[t]) / len(terms[t]) for t in (*TERMS, "total")]
            term_rows.append([pair["label"], site, *map(number, means)])
    return "\n".join(
        [
            "Relative L2 distance at the mixtures, mean over layers (last layer):\n",
            markdown(["learner / rollout", "MoE input", "MoE output"], rows),
            "\nTerms of Eq. 11, norms relative to ||W X||, mean over layers:\n",
            markdown(
                ["learner / rollout", "site", "drift", "activation", "weight", "second order", "total"], term_rows
            ),
        ]
    )


def main(argv: list[str]) -> None:
    args, overrides = subject_parser("layers", HELP).parse_known_args(argv)
    if resolve(load_config(config_argv(args.config, overrides)).quant).bf16_layers != "none":
        raise UserError('lab layers takes all layers alike; set quant.bf16_layers = "none"')
    subject = build_subject(args, overrides)
    data = measure(subject, args.batch_tokens)
    path = write_result(args.out, "layers", provenance("layers", argv, subject.cfg, [subject.cfg.train.seed]), data)
    style.save(figure(data), path.with_suffix(".png"))
    print(tables(data))
    print(f"\nwrote {path} and layers.png")
