"""How many programs a second the sandbox grades, by mechanism and number of workers.

    python benchmarks/bench_sandbox.py [--programs 400] [--tests 5] [--workers 1,2]

A program reads two numbers and prints their sum (one job: start in the sandbox, run every test in a process of its own,
compare outside). A tenth of the programs loop until their time limit of one second in the last row, as a policy under
training produces them. 256 x 16 responses of one step are 4096 programs. On a busy machine the CPU time is what counts.
"""

import argparse
import platform
import resource
import time

from quads.config.sections import RewardSettings
from quads.rl.rewards.code import submit_program
from quads.rl.rewards.code_tests import CodeTests
from quads.rl.rewards.isolation import program_limits
from quads.sandbox.isolation import NoIsolation, find_isolation
from quads.sandbox.pool import Sandbox

ADD = "```python\na, b = map(int, input().split())\nprint(a + b)\n```"
LOOP = "```python\nwhile True: pass\n```"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--programs", type=int, default=400)
    parser.add_argument("--tests", type=int, default=5)
    parser.add_argument("--workers", default="1,2")
    options = parser.parse_args()
    print(f"{platform.machine()}, Linux {platform.release()}, Python {platform.python_version()}")
    print(f"{options.programs} programs of {options.tests} tests")
    print(f"{'mechanism':<12} {'workers':>7} {'programs/s':>11} {'tests/s':>9} {'CPU ms a program':>17}")
    for mechanism in ("none", "landlock", "namespaces"):
        for workers in map(int, options.workers.split(",")):
            measure(mechanism, workers, [ADD] * options.programs, options.tests, "")
    looping = [LOOP if i % 10 == 0 else ADD for i in range(options.programs // 4)]
    measure("namespaces", int(options.workers.split(",")[-1]), looping, options.tests, "  a tenth loop for 1 s")


def measure(mechanism: str, workers: int, programs: list[str], num_tests: int, note: str) -> None:
    settings = RewardSettings(code_time_s=1.0)
    try:
        sandbox = Sandbox(find_isolation(mechanism), program_limits(settings), settings.code_total_s, workers)
    except NoIsolation as reason:
        print(f"{mechanism:<12} {workers:>7}  {reason}")
        return
    tests = CodeTests("", ("3 4\n",) * num_tests, ("7\n",) * num_tests)
    try:
        for future in [submit_program(sandbox, tests, ADD) for _ in range(4 * workers)]:  # servers start
            assert future.result().reward == 1.0
        cpu_s = cpu_seconds()
        started = time.perf_counter()
        rewards = [f.result().reward for f in [submit_program(sandbox, tests, program) for program in programs]]
        seconds = time.perf_counter() - started
    finally:
        sandbox.close()
    cpu_s = cpu_seconds() - cpu_s  # known once the servers have ended; a few starts are in it
    assert rewards == [float(program == ADD) for program in programs]
    rate = len(programs) / seconds
    per_program = 1000 * cpu_s / len(programs)
    print(f"{mechanism:<12} {workers:>7} {rate:>11.1f} {rate * num_tests:>9.0f} {per_program:>17.1f}{note}")


def cpu_seconds() -> float:
    """CPU time of this process and of all its children that have ended."""
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


if __name__ == "__main__":
    main()
