"""The reward pool and its command: each kind of reward, time limits, and answers that attack their scorer."""

import json
import os
import sys
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import sympy
import sympy.parsing.sympy_parser

from quads.config.sections import RewardSettings, SourceSettings
from quads.data.reasoning import make_dataset
from quads.rl.rewards.__main__ import main
from quads.rl.rewards.code import again
from quads.rl.rewards.code_tests import CodeTests
from quads.rl.rewards.judges import JudgePool, judge_environment
from quads.rl.rewards.pool import RewardPool
from quads.rl.rewards.task import narrow_scorers, read_formula, score
from quads.rl.rewards.text import tagged
from quads.sandbox.helpers import Helper, HelperError, HelperPool
from quads.types import Example, Verdict

SOURCES = {
    "math": SourceSettings(kind="jsonl", reward="math"),
    "percent": SourceSettings(kind="jsonl", reward="math", percent_as_unit=True),
    "exact": SourceSettings(kind="jsonl", reward="exact"),
    "tagged": SourceSettings(kind="jsonl", reward="exact", answer_tag="answer"),
    "gym": SourceSettings(kind="reasoning_gym", dataset="chain_sum", params={"max_terms": 3}),
    "tagged gym": SourceSettings(kind="reasoning_gym", dataset="chain_sum", answer_tag="answer"),
    "code": SourceSettings(kind="jsonl", reward="code"),
    "part": SourceSettings(kind="jsonl", reward="code", code_score="fraction"),
}


@pytest.fixture(scope="module")
def pool():
    pool = RewardPool(RewardSettings(workers=2, judge_time_s=2.0, code_time_s=2.0), SOURCES)
    yield pool
    pool.close()


def example(source: str, answer: Any) -> Example:
    return Example("0", source, "", [], answer)


def score_batch(pool: RewardPool, batch: list[tuple[Example, str]]) -> list[float]:
    return [future.result().reward for future in [pool.submit(example, text) for example, text in batch]]


def test_every_kind_in_one_batch(pool: RewardPool) -> None:
    gym, tagged_gym = (example(name, make_dataset("test", "chain_sum", {}, seed=3, size=4)[0]) for name in
                       ("gym", "tagged gym"))  # fmt: skip
    tests = CodeTests("", ("2", "3"), ("4", "9"))
    batch = [
        (example("math", "0.5"), r"\boxed{\frac{1}{2}}"),
        (example("math", "0.5"), r"\boxed{\frac{1}{3}}"),
        (example("percent", "25"), r"\boxed{25\%}"),
        (example("exact", "yes"), " yes\n"),
        (example("exact", "yes"), "Yes"),
        (example("tagged", "yes"), "hm <answer>no</answer> <answer> yes </answer>"),
        (example("tagged", "yes"), "yes"),
        (gym, gym.answer["answer"]),
        (gym, "no number"),
        (gym, " \n"),
        (tagged_gym, gym.answer["answer"]),
        (tagged_gym, "<answer></answer>"),
        (tagged_gym, f"<answer>{gym.answer['answer']}</answer>"),
        (example("code", tests), "```python\nprint(int(input()) ** 2)\n```"),
        (example("code", tests), "```python\nprint(4)\n```"),
        (example("part", tests), "```python\nprint(4)\n```"),
    ]
    assert score_batch(pool, batch) == [1.0, 0.0, 1.0, 1.0, 0.0, 1.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.5]


def test_scoring_runs_beside_the_caller(pool: RewardPool) -> None:
    slow = example("code", CodeTests("", ("",), ("1",)))
    started = time.monotonic()
    future = pool.submit(slow, "```\nimport time\ntime.sleep(1)\nprint(1)\n```")
    assert time.monotonic() - started < 0.5
    assert future.result().reward == 1.0


def test_an_answer_that_takes_for_ever_is_wrong_and_the_next_is_judged(pool: RewardPool) -> None:
    """An integral that no computer algebra finishes: the judge is killed, and replaced."""
    hard = r"\int_0^1 \sqrt{\sin(x^{17}+\cos(x^x))+\tan(x^3+x+1)^{\ln(x+2)}}\,dx"
    verdict = pool.submit(example("math", "1"), rf"\boxed{{{hard}}}").result(timeout=30)
    assert verdict.reward == 0.0 and verdict.failed
    assert verdict.seconds < 2.0 + 2.0  # the limit, and a busy machine
    assert score_batch(pool, [(example("math", "1"), r"\boxed{+1}")] * 4) == [1.0] * 4


def test_a_judge_that_died_while_idle_is_replaced_and_asked_again() -> None:
    pool = JudgePool("quads.rl.rewards.math", workers=1, time_s=10.0)
    try:
        judge = pool.add("make_judge", False)
        assert judge.submit("7", r"\boxed{7}").result(timeout=60).reward == 1.0
        (helper,) = pool._pool._helpers
        assert helper._process
        helper._process.kill()
        helper._process.wait()
        verdict = judge.submit("7", r"\boxed{7}").result(timeout=60)
        assert verdict.reward == 1.0 and not verdict.failed
    finally:
        pool.close()


def test_a_program_that_broke_its_server_is_tried_once_more() -> None:
    """And then has no verdict. `again` takes what starts the work, so that the second try is all new."""
    tries: list[Verdict] = []

    def submit(outcomes: list[Verdict]) -> "Future[Verdict]":
        tries.append(outcomes[len(tries)])
        future: Future[Verdict] = Future()
        future.set_result(tries[-1])
        return future

    broken, right = Verdict(0.0, 0.1, failed=True), Verdict(1.0, 0.1)
    for outcomes, last, number in (([right], right, 1), ([broken, right], right, 2), ([broken] * 3, broken, 2)):
        tries.clear()
        assert again(lambda outcomes=outcomes: submit(outcomes)).result(timeout=5) is last
        assert len(tries) == number


def test_tags() -> None:
    assert tagged(" a ", "") == "a"
    assert tagged("<answer>1</answer><answer>\n2\n</answer>", "answer") == "2"
    assert tagged("no tag", "answer") is None
    # The last attempt counts: one left open does not fall back to an earlier one.
    assert tagged("<a>1</a> no: <a>2", "a") is None and tagged("<a>1</a><a></a>", "a") == ""
    assert tagged("</a>", "a") is None and tagged("<a>" * 3 + "1</a></a>", "a") == "1"
    assert tagged("<a>1</a>" + " " * (1 << 20), "a") is None


# ---- reasoning-gym


@pytest.mark.parametrize(
    "name", ["chain_sum", "countdown", "n_queens", "spiral_matrix", "string_insertion", "polynomial_multiplication"]
)
def test_the_right_answer_of_a_data_set_scores_one(name: str) -> None:
    dataset = make_dataset("test", name, {}, seed=5, size=4)
    entry = dataset[0]
    answer = entry["answer"] or entry["metadata"]["valid_answers"][0]
    assert score(dataset, answer, entry) == 1.0


def test_scorers_that_eval_give_nothing_to_code() -> None:
    """reasoning-gym's scorer evaluates the answer with the solution in scope; here only literals are read."""
    dataset = make_dataset("test", "string_insertion", {}, seed=5, size=4)
    entry = dataset[0]
    vars(sys.modules[type(dataset).__module__]).pop("eval", None)  # as the library comes
    assert dataset.score_answer("list(oracle_answer)", entry) > 0  # the hole
    narrow_scorers()
    for attack in ("list(oracle_answer)", 'entry["answer"]', "[c for c in oracle_answer]", "__import__('os').getcwd()"):
        assert score(dataset, attack, entry) == 0.0
    assert score(dataset, str(list(entry["answer"])), entry) == pytest.approx(0.1)  # a literal list, as intended


@pytest.mark.parametrize(
    "name", ["countdown", "puzzle24", "simple_integration", "intermediate_integration", "polynomial_multiplication"]
)
def test_scorers_that_parse_run_nothing_and_take_every_right_answer(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer that fetches the entry's, from the frames above the parser."""
    dataset = make_dataset("test", name, {}, seed=3, size=16)
    entry = "__import__('sys')._getframe({}).f_locals['entry']"
    fetching = [f"__import__('sympy').S({entry.format(depth)}['answer'])" for depth in range(8)]
    for owner in (sympy, sys.modules[type(dataset).__module__]):
        if hasattr(owner, "parse_expr"):
            monkeypatch.setattr(owner, "parse_expr", sympy.parsing.sympy_parser.parse_expr)  # as the library comes
    nothing = score(dataset, "no answer at all", dataset[0])
    worth = max(score(dataset, attack, dataset[0]) for attack in fetching)
    assert worth == {"countdown": 0.05, "puzzle24": nothing}.get(name, 1.0)  # the hole; those two count digits as well
    narrow_scorers()
    for i in range(12):
        assert score(dataset, dataset[i]["answer"], dataset[i]) == 1.0
    for attack in (*fetching, "getattr(1, chr(97))", "exec(x)", "(lambda: 24)()"):
        assert score(dataset, attack, dataset[0]) == nothing


@pytest.mark.parametrize(
    "text",
    ["x.real", "x[0]", "[24]", "'24'", "f'{x}'", "sin.x", "sin(*x)", "log(x, evaluate=x)", "eval", "S(x)", "sympify(x)",
     "getattr(x, y)", "sin(x)(y)", "(lambda: 1)()", "1 if x else 2", "[y for y in x]", "{x}", "x, y", "x and y", "1j",
     "\uff45val(x)", "\uff58 + 1", "x := 1", "24 = x", "24; x"],
)  # fmt: skip
def test_what_is_no_formula(text: str) -> None:
    with pytest.raises((ValueError, SyntaxError)):
        read_formula(text)


def test_formulas() -> None:
    assert read_formula(" 6*(5 - 1) ") == 24 and read_formula("7//2 + 2**3 - -1") == 12
    assert str(read_formula("sqrt(alpha)*sin(x)/pi + C - exp(E)")) == "C + sqrt(alpha)*sin(x)/pi - exp(E)"


# ---- helper processes


def test_a_helper_that_cannot_start_says_why() -> None:
    pool = HelperPool(lambda: Helper(["/bin/sh", "-c", "echo no such thing >&2; exit 3"], {}), 1)
    try:
        with pytest.raises(HelperError, match="no such thing"):
            pool.submit(lambda helper: helper.ask(b"x", 1.0)).result(timeout=10)
    finally:
        pool.close()


def test_judges_find_packages_where_the_trainer_does(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}")
    monkeypatch.setenv("SECRET", "1")
    environment = judge_environment()
    repository = str(Path(__file__).resolve().parents[2])
    assert environment["PYTHONPATH"].split(os.pathsep) == [repository, str(tmp_path)] and "SECRET" not in environment


def test_closing_ends_work_and_processes() -> None:
    pool = JudgePool("quads.rl.rewards.math", workers=1, time_s=60.0)
    assert pool.add("make_judge", False).submit("1", r"\boxed{1}").result(timeout=60).reward == 1.0
    (pid,) = [int(p) for t in Path("/proc/self/task").iterdir() for p in (t / "children").read_text().split()
              if b"quads.rl.rewards.judge" in Path(f"/proc/{p}/cmdline").read_bytes()][-1:]  # fmt: skip
    pool.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


# ---- the command


def run(tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, rows: list[Any], *options: str) -> list[Any]:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    main([kind, str(file), "--workers", "2", *options])
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_math_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        {"response": r"so \boxed{\frac{1}{2}}", "answer": "0.5"},
        {"response": r"so \boxed{3}", "answer": 4},
        {"response": r"\boxed{10^{10^{10}}}", "answer": "10^{10^{10}}"},
    ]
    verdicts = run(tmp_path, capsys, "math", rows)
    assert [verdict["reward"] for verdict in verdicts] == [1.0, 0.0, 1.0]
    assert all(0 <= verdict["seconds"] < 5 for verdict in verdicts)


def test_code_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tests = [{"input": "2\n", "output": "4\n"}, {"input": "5\n", "output": "25"}]
    programs = ["print(int(input()) ** 2)", "print(4)", "while True: pass", "print(int(input()) ** 2)\nexit(1)"]
    rows = [{"response": f"Here:\n```python\n{program}\n```", "tests": tests} for program in programs]
    verdicts = run(tmp_path, capsys, "code", rows, "--time-s", "1")
    assert [verdict["reward"] for verdict in verdicts] == [1.0, 0.0, 0.0, 0.0]
    assert 0.9 < verdicts[2]["seconds"] < 4


def test_code_is_judged_no_stricter_than_by_those_who_made_the_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Tables of inputs and outputs as APPS and TACO have them: decimals are near, integers long, fences many."""
    third = {"inputs": [""], "outputs": ["0.333333333333"]}
    four = {"inputs": [""], "outputs": ["4"]}
    rows = [
        ("```python\nprint('%.6f' % (1/3))\n```", third, 1),
        ("```python\nprint('0.33')\n```", third, 0),
        ("```python\nprint(10**5000)\n```", {"inputs": [""], "outputs": ["1" + "0" * 5000]}, 1),
        ("```\ndef f(n):\n    return 10**n\n```", [{"input": "5000", "output": "1" + "0" * 5000, "fn_name": "f"}], 1),
        ("```\ndef f(x):\n    return [0.1 + 0.2, x]\n```", {"inputs": [[1]], "outputs": [[0.3, 1]], "fn_name": "f"}, 1),
        ("````python\nprint(4)\n````", four, 1),
        ("~~~python\nprint(4)\n~~~", four, 1),
        ("```python\ns = '''\n```\n'''\nprint(4)\n```", four, 1),
        ("```python\nprint(4)\n```\n```python\nprint(", four, 0),
    ]
    verdicts = run(tmp_path, capsys, "code", [{"response": r, "tests": tests} for r, tests, _ in rows])
    assert [verdict["reward"] for verdict in verdicts] == [right for _, _, right in rows]


@pytest.mark.parametrize(
    ("kind", "row", "message"),
    [
        ("math", "{", "line 2: is not JSON"),
        ("math", {"response": "x"}, "line 2: must be an object with response and answer"),
        ("math", {"response": 1, "answer": "x"}, "line 2: response must be text"),
        ("math", {"response": "x", "answer": [1]}, "line 2: column 'answer' must hold text or a number, has a list"),
        ("math", {"response": "x", "answer": None}, "line 2: has no answer"),
        ("code", {"response": "x", "tests": []}, "line 2: there are no tests"),
        ("code", {"response": "x", "tests": [{"input": "1"}]}, "line 2: test 1 must be an object"),
    ],
)
def test_bad_rows_of_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, row: Any, message: str
) -> None:
    good = {"response": "x", "answer": "1", "tests": [{"input": "", "output": ""}]}
    with pytest.raises(SystemExit) as stop:
        run(tmp_path, capsys, kind, [good, row])
    assert stop.value.code == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.out == ""


def test_missing_file(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["math", "/nowhere.jsonl"])
    assert stop.value.code == 2
    assert "cannot be read: No such file" in capsys.readouterr().err
