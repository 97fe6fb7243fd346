"""Learner tokens/s: forward, loss, backward, clip, AdamW and requantization, on a cut of the 25.5B model's layers.

    python -m benchmarks.bench_learner [--gpus N] [--layers 8] [--steps 10] [--profile] [CASE ...]

CASE is RECIPE:SEQUENCES[xLENGTH]:CHECKPOINTING:eager|compile[:GATHER], SEQUENCES of LENGTH (4096) random tokens a GPU
in one micro-batch, for example quads:8:full:compile or quads:1x16384:none:compile:packed. CASE@LAYERS overrides
--layers, CASE! adds where one update's time goes on the first GPU (--profile: for all). Cases run one after another in
the same processes (torchrun with N > 1: FSDP2 and expert parallelism over all GPUs, GATHER bf16 or packed). Without
cases: bf16 beside quads in three settings.

Each case also prints the loss and gradient norm of its first update: cases with the same total of sequences agree to
bf16 rounding, whatever the number of GPUs, gathers, checkpointing and compilation.

FLOPs are the model's (`ModelConfig.train_flops`); recomputation is not counted. MFU is against 989 TFLOP/s (dense bf16
of an H200's data sheet) and beside it against 789, what a large matmul reaches there.
"""

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import replace

import torch
import torch._dynamo

from benchmarks.kernel_times import summarize
from quads.config.sections import (
    OptimSettings,
    ParallelSettings,
    QuantSettings,
    RLSettings,
    RolloutSettings,
    TrainSettings,
)
from quads.distributed import Distributed, init_distributed
from quads.memory import GIB, ProcessShape, estimate_memory
from quads.model.config import ARCHITECTURES, ModelConfig
from quads.model.model import MoEDecoder
from quads.model.parallelize import parallelize, write_part
from quads.quant.convert import convert_learner
from quads.quant.masters import attach, requantize
from quads.quant.recipes import QuantSpec, resolve
from quads.rl.learner import Learner
from quads.rl.loss import grpo_loss
from quads.rl.packing import Microbatch, Sample, pack
from quads.types import Completion

LENGTH = 4096
WARM_UP = 4
DEFAULT_CASES = [
    f"{recipe}:{setting}"
    for setting in ("8:full:compile", "4:none:compile", "4:full:eager")
    for recipe in ("bf16", "quads")
]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("cases", nargs="*")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    if args.gpus > 1 and "WORLD_SIZE" not in os.environ:
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={args.gpus}"]
        paths = os.pathsep.join([os.getcwd(), *filter(None, [os.environ.get("PYTHONPATH")])])
        sys.exit(subprocess.call([*launch, __file__, *sys.argv[1:]], env={**os.environ, "PYTHONPATH": paths}))
    # A layer that was compiled too often would run eager, without a word, in the middle of a benchmark.
    torch._dynamo.config.recompile_limit = 64
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    with init_distributed(ParallelSettings(ep=args.gpus), TrainSettings()) as world:
        world.print(f"{torch.cuda.get_device_name()} x {args.gpus}, torch {torch.__version__}")
        world.print("| case | step s | tokens/s/GPU | TFLOP/s | MFU 989 / 789 | requantize s | peak GiB (estimate) |")
        world.print("|---" * 7 + "|")
        for case in args.cases or DEFAULT_CASES:
            name, _, layers = case.removesuffix("!").partition("@")
            began = time.perf_counter()
            measure(name, int(layers or args.layers), args.steps, args.profile or case.endswith("!"), world)
            gc.collect()
            torch.cuda.empty_cache()
            world.print(
                f"({time.perf_counter() - began:.0f} s; {torch.cuda.memory_allocated() / GIB:.2f} GiB left over)"
            )


def measure(case: str, layers: int, steps: int, profile: bool, world: Distributed) -> None:
    recipe, batch, checkpointing, mode, *rest = case.split(":")
    sequences, length = (int(number) for number in (batch if "x" in batch else f"{batch}x{LENGTH}").split("x"))
    parallel = ParallelSettings(
        ep=world.size,
        activation_checkpointing=checkpointing,  # type: ignore[arg-type]
        compile=mode == "compile",
    )
    config = replace(ARCHITECTURES["moe25b_a3b"], num_layers=layers)
    spec = resolve(QuantSettings(recipe=recipe))  # type: ignore[arg-type]
    all_gather = rest[0] if rest else "bf16"
    torch.cuda.reset_peak_memory_stats()
    learner = build_learner(config, spec, parallel, world, all_gather)
    microbatches, denominator = make_batch(config, sequences, length, world)
    microbatches = learner.add_fixed_logprobs(microbatches)
    first = learner.update(microbatches, denominator)
    times = [seconds(lambda: learner.update(microbatches, denominator)) for _ in range(WARM_UP + steps)]
    requantize_s = statistics.median(seconds(lambda: requantize(learner.model)) for _ in range(3))
    if profile and world.is_main:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as run:
            learner.update(microbatches, denominator)
            torch.cuda.synchronize()
        print(f"{case}@{layers}\n{summarize(run.events())}")
    elif profile:
        learner.update(microbatches, denominator)
    peak, reserved = torch.cuda.max_memory_allocated() / GIB, torch.cuda.max_memory_reserved() / GIB
    phases = memory_phases(learner, microbatches[0], denominator)
    if world.is_main:
        step_s = statistics.median(times[WARM_UP:])
        name = f"{case}@{layers}"
        report(name, config, spec, parallel, world, sequences, length, all_gather, step_s, requantize_s, peak)
        update = {"case": name, "first_loss": first.loss, "first_grad_norm": first.grad_norm}
        spread = {"fastest_s": min(times[WARM_UP:]), "slowest_s": max(times[WARM_UP:])}
        print(json.dumps({**update, **spread, "reserved_gib": reserved, **phases}), flush=True)


def build_learner(
    config: ModelConfig, spec: QuantSpec, parallel: ParallelSettings, world: Distributed, all_gather: str
) -> Learner:
    with torch.device("meta"):
        model = MoEDecoder(config, torch.bfloat16)
    convert_learner(model, spec)
    parallelize(model, world.meshes, parallel.activation_checkpointing, parallel.compile)
    model.to_empty(device=world.device)
    model.init_weights(torch.Generator(world.device).manual_seed(0), write_part)
    if world.meshes:
        attach(model, all_gather, spec)  # type: ignore[arg-type]
    return Learner(
        model, spec, OptimSettings(), RLSettings(), temperature=1.0, steps=100, updates_per_step=1, world=world
    )


def make_batch(config: ModelConfig, sequences: int, length: int, world: Distributed) -> tuple[list[Microbatch], float]:
    """Random tokens; a prompt of one token, so that all others have logits and loss, as in pretraining."""
    samples = []
    for i in range(world.rank * sequences, (world.rank + 1) * sequences):
        generator = torch.Generator().manual_seed(i)  # one GPU with 8 sequences sees what two see with 4 each
        first, *rest = torch.randint(config.vocab_size, (length,), generator=generator).tolist()
        samples.append(Sample([first], Completion(rest, [-12.0] * len(rest), "stop", 0), (-1.0) ** i))
    microbatches, denominator = pack(samples, sequences * length, "token")
    return microbatches, denominator * world.size


def memory_phases(learner: Learner, batch: Microbatch, denominator: float) -> dict[str, float]:
    """GiB allocated between the phases of an update, and the peaks within them."""
    learner.optimizer.zero_grad(set_to_none=True)
    torch.cuda.reset_peak_memory_stats()
    found = {"before_forward": torch.cuda.memory_allocated()}
    logprobs_N, _, _ = learner.forward_logprobs(learner.model, batch)
    found |= {"forward_peak": torch.cuda.max_memory_allocated(), "after_forward": torch.cuda.memory_allocated()}
    torch.cuda.reset_peak_memory_stats()
    grpo_loss(logprobs_N, batch, learner.loss_config, denominator)[0].backward()
    found |= {"backward_peak": torch.cuda.max_memory_allocated(), "after_backward": torch.cuda.memory_allocated()}
    learner.optimizer.zero_grad(set_to_none=True)
    return {f"{name}_gib": size / GIB for name, size in found.items()}


def seconds(call) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def report(
    case: str,
    config: ModelConfig,
    spec: QuantSpec,
    parallel: ParallelSettings,
    world: Distributed,
    sequences: int,
    length: int,
    all_gather: str,
    step_s: float,
    requantize_s: float,
    peak: float,
) -> None:
    tokens_per_s = sequences * length / step_s
    tflops = config.train_flops(sequences * [length]) / step_s / 1e12
    tokens = RLSettings(microbatch_tokens=sequences * length)
    shape = ProcessShape(
        config, spec, RolloutSettings(), tokens, torch.bfloat16, parallel, world.size, all_gather, accumulated=False
    )
    estimate = estimate_memory(shape)
    learner_gib = estimate.of("learn") - estimate.phases["learn"].get("engine weights", 0.0)
    print(
        f"| {case} | {step_s:.3f} | {tokens_per_s:,.0f} | {tflops:.0f} | {tflops / 989:.1%} / {tflops / 789:.1%} "
        f"| {requantize_s:.3f} | {peak:.0f} ({learner_gib:.0f}) |"
    )
    row = {"case": case, "gpus": world.size, "step_s": step_s, "tokens_per_s_per_gpu": tokens_per_s, "peak_gib": peak}
    print(json.dumps({**row, "requantize_s": requantize_s, "estimate_gib": learner_gib}))


if __name__ == "__main__":
    main()
