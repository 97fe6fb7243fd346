"""Score the responses of a file, to check verdicts by hand.

    python -m quads.rl.rewards math FILE                   rows {response, answer}; also `exact`
    python -m quads.rl.rewards code FILE                   rows {response, tests: [{input, output}]}: stdin, stdout
    python -m quads.rl.rewards my_rewards.py:score FILE    rows {response, answer} and what else the function reads

print one JSON object a row, in order: reward (null without a verdict) and seconds. Options: --sandbox none, --time-s
SECONDS, --confined for a function that asks for it.
"""

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

from quads.config.options import real, whole
from quads.config.sections import REWARDS, RewardSettings, SourceSettings
from quads.config.sources import split_function
from quads.data.rows import BadRow, refuse_bad_rows
from quads.data.sources import read_jsonl
from quads.errors import UserError, main_guard
from quads.rl.rewards.pool import RewardPool
from quads.rl.rewards.reward import Reward
from quads.sandbox.isolation import MECHANISMS
from quads.types import Example

SOURCE = "rows"


@main_guard
def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m quads.rl.rewards", description="Score responses of a JSONL file.")
    parser.add_argument("reward", help="exact, math, code, or FILE.py:FUNCTION")
    parser.add_argument("file", type=Path)
    parser.add_argument("--sandbox", choices=("auto", *MECHANISMS, "none"), default="auto", help="isolates programs")
    parser.add_argument(
        "--time-s", type=real(above=0.0), default=None, help="seconds for one answer, or one test of a program"
    )
    parser.add_argument("--confined", action="store_true", help="judge in forks without files, as the key of a source")
    parser.add_argument("--workers", type=whole(0), default=0, help="processes (default: one for each core)")
    options = parser.parse_args(argv)
    words = [word for word in REWARDS if word != "task"]  # which judges generated problems, not rows of a file
    if options.reward not in words and not split_function(options.reward)[0]:
        raise UserError(f"{options.reward!r} is no reward; one of {', '.join(words)}, or FILE.py:FUNCTION")
    settings = RewardSettings(sandbox=options.sandbox, workers=options.workers)
    if options.time_s is not None:
        settings = dataclasses.replace(settings, judge_time_s=options.time_s, code_time_s=options.time_s)
    column = "tests" if options.reward == "code" else "answer"
    source = SourceSettings(kind="jsonl", reward=options.reward, answer_column=column, confined=options.confined)
    pool = RewardPool(settings, {SOURCE: source})
    try:
        examples = read_examples(pool.rewards[SOURCE], options.file)
        pool.check()
        for future in [pool.submit(example, response) for example, response in examples]:
            verdict = future.result()
            reward = None if verdict.failed else verdict.reward
            print(json.dumps({"reward": reward, "seconds": round(verdict.seconds, 4)}), flush=True)
    finally:
        pool.close()


def read_examples(reward: Reward, file: Path) -> list[tuple[Example, str]]:
    """The rows of the command's input file. UserError that lists the bad ones by line."""
    examples, bad, total = [], [], 0
    for number, row in read_jsonl(file, "FILE"):
        total += 1
        try:
            examples.append(_read_example(reward, number, row))
        except BadRow as reason:
            bad.append((number, str(reason)))
    refuse_bad_rows(str(file), "line", bad, total)
    return examples


def _read_example(reward: Reward, number: int, row: Any) -> tuple[Example, str]:
    if isinstance(row, BadRow):
        raise row
    wanted = ["response", *reward.columns]
    if not isinstance(row, dict) or not set(wanted) <= row.keys():
        raise BadRow(f"must be an object with {' and '.join(wanted)}")
    if not isinstance(row["response"], str):
        raise BadRow("response must be text")
    prompt, answer = reward.read(row, row.get("prompt", ""))
    if answer is None:
        raise BadRow("has no answer")
    return Example(f"line {number}", SOURCE, prompt, [], reward.unpack(answer)), row["response"]


if __name__ == "__main__":
    main()
