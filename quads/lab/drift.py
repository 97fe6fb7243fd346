"""`python -m quads.lab drift --config CONFIG`: how far the two sides differ without any quantization.

This is the floor below which no alignment reaches (paper, Section 4.5 and Fig. 9b). The policy is the same, unquantized
everywhere; what differs is the code that computes it:

    learner   the packed forward          packed   the native engine's model over whole sequences
    engine    log-probs as the engine of  decode   the native engine's model, prompt first and then token by token
              [rollout] engine reported them while it sampled (native or vllm)

and, for one layer, |A_learner - A_decode| at the input of the mixture, over tokens and channels. With dtype = float32
the native engine computes in float64 on a CPU; `--model.dtype bfloat16` shows what training in bf16 sees.
"""

from dataclasses import replace
from typing import Any

import torch
from matplotlib.figure import Figure

from quads.config.options import whole
from quads.lab import style
from quads.lab.capture import capture
from quads.lab.channels import SHARES, channel_shares, heat_map
from quads.lab.decode import decode, decoded_inputs
from quads.lab.policies import evaluate, gap_statistics, learner, rollout, routing_flips
from quads.lab.results import markdown, number, provenance, write_result
from quads.lab.subject import Subject, build_subject, subject_parser

HELP = "drift between learner and engines without quantization, by token and by channel"


def measure(subject: Subject, batch_tokens: int, layer: int) -> dict[str, Any]:
    plain_learner = learner(subject, "bf16", "bf16")
    engine_model = rollout(subject, replace(subject.spec, rollout="bf16"))
    sides = {
        "learner": evaluate(plain_learner, subject.sequences, batch_tokens),
        "packed": evaluate(engine_model, subject.sequences, batch_tokens),
        "decode": decode(engine_model, subject.sequences),
    }
    logprobs = {name: side.logprobs for name, side in sides.items()}
    logprobs["engine"] = subject.sequences.sampled_logprobs
    names = list(logprobs)
    pairs = [
        {"sides": [a, b], **gap_statistics(logprobs[a] - logprobs[b])}
        for i, a in enumerate(names)
        for b in names[i + 1 :]
    ]
    a = capture(plain_learner, subject.sequences, batch_tokens).moe_in[layer].double()
    difference = decoded_inputs(engine_model, subject.sequences, layer).double() - a
    return {
        "batch": {**subject.facts, "engine": subject.cfg.rollout.engine},
        "pairs": pairs,
        "routing_flips": routing_flips(sides["learner"], sides["decode"]),
        "map": {
            "layer": layer,
            "channels": a.shape[1],
            "values": heat_map(difference),
            "relative": float(difference.norm() / a.norm()),
            "shares": dict(zip(map(str, SHARES), channel_shares(difference), strict=True)) if difference.any() else {},
        },
    }


def figure(data: dict[str, Any]) -> Figure:
    """Heat map of the drift, and the pairs' mean and largest gap."""
    fig, axes = style.new_figure(columns=2, width=5.6)
    picture = torch.tensor(data["map"]["values"])
    limit = float(picture.flatten().quantile(0.995)) or 1.0
    extent = (0, data["map"]["channels"], len(picture), 0)
    image = axes[0].imshow(
        picture.numpy(), aspect="auto", cmap="magma", vmin=0, vmax=limit, interpolation="nearest", extent=extent
    )
    fig.colorbar(image, ax=axes[0], fraction=0.05)
    style.finish(axes[0], f"|A_learner - A_decode|, layer {data['map']['layer'] + 1}", "channel", "token")
    axes[0].grid(False)
    names = [" / ".join(pair["sides"]) for pair in data["pairs"]]
    series = {quantity: [max(pair[quantity], 1e-12) for pair in data["pairs"]] for quantity in ("mean", "max")}
    style.grouped_bars(axes[1], names, series, (style.BLUE, style.SKY))
    axes[1].set_yscale("log")
    style.finish(axes[1], "Log-prob drift, nothing quantized", "", "|gap| (nats)", legend=True)
    axes[1].set_xticks(range(len(names)), names, rotation=30, ha="right", fontsize=8.5)
    return fig


def tables(data: dict[str, Any]) -> str:
    """Markdown."""
    rows = [[" / ".join(p["sides"]), *(number(p[q]) for q in ("mean", "rms", "p99", "max"))] for p in data["pairs"]]
    shares = ", ".join(
        f"top {100 * float(s):g} % of channels: {100 * v:.0f} %" for s, v in data["map"]["shares"].items()
    )
    return (
        f"|gap| in nats, nothing quantized, {data['batch']['dtype']}, sampled by the "
        f"{data['batch']['engine']} engine:\n\n"
        + markdown(["sides", "mean", "rms", "p99", "max"], rows)
        + f"\n\nLayer {data['map']['layer'] + 1}: relative L2 {number(data['map']['relative'])}; share of its square: "
        f"{shares or 'no difference'}. Experts differ in {100 * data['routing_flips']:.2f} % of tokens x layers."
    )


def main(argv: list[str]) -> None:
    parser = subject_parser("drift", HELP)
    parser.add_argument(
        "--layer", type=whole(-1), default=-1, help="layer of the heat map, from 0 (default: -1, the middle one)"
    )
    args, overrides = parser.parse_known_args(argv)
    subject = build_subject(args, overrides, native=False, layer=args.layer)
    data = measure(subject, args.batch_tokens, subject.layer)
    path = write_result(args.out, "drift", provenance("drift", argv, subject.cfg, [subject.cfg.train.seed]), data)
    style.save(figure(data), path.with_suffix(".png"))
    print(tables(data))
    print(f"\nwrote {path} and drift.png")
