"""`python -m quads.lab channels --config CONFIG`: which activation channels lose most to 4 bits, and how steadily.

R = Q_A(X) - X at the input of the experts' first matrices (w13), for the unquantized policy (paper, Fig. 4a):

    heat map     |R| over tokens and channels of one layer
    share        of ||R||^2 that the top channels hold, by layer. Half of the channels would hold half if all lost alike
    persistence  overlap of the top 12.5 % of channels: between the two halves of the batch, between a token and the
                 batch, and between layers. 12.5 % is what chance gives
    captured     share of ||R||^2 that lies in the selected channels at ratio 0.5, by kind of selection
"""

from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

from quads.config.options import whole
from quads.lab import style
from quads.lab.capture import capture
from quads.lab.policies import learner
from quads.lab.results import markdown, provenance, write_result
from quads.lab.subject import Subject, build_subject, subject_parser
from quads.quant import residual
from quads.quant.formats import FORMATS

HELP = "activation error by channel: heat map, concentration, persistence over tokens and layers"

SHARES = (0.01, 0.05, 0.125, 0.25, 0.5, 0.75)
TOP = 0.125  # of the channels, for persistence
MAP_TOKENS, MAP_CHANNELS = 64, 256  # size of the stored heat map


def channel_shares(r_TK: Tensor) -> list[float]:
    """Share of ||R||^2 in the top fraction of channels, for each of SHARES."""
    energy = r_TK.double().square().sum(0).sort(descending=True).values
    cumulated = torch.cat([energy.new_zeros(1), energy.cumsum(0)]) / energy.sum()
    return [float(cumulated[round(share * len(energy))]) for share in SHARES]


def top_channels(r_TK: Tensor) -> Tensor:
    """bool [K]: the TOP fraction with the most error."""
    return residual.select_channels(residual.channel_scores(r_TK, "batch"), TOP, "batch")


def overlap(a: Tensor, b: Tensor) -> float:
    """Share of the channels of `a` that `b` has too; bool masks of the same count."""
    return float((a & b).sum() / a.sum().clamp(min=1))


def captured_share(r_TK: Tensor, ratio: float, block: int) -> dict[str, float]:
    """Share of ||R||^2 in the selected channels, by selection. block: of the format."""
    energy = r_TK.double().square()
    shares = {}
    for selection in ("batch", "block", "token"):
        mask = residual.select_channels(residual.channel_scores(r_TK, selection), ratio, selection, block)
        shares[selection] = float(torch.where(mask, energy, 0.0).sum() / energy.sum())
    return shares


def measure(subject: Subject, batch_tokens: int, layer: int) -> dict[str, Any]:
    inputs = capture(learner(subject, "bf16", "bf16"), subject.sequences, batch_tokens).moe_in
    format, rule = FORMATS[subject.spec.format], subject.spec.rule(subject.spec.format)
    errors = [format.qdq_rows(x, rule, torch.float32) - x.float() for x in inputs]
    tops = [top_channels(r) for r in errors]
    layers = []
    for x, r, top in zip(inputs, errors, tops, strict=True):
        half = len(r) // 2
        token_mask = residual.select_channels(residual.channel_scores(r, "token"), TOP, "token")
        layers.append(
            {
                "relative_error": float(r.double().norm() / x.double().norm()),
                "shares": channel_shares(r),
                "captured": captured_share(r, 0.5, format.block),
                "halves": overlap(top_channels(r[:half]), top_channels(r[half:])),
                "token_and_batch": float((token_mask & top).sum(-1).double().mean() / top.sum().clamp(min=1)),
                "outlier_ratio": float(x.abs().amax() / x.double().square().mean().sqrt()),
            }
        )
    return {
        "batch": subject.facts,
        "share_points": list(SHARES),
        "layers": layers,
        "between_layers": [[overlap(a, b) for b in tops] for a in tops],
        "map": {"layer": layer, "channels": errors[layer].shape[1], "values": heat_map(errors[layer])},
    }


def heat_map(r_TK: Tensor) -> list[list[float]]:
    """|R| of the first MAP_TOKENS tokens; more than MAP_CHANNELS channels are cut into as many
    runs, of which the largest value is kept."""
    picture = r_TK[:MAP_TOKENS].abs()
    if picture.shape[1] > MAP_CHANNELS:
        picture = torch.stack([part.amax(1) for part in picture.tensor_split(MAP_CHANNELS, dim=1)], dim=1)
    return [[float(f"{value:.3g}") for value in row] for row in picture.tolist()]


def figure(data: dict[str, Any]) -> Figure:
    """Heat map, concentration by layer, overlap between layers."""
    fig, axes = style.new_figure(columns=3, width=4.8)
    picture = torch.tensor(data["map"]["values"])
    limit = float(picture.flatten().quantile(0.995))
    image = axes[0].imshow(picture.numpy(), aspect="auto", cmap="magma", vmax=limit, interpolation="nearest",
                           extent=(0, data["map"]["channels"], len(picture), 0))  # fmt: skip
    fig.colorbar(image, ax=axes[0], fraction=0.05)
    style.finish(axes[0], f"|R| at w13, layer {data['map']['layer'] + 1}", "channel", "token")
    axes[0].grid(False)
    for i, (share, colour) in enumerate(zip(data["share_points"], style.SEQUENCE, strict=False)):
        values, label = [100 * layer["shares"][i] for layer in data["layers"]], f"top {100 * share:g} %"
        axes[1].plot(range(1, len(values) + 1), values, marker="o", ms=3, lw=1.6, color=colour, label=label)
    axes[1].set_ylim(0, 100)
    style.whole_numbers(axes[1].xaxis)
    style.finish(axes[1], "Share of the error in the top channels", "layer", "share of ||R||² (%)")
    style.label_ends(axes[1])
    between = torch.tensor(data["between_layers"])
    edge = len(between) + 0.5
    image = axes[2].imshow(
        between.numpy(), cmap="viridis", vmin=0, vmax=1, extent=(0.5, edge, edge, 0.5), interpolation="nearest"
    )
    fig.colorbar(image, ax=axes[2], fraction=0.05)
    style.finish(axes[2], f"Overlap of the top {100 * TOP:g} %", "layer", "layer")
    axes[2].grid(False)
    for axis in (axes[2].xaxis, axes[2].yaxis):
        style.whole_numbers(axis)
    return fig


def tables(data: dict[str, Any]) -> str:
    """Markdown, at most ten layers."""
    chosen = sorted({round(i * (len(data["layers"]) - 1) / 9) for i in range(10)})
    header = ["layer", "error", "outlier", *(f"top {100 * s:g} %" for s in data["share_points"])]
    header += ["halves", "token", "50 % batch", "50 % block", "50 % token"]
    rows = []
    for index in chosen:
        layer = data["layers"][index]
        shares = [*layer["shares"], layer["halves"], layer["token_and_batch"], *layer["captured"].values()]
        cells = [
            f"{100 * layer['relative_error']:.1f} %",
            f"{layer['outlier_ratio']:.0f}",
            *(f"{100 * s:.0f} %" for s in shares),
        ]
        rows.append([str(index + 1), *cells])
    return (
        "error: ||R|| / ||X||. outlier: max |X| / rms X. top: share of ||R||^2 in the top channels. halves, token: "
        "overlap of the top 12.5 % between halves of the batch, and between a token and the batch. 50 %: share of "
        "||R||^2 in the channels selected at ratio 0.5.\n\n" + markdown(header, rows)
    )


def main(argv: list[str]) -> None:
    parser = subject_parser("channels", HELP)
    parser.add_argument(
        "--layer", type=whole(-1), default=-1, help="layer of the heat map, from 0 (default: -1, the middle one)"
    )
    args, overrides = parser.parse_known_args(argv)
    subject = build_subject(args, overrides, layer=args.layer)
    data = measure(subject, args.batch_tokens, subject.layer)
    path = write_result(args.out, "channels", provenance("channels", argv, subject.cfg, [subject.cfg.train.seed]), data)
    style.save(figure(data), path.with_suffix(".png"))
    print(tables(data))
    print(f"\nwrote {path} and channels.png")
