"""`python -m quads.lab formats --config CONFIG`: recipes x formats in one table.

       without --rl, minutes on a CPU: the log-prob gap of every pair on responses that were sampled once (gaps.py).
--rl   (a GPU) GRPO of every recipe with every format under each correction of the loss: pass@1 on held-out prompts
       after --steps steps, judged in the precision that the run rolls out with and in bf16, mean and each seed.
       Many runs share a GPU (--jobs). The table may be filled in parts (--seconds ends one): the command again, with
       the same settings, fills what is missing, and --seconds 0 draws what there is.
"""

import argparse
import os
from pathlib import Path

from quads.config.options import real, whole
from quads.errors import UserError
from quads.lab import style
from quads.lab.formats import fill, gaps, show_rl
from quads.lab.formats.axes import COLUMNS, CORRECTIONS, ROWS, Axes, chosen
from quads.lab.results import provenance, write_result
from quads.lab.subject import build_subject, subject_parser

HELP = "recipes x formats: the log-prob gap of every pair, and what RL makes of it"


def main(argv: list[str]) -> None:
    parser = subject_parser("formats", HELP)
    parser.set_defaults(out=Path("lab/formats"))
    parser.add_argument("--rl", action="store_true", help="train every cell (a GPU)")
    parser.add_argument("--rows", default="", help="recipes, separated by commas (without --rl: by semicolons) "
                        "(default: all)")  # fmt: skip
    parser.add_argument("--columns", default=",".join(COLUMNS), help="formats with their scale rules (default: all)")
    parser.add_argument("--corrections", default=",".join(CORRECTIONS), help="with --rl: of the loss (default: all)")
    parser.add_argument("--steps", type=whole(1), default=40, help="with --rl: of training (default: 40)")
    parser.add_argument("--seeds", type=whole(1), default=2, help="with --rl: seeds 0, 1, ... (default: 2)")
    parser.add_argument("--jobs", type=whole(1), default=1, help="with --rl: runs at the same time (default: 1)")
    parser.add_argument("--seconds", type=real(low=0.0), default=None, help="with --rl: end this part then")
    args, others = parser.parse_known_args(argv)
    if not args.rl:
        show_gaps(args, argv, others)
        return
    axes = Axes(
        chosen(args.rows or ",".join(ROWS), list(ROWS), "--rows"),
        chosen(args.columns, list(COLUMNS), "--columns"),
        chosen(args.corrections, list(CORRECTIONS), "--corrections"),
        args.seeds,
    )
    cells = axes.cells()
    settings = fill.common_settings(cells[0].config(args.config, others))
    table = fill.Table(args.out / "formats_rl.json", argv, settings, args.steps)
    if args.seconds != 0:
        threads = max(1, (os.cpu_count() or 1) // args.jobs)
        fill.Filling(table, cells, args.config, others, args.jobs, threads).run(args.seconds)
    text = show_rl.tables(table.data, axes)
    args.out.mkdir(parents=True, exist_ok=True)
    table.path.with_suffix(".md").write_text(text + "\n", encoding="utf-8")
    style.save(show_rl.figure(table.data, axes), table.path.with_suffix(".png"))
    missing = len(table.missing(cells))
    print(f"{text}\n\n{missing} of {len(cells)} cells are missing; wrote {table.path}, .md and .png")
    for key, why in table.data["failed"].items():
        print(f"failed: {key}: {why}")


def show_gaps(args: argparse.Namespace, argv: list[str], others: list[str]) -> None:
    """The gap half: formats.json, .md and .png in --out."""
    rows = [name.strip() for name in args.rows.split(";") if name.strip()] or list(gaps.GAP_ROWS)
    unknown = [name for name in rows if name not in gaps.GAP_ROWS]
    if unknown:
        raise UserError(f"--rows {args.rows}: use names of {'; '.join(gaps.GAP_ROWS)}")
    columns = chosen(args.columns, list(COLUMNS), "--columns")
    for row in rows:
        for column in columns:
            gaps.cell_config(args.config, others, row, column)
    subject = build_subject(args, others)
    data = gaps.measure(subject, args.config, others, rows, columns, args.batch_tokens)
    path = write_result(args.out, "formats", provenance("formats", argv, subject.cfg, [subject.cfg.train.seed]), data)
    text = gaps.tables(data)
    path.with_suffix(".md").write_text(text + "\n", encoding="utf-8")
    style.save(gaps.figure(data), path.with_suffix(".png"))
    print(f"{text}\n\nwrote {path}, .md and .png")
