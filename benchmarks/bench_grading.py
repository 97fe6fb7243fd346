"""How much of the grading is hidden behind the rollout: the same rollout, graded beside it and after it.
Before that, how long a hostile response can hold the trainer while its answer is looked for (`--scans`: only that).

    python benchmarks/bench_grading.py [--prompts 64] [--group 8] [--slots 64] [--tests 5] [--workers N]

The native engine draws responses of random weights (lengths up to 256 tokens, in waves of `slots`); every response is
graded as a program of `tests` tests in the sandbox, whatever its text, so that both arms grade the same work. `tail` is
what the step waits for after the last response: `time/reward_s` of a run.
"""

import argparse
import functools
import os
import platform
import time
import timeit
from concurrent.futures import Future

import torch

from quads.config.sections import RewardSettings, RolloutSettings
from quads.model.config import ARCHITECTURES
from quads.model.model import MoEDecoder
from quads.quant.recipes import QuantSpec
from quads.rl.grading import Grading
from quads.rl.rewards.code import submit_program
from quads.rl.rewards.code_tests import CodeTests
from quads.rl.rewards.isolation import isolation, program_limits
from quads.rl.rewards.text import extract_code, tagged
from quads.rollout.engine import ignore
from quads.rollout.native.engine import NativeEngine
from quads.rollout.sync import sync
from quads.sandbox.pool import Sandbox
from quads.types import Example, Sampling, Verdict

PROGRAM = "```python\na, b = map(int, input().split())\nprint(a + b)\n```"
SPEC = QuantSpec("bf16", "bf16", "bf16")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--tests", type=int, default=5)
    parser.add_argument("--workers", type=int, default=0, help="graders (default: one for each core)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--scans", action="store_true", help="time the scans for an answer alone")
    options = parser.parse_args()
    time_scans()
    if options.scans:
        return
    config, device = ARCHITECTURES["tiny"], torch.device(options.device)
    learner = MoEDecoder(config)
    learner.init_weights(torch.Generator().manual_seed(0))
    engine = NativeEngine(config, SPEC, RolloutSettings("native", options.slots, 64, 256), torch.bfloat16, device)
    sync(learner.to(device), engine, SPEC, version=1)
    settings = RewardSettings(workers=options.workers)
    sandbox = Sandbox(isolation(), program_limits(settings), settings.code_total_s, settings.workers)
    tests = CodeTests("", ("3 4\n",) * options.tests, ("7\n",) * options.tests)
    print(f"{platform.machine()}, {os.cpu_count()} cores, {device}, Python {platform.python_version()}")
    print(f"{options.prompts} prompts x {options.group}, {options.slots} slots, sandbox {sandbox.mechanism}")

    def submit(example: Example, text: str) -> "Future[Verdict]":
        return submit_program(sandbox, tests, PROGRAM)

    try:
        for future in [submit_program(sandbox, tests, PROGRAM) for _ in range(4 * (options.workers or 16))]:
            future.result()  # servers have started
        print(f"{'graded':<10} {'rollout s':>10} {'tail s':>8} {'together':>9}")
        for repeat in range(3):
            for graded in ("after", "beside"):
                rollout_s, tail_s = measure(engine, options, submit, graded == "beside", seed=repeat)
                print(f"{graded:<10} {rollout_s:>10.2f} {tail_s:>8.2f} {rollout_s + tail_s:>9.2f}")
    finally:
        sandbox.close()


def time_scans() -> None:
    """The slowest of several hostile texts of 32k tokens (131 kB), for each scan of a response in the trainer."""
    hostile = ["\n", " ", "`", "'", '"', "```\n", "````\n", "```\n  ", "~~~\n```\n", "```python\nx='\\", "</think>"]
    hostile += ["```\n'''\n```\n", "```\n'\n```\n", "```\n#'\n```\n", "```\n\\'''\n```\n", '```\n"""x\n```\n']
    hostile += ["<a>", "</a>", "<a></a>", "<a"]
    texts = [start + (unit * 131_072)[:131_068] for unit in hostile for start in ("", "```\n")]
    numbers = "1.0 " * 500_000, "1 " * 500_000
    lines = CodeTests("", ("",), (numbers[1],), numeric_lines=True)
    scans = {
        "extract_code": [functools.partial(extract_code, text) for text in texts],
        "tagged": [functools.partial(tagged, text, "a") for text in texts],
        "a line of 2 MB": [functools.partial(lines.accepts, 0, numbers[0])],
    }
    for name, calls in scans.items():
        seconds = []
        for call in calls:
            seconds.append(min(timeit.repeat(call, number=1, repeat=3)))  # other processes take turns
        print(f"{name:<16} {1000 * max(seconds):>7.1f} ms")


def measure(engine: NativeEngine, options: argparse.Namespace, submit, beside: bool, seed: int) -> tuple[float, float]:
    """Seconds of the rollout, and from its end to the last verdict."""
    examples = [Example(str(p), "bench", "", [5 + p % 50, 7, 9]) for p in range(options.prompts)]
    grading = Grading(submit, lambda batch: [""] * len(batch), (), examples, truncated=True)
    seeds = [seed * 1_000_003 + i for i in range(options.prompts * options.group)]
    # Twelve of the tiny vocabulary's tokens end a response: about 40 tokens each, a few of them 256.
    sampling = Sampling(256, 1.0, tuple(range(12)))
    started = time.perf_counter()
    prompts = [example.prompt_ids for example in examples]
    groups = engine.generate(prompts, options.group, sampling, seeds, on_group=grading.add if beside else ignore)
    drawn = time.perf_counter()
    if not beside:
        for prompt, group in enumerate(groups):
            grading.add(prompt, group)
    assert grading.finish().rewards_PG.min() == 1.0
    return drawn - started, time.perf_counter() - drawn


if __name__ == "__main__":
    main()
