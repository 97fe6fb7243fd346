"""Tests of programs: the forms data sets store them in, and when an output passes."""

import base64
import dataclasses
import json
import pickle
import time
import zlib
from typing import Any

import pytest

from quads.rl.rewards.code_tests import CodeTests, livecodebench_prompt, parse_tests, whole_number
from quads.rl.rewards.text import extract_code


@pytest.mark.parametrize(
    ("stored", "tests"),
    [
        ([{"input": "1\n", "output": "2\n"}], CodeTests("", ("1\n",), ("2\n",))),
        ('[{"input": "1", "output": "2", "type": "stdin_stdout"}]', CodeTests("", ("1",), ("2",))),
        (
            [{"fn_name": "f", "input": [1, "a"], "output": 3}, {"fn_name": "f", "input": [2, "b"], "output": [4]}],
            CodeTests("f", ([1, "a"], [2, "b"]), (3, [4]), boxed_outputs=True),
        ),
        (
            [{"input": '1\n"a"', "output": "[3]", "testtype": "functional", "metadata": {"func_name": "f"}}],
            CodeTests("f", ([1, "a"],), ([3],), boxed_outputs=True),
        ),
        (
            {"inputs": ["1", ["2", "3"]], "outputs": ["x", "y"]},
            CodeTests("", ("1", "2\n3"), ("x", "y"), True, tolerance=1e-6),
        ),
        (
            {"fn_name": "f", "inputs": [[1], [[2]]], "outputs": [[3], [[4]]]},
            CodeTests("f", ([1], [[2]]), ([3], [[4]]), boxed_outputs=True, tolerance=1e-6),
        ),
    ],
)
def test_stored_forms(stored: Any, tests: CodeTests) -> None:
    assert parse_tests(stored, "pairs") == tests


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        ([], "no tests"),
        ({"inputs": [], "outputs": []}, "no tests"),
        ("not json", "not JSON"),
        (7, "must be a list"),
        ([{"input": "1"}], "test 1 must be an object with input and output"),
        ([{"input": 1, "output": "2"}], "input and output of test 1 must be text"),
        ({"inputs": ["1"], "outputs": ["1", "2"]}, "1 inputs but 2 outputs"),
        ({"inputs": "1", "outputs": "2"}, "lists `inputs` and `outputs`"),
        ({"fn_name": "not a name", "inputs": [[1]], "outputs": [1]}, "must be a Python name"),
        ({"fn_name": "f", "inputs": ["1 2"], "outputs": ["3"]}, "one JSON value a line"),
        ({"fn_name": "f", "inputs": [5], "outputs": ["3"]}, "arguments must be a list"),
    ],
)
def test_tests_that_cannot_be_read(stored: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_tests(stored, "pairs")


def livecodebench(private: str) -> dict[str, str]:
    public = [{"input": "1\n", "output": "2\n", "testtype": "stdin"}]
    return {
        "starter_code": "", "metadata": "{}", "public_test_cases": json.dumps(public), "private_test_cases": private,
    }  # fmt: skip


def test_livecodebench_columns() -> None:
    private = [{"input": "3\n", "output": "4\n", "testtype": "stdin"}]
    packed = base64.b64encode(zlib.compress(pickle.dumps(json.dumps(private)))).decode()
    for stored in (json.dumps(private), packed):
        tests = parse_tests(livecodebench(stored), "livecodebench")
        assert tests == CodeTests("", ("1\n", "3\n"), ("2\n", "4\n"), numeric_lines=True)


class Attack:
    def __reduce__(self) -> Any:
        return print, ("this must not run",)


def test_a_packed_test_column_cannot_run_code(capsys: pytest.CaptureFixture[str]) -> None:
    packed = base64.b64encode(zlib.compress(pickle.dumps(Attack()))).decode()
    with pytest.raises(ValueError, match="cannot be read: it names builtins.print"):
        parse_tests(livecodebench(packed), "livecodebench")
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("stored", ["!!", "aGk=", base64.b64encode(zlib.compress(b"x")).decode()])
def test_damaged_packed_columns(stored: str) -> None:
    with pytest.raises(ValueError, match="LiveCodeBench test columns cannot be read"):
        parse_tests(livecodebench(stored), "livecodebench")


@pytest.mark.parametrize(
    ("printed", "expected", "passes"),
    [
        ("7\n", "7", True),
        ("7", "7\n\n", True),
        ("1 2  \n3\t\n", "1 2\n3", True),  # trailing white space is ignored
        (" 7", "7", False),
        ("1\n\n2", "1\n2", False),
        ("7.0", "7", False),
        ("", "", True),
        ("7\n8", "7", False),
        ("Yes", "YES", False),
    ],
)
def test_plain_output(printed: str, expected: str, passes: bool) -> None:
    assert CodeTests("", ("",), (expected,)).accepts(0, printed) is passes


@pytest.mark.parametrize(
    ("printed", "expected", "passes"),
    [
        ("  7.0 \n", "7", True),
        ("1e2 3", "100 3.00", True),
        ("7.0000001", "7", False),
        ("yes", "Yes", False),
        ("1 2", "1\n2", False),
        ("12345678901234567891", "12345678901234567890", False),  # exact, however long
    ],
)
def test_lenient_output(printed: str, expected: str, passes: bool) -> None:
    assert CodeTests("", ("",), (expected,), numeric_lines=True).accepts(0, printed) is passes


@pytest.mark.parametrize(
    ("printed", "expected", "passes"),
    [
        ("0.333333", "0.333333333333", True),
        ("0.33", "0.333333333333", False),
        ("1000000.5", "1000001.0", True),  # of the expected value
        ("1e-7", "0.0", True),
        ("3.0000001", "3", False),  # an integer is exact
        ("12345678901234567891", "12345678901234567890", False),
        ("x 0.333333", "x 0.3333333", False),  # a line of numbers, or the same text
        ("nan", "0.5", False),
        ("inf", "1e400", False),
    ],
)
def test_tolerance(printed: str, expected: str, passes: bool) -> None:
    for stored in ({"inputs": [""], "outputs": [expected]}, [{"input": "", "output": expected}]):
        assert parse_tests(stored, "pairs", 1e-6).accepts(0, printed) is passes
    assert (
        parse_tests({"inputs": [""], "outputs": [expected]}, "pairs").accepts(0, printed) is passes
    )  # what tables mean
    for exact in (parse_tests(stored, "pairs"), parse_tests({"inputs": [""], "outputs": [expected]}, "pairs", 0.0)):
        assert not exact.accepts(0, printed)


def test_tolerance_of_returned_values() -> None:
    tests = parse_tests({"inputs": [[1], [1]], "outputs": [[0.3, 1], [2, 0.5]], "fn_name": "f"}, "pairs")
    assert (
        tests.accepts(0, [0.1 + 0.2, 1]) and not tests.accepts(0, [0.31, 1]) and not tests.accepts(1, [2.0000001, 0.5])
    )
    exact = dataclasses.replace(tests, tolerance=0.0)
    assert not exact.accepts(0, [0.1 + 0.2, 1]) and exact.accepts(0, [0.3, 1])


def test_comparing_a_long_output_does_not_hold_the_trainer_up() -> None:
    tests = CodeTests("", ("",), ("1 " * 500_000,), numeric_lines=True)
    assert tests.accepts(0, "1 " * 500_000 + " ")  # however long, where it is the same text
    started = time.process_time()
    assert not tests.accepts(0, "1.0 " * 500_000)  # 2 MB in other words
    assert time.process_time() - started < 0.2
    numbers = [str(10**6 + i) for i in range(16_000)]
    tests = CodeTests("", ("",), (" ".join(numbers),), numeric_lines=True)
    started = time.process_time()
    assert tests.accepts(0, " ".join(f"{number}.0" for number in numbers))
    assert not tests.accepts(0, " ".join(f"{number}.5" for number in numbers))
    assert time.process_time() - started < 0.4


def test_integers_of_any_length_are_exact() -> None:
    digits = "9" * 6000
    tests = parse_tests([{"input": "", "output": digits, "fn_name": "f"}], "pairs")
    assert tests.accepts(0, whole_number(digits)) and not tests.accepts(0, whole_number(digits[:-1] + "8"))
    assert tests.accepts(0, whole_number(digits)) and whole_number("12") == 12


@pytest.mark.parametrize(
    ("returned", "expected", "passes"),
    [
        (3, 3, True), (3.0, 3, True), (True, 1, False), (1, True, False), (True, True, True), ([1, 2], [1, 2], True),
        ([1], [2], False), ([1], [1, 2], False), ({"a": [1]}, {"a": [1]}, True), ({"a": 1}, {"b": 1}, False),
        (None, None, True), (None, 0, False), ("1", 1, False), ([[True]], [[1]], False),
    ],
)  # fmt: skip
def test_returned_values(returned: Any, expected: Any, passes: bool) -> None:
    assert CodeTests("f", ([],), (expected,)).accepts(0, returned) is passes


def test_boxed_outputs() -> None:
    assert CodeTests("f", ([],), ([3],), boxed_outputs=True).accepts(0, 3)
    assert not CodeTests("f", ([],), ([3],)).accepts(0, 3)


@pytest.mark.parametrize(
    ("response", "code"),
    [
        ("Text.\n```python\na = 1\n```\nMore.\n```\nb = 2\n```\nEnd.", "b = 2\n"),
        ("```py\nx\n```", "x\n"),
        ("```python\r\nx\r\n```", "x\n"),
        ("<think>\n```\nwrong\n```\n</think>\n```\nright\n```", "right\n"),
        ("  ```python\n  x = 1\n  ```", "x = 1\n"),
        ("1. So:\n\n    ```python\n    def f():\n\n        return 1\n    ```", "def f():\n\n    return 1\n"),
        ("  ```python\nx = 1\n  ```", "x = 1\n"),
        ("```python\nprint('```')\n```", "print('```')\n"),
        ("print(1)", "print(1)"),
        ("````python\na\n```\nb\n````", "a\n```\nb\n"),
        ("~~~python\nprint(4)\n~~~~ ", "print(4)\n"),
        ("~~~\n```\n~~~", "```\n"),
        ("```python\ns = '''\n```\n'''\nprint(4)\n```", "s = '''\n```\n'''\nprint(4)\n"),
        (
            '```\nx = """a\\"""\n```\n"""  # \'\'\'\ny = "\'\'\'"\n```\nend',
            'x = """a\\"""\n```\n"""  # \'\'\'\ny = "\'\'\'"\n',
        ),
        ("```python\nx = '''\n```\nnever closed", "x = '''\n"),  # a string that never ends is none
        ("```text\nit'''s\n```\n```python\nx = '''a'''\n```", "x = '''a'''\n"),  # other languages have other strings
        # The last attempt counts, finished or not.
        ("```python\nprint(4)\n```\nBetter:\n```python\nprint(5)\n", None),
        ("```python\nprint(4)\n```\n```", None),
        ("````python\nprint(4)\n```", None),
        ("```\nx\n```" + " " * (1 << 20), None),
        ("```\n```\n" * 4095 + "```\nx\n```", "x\n"),
        ("```\n```\n" * 4096 + "```\nx\n```", None),  # more than 8192 fences
    ],
)
def test_the_last_fenced_block_counts(response: str, code: str | None) -> None:
    assert extract_code(response) == code


def test_livecodebench_prompt_names_the_form_of_the_answer() -> None:
    assert "standard input" in livecodebench_prompt("Add.", {"starter_code": ""})
    starter = livecodebench_prompt("Add.", {"starter_code": "def add(a, b):"})
    assert "```python\ndef add(a, b):\n```" in starter and "standard input" not in starter
