"""What the residual costs on this GPU, as two operands and folded, beside FP8 and bf16; and tiles that nobody stored.

    python -m benchmarks.bench_residual [layer] [projections] [--tokens 16,64] [--tiles] [--no-check]

Shape of the 25.5B model: 128 experts, hidden 2048, width 768, top-8. The residual has every channel ("batch": half of
them), in the expert layer at w13. Routing is uniform, of 12 experts alone ("hot"), or with a share of 1 / rank an
expert ("zipf"). --tiles times launch configurations beside the stored ones: blocks of two sizes in the layer, and those
of projections.

Kernels are checked and compiled first, by processes of their own: codes against the definition, operands against the
reference bit for bit, 13 launches against each other. A time is the median of three rounds, each the median of graph
replays over rotating weights and routings; the spread is that of the rounds.
"""

import argparse
import functools
import os
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from multiprocessing import get_context
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

from benchmarks import baselines
from benchmarks.timing import graph_us, read_gbps
from benchmarks.tune_kernels import EXPERTS, HIDDEN, SHAPES, TOP_K, WIDTH, weight
from quads.quant.triton import ops as kernels
from quads.quant.triton.tune import ShapeClass, Tile, shape_class
from tests.numerics import kernel_checks as check

TOKENS = (16, 64, 256, 1024, 4096)
W4 = {  # precision, selection, folded
    "w4a4": ("w4a4", "all", False),
    "two": ("w4a4_residual", "all", False),
    "folded": ("w4a4_residual", "all", True),
    "batch": ("w4a4_residual", "batch", True),
}
FP8_TILES = tuple((bn, bk, 3, 4) for bn in (64, 128) for bk in (128, 256))
LARGE = {  # stored bm -> (large, its tile)
    8: (
        (16, Tile(64, 1, 3, 4)),
        (32, Tile(64, 1, 3, 4)),
        (32, Tile(64, 2, 3, 4)),
        (32, Tile(128, 1, 3, 4)),
        (64, Tile(64, 1, 3, 4)),
        (64, Tile(128, 1, 3, 4)),
    ),
    32: ((64, Tile(128, 1, 3, 4)), (128, Tile(128, 1, 3, 4)), (128, Tile(128, 1, 3, 8)), (64, Tile(64, 1, 3, 4))),
}
DENSE = {  # tokens -> (bm, tile)
    16: (
        (8, Tile(64, 2, 3, 2)),
        (8, Tile(64, 2, 3, 2, 2)),
        (16, Tile(64, 2, 3, 4)),
        (16, Tile(64, 2, 3, 4, 2)),
        (16, Tile(64, 2, 5, 4, 4)),
    ),
    64: (
        (32, Tile(64, 1, 3, 4)),
        (32, Tile(64, 1, 3, 4, 2)),
        (64, Tile(32, 1, 3, 2)),
        (64, Tile(32, 1, 4, 2)),
        (64, Tile(64, 1, 3, 4)),
        (64, Tile(64, 1, 3, 4, 2)),
        (64, Tile(64, 1, 3, 4, 4)),
    ),
    256: (
        (64, Tile(64, 1, 3, 4)),
        (64, Tile(128, 1, 3, 4)),
        (64, Tile(128, 1, 3, 4, 2)),
        (128, Tile(64, 1, 3, 4)),
        (128, Tile(128, 1, 3, 4)),
        (128, Tile(128, 1, 3, 8, 2)),
    ),
}


class Job(NamedTuple):
    """One cell: kind "layer" (how = routing) or "projection" (how = "qkv" or "o"); variant: a name, or fp8 with its bm
    and tile; row: a shape class in place of the stored one."""

    kind: str
    how: str
    tokens: int
    variant: str
    fp8: tuple = ()
    row: ShapeClass | None = None


Times = list[tuple[Job, list[float]]]  # microseconds of each round


@functools.cache
def weights(what: str, count: int) -> list:
    """w4, bf16 or fp8 weights of `count` layers or projections."""
    name, _, kind = what.partition(" ")
    if name == "layer":
        shapes = ((EXPERTS, 2 * WIDTH, HIDDEN), (EXPERTS, HIDDEN, WIDTH))
        if kind == "w4":
            return [(weight(shapes[0], True), weight(shapes[1])) for _ in range(count)]
        full = [tuple(torch.randn(s, device="cuda").bfloat16() * 0.02 for s in shapes) for _ in range(count)]
        return full if kind == "bf16" else [tuple(baselines.fp8_weight(w) for w in pair) for pair in full]
    if kind == "w4":
        return [weight(SHAPES[name]) for _ in range(count)]
    full = [torch.randn(SHAPES[name], device="cuda").bfloat16() * 0.02 for _ in range(count)]
    return full if kind == "bf16" else [baselines.fp8_weight(w) for w in full]


def instead(row: ShapeClass | None) -> AbstractContextManager:
    """Kernels take this shape class, if there is one, in place of the stored one."""
    return patch.object(kernels, "shape_class", lambda *arguments: row) if row else nullcontext()


def routing(how: str, tokens: int, generator: torch.Generator) -> torch.Tensor:
    """Expert ids int64 [tokens, 8]."""
    share = torch.ones(EXPERTS)
    if how == "hot":
        share[12:] = 0
    elif how == "zipf":
        share = 1 / torch.arange(1, EXPERTS + 1)
    scores = share.log() - (-torch.rand(tokens, EXPERTS, generator=generator).log()).log()
    order = torch.randperm(EXPERTS, generator=generator)
    return order[scores.topk(TOP_K).indices].cuda()


def calls(job: Job, repeats: int) -> list[Callable]:
    """What is captured in one graph."""
    generator = torch.Generator().manual_seed(job.tokens)  # the same routings for every variant
    if job.kind == "layer":
        stack = weights(f"layer {'w4' if job.variant in W4 else job.variant}", min(repeats, 2))
        x = [torch.randn(job.tokens, HIDDEN, device="cuda", dtype=torch.bfloat16) for _ in range(repeats)]
        ids = [routing(job.how, job.tokens, generator) for _ in range(repeats)]
        gates = [torch.rand(job.tokens, TOP_K, device="cuda").bfloat16() for _ in range(repeats)]

        def layer(i: int) -> None:
            pair = stack[i % len(stack)]
            if job.variant == "bf16":
                baselines.bf16_moe(x[i], *pair, ids[i], gates[i])
            elif job.variant == "fp8":
                bm, tile = job.fp8
                baselines.fp8_moe(x[i], *pair, ids[i], gates[i], bm, (tile, tile))
            else:
                precision, selection, fold = W4[job.variant]
                with instead(job.row):
                    kernels.moe(x[i], *pair, ids[i], gates[i], precision, selection=selection, fold=fold)  # pyright: ignore[reportArgumentType]

        return [functools.partial(layer, i) for i in range(repeats)]
    stack = weights(f"{job.how} {'w4' if job.variant in W4 else job.variant}", 2 * repeats)
    x = torch.randn(job.tokens, SHAPES[job.how][1], device="cuda", dtype=torch.bfloat16)

    def projection(w: Any) -> None:
        if job.variant == "bf16":
            torch.mm(x, w.t())
        elif job.variant == "fp8":
            q, s = baselines.fp8_rows(x)
            torch._scaled_mm(
                q, w[0].t(), s.unsqueeze(1), w[1].unsqueeze(0), out_dtype=torch.bfloat16, use_fast_accum=True
            )
        else:
            precision, selection, fold = W4[job.variant]
            with instead(job.row):
                kernels.linear(x, w, precision, selection=selection, fold=fold)  # pyright: ignore[reportArgumentType]

    return [functools.partial(projection, w) for w in stack]


def find_jobs(tables: list[str], sizes: list[int], tiles: bool) -> list[Job]:
    jobs = []
    for tokens in sizes:
        if "layer" in tables:
            for how in ("uniform", "hot", "zipf") if tokens <= 256 else ("uniform",):
                jobs += [Job("layer", how, tokens, name) for name in (*W4, "bf16")]
                rows = tokens * TOP_K / (12 if how == "hot" else EXPERTS)
                most = max((16 if how == "zipf" else 4) * rows, 16)
                for bm in (bm for bm in (16, 32, 64, 128) if rows / 2.1 <= bm <= most):
                    jobs += [Job("layer", how, tokens, "fp8", (bm, tile)) for tile in FP8_TILES]
                stored = shape_class(torch.device("cuda"), "moe", tokens * TOP_K / EXPERTS)
                for large, tile in LARGE.get(stored.bm, ()) if tiles and tokens <= 256 else ():
                    row = stored._replace(large=large, tiles=stored.tiles | {"w13_large": tile, "w2_large": tile})
                    jobs.append(Job("layer", how, tokens, "folded", row=row))
        for layer in ("qkv", "o") if "projections" in tables else ():
            jobs += [Job("projection", layer, tokens, name) for name in (*W4, "bf16", "fp8")]
            for bm, tile in DENSE.get(tokens, ()) if tiles else ():
                row = ShapeClass(float("inf"), bm, {"dense": tile})
                jobs.append(Job("projection", layer, tokens, "folded", row=row))
    return jobs


def check_codes(bm: int, tile: Tile) -> None:
    row = ShapeClass(float("inf"), bm, {"dense": tile})
    with instead(row):
        for fold in (False, True):
            check.check_every_code_and_scale("cuda", fold)


def check_operand(rows: int, k: int, selection: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        check.check_activation_quantizer(rows, k, selection, 0.5, "cuda", dtype)  # pyright: ignore[reportArgumentType]


def check_sums(rows: int, n: int, k: int) -> None:
    check.check_linear(rows, n, k, "w4a4_residual", "all", "cuda", fold=True)


def check_launches(job: Job) -> None:
    """13 launches of the same call give the same bits; a map with two sizes of blocks the sums of one with one."""
    captured = []
    real = kernels.moe if job.kind == "layer" else kernels.linear

    def keep(*args: Any, **kwargs: Any) -> torch.Tensor:
        captured.append(real(*args, **kwargs))
        return captured[-1]

    call = calls(job, 1)[0]
    with patch.object(kernels, real.__name__, keep):
        for _ in range(13):
            call()
    first = captured[0]
    assert first.isfinite().all() and all(torch.equal(first, each) for each in captured), "bits move"


def checks(tiles: bool) -> list[tuple[str, Callable, tuple]]:
    found = [
        (f"codes {bm} {tuple(tile)}", check_codes, (bm, tile))
        for bm, tile in (*LARGE[8], *LARGE[32], (8, Tile(64, 1, 3, 2)))
    ]
    for rows, k in ((7, 48), (64, 2064), (300, 2048), (700, 768)):
        found += [(f"operand {rows} {k} {s}", check_operand, (rows, k, s)) for s in ("batch", "token", "all")]
    found += [(f"sums {rows}", check_sums, (rows, 2048, 4096)) for rows in (5, 64, 200, 700)]
    jobs = [Job("layer", how, tokens, "folded") for tokens in TOKENS for how in ("uniform", "hot")]
    jobs += [Job("projection", "qkv", tokens, "folded") for tokens in TOKENS]
    if tiles:
        jobs += [job for job in find_jobs(["layer"], [16, 64, 256], True) if job.row]
    return found + [
        (f"launches {job.kind} {job.how} {job.tokens} {label(job)}", check_launches, (job,)) for job in jobs
    ]


def run_check(name: str, call: Callable, arguments: tuple) -> str:
    """Empty, or what is wrong."""
    torch.manual_seed(0)
    try:
        call(*arguments)
        torch.cuda.synchronize()
    except Exception as error:
        return f"{name}: {type(error).__name__} {str(error)[:300]}"
    return ""


def compile_job(job: Job) -> str:
    try:
        calls(job, 1)[0]()
        torch.cuda.synchronize()
    except Exception as error:
        return f"{label(job)} {job.how} {job.tokens}: {type(error).__name__} {str(error)[:100]}"
    return ""


def label(job: Job) -> str:
    if job.row is not None:
        tile = job.row.tiles.get("w13_large", job.row.tiles.get("dense"))
        size = f"{job.row.bm}/{job.row.large}" if job.row.large else job.row.bm
        return f"{size} {','.join(map(str, tile or ()))}"
    return job.variant


def time_all(jobs: list[Job], rounds: int = 3) -> Times:
    times: Times = [(job, []) for job in jobs]
    for _ in range(rounds):
        for job, us in times:
            try:
                us.append(graph_us(calls(job, 8 if job.tokens <= 256 else 4), replays=5))
            except Exception as error:
                if not us:
                    print("skipped:", label(job), job.how, job.tokens, str(error)[:80], flush=True)
    return [(job, us) for job, us in times if us]


def table(times: Times, kind: str) -> None:
    """A line for each routing or matrix and number of tokens: medians, ratios, and the tiles that were tried."""
    names = (*W4, "bf16", "fp8")
    print(
        f"\n{kind}, us: {'':16s}"
        + " ".join(f"{name:>8s}" for name in names)
        + "   two/w4a4 folded/w4a4 fp8/folded best/folded spread"
    )
    for how, tokens in dict.fromkeys((job.how, job.tokens) for job, _ in times if job.kind == kind):
        cells = [(job, us) for job, us in times if (job.kind, job.how, job.tokens) == (kind, how, tokens)]
        best: dict[str, float] = {}
        for job, us in cells:
            if job.row is None:
                best[job.variant] = min(best.get(job.variant, float("inf")), statistics.median(us))
        get = {name: best.get(name, float("nan")) for name in names}
        spread = max((max(us) - min(us)) / statistics.median(us) for _, us in cells)
        other = min(get["fp8"], get["bf16"])
        print(
            f"{how:>12s} {tokens:6d}      " + " ".join(f"{us:8.1f}" for us in get.values()),
            f"  {get['two'] / get['w4a4']:8.3f} {get['folded'] / get['w4a4']:11.3f} {get['fp8'] / get['folded']:10.2f}"
            f" {other / get['folded']:11.2f} {100 * spread:4.0f} %",
            flush=True,
        )
        tried = sorted((statistics.median(us), label(job)) for job, us in cells if job.row is not None)
        if tried:
            print("               tiles, folded: " + "; ".join(f"{name}: {us:.1f}" for us, name in tried), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="*", default=["layer", "projections"])
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    parser.add_argument("--tiles", action="store_true", help="also tiles that are not stored")
    parser.add_argument("--no-check", action="store_true")
    args = parser.parse_args()
    began = time.monotonic()
    jobs = find_jobs(args.tables, [int(each) for each in args.tokens.split(",")], args.tiles)
    workers = min(14, os.cpu_count() or 1)
    with ProcessPoolExecutor(workers, get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        todo = [] if args.no_check else checks(args.tiles)
        answers = [pool.submit(run_check, *each) for each in todo]
        compiled = [pool.submit(compile_job, job) for job in jobs]
        wrong = [text for text in (each.result() for each in answers) if text]
        failed = [text for text in (each.result() for each in compiled) if text]
    print(f"{len(todo)} checks, {len(wrong)} failed; {len(jobs)} cells, {len(failed)} do not run", end=" ")
    print(f"({time.monotonic() - began:.0f} s)", flush=True)
    for text in (*wrong, *failed):
        print(" ", text, flush=True)
    times = time_all(jobs)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, read {read_gbps():.0f} GB/s", end=", ")
    print(f"{time.monotonic() - began:.0f} s in all; residual: every channel, site w13", flush=True)
    for kind in ("layer", "projection"):
        if any(job.kind == kind for job, _ in times):
            table(times, kind)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
