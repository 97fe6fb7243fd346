"""How data sets store the tests of a programming problem, read into one form.

Read here: lists of {input, output} pairs; {inputs, outputs, fn_name} tables (APPS, TACO and their heirs); either one as
JSON text; and the columns of LiveCodeBench. A problem with a function name is called, any other reads stdin.
"""

import base64
import binascii
import dataclasses
import io
import json
import math
import pickle
import zlib
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any

LONGEST_NUMBER = 50_000  # characters
MOST_REWRITTEN = 1 << 18  # characters of the lines of one output that are not equal as text
TABLE_TOLERANCE = 1e-6  # of APPS, TACO and their heirs, whose own judges compare floats
LIVECODEBENCH_COLUMNS = ("starter_code", "public_test_cases", "private_test_cases", "metadata")


@dataclass(frozen=True)
class CodeTests:
    """Tests of one problem. `inputs[i]` is text for stdin, or the list of arguments where `function` is set.

    Example: `CodeTests("", ("3 4\\n",), ("7\\n",))`
    """

    function: str  # name of the function to call, also a method of class Solution; "": run as a script
    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]  # expected stdout, or expected return values as JSON
    numeric_lines: bool = False  # stdout lines may differ in spaces at both ends and in how a number is written
    boxed_outputs: bool = False  # a return value may be stored as a list of one
    tolerance: float = 0.0  # by which two decimals may differ, absolutely or of the expected one; integers are exact

    def accepts(self, index: int, produced: Any) -> bool:
        """Does test `index` pass? produced: stdout as text, or the return value as JSON gives it."""
        expected = self.outputs[index]
        if self.function:
            return self._same_json(produced, expected) or (
                self.boxed_outputs
                and isinstance(expected, list)
                and len(expected) == 1
                and self._same_json(produced, expected[0])
            )
        if _without_trailing_space(produced) == _without_trailing_space(expected):
            return True
        if not self.numeric_lines and not self.tolerance:
            return False
        ours, theirs = produced.strip().split("\n"), expected.strip().split("\n")
        if len(ours) != len(theirs):
            return False
        differ = [(a.strip(), b.strip()) for a, b in zip(ours, theirs, strict=True) if a.strip() != b.strip()]
        # Reading numbers holds the trainer up: lines that are equal need none, and the others have a bound.
        return sum(len(a) for a, _ in differ) <= MOST_REWRITTEN and all(self._same_line(a, b) for a, b in differ)

    def _same_json(self, ours: Any, theirs: Any) -> bool:
        """Equal JSON values: 1 and 1.0 are equal, True and 1 are not. Decimals may differ by the tolerance."""
        if isinstance(ours, bool) or isinstance(theirs, bool):
            return ours is theirs
        if isinstance(ours, list) and isinstance(theirs, list):
            return len(ours) == len(theirs) and all(map(self._same_json, ours, theirs))
        if isinstance(ours, dict) and isinstance(theirs, dict):
            return ours.keys() == theirs.keys() and all(self._same_json(ours[key], theirs[key]) for key in ours)
        if isinstance(ours, float) and isinstance(theirs, float) and self._near(ours, theirs):
            return True
        return ours == theirs

    def _same_line(self, ours: str, theirs: str) -> bool:
        """Lines of equal numbers, however written."""
        a, b = ours.split(), theirs.split()
        try:
            return len(a) == len(b) and all(self._same_number(x, y) for x, y in set(zip(a, b, strict=True)))
        except InvalidOperation:  # a word
            return False

    def _same_number(self, ours: str, theirs: str) -> bool:
        if max(len(ours), len(theirs)) > LONGEST_NUMBER:
            return False
        a, b = Decimal(ours), Decimal(theirs)
        if a == b:
            return True
        whole = ours.lstrip("+-").isdigit() or theirs.lstrip("+-").isdigit()
        return not whole and self._near(float(a), float(b))

    def _near(self, ours: float, theirs: float) -> bool:
        return math.isfinite(ours) and abs(ours - theirs) <= self.tolerance * max(1.0, abs(theirs))


def parse_tests(value: Any, code_format: str, tolerance: float = -1.0) -> CodeTests:
    """Read a test column (or the LiveCodeBench columns as a dict). ValueError says what is wrong with it.

    tolerance: of decimals in outputs; -1: that of the judges which the stored form was made for.
    """
    tests = _parse(value, code_format)
    return tests if tolerance < 0 else dataclasses.replace(tests, tolerance=tolerance)


def _parse(value: Any, code_format: str) -> CodeTests:
    if code_format == "livecodebench":
        return _parse_livecodebench(value)
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            raise ValueError("the tests are text that is not JSON") from None
    if isinstance(value, dict):
        return _parse_table(value)
    if not isinstance(value, list | tuple):
        raise ValueError(f"tests must be a list of {{input, output}}, not of type {type(value).__name__}")
    return _parse_pairs(value, numeric_lines=False)


def livecodebench_prompt(question: Any, row: dict[str, Any]) -> Any:
    """The question with what LiveCodeBench says about the form of the answer, in our words."""
    if not isinstance(question, str):
        return question
    starter = row["starter_code"]
    if isinstance(starter, str) and starter.strip():
        return f"{question}\n\nComplete this code, and answer with all of it in one block:\n```python\n{starter}\n```"
    return (
        f"{question}\n\nRead from standard input and write to standard output. Answer with the program in one block:\n"
        "```python\n# your code\n```"
    )


def _parse_pairs(pairs: Any, numeric_lines: bool, function: str = "") -> CodeTests:
    if not pairs:
        raise ValueError("there are no tests")
    inputs, outputs = [], []
    for number, pair in enumerate(pairs, 1):
        if not isinstance(pair, dict) or "input" not in pair or "output" not in pair:
            raise ValueError(f"test {number} must be an object with input and output")
        function = function or _function_name(pair)
        inputs.append(pair["input"])
        outputs.append(pair["output"])
    if function:
        return _call_tests(function, inputs, outputs, boxed=not numeric_lines)
    return _stdin_tests(inputs, outputs, numeric_lines)


def _function_name(pair: dict[str, Any]) -> str:
    """Of a pair that calls a function: fn_name, or metadata.func_name beside testtype = "functional"."""
    if pair.get("testtype") == "functional" and isinstance(pair.get("metadata"), dict):
        return pair["metadata"].get("func_name") or ""
    return pair.get("fn_name") or ""


def _parse_table(table: dict[str, Any]) -> CodeTests:
    inputs, outputs = table.get("inputs"), table.get("outputs")
    if not isinstance(inputs, list | tuple) or not isinstance(outputs, list | tuple):
        raise ValueError("tests must have lists `inputs` and `outputs`, or be a list of {input, output}")
    if len(inputs) != len(outputs):
        raise ValueError(f"tests have {len(inputs)} inputs but {len(outputs)} outputs")
    if not inputs:
        raise ValueError("there are no tests")
    if table.get("fn_name"):
        tests = _call_tests(table["fn_name"], list(inputs), list(outputs), boxed=True)
        return dataclasses.replace(tests, tolerance=TABLE_TOLERANCE)
    # Some rows store a test as a list of lines. Such sets have always been graded leniently on spaces and numbers.
    joined = [
        ["\n".join(map(str, text)) if isinstance(text, list) else text for text in side] for side in (inputs, outputs)
    ]
    return dataclasses.replace(_stdin_tests(*joined, numeric_lines=True), tolerance=TABLE_TOLERANCE)


def _parse_livecodebench(row: Any) -> CodeTests:
    try:
        tests = json.loads(row["public_test_cases"]) + _private_tests(row["private_test_cases"])
        function = json.loads(row["metadata"] or "{}").get("func_name") or ""
    except (
        ValueError,
        TypeError,
        AttributeError,
        binascii.Error,
        zlib.error,
        pickle.UnpicklingError,
        EOFError,
    ) as error:
        raise ValueError(f"the LiveCodeBench test columns cannot be read: {error}") from None
    return _parse_pairs(tests, numeric_lines=True, function=function)


def _private_tests(text: str) -> list[Any]:
    """JSON, or as in code_generation_lite base64(zlib(pickle(JSON text)))."""
    try:
        return json.loads(text)
    except ValueError:
        payload = zlib.decompress(base64.b64decode(text, validate=True))
        return json.loads(_TextUnpickler(io.BytesIO(payload)).load())


class _TextUnpickler(pickle.Unpickler):
    """A pickle may run any code; one that holds text needs to name no class at all."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def _stdin_tests(inputs: list[Any], outputs: list[Any], numeric_lines: bool) -> CodeTests:
    for number, pair in enumerate(zip(inputs, outputs, strict=True), 1):
        if not all(isinstance(text, str) for text in pair):
            raise ValueError(f"input and output of test {number} must be text")
    return CodeTests("", tuple(inputs), tuple(outputs), numeric_lines)


def _call_tests(function: Any, inputs: list[Any], outputs: list[Any], boxed: bool) -> CodeTests:
    """Arguments are a list, or text with one JSON value a line; a result is a value, or JSON text."""
    if not isinstance(function, str) or not function.isidentifier():
        raise ValueError(f"the function name must be a Python name, is {function!r}")
    arguments, results = [], []
    for number, (given, expected) in enumerate(zip(inputs, outputs, strict=True), 1):
        try:
            as_text = isinstance(given, str)
            arguments.append([json.loads(line) for line in given.split("\n") if line] if as_text else list(given))
            stored = as_text and isinstance(expected, str)
            results.append(json.loads(expected, parse_int=whole_number) if stored else expected)
        except (ValueError, TypeError):
            raise ValueError(f"test {number}: arguments must be a list, or one JSON value a line") from None
    return CodeTests(function, tuple(arguments), tuple(results), boxed_outputs=boxed)


def _without_trailing_space(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.rstrip().split("\n"))


def whole_number(digits: str) -> int | Decimal:
    """An integer of JSON, however long: Python's own reading refuses more than 4300 digits."""
    return int(digits) if len(digits) < 4300 else Decimal(digits)
