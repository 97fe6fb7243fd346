"""Score the responses of a file, to check verdicts by hand.

    python -m quads.rl.rewards math FILE    rows {response, answer}
    python -m quads.rl.rewards code FILE    rows {response, tests: [{input, output}]}: stdin, stdout

print one JSON object a row, in order: reward (1.0 or 0.0) and seconds. Options: --sandbox none, --time-s SECONDS.
"""

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

from quads.config.options import real, whole
from quads.config.sections import RewardSettings
from quads.data.rows import BadRow, refuse_bad_rows
from quads.data.sources import read_jsonl
from quads.errors import main_guard
from quads.rl.rewards.code_tests import parse_tests
from quads.rl.rewards.pool import RewardPool
from quads.sandbox.pool import MECHANISMS
from quads.types import Example


@main_guard
def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m quads.rl.rewards", description="Score responses of a JSONL file.")
    parser.add_argument("kind", choices=("math", "code"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--sandbox", choices=("auto", *MECHANISMS, "none"), default="auto", help="isolates programs")
    parser.add_argument(
        "--time-s", type=real(above=0.0), default=None, help="seconds for one answer, or one test of a program"
    )
    parser.add_argument("--workers", type=whole(0), default=0, help="processes (default: one for each core)")
    options = parser.parse_args(argv)
    examples = read_examples(options.kind, options.file)
    settings = RewardSettings(sandbox=options.sandbox, workers=options.workers)
    if options.time_s is not None:
        settings = dataclasses.replace(settings, judge_time_s=options.time_s, code_time_s=options.time_s)
    pool = RewardPool(settings)
    try:
        for future in [pool.submit(example, response) for example, response in examples]:
            verdict = future.result()
            print(json.dumps({"reward": verdict.reward, "seconds": round(verdict.seconds, 4)}), flush=True)
    finally:
        pool.close()


def read_examples(kind: str, file: Path) -> list[tuple[Example, str]]:
    """The rows of the command's input file. UserError that lists the bad ones by line."""
    examples, bad, total = [], [], 0
    for number, row in read_jsonl(file, "FILE"):
        total += 1
        try:
            examples.append(_read_example(kind, number, row))
        except (BadRow, ValueError) as reason:
            bad.append((number, str(reason)))
    refuse_bad_rows(str(file), "line", bad, total)
    return examples


def _read_example(kind: str, number: int, row: Any) -> tuple[Example, str]:
    if isinstance(row, BadRow):
        raise row
    wanted = "answer" if kind == "math" else "tests"
    if not isinstance(row, dict) or not {"response", wanted} <= row.keys():
        raise BadRow(f"must be an object with response and {wanted}")
    if not isinstance(row["response"], str):
        raise BadRow("response must be text")
    answer = row[wanted]
    if kind == "code":
        answer = parse_tests(answer, "pairs")
    elif isinstance(answer, bool) or not isinstance(answer, str | int | float):
        raise BadRow("answer must be text or a number")
    else:
        answer = str(answer)
    return Example(str(number), str(kind), "", [], answer, {"reward": kind}), row["response"]


if __name__ == "__main__":
    main()
