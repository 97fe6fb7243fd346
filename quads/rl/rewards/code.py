"""Reward `code`: does the program in a response pass its tests? It runs in a sandbox; outputs are compared here."""

import json
import re
from concurrent.futures import Future
from typing import Any

from quads.config.sections import SourceSettings
from quads.data.rows import BadRow, Prompt, column_value
from quads.rl.rewards.code_tests import LIVECODEBENCH_COLUMNS, CodeTests, livecodebench_prompt, parse_tests
from quads.rl.rewards.reward import Graders, Reward
from quads.sandbox.helpers import then
from quads.sandbox.pool import Job, Outcome, Sandbox
from quads.types import Example, Verdict

FENCED = re.compile(r"^([ \t]*)```[^\n`]*\n(.*?)^[ \t]*```[ \t]*$", re.MULTILINE | re.DOTALL)


class Code(Reward):
    """1 if all tests pass, or with code_score = "fraction" the fraction that does."""

    keys = ("code_format", "code_score")

    def __init__(self, where: str, word: str, settings: SourceSettings, graders: Graders):
        livecodebench = settings.code_format == "livecodebench"
        self.columns = LIVECODEBENCH_COLUMNS if livecodebench else (settings.answer_column,)
        self._settings, self._graders = settings, graders
        graders.need_sandbox()

    def read(self, values: dict[str, Any], prompt: Prompt) -> tuple[Prompt, Any]:
        """The tests as they are stored: data sets pack them, and unpacked ones of all rows would fill the memory."""
        stored: Any
        if self._settings.code_format == "livecodebench":
            stored = {column: column_value(values, column) for column in self.columns}
            prompt = livecodebench_prompt(prompt, stored)
        else:
            stored = column_value(values, self._settings.answer_column)
        try:
            self.unpack(stored)
        except ValueError as error:
            raise BadRow(str(error)) from None
        return prompt, stored

    def unpack(self, answer: Any) -> CodeTests:
        return parse_tests(answer, self._settings.code_format)

    def submit(self, example: Example, answer: CodeTests, text: str) -> "Future[Verdict]":
        return submit_program(self._graders.sandbox, answer, text, self._settings.code_score)


def extract_code(response: str) -> str:
    """The last fenced block after any `</think>`; a response without fences is taken to be code itself."""
    response = response.rpartition("</think>")[2].replace("\r\n", "\n")
    blocks = FENCED.findall(response)
    if not blocks:
        return response
    indent, code = blocks[-1]  # a block inside a list item is indented with its fence
    return re.sub(rf"^{indent}", "", code, flags=re.MULTILINE) if indent else code


def submit_program(sandbox: Sandbox, tests: CodeTests, response: str, score: str = "all") -> "Future[Verdict]":
    """Start grading. score `all`: 1.0 if every test passes, else 0.0, and the first failure ends it; `fraction`: the
    fraction of tests that pass."""
    job = Job(extract_code(response), tests.inputs, tests.function, bool(tests.function) or tests.numeric_lines)
    passed: list[bool] = []

    def go_on(index: int, outcome: Outcome) -> bool:
        passed.append(_passes(tests, index, outcome))
        return passed[-1] or score == "fraction"

    def judge(run: tuple[tuple[list[Outcome], float] | None, float]) -> Verdict:
        if run[0] is None:  # nothing is sure about a program that broke its server
            return Verdict(0.0, run[1], failed=True)
        outcomes, seconds = run[0]
        passed.extend(_passes(tests, i, outcomes[i]) for i in range(len(passed), len(outcomes)))  # the last one
        share = sum(passed) / len(tests.inputs)
        return Verdict(share if score == "fraction" else float(share == 1.0), seconds)

    return then(sandbox.submit(job, go_on), judge)


def _passes(tests: CodeTests, index: int, outcome: Outcome) -> bool:
    if outcome.verdict != "ok":
        return False
    text = outcome.output.decode("utf-8", "replace")
    if not tests.function:
        return tests.accepts(index, text)
    try:
        return tests.accepts(index, json.loads(text))
    except (ValueError, RecursionError):
        return False
