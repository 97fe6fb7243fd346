"""Rollout throughput in vLLM: this project's 4-bit layers beside stock precisions, on the 25.5B shape with random
weights.

    python benchmarks/bench_vllm.py [--engines fp8,w4a4,w4a4_residual] [--batches 16,64,256] [--new-tokens 200]
                                    [--rounds 2] [--arch moe25b_a3b] [--together 3] [--seeded] [--long 64,4096,4096]
                                    [--profile FOLDER] [--markdown FILE]

Every engine runs in a process of its own: `bf16`, `fp8` (vLLM's online quantization), `nvfp4` (vLLM's own choice of
kernel: Marlin on Hopper), and w4a16, w4a4, w4a4_residual of the plugin. The plugin's draw tokens with the trainer's
sampler (vllm/sampler.py), the stock ones with vLLM's, or with the trainer's too: `fp8+sampler`. Up to `together` of
them start at the same time and share the GPU's memory; a lock lets one measure at a time, while the others wait with an
idle GPU.

Equal work: router, embeddings, output layer and norms hold the same values in every engine, those of a model at its
start (normal, 0.02; norms 1). The other matrices are vLLM's dummy values, so small that the hidden states are the
embeddings: tokens spread over experts evenly, and equally in every engine. `experts_hit` says over how many. Prompts
are random tokens, responses have a fixed length, prefix caching is off, a warm-up of each batch size is not counted.
`tokens_per_s` includes the prefill; `decode_ms` is the median of the steps in the second half of the responses. `--long
B,P,N`: B sequences from P to P + N tokens, with the decode rate of each quarter.
For the plugin's engines a sync is timed too: all weights as bf16 tensors on the GPU, quantized and written in place.
Prints one JSON object a measurement. A second run finds vLLM's compiled graphs on disk: see `start_s`.
"""

import argparse
import fcntl
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quads.model.config import ARCHITECTURES, ModelConfig
from quads.model.hf import parameter_shapes
from quads.rollout.vllm.options import METHOD
from quads.rollout.vllm.setup import cache_root, model_folder

PLUGIN = ("w4a16", "w4a4", "w4a4_residual")
NVFP4_CONFIG = {
    "quant_method": "modelopt",
    "quant_algo": "NVFP4",
    "group_size": 16,
    "ignore": ["lm_head", "*.mlp.gate"],
}
WARM_UP_TOKENS = 32
SAMPLER = "+sampler"  # behind the name of a stock precision: with the trainer's sampler
LONGEST = 8192  # of max_model_len: the same engine for short and long responses
PROFILED_STEPS = 10  # decode steps whose kernels are listed


def engine_arguments(engine: str, selection: str) -> dict[str, Any]:
    """What tells vLLM the precision."""
    engine = engine.removesuffix(SAMPLER)
    if engine in PLUGIN:
        options = {"precision": engine, "targets": ["experts", "attention"], "residual_selection": selection}
        return {"quantization": METHOD, "hf_overrides": {"quantization_config": {"quant_method": METHOD, **options}}}
    if engine == "fp8":
        return {"quantization": "fp8"}
    return {"hf_overrides": {"quantization_config": NVFP4_CONFIG}} if engine == "nvfp4" else {}


def bf16_weights(config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """Every parameter once, with the values that vLLM's dummy loader gives a parameter of that size. Tensors of one
    shape share them, so that memory holds one layer's worth."""
    from vllm.model_executor.model_loader.weight_utils import initialize_single_dummy_weight

    values: dict[torch.Size, Tensor] = {}
    for name, shape in parameter_shapes(config).items():
        if shape not in values:
            values[shape] = torch.empty(shape, dtype=torch.bfloat16, device="cuda")
            initialize_single_dummy_weight(values[shape])
        yield name, values[shape]


@contextmanager
def turn(lock: str) -> Iterator[None]:
    """Wait until no other engine measures."""
    if not lock:
        yield
        return
    with Path(lock).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def run_engine(arguments: argparse.Namespace) -> None:
    """In a process of its own: build, sync if it can, measure."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM

    from quads.rollout.vllm.patches import install_sampler
    from quads.rollout.vllm.plugin import register
    from quads.rollout.vllm.setup import register_models

    register()
    register_models()
    config, engine = ARCHITECTURES[arguments.arch], arguments.engine
    if engine in PLUGIN or engine.endswith(SAMPLER):
        install_sampler()
    batches = [int(b) for b in arguments.batches.split(",")]
    long = [int(n) for n in arguments.long.split(",")] if arguments.long else []
    longest = max(LONGEST, arguments.prompt_tokens + arguments.new_tokens, sum(long[1:]))
    kv_bytes = kv_size(config, max(batches), arguments.prompt_tokens + arguments.new_tokens)
    if long:
        kv_bytes = max(kv_bytes, kv_size(config, long[0], sum(long[1:])))
    precision = engine_arguments(engine, arguments.selection)
    start = time.perf_counter()
    llm = LLM(
        model=str(model_folder(cache_root(), config, precision)),
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=longest,
        max_num_seqs=max(batches),
        max_num_batched_tokens=max(8192, longest),
        enable_prefix_caching=False,
        kv_cache_memory_bytes=kv_bytes,
        gpu_memory_utilization=0.01,
        disable_log_stats=True,
        logprobs_mode="processed_logprobs",
        compilation_config={"cudagraph_capture_sizes": sorted(batches)},
        **precision,
    )
    show(arguments, start_s=round(time.perf_counter() - start, 1))
    with turn(arguments.lock):
        if engine in PLUGIN:
            (quant_config,) = llm.apply_model(lambda model: model.quant_config)
            print(quant_config.banner(), flush=True)
            for _ in range(2):
                show(arguments, **measure_sync(llm, config))
        (hit,) = llm.apply_model(lambda model: spread_tokens(model, batches, config.top_k))
        show(arguments, experts_hit=hit)
        generator = torch.Generator().manual_seed(0)
        passes = ["warm-up", *["round"] * arguments.rounds, *["seeded"] * arguments.seeded] if arguments.rounds else []
        for kind in passes:
            for batch in batches:
                new = WARM_UP_TOKENS if kind == "warm-up" else arguments.new_tokens
                times = generate(llm, config, generator, batch, arguments.prompt_tokens, new, kind == "seeded")
                if kind != "warm-up":
                    key = "seeded_tokens_per_s" if kind == "seeded" else "tokens_per_s"
                    decode = statistics.median(step_seconds(times, arguments.new_tokens // 2))
                    rates = {key: round(batch * arguments.new_tokens / times[-1]), "decode_ms": round(1000 * decode, 3)}
                    show(arguments, sequences=batch, **rates)
        if arguments.profile:
            for batch in batches:
                profile(llm, arguments, config, generator, batch)
        if long:
            batch, prompt, new = long
            times = generate(llm, config, generator, batch, prompt, new)
            steps = step_seconds(times, new - new // 32)  # the first few still share their steps with prompts
            quarters = [steps[i * len(steps) // 4 : (i + 1) * len(steps) // 4] for i in range(4)]
            show(
                arguments,
                sequences=batch,
                context=[prompt, prompt + new],
                tokens_per_s=round(batch * new / times[-1]),
                decode_tokens_per_s=round(batch * len(steps) / sum(steps)),
                decode_tokens_per_s_by_quarter=[round(batch * len(quarter) / sum(quarter)) for quarter in quarters],
            )


def kv_size(config: ModelConfig, batch: int, longest: int) -> int:
    """Bytes for `batch` sequences of `longest` tokens in blocks of 16, and a block more each."""
    token = 2 * config.num_layers * config.num_kv_heads * config.head_dim * 2
    return token * batch * (longest + 32) + (64 << 20)


def generate(
    llm: Any, config: ModelConfig, generator: torch.Generator, batch: int, prompt: int, new: int, seeded: bool = False
) -> list[float]:
    """`batch` responses of `new` tokens to prompts of `prompt` tokens: the seconds from the start to the end of every
    step."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    prompts = torch.randint(0, config.vocab_size, (batch, prompt), generator=generator).tolist()
    torch.cuda.synchronize()
    start, times = time.perf_counter(), []
    for i, tokens in enumerate(prompts):
        params = SamplingParams(
            max_tokens=new,
            ignore_eos=True,
            detokenize=False,
            seed=i if seeded else None,
            logprobs=0,
            flat_logprobs=True,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        llm.llm_engine.add_request(str(i), {"prompt_token_ids": tokens}, params)
    while llm.llm_engine.has_unfinished_requests():
        llm.llm_engine.step()
        times.append(time.perf_counter() - start)
    return times


def step_seconds(times: list[float], count: int) -> list[float]:
    """How long each of the last `count` steps took."""
    return [after - before for before, after in pairwise(times)][-count:]


@torch.no_grad()
def spread_tokens(model: Any, batches: list[int], top_k: int) -> dict[int, float]:
    """Fill what decides the routing; returns the mean number of experts that a batch of each size meets in a layer."""
    generator = torch.Generator("cuda").manual_seed(0)
    gates = []
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if name.endswith("norm"):
            weight.fill_(1.0)
        elif name.endswith(("embed_tokens", "lm_head")):
            weight.normal_(0.0, 0.02, generator=generator)
        elif name.endswith("mlp.gate"):
            shape = sorted(weight.shape)  # [experts, hidden]
            gates.append(
                torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_(0.0, 0.02, generator=generator)
            )
            fill_gate(module, gates[-1])
    hit = {}
    for batch in batches:
        tokens = torch.randint(0, 100_000, (batch,), device="cuda", generator=generator)
        hidden = model.model.embed_tokens.weight[tokens]
        counts = [(hidden @ gate.t()).topk(top_k, dim=-1).indices.unique().numel() for gate in gates]
        hit[batch] = round(sum(counts) / len(counts), 1)
    return hit


def fill_gate(module: Any, values: Tensor) -> None:
    """values: bf16 [experts, hidden]. vLLM's fp8 quantizes the router too, with one scale, and stores it transposed."""
    weight = module.weight
    if weight.dtype == torch.bfloat16:
        weight.copy_(values)
        return
    scale = values.abs().amax().float() / torch.finfo(weight.dtype).max
    codes = (values.float() / scale).to(weight.dtype)
    weight.copy_(codes if weight.shape == codes.shape else codes.t())
    module.weight_scale.fill_(scale)


def profile(
    llm: Any, arguments: argparse.Namespace, config: ModelConfig, generator: torch.Generator, batch: int
) -> None:
    """Writes what the GPU does in a decode step of `batch` sequences: a long response less a short one, by kernel."""
    totals: list[dict[str, tuple[float, int]]] = []
    for new in (2, 2 + PROFILED_STEPS):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            generate(llm, config, generator, batch, arguments.prompt_tokens, new)
        totals.append({e.key: (e.self_device_time_total, e.count) for e in profiler.key_averages()})
    short, long = totals
    rows = []
    for name, (time_us, count) in long.items():
        less_us, less = short.get(name, (0.0, 0))
        rows.append(((time_us - less_us) / PROFILED_STEPS, (count - less) / PROFILED_STEPS, name))
    rows.sort(reverse=True)
    lines = [f"{sum(row[0] for row in rows) / 1000:.3f} ms of kernels a step", "   us a step  launches  kernel"]
    lines += [f"{us:12.1f}  {count:8.1f}  {name[:110]}" for us, count, name in rows[:40]]
    Path(arguments.profile).mkdir(parents=True, exist_ok=True)
    (Path(arguments.profile) / f"{arguments.engine}_{batch}.txt").write_text("\n".join(lines) + "\n")


def show(arguments: argparse.Namespace, **values: Any) -> None:
    print(json.dumps({"engine": arguments.engine, "arch": arguments.arch, **values}), flush=True)


def measure_sync(llm: Any, config: ModelConfig) -> dict[str, float]:
    """Seconds of a whole sync from bf16 tensors on the GPU, and GiB that it needed beyond what was allocated."""
    weights = list(bf16_weights(config))
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before, start = torch.cuda.memory_allocated(), time.perf_counter()
    with torch.no_grad():
        llm.apply_model(lambda model: model.quant_config.state.ledger.begin())
        llm.apply_model(lambda model: model.load_weights((name, tensor.detach()) for name, tensor in weights))
    torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    extra = (torch.cuda.max_memory_allocated() - before) / 2**30
    return {"sync_s": round(seconds, 3), "sync_extra_gib": round(extra, 2)}


def report(rows: list[dict[str, Any]], arguments: argparse.Namespace) -> str:
    """The measurements as a Markdown table, every round."""
    batches = arguments.batches.split(",")
    sizes = f"prompts of {arguments.prompt_tokens} tokens, {arguments.new_tokens} new tokens"
    where = f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Python {platform.python_version()}"
    lines = [
        f"`{arguments.arch}`, random weights, {sizes}; {where}, commit {commit()}.",
        f"Tokens/s of each of {arguments.rounds} rounds. `{' '.join(sys.argv)}`",
        "",
        "| engine | " + " | ".join(f"{b} sequences" for b in batches) + " | sync s | sync extra GiB | start s |",
        "| --- |" + " --- |" * (len(batches) + 3),
    ]
    for engine in arguments.engines.split(","):
        mine = [row for row in rows if row["engine"] == engine]
        rates = [
            " / ".join(
                str(row["tokens_per_s"])
                for row in mine
                if row.get("sequences") == int(batch) and "tokens_per_s" in row and "context" not in row
            )
            for batch in batches
        ]
        sync = next((row for row in reversed(mine) if "sync_s" in row), {"sync_s": "", "sync_extra_gib": ""})
        start = next((row["start_s"] for row in mine if "start_s" in row), "failed")
        lines.append(f"| {engine} | {' | '.join(rates)} | {sync['sync_s']} | {sync['sync_extra_gib']} | {start} |")
    return "\n".join(lines)


def commit() -> str:
    result = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return result.stdout.strip() or "unknown"


def run_group(engines: list[str], lock: str, rows: list[dict[str, Any]]) -> None:
    """A process for each of `engines`, all at once; their lines are printed as they come."""

    def follow(engine: str) -> None:
        command = [sys.executable, __file__, *sys.argv[1:], "--engine", engine, "--lock", lock]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                print(line, end="", flush=True)
                if line.startswith("{"):
                    rows.append(json.loads(line))

    threads = [threading.Thread(target=follow, args=(engine,)) for engine in engines]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--engines", default="fp8,w4a4,w4a4_residual")
    parser.add_argument("--engine", default="", help=argparse.SUPPRESS)
    parser.add_argument("--batches", default="16,64,256")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--arch", default="moe25b_a3b")
    parser.add_argument("--selection", default="batch", help="of residual channels: batch, block, token")
    parser.add_argument("--together", type=int, default=1, help="engines that start at the same time")
    parser.add_argument("--seeded", action="store_true", help="a further round with a seed for each request")
    parser.add_argument("--profile", default="", help="folder for a table of GPU kernels of each engine and batch")
    parser.add_argument(
        "--long", default="", help="SEQUENCES,PROMPT,NEW: decode rate from context PROMPT to PROMPT + NEW"
    )
    parser.add_argument("--lock", default="", help="file that is locked while an engine measures (default: a new one)")
    parser.add_argument("--markdown", type=Path, default=None)
    arguments = parser.parse_args()
    if arguments.engine:
        run_engine(arguments)
        return
    rows: list[dict[str, Any]] = []
    engines = arguments.engines.split(",")
    with tempfile.TemporaryDirectory() as folder:
        for first in range(0, len(engines), arguments.together):
            run_group(engines[first : first + arguments.together], arguments.lock or str(Path(folder) / "lock"), rows)
    table = report(rows, arguments)
    print(table)
    if arguments.markdown:
        arguments.markdown.write_text(table + "\n")


if __name__ == "__main__":
    main()
