"""Reward `code`: does the program in a response pass its tests? It runs in a sandbox; outputs are compared here."""

import json
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from quads.config.sections import SourceSettings
from quads.data.rows import BadRow, Prompt, column_value
from quads.rl.rewards.code_tests import (
    LIVECODEBENCH_COLUMNS,
    CodeTests,
    livecodebench_prompt,
    parse_tests,
    whole_number,
)
from quads.rl.rewards.isolation import user_error
from quads.rl.rewards.reward import Graders, Reward, at_once
from quads.rl.rewards.text import extract_code
from quads.sandbox.helpers import then
from quads.sandbox.pool import Job, Outcome, Sandbox
from quads.types import Example, Verdict


class Code(Reward):
    """1 if all tests pass, or with code_score = "fraction" the fraction that does."""

    keys = ("code_format", "code_score", "code_tolerance")

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
        return parse_tests(answer, self._settings.code_format, self._settings.code_tolerance)

    def submit(self, example: Example, answer: CodeTests, text: str) -> "Future[Verdict]":
        return submit_program(self._graders.sandbox, answer, text, self._settings.code_score)


def submit_program(sandbox: Sandbox, tests: CodeTests, response: str, score: str = "all") -> "Future[Verdict]":
    """Start grading. score `all`: 1.0 if every test passes, else 0.0, and the first failure ends it; `fraction`: the
    fraction of tests that pass. A program that broke its server gives no verdict, and gets a fresh one once."""
    code = extract_code(response)
    if code is None:
        return at_once(0.0)
    job = Job(code, tests.inputs, tests.function, bool(tests.function) or tests.numeric_lines)
    return again(lambda: _submit(sandbox, tests, job, score))


def _submit(sandbox: Sandbox, tests: CodeTests, job: Job, score: str) -> "Future[Verdict]":
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

    return then(sandbox.submit(job, go_on), judge, user_error)


def again(submit: "Callable[[], Future[Verdict]]") -> "Future[Verdict]":
    """A future of the verdict; where the first try has none, of a second one."""
    final: Future[Verdict] = Future()

    def settle(future: "Future[Verdict]", tries: int) -> None:
        try:
            verdict = future.result()
            if verdict.failed and tries > 1:
                submit().add_done_callback(lambda second: settle(second, tries - 1))
            else:
                final.set_result(verdict)
        except BaseException as error:
            final.set_exception(error)

    submit().add_done_callback(lambda first: settle(first, 2))
    return final


def _passes(tests: CodeTests, index: int, outcome: Outcome) -> bool:
    if outcome.verdict != "ok":
        return False
    text = outcome.output.decode("utf-8", "replace")
    if not tests.function:
        return tests.accepts(index, text)
    try:
        return tests.accepts(index, json.loads(text, parse_int=whole_number))
    except (ValueError, ArithmeticError, RecursionError):
        return False
