"""Decoding speed of the native engine with and without CUDA graphs: tokens/s at several batch sizes.

    python -m benchmarks.bench_native [--layers 8] [--precisions bf16,w4a16,w4a4,w4a4_residual] [--seqs 1,16,64,256]

The 25.5B shape cut to `--layers` layers, random weights, prompts of 128, 200 new tokens (no stop token). A time is of a
whole generate, prefill included; the first call, which compiles and captures, is not counted. "step" is the time of a
decoding step.
"""

import argparse
import time
from dataclasses import replace

import torch

from quads.config.sections import RolloutSettings
from quads.model.config import ARCHITECTURES
from quads.quant.recipes import QuantSpec
from quads.quant.tensor import QuantizedTensor
from quads.rollout.native.engine import NativeEngine
from quads.types import Sampling

PROMPT, NEW = 128, 200


def random_weights(engine: NativeEngine):
    """Values for every weight of the engine, made one at a time."""
    from quads.quant.rollout import named_weights

    for name, stored in named_weights(engine.model):
        values = torch.ones(stored.shape) if stored.dim() == 1 else None
        if values is None:
            values = torch.randn(stored.shape, device="cuda", dtype=torch.bfloat16) * 0.02
        yield name, QuantizedTensor.from_hp(values, "nvfp4") if isinstance(stored, QuantizedTensor) else values


def measure(engine: NativeEngine, sequences: int) -> float:
    prompts = torch.randint(5, 1000, (sequences, PROMPT)).tolist()
    sampling, seeds = Sampling(NEW, 1.0), list(range(sequences))
    times = []
    for _ in range(3):
        torch.cuda.synchronize()
        start = time.perf_counter()
        engine.generate(prompts, 1, sampling, seeds)
        times.append(time.perf_counter() - start)
    return min(times[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--precisions", default="bf16,w4a16,w4a4,w4a4_residual")
    parser.add_argument("--seqs", default="1,16,64,256")
    parser.add_argument("--eager", default="64", help="sizes that are also run without graphs")
    args = parser.parse_args()
    sizes, eager = ([int(size) for size in text.split(",") if size] for text in (args.seqs, args.eager))
    config = replace(ARCHITECTURES["moe25b_a3b"], num_layers=args.layers)
    print(torch.cuda.get_device_name(), "torch", torch.__version__, f"{args.layers} layers", flush=True)
    for precision in args.precisions.split(","):
        spec = QuantSpec("bf16" if precision == "bf16" else "nvfp4", "bf16", precision)
        settings = RolloutSettings(max_batch=max(sizes), max_prompt_tokens=PROMPT, max_new_tokens=NEW)
        engine = NativeEngine(config, spec, settings, torch.bfloat16, "cuda")
        engine.update_weights(random_weights(engine), 1)
        for graphs in (True, False):
            engine.decoder.graphs = graphs
            for size in sizes if graphs else eager:
                seconds = measure(engine, size)
                print(
                    f"{precision:14s} {'graphs' if graphs else 'eager ':6s} {size:4d} sequences  "
                    f"{size * NEW / seconds:9.0f} tokens/s  step {seconds / NEW * 1000:7.2f} ms",
                    flush=True,
                )
        engine.close()
        del engine
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
