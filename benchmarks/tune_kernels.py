"""Find the launch configurations of the 4-bit GEMM on this GPU and write quads/quant/triton/tuned/NAME.json.

    python -m benchmarks.tune_kernels OUT.json [moe] [dense] [--tokens 16,64] [--seconds 60]

Times one layer of 128 experts (hidden 2048, width 768, top-8) and the attention projections (2048 -> 5120, 4096 ->
2048). Candidates are compiled by all CPU cores first, in processes of their own.
"""

import argparse
import functools
import itertools
import json
import os
import re
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch
import triton

from benchmarks.timing import graph_us
from quads.quant.triton import ops as kernels
from quads.quant.triton.activations import Compensation, Operand
from quads.quant.triton.dense import expanded
from quads.quant.triton.routing import Routing, max_blocks, route
from quads.quant.triton.tune import ShapeClass, Tile

EXPERTS, HIDDEN, WIDTH, TOP_K = 128, 2048, 768, 8
SHAPES = {"w13": (2 * WIDTH, HIDDEN), "w2": (HIDDEN, WIDTH), "qkv": (5120, 2048), "o": (2048, 4096)}
ROUTED = {1: (8,), 16: (8,), 64: (8, 16), 256: (16, 32), 1024: (32, 64), 4096: (64, 128)}
DENSE = {1: (8,), 16: (8, 16), 64: (16, 32, 64), 256: (32, 64, 128)}
TABLES = {"moe": (ROUTED, ("w13", "w2")), "dense": (DENSE, ("qkv", "o"))}
H200_MULTIPROCESSORS = 132
CLASS_ENDS = {1: 0.5, 16: 2, 64: 6, 256: 24, 1024: 96, 4096: None}  # tokens per expert


def candidates(bm: int, residual: bool) -> list[Tile]:
    """Tiles of a routed layer; what was never within 10 % of the best is left out."""
    columns = 2 * bm if residual else bm
    out = []
    depths = (2, 3) if columns > 32 else (3, 4)
    for (bn, warps), kstep, stages in itertools.product(((64, 2), (128, 4), (128, 8)), (1, 2), depths):
        if columns > 32 and kstep == 2 or columns <= 8 and kstep == 1 and warps == 4:
            continue
        if warps == 2 and columns > 16 or warps == 8 and columns < 32:
            continue
        out.append(Tile(bn, kstep, stages, warps))
    return out


def dense_candidates(
    layer: str, tokens: int, bm: int, residual: bool, multiprocessors: int = H200_MULTIPROCESSORS
) -> list[Tile]:
    """Tiles of a linear layer, of two steps or more, that give half a program to eight programs to a multiprocessor."""
    columns = 2 * bm if residual else bm
    out = []
    shapes = ((64, 2), (64, 4), (128, 4), (128, 8))
    for (bn, warps), kstep, stages, split in itertools.product(shapes, (1, 2), (3, 5), (1, 2, 4, 8)):
        programs = -(-tokens // bm) * SHAPES[layer][0] // bn * split
        if kstep != 2 and columns < 32 or kstep != 1 and columns > 32 or warps < 4 and columns > 16:
            continue
        steps = SHAPES[layer][1] // 128 // kstep // split
        if warps == 8 and columns < 64 or stages == 5 and (tokens > 16 or steps < 4) or steps < 2:
            continue
        if 0.5 <= programs / multiprocessors <= 8:
            out.append(Tile(bn, kstep, stages, warps, split))
    return out


def launcher(job: tuple, weights: list, routings: list) -> Callable[[int], None]:
    """The GEMM of a job (layer, tokens, bm, tile, residual) with the i-th weight and routing."""
    layer, tokens, bm, tile, residual = job
    n, k = SHAPES[layer]
    routed = layer in ("w13", "w2")
    blocks = max_blocks(tokens * TOP_K, EXPERTS, bm) if routed else -(-tokens // bm)
    rows = blocks * bm if layer == "w2" else tokens
    count = 2 * rows if residual else rows
    operand = Operand(torch.randn(count, k, device="cuda").bfloat16(), torch.rand(count, device="cuda"), None, residual)
    row = ShapeClass(float("inf"), bm, {layer if routed else "dense": tile})
    width = {"w13": WIDTH, "w2": HIDDEN}.get(layer, n)
    out_rows = {"w13": blocks * bm, "w2": tokens * TOP_K}.get(layer, tokens)
    out = torch.empty(out_rows, width, dtype=torch.bfloat16, device="cuda")

    def call(i: int) -> None:
        weight = weights[i % len(weights)]
        if routed:
            top_k = TOP_K if layer == "w13" else 1  # x of w2 has a row a slot
            how = {"layer": layer, "n_rows": tokens * TOP_K, "routing": routings[i], "top_k": top_k}
        else:
            how = {"layer": "dense", "n_rows": tokens}
        kernels._gemm(operand, weight, out, row=row, name="", blocks=blocks, **how)

    return call


def measure(job: tuple, weights: list, routings: list) -> float:
    call = launcher(job, weights, routings)
    repeats = 8 if job[1] <= 256 else 4
    return graph_us([lambda i=i: call(i) for i in range(repeats)], replays=5)


def shape_of(layer: str) -> tuple[int, ...]:
    return (EXPERTS, *SHAPES[layer]) if layer in ("w13", "w2") else SHAPES[layer]


@functools.cache
def blank(layer: str) -> kernels.KernelWeight:
    """A weight whose bytes do not matter."""
    return kernels.KernelWeight(shape_of(layer), swiglu=layer == "w13", device="cuda")


def precompile(job: tuple) -> None:
    """One launch, as it will be timed: what a kernel is compiled for depends on every argument."""
    _, tokens, bm, *_ = job
    routings = [] if job[0] in ("qkv", "o") else [random_routing(tokens, bm)]
    try:
        launcher(job, [blank(job[0])], routings)(0)
        torch.cuda.synchronize()
    except Exception as error:  # a configuration that does not fit is found again, and skipped, when it is timed
        print("does not compile:", job, str(error)[:80])


def precompile_expanded(layer: str) -> None:
    for residual in (False, True):
        expand_us([blank(layer)], 64, residual)


def random_routing(tokens: int, bm: int) -> Routing:
    return route(torch.rand(tokens, EXPERTS, device="cuda").topk(TOP_K).indices, EXPERTS, bm)


def expand_us(weights: list, tokens: int, residual: bool) -> float:
    """The whole linear layer by way of a bfloat16 weight."""
    x = torch.randn(tokens, weights[0].k, device="cuda", dtype=torch.bfloat16)
    how = Compensation(0.5, "token")
    precision = "w4a4_residual" if residual else "w4a4"
    return graph_us([lambda w=w: expanded(x, w, precision, how, None) for w in weights], replays=5)


def weight(shape: tuple[int, ...], swiglu: bool = False) -> kernels.KernelWeight:
    w = torch.randn(shape, device="cuda", dtype=torch.bfloat16) * 0.02
    return kernels.KernelWeight.from_packed(*kernels.quantize(w), swiglu=swiglu)


def pretty(content: dict) -> str:
    """JSON with one shape class a line."""
    text = json.dumps(content, indent=1)
    for opening, inside, closing in (("[", r"[^\[\]{}]*?", "]"), ("{", r"\"up_to\"[^{}]*?", "}")):
        pattern = rf"\{opening}\s+({inside})\s+\{closing}"
        text = re.sub(pattern, lambda m, o=opening, c=closing: o + re.sub(r"\s+", " ", m[1]) + c, text)
    return text + "\n"


def find_jobs(asked: list[str], sizes: list[int], multiprocessors: int = H200_MULTIPROCESSORS) -> list[tuple]:
    """(layer, tokens, bm, tile, residual) of everything to time on a GPU with so many multiprocessors."""
    jobs = []
    for name, (table, layers) in TABLES.items():
        for tokens, bms in table.items() if name in asked else ():
            for bm, residual, layer in itertools.product(bms, (False, True), layers):
                if tokens not in sizes or residual and (bm > 64 or layer == "w2"):
                    continue  # w2 is compensated only on request: plain tiles serve
                if name == "moe":
                    tiles = candidates(bm, residual)
                else:
                    tiles = dense_candidates(layer, tokens, bm, residual, multiprocessors)
                jobs += [(layer, tokens, bm, tile, residual) for tile in tiles]
    return jobs


def compile_all(jobs: list[tuple], dense: bool) -> None:
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
        waiting = [pool.submit(precompile_expanded, layer) for layer in ("qkv", "o") if dense]
        distinct = {}
        for job in jobs:
            layer, tokens, bm, tile, residual = job
            distinct.setdefault((layer, tokens == 1, tokens <= 16, bm, tile, residual), job)
        waiting += [pool.submit(precompile, job) for job in distinct.values()]
        for each in waiting:
            each.result()


def time_all(jobs: list[tuple], stacks: dict[str, list], until: float) -> dict[tuple, float]:
    """Microseconds of each job, of as many as there is time for."""
    times: dict[tuple, float] = {}
    routings: dict[tuple, list] = {}
    for job in jobs:
        layer, tokens, bm, *_ = job
        if time.monotonic() > until:
            print(len(jobs) - len(times), "configurations not timed", flush=True)
            break
        if layer in ("w13", "w2") and (tokens, bm) not in routings:
            routings[tokens, bm] = [random_routing(tokens, bm) for _ in range(8)]
        try:
            times[job] = measure(job, stacks[layer], routings.get((tokens, bm), []))
        except Exception as error:
            print("skipped:", job, type(error).__name__, str(error)[:100], flush=True)
    return times


def best_row(times: dict[tuple, float], name: str, tokens: int, residual: bool) -> tuple[float, dict] | None:
    """(microseconds of both layers, the row of the tuning file) for the fastest bm; None if none was timed."""
    table, pair = TABLES[name]
    options = []
    for bm in table[tokens]:
        tiles = []
        for layer in pair:
            plain = not residual or layer == "w2"
            us = {j[3]: t for j, t in times.items() if j[:3] == (layer, tokens, bm) and j[4] != plain}
            tiles.append(min(((t, tile) for tile, t in us.items()), default=None))
        if None not in tiles:
            options.append((tiles[0][0] + tiles[1][0], bm, tiles))
    for total, bm, ((first, tile), (second, other)) in sorted(options):
        label = name + (" residual" if residual else "")
        print(f"{label} {tokens}: bm {bm} {first:.1f} {tuple(tile)} + {second:.1f} {tuple(other)} = {total:.1f} us")
    if not options:
        return None
    total, bm, ((_, tile), (_, other)) = min(options)
    names = ("w13", "w2") if name == "moe" else ("dense", "narrow")
    up_to = CLASS_ENDS[tokens] if name == "moe" else tokens
    return total, {"up_to": up_to, "bm": bm, names[0]: list(tile), names[1]: list(other)}


def expand_from(stacks: dict[str, list], best: dict[int, float], residual: bool) -> float:
    """The most tokens that the GEMM still serves faster than torch with an expanded weight does."""
    name, served = "dense residual" if residual else "dense", 0
    for tokens, gemms in best.items():
        us = sum(expand_us(stacks[layer], tokens, residual) for layer in ("qkv", "o"))
        print(f"{name} {tokens}: by an expanded weight {us:.1f} us, quantization included")
        if us - 6 < gemms:  # the GEMMs were timed without their two quantizations
            break
        served = tokens
    return served


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="tuning file; classes that are not timed keep their rows")
    parser.add_argument("layers", nargs="*", default=["moe", "dense"])
    parser.add_argument("--tokens", default=",".join(map(str, ROUTED)))
    parser.add_argument("--seconds", type=float, default=float("inf"), help="time nothing new after so long")
    args = parser.parse_args()
    began = time.monotonic()
    multiprocessors = torch.cuda.get_device_properties().multi_processor_count
    jobs = find_jobs(args.layers, [int(each) for each in args.tokens.split(",")], multiprocessors)
    print(f"{len(jobs)} configurations for {multiprocessors} multiprocessors", flush=True)
    compile_all(jobs, "dense" in args.layers)
    print(f"compiled after {time.monotonic() - began:.0f} s", flush=True)
    stacks = {
        layer: [weight(shape_of(layer), layer == "w13") for _ in range(2)]
        for layer in ("w13", "w2")
        if "moe" in args.layers
    }
    stacks |= {layer: [weight(SHAPES[layer]) for _ in range(16)] for layer in ("qkv", "o") if "dense" in args.layers}
    times = time_all(jobs, stacks, began + args.seconds)
    print(f"timed after {time.monotonic() - began:.0f} s", flush=True)
    args.out.with_suffix(".all").write_text(json.dumps([[*j[:3], *j[3], j[4], us] for j, us in times.items()]))

    classes: dict[str, list] = json.loads(args.out.read_text())["classes"] if args.out.exists() else {}
    for name, residual in itertools.product(args.layers, (False, True)):
        found = {tokens: best_row(times, name, tokens, residual) for tokens in TABLES[name][0]}
        found = {tokens: each for tokens, each in found.items() if each is not None}
        rows = {row["up_to"]: row for row in classes.get(name + "_residual" * residual, [])}
        rows |= {row["up_to"]: row for _, row in found.values()}
        if name == "dense":
            served = expand_from(stacks, {tokens: us for tokens, (us, _) in found.items()}, residual)
            rows = {up_to: row for up_to, row in rows.items() if up_to is not None and up_to <= served}
            rows[None] = {"up_to": None, "bm": 64, "dense": [128, 1, 3, 4], "expand": True}
        order = sorted(rows, key=lambda up_to: float("inf") if up_to is None else up_to)
        classes[name + "_residual" * residual] = [rows[up_to] for up_to in order]
    content = {
        "device": torch.cuda.get_device_name(),
        "found_by": "python -m benchmarks.tune_kernels",
        "versions": {"torch": torch.__version__, "triton": triton.__version__},
        "tile": list(Tile._fields),
        "classes": classes,
    }
    args.out.write_text(pretty(content))


if __name__ == "__main__":
    main()
