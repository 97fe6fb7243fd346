"""Rollout throughput in vLLM: this project's 4-bit layers beside stock precisions, on the 25.5B shape with random
weights.

    python benchmarks/bench_vllm.py [--engines fp8,w4a4,w4a4_residual] [--batches 16,64,256] [--new-tokens 200]
                                    [--rounds 2] [--arch moe25b_a3b] [--markdown FILE]

Every engine runs in a process of its own: `bf16`, `fp8` (vLLM's online quantization), `nvfp4` (vLLM's own choice of
kernel: Marlin on Hopper), and w4a16, w4a4, w4a4_residual of the plugin. Prompts are random tokens, responses have a
fixed length, prefix caching is off, one warm-up of each batch size is not counted. For the plugin's engines a sync is
timed too: all weights as bf16 tensors on the GPU, quantized and written in place. Prints one JSON object a
measurement.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quads.model.config import ARCHITECTURES, ModelConfig
from quads.model.hf import parameter_shapes
from quads.rollout.vllm_folder import write_model_folder
from quads.rollout.vllm_options import PluginOptions

STOCK = ("bf16", "fp8", "nvfp4")
PLUGIN = ("w4a16", "w4a4", "w4a4_residual")
NVFP4_CONFIG = {
    "quant_method": "modelopt",
    "quant_algo": "NVFP4",
    "group_size": 16,
    "ignore": ["lm_head", "*.mlp.gate"],
}


def engine_arguments(engine: str) -> dict[str, Any]:
    """What tells vLLM the precision."""
    if engine in PLUGIN:
        options = PluginOptions(precision=engine, targets=("experts", "attention"))
        return {"quantization": "quads", "hf_overrides": {"quantization_config": options.to_dict()}}
    if engine == "fp8":
        return {"quantization": "fp8"}
    return {"hf_overrides": {"quantization_config": NVFP4_CONFIG}} if engine == "nvfp4" else {}


def bf16_weights(config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """Every parameter once. Tensors of one shape share a few random values, so that memory holds one layer's worth."""
    values: dict[torch.Size, Tensor] = {}
    for name, shape in parameter_shapes(config).items():
        if shape not in values:
            scale = 0.02 if len(shape) > 1 else 1.0
            values[shape] = torch.randn(shape, dtype=torch.bfloat16, device="cuda") * scale
        yield name, values[shape]


def run_engine(arguments: argparse.Namespace) -> None:
    """In a process of its own: build, sync if it can, measure."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams

    from quads.rollout.vllm_plugin import register

    register()
    config, engine = ARCHITECTURES[arguments.arch], arguments.engine
    batches = [int(b) for b in arguments.batches.split(",")]
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        llm = LLM(
            model=str(write_model_folder(Path(folder), config)),
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_model_len=arguments.prompt_tokens + arguments.new_tokens,
            max_num_seqs=max(batches),
            max_num_batched_tokens=max(8192, arguments.prompt_tokens + arguments.new_tokens),
            enable_prefix_caching=False,
            gpu_memory_utilization=0.9,
            disable_log_stats=True,
            logprobs_mode="processed_logprobs",
            compilation_config={"cudagraph_capture_sizes": sorted({1, 2, 4, 8, *batches})},
            **engine_arguments(engine),
        )
    common = {"engine": engine, "arch": arguments.arch}
    print(json.dumps({**common, "start_s": round(time.perf_counter() - start, 1)}), flush=True)
    if engine in PLUGIN:
        (config_of_engine,) = llm.apply_model(lambda model: model.quant_config)
        print(config_of_engine.banner(), flush=True)
        for _ in range(2):
            print(json.dumps({**common, **measure_sync(llm, config)}), flush=True)
    generator = torch.Generator().manual_seed(0)
    for round_number in range(arguments.rounds + 1):
        for batch in batches:
            prompts = torch.randint(
                0, config.vocab_size, (batch, arguments.prompt_tokens), generator=generator
            ).tolist()
            params = [
                SamplingParams(max_tokens=arguments.new_tokens, ignore_eos=True, detokenize=False, seed=i, logprobs=0)
                for i in range(batch)
            ]
            torch.cuda.synchronize()
            start = time.perf_counter()
            llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
            seconds = time.perf_counter() - start
            if round_number:
                rate = round(batch * arguments.new_tokens / seconds)
                row = {**common, "round": round_number, "sequences": batch, "tokens_per_s": rate}
                print(json.dumps(row), flush=True)


def measure_sync(llm: Any, config: ModelConfig) -> dict[str, float]:
    """Seconds of a whole sync from bf16 tensors on the GPU, and GiB that it needed beyond what was allocated."""
    weights = list(bf16_weights(config))
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before, start = torch.cuda.memory_allocated(), time.perf_counter()
    with torch.no_grad():
        llm.apply_model(lambda model: model.quant_config.ledger.begin())
        llm.apply_model(lambda model: model.load_weights((name, tensor.detach()) for name, tensor in weights))
    torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    extra = (torch.cuda.max_memory_allocated() - before) / 2**30
    return {"sync_s": round(seconds, 2), "sync_extra_gib": round(extra, 2)}


def report(rows: list[dict[str, Any]], arguments: argparse.Namespace) -> str:
    """The measurements as a Markdown table, best of the rounds."""
    batches = arguments.batches.split(",")
    sizes = f"prompts of {arguments.prompt_tokens} tokens, {arguments.new_tokens} new tokens"
    where = f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Python {platform.python_version()}"
    lines = [
        f"`{arguments.arch}`, random weights, {sizes}; {where}, commit {commit()}.",
        f"Tokens/s of each of {arguments.rounds} rounds. `{' '.join(sys.argv)}`",
        "",
        "| engine | " + " | ".join(f"{b} sequences" for b in batches) + " | sync s | sync extra GiB |",
        "| --- |" + " --- |" * (len(batches) + 2),
    ]
    for engine in arguments.engines.split(","):
        mine = [row for row in rows if row["engine"] == engine]
        rates = [
            " / ".join(str(row["tokens_per_s"]) for row in mine if row.get("sequences") == int(batch))
            for batch in batches
        ]
        sync = next((row for row in reversed(mine) if "sync_s" in row), {"sync_s": "", "sync_extra_gib": ""})
        lines.append(f"| {engine} | {' | '.join(rates)} | {sync['sync_s']} | {sync['sync_extra_gib']} |")
    return "\n".join(lines)


def commit() -> str:
    result = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return result.stdout.strip() or "unknown"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--engines", default="fp8,w4a4,w4a4_residual")
    parser.add_argument("--engine", default="", help=argparse.SUPPRESS)
    parser.add_argument("--batches", default="16,64,256")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--arch", default="moe25b_a3b")
    parser.add_argument("--markdown", type=Path, default=None)
    arguments = parser.parse_args()
    if arguments.engine:
        run_engine(arguments)
        return
    rows: list[dict[str, Any]] = []
    for engine in arguments.engines.split(","):
        command = [sys.executable, __file__, *sys.argv[1:], "--engine", engine]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                print(line, end="", flush=True)
                if line.startswith("{"):
                    rows.append(json.loads(line))
    table = report(rows, arguments)
    print(table)
    if arguments.markdown:
        arguments.markdown.write_text(table + "\n")


if __name__ == "__main__":
    main()
