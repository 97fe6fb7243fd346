"""Tables of the 4-bit kernels on this GPU: quantizers, expert layer, attention projections; beside FP8, bf16, floors.

    python -m benchmarks.bench_kernels [quantize] [experts] [attention] [--tokens 16,64] [--hot 16]
        [--tuned FILE.json]

Model shape: 128 experts, hidden 2048, width 768, top-8 (25.5B parameters). Everything runs in CUDA graphs over rotating
weights and routings; a time is the median, and covers the whole layer: quantization, routing, both GEMMs, SwiGLU, the
weighted sum. A floor is the bytes that must move over the read bandwidth measured in the same run.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks import baselines, vllm_baselines
from benchmarks.timing import copy_gbps, graph_us, read_gbps
from benchmarks.tune_kernels import EXPERTS, HIDDEN, TOP_K, WIDTH, weight
from quads.quant.triton import ops as kernels
from quads.quant.triton import tune as kernels_tune
from quads.quant.triton.activations import Compensation, quantize_activations
from quads.quant.triton.pack import weight_amax

TOKENS = (1, 16, 64, 256, 1024, 4096)
VARIANTS = {
    "w4a16": ("w4a16", "batch"),
    "w4a4": ("w4a4", "batch"),
    "+res batch": ("w4a4_residual", "batch"),
    "+res token": ("w4a4_residual", "token"),
    "+res 2:4": ("w4a4_residual", "2:4"),
    "+res all": ("w4a4_residual", "all"),
}


def quantizers(copy: float) -> None:
    print(f"\nquantizers, GB/s moved and share of the copy bandwidth {copy:.0f} GB/s")
    for rows, k in ((8192, 2048), (32768, 2048), (16384, 4096)):
        quantizer_rows(rows, k, copy)


def quantizer_rows(rows: int, k: int, copy: float) -> None:
    sets = [torch.randn(rows, k, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
    wide = [x.view(16, rows // 16, k) for x in sets]
    g = [torch.full((16,), 2.0**-9, device="cuda") for _ in sets]
    gs = [torch.full((16,), 2.0**9, device="cuda") for _ in sets]
    tiles = [kernels.KernelWeight(x.shape, device="cuda").quantize_(x, each) for x, each in zip(wide, g, strict=True)]
    packed = [kernels.quantize(x, each) for x, each in zip(wide, g, strict=True)]
    half = 2.0 + 0.5625
    jobs: list[tuple[str, float, Callable]] = [
        ("quantize rows to codes", half, lambda i: quantize_activations(sets[i], k, codes=True)),
        ("quantize rows to values", 4.0, lambda i: quantize_activations(sets[i], k)),
        ("weight pack, g given", half, lambda i: kernels.quantize(wide[i], g[i], gs=gs[i])),
        ("weight into tiles, g given", half, lambda i: tiles[i].quantize_(wide[i], g[i], gs=gs[i])),
        ("packed weight into tiles", 2 * 0.5625, lambda i: tiles[i].load_(*packed[i])),
        ("weight QDQ, g given", 4.0, lambda i: kernels.qdq(wide[i], g[i], gs=gs[i], dtype=torch.bfloat16)),
        ("weight amax", 2.0, lambda i: weight_amax(wide[i])),
    ]
    for selection, reads in (("token", 1), ("batch", 2), ("block", 2)):
        how = Compensation(0.5, selection)
        per_element = 2.0 * reads + 1.125
        name = f"+ residual, {selection}, codes"
        jobs.append((name, per_element, lambda i, how=how: quantize_activations(sets[i], k, how, codes=True)))
        name, per_element = f"+ residual, {selection}, values", 2.0 * reads + 4.0
        jobs.append((name, per_element, lambda i, how=how: quantize_activations(sets[i], k, how)))
    for name, per_element, call in jobs:
        us = graph_us([lambda i=i, call=call: call(i) for i in range(4)])
        gbps = rows * k * per_element / us / 1000
        print(f"  {rows:6d} x {k}  {name:28s} {us:8.1f} us  {gbps:6.0f} GB/s  {100 * gbps / copy:4.0f} %", flush=True)


def fastest(calls: dict) -> tuple[float, object]:
    """Of several configurations, (us, its key); NaN if none runs."""
    times = {}
    for key, make in calls.items():
        try:
            times[key] = graph_us(make, replays=5)
        except Exception as error:
            print("  skipped", key, type(error).__name__, str(error)[:90])
    key = min(times, key=lambda each: times[each], default=None)
    return times.get(key, float("nan")), key


def experts(read: float, sizes: list[int], hot: int) -> None:
    w4 = [(weight((EXPERTS, 2 * WIDTH, HIDDEN), True), weight((EXPERTS, HIDDEN, WIDTH))) for _ in range(2)]
    shapes = ((EXPERTS, 2 * WIDTH, HIDDEN), (EXPERTS, HIDDEN, WIDTH))
    full = [tuple(torch.randn(s, device="cuda").bfloat16() * 0.02 for s in shapes) for _ in range(2)]
    fp8 = [tuple(baselines.fp8_weight(w) for w in pair) for pair in full]
    print("\nexpert layer, us (whole layer); ratio = fastest FP8 / each, and Marlin / each")
    others = vllm_baselines.layers(full, fp8)
    print(
        "  tokens    hit  floor w4     bf16      fp8 fp8 torch vllm fp8   marlin "
        + " ".join(f"{name:>10s}" for name in VARIANTS)
    )
    for tokens in sizes:
        expert_row(tokens, w4, full, fp8, others, read, hot)


def expert_row(tokens: int, w4: list, full: list, fp8: list, others: dict[str, list], read: float, hot: int) -> None:
    repeats = 8 if tokens <= 256 else 4
    span = range(repeats)
    x = [torch.randn(tokens, HIDDEN, device="cuda", dtype=torch.bfloat16) for _ in span]
    ids = [torch.rand(tokens, hot, device="cuda").topk(TOP_K).indices for _ in span]
    ids = [torch.randperm(EXPERTS, device="cuda")[each] for each in ids]
    if tokens == 1:  # disjoint experts, so that no weight is still in the cache
        ids = [torch.arange(TOP_K, device="cuda").view(1, TOP_K) + TOP_K * i for i in span]
    gates = [torch.rand(tokens, TOP_K, device="cuda").bfloat16() for _ in span]
    hit = sum(i.unique().numel() for i in ids) / repeats
    floor = hit * 3 * HIDDEN * WIDTH * 0.5625 / read / 1000
    bf16, _ = fastest({0: [lambda i=i: baselines.bf16_moe(x[i], *full[i % 2], ids[i], gates[i]) for i in span]})
    grouped, _ = fastest(
        {0: [lambda i=i: baselines.scaled_grouped_moe(x[i], *fp8[i % 2], ids[i], gates[i]) for i in span]}
    )
    per_expert = tokens * TOP_K / EXPERTS
    bms = (16,) if per_expert <= 2 else (16, 32) if per_expert <= 6 else (16, 32, 64) if per_expert <= 24 else (64, 128)

    def fp8_calls(bm, config):
        return [lambda i=i: baselines.fp8_moe(x[i], *fp8[i % 2], ids[i], gates[i], bm, (config, config)) for i in span]

    configs = {(bm, config): fp8_calls(bm, config) for bm in bms for config in baselines.FP8_CONFIGS}
    native, which = fastest(configs)

    ids32, gates32 = [i.int() for i in ids], [g.float() for g in gates]
    stock = {
        name: fastest({0: [lambda i=i, each=each: each[i % 2](x[i], ids32[i], gates32[i]) for i in span]})[0]
        for name, each in others.items()
    }
    marlin, vllm_fp8 = stock.get("marlin", float("nan")), stock.get("vllm fp8", float("nan"))

    def w4_us(precision, selection):
        return graph_us(
            [lambda i=i: kernels.moe(x[i], *w4[i % 2], ids[i], gates[i], precision, selection=selection) for i in span]
        )

    row = [w4_us(*variant) for variant in VARIANTS.values()]
    baseline = min(us for us in (native, grouped, vllm_fp8) if us == us)
    print(
        f"{tokens:8d} {hit:6.1f} {floor:9.1f} {bf16:8.1f} {native:8.1f} {grouped:9.1f} {vllm_fp8:8.1f} {marlin:8.1f} "
        + " ".join(f"{us:10.1f}" for us in row)
        + "   ratio "
        + " ".join(f"{baseline / us:.2f}" for us in row)
        + "   marlin "
        + " ".join(f"{marlin / us:.2f}" for us in row)
        + f"   fp8 bm, (bn, bk, stages, warps): {which}",
        flush=True,
    )


def attention(read: float, sizes: list[int]) -> None:
    print("\nattention projections, us (quantization and GEMM); ratio = FP8 (torch._scaled_mm, rows) / each")
    for n, k in ((5120, 2048), (2048, 4096)):
        w4 = [weight((n, k)) for _ in range(16)]
        full = [torch.randn(n, k, device="cuda").bfloat16() * 0.02 for _ in range(16)]
        fp8 = [baselines.fp8_weight(w) for w in full]
        print(f"{k} -> {n}: tokens, floor w4, bf16, fp8, " + ", ".join(VARIANTS))
        for tokens in sizes:
            x = torch.randn(tokens, k, device="cuda", dtype=torch.bfloat16)
            attention_row(x, w4, full, fp8, n * k * 0.5625 / read / 1000)


def attention_row(x: torch.Tensor, w4: list, full: list, fp8: list, floor: float) -> None:
    def scaled(w):
        q, s = baselines.fp8_rows(x)
        return torch._scaled_mm(
            q, w[0].t(), s.unsqueeze(1), w[1].unsqueeze(0), out_dtype=torch.bfloat16, use_fast_accum=True
        )

    bf16 = graph_us([lambda w=w: x @ w.t() for w in full])
    native, _ = fastest({0: [lambda w=w: scaled(w) for w in fp8]})
    row = [
        graph_us([lambda w=w, p=precision, s=selection: kernels.linear(x, w, p, selection=s) for w in w4])
        for precision, selection in VARIANTS.values()
    ]
    print(
        f"  {x.shape[0]:6d} {floor:7.1f} {bf16:8.1f} {native:8.1f}   "
        + " ".join(f"{us:8.1f}" for us in row)
        + "   ratio "
        + " ".join(f"{native / us:.2f}" for us in row),
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="*", default=["quantize", "experts", "attention"])
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    parser.add_argument("--hot", type=int, default=EXPERTS, help="experts that tokens choose from (uneven routing)")
    parser.add_argument("--tuned", help="launch configurations in place of the stored ones")
    args = parser.parse_args()
    sizes = [int(each) for each in args.tokens.split(",")]
    if args.tuned:
        classes = kernels_tune.load(Path(args.tuned))
        kernels_tune.stored = lambda name: classes
    copy, read = copy_gbps(), read_gbps()
    print(torch.cuda.get_device_name(), "torch", torch.__version__, f"copy {copy:.0f} GB/s, read {read:.0f} GB/s")
    if "quantize" in args.tables:
        quantizers(copy)
    if "experts" in args.tables:
        experts(read, sizes, args.hot)
    if "attention" in args.tables:
        attention(read, sizes)


if __name__ == "__main__":
    main()
