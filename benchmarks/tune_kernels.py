"""Find the launch configurations of the 4-bit GEMM on this GPU and write quads/quant/tuned/NAME.json.

    python -m benchmarks.tune_kernels OUT.json [moe] [dense]

Classes that are not asked for are taken over from OUT.json, if it exists.

Times one layer of 128 experts (hidden 2048, width 768, top-8) and the attention projections (2048 -> 5120, 4096 ->
2048). Candidates are compiled by all CPU cores first, in processes of their own.
"""

import itertools
import json
import os
import re
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch

from benchmarks.timing import graph_us
from quads.quant import kernels
from quads.quant.kernels_dense import expanded
from quads.quant.kernels_gemm import w4_gemm_kernel
from quads.quant.kernels_moe import max_blocks, route
from quads.quant.kernels_quantize import Compensation, Operand
from quads.quant.kernels_tune import ShapeClass, Tile

EXPERTS, HIDDEN, WIDTH, TOP_K = 128, 2048, 768, 8
SHAPES = {"w13": (2 * WIDTH, HIDDEN), "w2": (HIDDEN, WIDTH), "qkv": (5120, 2048), "o": (2048, 4096)}
MODES = {"w13": "gather", "w2": "scatter", "qkv": "dense", "o": "dense"}
ROUTED = {1: (8,), 16: (8,), 64: (8, 16), 256: (16, 32), 1024: (32, 64), 4096: (64, 128)}
DENSE = {1: (8,), 16: (8, 16), 64: (16, 32, 64), 256: (32, 64, 128)}
NUMBERS = ("n_rows", "N", "NB", "KB", "stride_x", "stride_out")
MULTIPROCESSORS = 132
CLASS_ENDS = {1: 0.5, 16: 2, 64: 6, 256: 24, 1024: 96, 4096: None}  # tokens per expert


def candidates(bm: int, residual: bool) -> list[Tile]:
    """Tiles of a routed layer; what was never within 10 % of the best is left out."""
    columns = 2 * bm if residual else bm
    out = []
    for (bn, warps), kstep, stages in itertools.product(((64, 2), (128, 4)), (1, 2), (2, 3, 4)):
        if columns > 32 and (warps < 4 or kstep == 2) or columns <= 8 and kstep == 1:
            continue
        if columns > 16 and warps < 4 or columns > 128 and bn == 128:
            continue
        out.append(Tile(bn, kstep, stages, warps))
    return out


def dense_candidates(layer: str, tokens: int, bm: int, residual: bool) -> list[Tile]:
    """Tiles of a linear layer, as far as programs that share K do not make more than eight for a multiprocessor."""
    columns = 2 * bm if residual else bm
    out = []
    for (bn, warps), kstep, split in itertools.product(((64, 2), (64, 4), (128, 4)), (1, 2), (1, 2, 4, 8)):
        programs = -(-tokens // bm) * SHAPES[layer][0] // bn * split
        if kstep != 2 and columns < 32 or kstep != 1 and columns > 32 or warps < 4 and columns > 16:
            continue
        if split == 1 or programs <= 8 * MULTIPROCESSORS:
            out.append(Tile(bn, kstep, 3, warps, split))
    return out


def arguments(layer: str, tokens: int, bm: int, tile: Tile, residual: bool) -> dict:
    n, k = SHAPES[layer]
    routed = layer in ("w13", "w2")
    pairs = tokens * TOP_K if routed else tokens
    stride_out = {"w13": WIDTH, "w2": HIDDEN}.get(layer, n)
    numbers = {
        "n_rows": pairs,
        "N": n,
        "NB": -(-n // 128),
        "KB": -(-k // 128),
        "stride_x": k,
        "stride_out": stride_out,
    }
    constants = {
        "TOP_K": TOP_K if layer == "w13" else 1,
        "BM": bm,
        "BN": tile.bn,
        "KSTEP": tile.kstep if -(-k // 128) // tile.split % tile.kstep == 0 else 1,
        "MODE": MODES[layer],
        "SCALED": True,
        "RESIDUAL": residual,
        "SPLIT": tile.split,
        "ASM": True,
        "launch_pdl": pairs >= EXPERTS if routed else tokens <= 16,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }
    return {**numbers, **constants}


def signature(args: dict) -> str:
    """What tells compiled kernels apart: constants, and which integers are 1 or multiples of 16."""
    kinds = {name: (value == 1, value % 16 == 0) for name, value in args.items() if name in NUMBERS}
    return str(args | kinds)


def precompile(job: tuple) -> None:
    pointers = (torch.bfloat16, torch.float32, torch.int16, torch.uint8, torch.float32, torch.int32, torch.int32)
    try:
        out = torch.bfloat16 if job[3].split == 1 else torch.float32
        w4_gemm_kernel.warmup(*pointers, out, grid=(1,), **arguments(*job))
    except Exception as error:  # a configuration that does not fit is found again, and skipped, when it is timed
        print("does not compile:", job, str(error)[:80])


def precompile_expanded(shape: tuple[int, int]) -> None:
    for residual in (False, True):
        expand_us([weight(shape)], 64, residual)


def measure(layer: str, tokens: int, bm: int, tile: Tile, residual: bool, weights: list, routings: list) -> float:
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
            kernels._gemm(operand, weight, out, layer, row, "", blocks, tokens * TOP_K, routings[i], TOP_K)
        else:
            kernels._gemm(operand, weight, out, "dense", row, "", blocks, tokens)

    repeats = 8 if tokens <= 256 else 4
    return graph_us([lambda i=i: call(i) for i in range(repeats)], replays=5)


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
    return re.sub(r"\{\s+(\"up_to\"[^{}]*?)\s+\}", lambda m: "{" + re.sub(r"\s+", " ", m[1]) + "}", text) + "\n"


def main() -> None:
    began = time.monotonic()
    asked = sys.argv[2:] or ["moe", "dense"]
    tables = [each for each in (("moe", ROUTED, ("w13", "w2")), ("dense", DENSE, ("qkv", "o"))) if each[0] in asked]
    jobs = []
    for name, table, layers in tables:
        for tokens, bms in table.items():
            for bm, residual, layer in itertools.product(bms, (False, True), layers):
                if residual and (bm > 64 or layer == "w2"):  # w2 is compensated only on request: plain tiles serve
                    continue
                routed = name == "moe"
                tiles = candidates(bm, residual) if routed else dense_candidates(layer, tokens, bm, residual)
                jobs += [(layer, tokens, bm, tile, residual) for tile in tiles]
    distinct = {signature(arguments(*job)): job for job in jobs}
    print(len(jobs), "configurations,", len(distinct), "kernels", flush=True)
    stacks: dict[str, list] = {}
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
        waiting = []
        if "dense" in asked:
            waiting += [pool.submit(precompile_expanded, SHAPES[layer]) for layer in ("qkv", "o")]
        waiting += [pool.submit(precompile, job) for job in distinct.values()]
        if "moe" in asked:
            stacks["w13"] = [weight((EXPERTS, 2 * WIDTH, HIDDEN), True) for _ in range(2)]
            stacks["w2"] = [weight((EXPERTS, HIDDEN, WIDTH)) for _ in range(2)]
        if "dense" in asked:
            stacks |= {layer: [weight(SHAPES[layer]) for _ in range(16)] for layer in ("qkv", "o")}
        for each in waiting:
            each.result()
    print(f"compiled after {time.monotonic() - began:.0f} s", flush=True)
    times: dict[tuple, float] = {}
    routing_cache: dict[tuple, list] = {}
    for job in jobs:
        layer, tokens, bm, tile, residual = job
        if layer in ("w13", "w2") and (tokens, bm) not in routing_cache:
            ids = [torch.rand(tokens, EXPERTS, device="cuda").topk(TOP_K).indices for _ in range(8)]
            routing_cache[tokens, bm] = [route(each, EXPERTS, bm) for each in ids]
        try:
            times[job] = measure(*job, stacks[layer], routing_cache.get((tokens, bm), []))
        except Exception as error:
            print("skipped:", job, type(error).__name__, str(error)[:100], flush=True)
    print(f"timed after {time.monotonic() - began:.0f} s", flush=True)

    target = Path(sys.argv[1])
    classes: dict[str, list] = json.loads(target.read_text())["classes"] if target.exists() else {}
    classes = {name: rows for name, rows in classes.items() if name.removesuffix("_residual") not in asked}
    best_us: dict[tuple[str, int], float] = {}
    for residual in (False, True):
        suffix = "_residual" if residual else ""
        for name, table, pair in tables:
            rows = classes.setdefault(name + suffix, [])
            for tokens, bms in table.items():
                options = []
                for bm in bms:
                    found = {job: us for job, us in times.items() if job[1] == tokens and job[2] == bm}
                    if name == "moe":
                        first = {job[3]: us for job, us in found.items() if job[0] == "w13" and job[4] == residual}
                        second = {job[3]: us for job, us in found.items() if job[0] == "w2" and not job[4]}
                        if first and second:
                            best = [min(each, key=each.get) for each in (first, second)]
                            options.append((first[best[0]] + second[best[1]], bm, best, first, second))
                    else:
                        first, second = (
                            {job[3]: us for job, us in found.items() if job[0] == layer and job[4] == residual}
                            for layer in pair
                        )
                        if first and second:
                            best = [min(each, key=each.get) for each in (first, second)]
                            options.append((first[best[0]] + second[best[1]], bm, best, first, second))
                us, bm, best, first, second = min(options, key=lambda option: option[0])
                row: dict = {"up_to": CLASS_ENDS[tokens] if name == "moe" else tokens}
                row["bm"] = bm
                for layer, tile in zip(("w13", "w2") if name == "moe" else ("dense", "narrow"), best, strict=True):
                    row[layer] = list(tile)
                rows.append(row)
                best_us[name + suffix, tokens] = us
                for other in sorted(options):
                    print(
                        name + suffix,
                        tokens,
                        "bm",
                        other[1],
                        [tuple(t) for t in other[2]],
                        f"{other[0]:.1f} us",
                        end=" ",
                    )
                    print(f"= {min(other[3].values()):.1f} + {min(other[4].values()):.1f}")
    if "dense" in asked:
        for residual in (False, True):
            name = "dense_residual" if residual else "dense"
            for tokens in DENSE:
                us = sum(expand_us(stacks[layer], tokens, residual) for layer in ("qkv", "o"))
                print(name, tokens, f"expanded: {us:.1f} us with quantization")
                if us - 6 < best_us[name, tokens]:  # the other time is without quantization
                    classes[name] = [row for row in classes[name] if row["up_to"] < tokens]
                    break
            classes[name].append({"up_to": None, "bm": 64, "dense": [128, 1, 3, 4], "expand": True})
    content = {
        "device": torch.cuda.get_device_name(),
        "found_by": "python -m benchmarks.tune_kernels",
        "versions": {"torch": torch.__version__, "triton": __import__("triton").__version__},
        "tile": ["bn", "kstep", "stages", "warps"],
        "classes": classes,
    }
    target.write_text(pretty(content))
    every = [[*job[:3], *job[3], job[4], us] for job, us in times.items()]
    target.with_suffix(".all").write_text(json.dumps(every))


if __name__ == "__main__":
    main()
