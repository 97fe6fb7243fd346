"""How many answers a second one judge scores, by kind of answer: what each costs is a fork, unless no parser is needed.

    python benchmarks/bench_judges.py [--answers 300] [--sandbox auto]

One worker, so the numbers are those of a core. `plain` answers are numbers or the gold answer's own text, which are
compared without a judge; `expressions` are read by math-verify's grammar; `countdown` is scored by reasoning-gym.
"""

import argparse
import platform
import time

from quads.config.sections import RewardSettings, SourceSettings
from quads.data.reasoning import make_dataset
from quads.rl.rewards.pool import RewardPool
from quads.types import Example

PLAIN = [("42", r"so \boxed{42}", 1.0), ("42", r"so \boxed{-7}", 0.0), (r"\frac{1}{3}", r"\boxed{\frac{1}{3}}", 1.0)]
EXPRESSIONS = [
    (r"\frac{1}{3}", r"so \boxed{\frac{2}{6}}", 1.0),
    (r"2\sqrt{3}", r"so \boxed{\sqrt{12}}", 1.0),
    ("(1, 2)", r"so \boxed{(2, 1)}", 0.0),
    ("x^2+2x+1", r"so \boxed{(x+1)^2}", 1.0),
]


def main() -> None:
    parser = argparse.ArgumentParser(description="Answers a second that one judge scores.")
    parser.add_argument("--answers", type=int, default=300)
    parser.add_argument("--sandbox", default="auto")
    options = parser.parse_args()
    math = SourceSettings(kind="jsonl", reward="math")
    game = SourceSettings(kind="reasoning_gym", dataset="countdown")
    pool = RewardPool(RewardSettings(workers=1, sandbox=options.sandbox), {"math": math, "task": game})
    print(f"{platform.machine()}, Linux {platform.release()}, Python {platform.python_version()}, {pool.check()}")
    entry = make_dataset("bench", "countdown", {}, seed=1, size=4)[0]
    rows = {
        "plain": [(Example("0", "math", "", [], gold), text, reward) for gold, text, reward in PLAIN],
        "expressions": [(Example("0", "math", "", [], gold), text, reward) for gold, text, reward in EXPRESSIONS],
        "countdown": [(Example("0", "task", "", [], entry), entry["answer"], 1.0)],
    }
    try:
        for name, kinds in rows.items():
            requests = [kinds[i % len(kinds)] for i in range(options.answers)]
            for example, text, _ in requests[:8]:  # the judge has started
                pool.submit(example, text).result()
            started = time.perf_counter()
            verdicts = [future.result() for future in [pool.submit(example, text) for example, text, _ in requests]]
            seconds = time.perf_counter() - started
            assert [verdict.reward for verdict in verdicts] == [reward for _, _, reward in requests], name
            print(f"{name:<12} {options.answers / seconds:>8.0f} answers/s")
    finally:
        pool.close()


if __name__ == "__main__":
    main()
