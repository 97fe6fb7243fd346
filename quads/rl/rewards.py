"""Rewards of responses, computed in other processes: a pool that takes them one by one (grading.py has a batch).

`exact` compares text here; `math` and `task` go to judges (judges.py), `code` to sandboxes (sandbox.py). What cannot be
judged in time is worth 0.

    python -m quads.rl.rewards math FILE    rows {response, answer}
    python -m quads.rl.rewards code FILE    rows {response, tests: [{input, output}]}: stdin, stdout

print one JSON object a row, in order: reward (1.0 or 0.0) and seconds. Options: --sandbox none, --time-s SECONDS.
"""

import argparse
import dataclasses
import json
import re
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from quads.config_sections import RewardSettings, SourceSettings
from quads.errors import main_guard
from quads.options import real, whole
from quads.rl.code_reward import submit_program
from quads.rl.code_tests import parse_tests
from quads.rl.helpers import Verdict
from quads.rl.judges import JudgePool
from quads.rl.rows import BadRow, refuse_bad_rows
from quads.rl.sandbox import MECHANISMS, Sandbox
from quads.rl.sources import read_jsonl
from quads.types import Example


class RewardPool:
    """Scores responses. Processes start with the first response that needs them; `close` ends them.

    Example: `RewardPool(RewardSettings()).submit(example, "The answer is 7.").result().reward` -> 1.0
    """

    def __init__(self, settings: RewardSettings | None = None):
        self.settings = settings or RewardSettings()
        self._judges: dict[str, JudgePool] = {}
        self._sandbox: Sandbox | None = None

    def submit(self, example: Example, text: str) -> "Future[Verdict]":
        """Start scoring one response."""
        kind = example.meta["reward"]
        if kind == "math":
            return self.judges("math").submit("math", example.answer, text, example.meta.get("percent_as_unit", False))
        if kind == "code":
            return submit_program(self.sandbox, example.answer, text, example.meta.get("code_score", "all"))
        answer = tagged(text, example.meta.get("answer_tag", ""))
        if kind == "task":
            return self.judges("task").submit(
                "task", example.meta["dataset"], example.meta["params"], example.answer, answer
            )
        verdict: Future[Verdict] = Future()
        verdict.set_result(Verdict(float(answer is not None and answer == example.answer), 0.0))
        return verdict

    def judges(self, kind: str) -> JudgePool:
        if kind not in self._judges:
            self._judges[kind] = JudgePool(kind, self.settings.workers, self.settings.judge_time_s)
        return self._judges[kind]

    @property
    def sandbox(self) -> Sandbox:
        if self._sandbox is None:
            self._sandbox = Sandbox(self.settings)
        return self._sandbox

    def close(self) -> None:
        """Kill the processes and what runs in them."""
        for pool in (*self._judges.values(), self._sandbox):
            if pool:
                pool.close()


def find_isolation(settings: RewardSettings, sources: Mapping[str, SourceSettings]) -> str:
    """The mechanism that isolates generated programs, "" if no source has any.

    Raises:
        UserError: they cannot be isolated here; better said now than after the first rollout.
    """
    if not any(source.reward == "code" for source in sources.values()):
        return ""
    sandbox = Sandbox(settings)
    sandbox.close()
    return sandbox.mechanism


def tagged(text: str, tag: str) -> str | None:
    """What stands in the last <tag>...</tag>, or without a tag the whole text; None where the tag is missing."""
    if not tag:
        return text.strip()
    found = re.findall(rf"<{re.escape(tag)}>(.*?)</{re.escape(tag)}>", text, re.DOTALL)
    return found[-1].strip() if found else None


# ---- the command


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
