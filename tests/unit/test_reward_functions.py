"""Rewards of the user: FILE.py:FUNCTION in the judges, several with weights, and every fault of one said in words."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from quads.config.sections import RewardSettings, SourceSettings, TaskSettings, WeightedReward
from quads.data.tasks import build_task
from quads.data.tokenizer import Tokenizer
from quads.errors import UserError
from quads.rl.grading import Grading, part_means
from quads.rl.rewards.pool import RewardPool
from quads.types import Completion, Example
from tests.helpers import REPOSITORY
from tests.tiny_run import write_jsonl

TOKENIZER = Tokenizer(REPOSITORY / "examples" / "tokenizer")
FUNCTIONS = """
import time
from neighbour import TWO
def score(prompt, response, answer, row): return TWO * (response == answer) + len(prompt) / 8 + row["bonus"]
def short(prompt, response, answer, row): return -len(response)
def returns(prompt, response, answer, row): return eval(response)
def raises(prompt, response, answer, row):
    return {}["key"]
def hangs(prompt, response, answer, row):
    while response == "hang": time.sleep(0.1)
    return 1
def three(prompt, response, answer): return 0
async def waits(prompt, response, answer, row): return 0
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Named from the current folder, which is not that of the file."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "my.py").write_text(FUNCTIONS)
    (tmp_path / "mine" / "neighbour.py").write_text("TWO = 2\n")
    monkeypatch.chdir(tmp_path)
    return "mine/my.py"


def pool_of(judge_time_s: float = 5.0, **source: Any) -> RewardPool:
    settings = RewardSettings(workers=1, judge_time_s=judge_time_s)
    return RewardPool(settings, {"s": SourceSettings(kind="jsonl", **source)})


def verdict(pool: RewardPool, text: str, row: dict[str, Any], prompt: str = "four") -> Any:
    reward = pool.rewards["s"]
    prompt_, answer = reward.read(row, prompt)
    return pool.submit(Example("s/7", "s", prompt_, [], reward.unpack(answer)), text).result(timeout=60)


def test_a_function_gets_prompt_response_answer_and_row(file: str) -> None:
    pool = pool_of(reward=f"{file}:score")
    try:
        pool.check()
        assert verdict(pool, "7", {"answer": 7, "bonus": 0.25}).reward == 2 + 0.5 + 0.25
        assert verdict(pool, "8", {"answer": "7", "bonus": 0}, prompt="eight").reward == 5 / 8
    finally:
        pool.close()


def test_rows_give_every_column_and_the_answer_may_be_left_out(file: str, tmp_path: Path) -> None:
    rows = [{"prompt": f"p{i}", "bonus": i, "list": [i]} for i in range(6)]
    write_jsonl(tmp_path / "rows.jsonl", rows)
    source = SourceSettings(
        kind="datasets", dataset=str(tmp_path / "rows.jsonl"), reward=f"{file}:score", answer_column="", eval_rows=0
    )
    pool = RewardPool(RewardSettings(workers=1), {"s": source})
    task = build_task(TaskSettings(train=("s",), eval=("s",)), {"s": source}, pool.rewards, TOKENIZER, seed=0)
    answers = sorted((example.answer for example in task.batch(0, 6)), key=lambda pair: pair[1]["bonus"])
    assert answers == [(None, row) for row in rows]
    pool.close()
    with pytest.raises(UserError, match="answer_column is empty; reward 'exact' needs the answer"):
        pool_of(reward="exact", answer_column="")


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("mine/no.py:score", "there is no file .*/mine/no.py"),
        ("mine/my.py:scroe", "mine/my.py has no function 'scroe'"),
        ("mine/my.py:TWO", "mine/my.py has no function 'TWO'"),
        (
            "mine/my.py:three",
            r"three must take \(prompt, response, answer, row\).* is three\(prompt, response, answer\)",
        ),
        ("mine/my.py:waits", "waits is async"),
        ("mine/syntax.py:score", "syntax.py line 2: "),
        (
            "mine/imports.py:score",
            r"raised ModuleNotFoundError: No module named 'nowhere' \(.*imports.py line 1",
        ),
        ("mine/exits.py:score", "importing it raised SystemExit: 3"),
    ],
)
def test_a_function_that_cannot_be_used_is_refused_at_the_start(file: str, function: str, words: str) -> None:
    Path("mine/syntax.py").write_text("\ndef score(:\n")
    Path("mine/imports.py").write_text("import nowhere\n")
    Path("mine/exits.py").write_text("raise SystemExit(3)\n")
    with pytest.raises(UserError, match=rf"^\[sources.s\] reward {function}: .*{words}"):
        pool = pool_of(reward=function)
        try:
            pool.check()
        finally:
            pool.close()


def test_what_a_function_may_return(file: str) -> None:
    pool = pool_of(reward=f"{file}:returns")
    row = {"answer": "1"}
    try:
        good = {"1": 1.0, "True": 1.0, "False": 0.0, "-2.5": -2.5, "1e6": 1e6, "__import__('numpy').float32(0.5)": 0.5}
        assert {text: verdict(pool, text, row).reward for text in good} == good
        for text in ("None", "'1'", "[1]", "1j", "float('nan')", "float('inf')", "10**400", "-1000001"):
            with pytest.raises(UserError, match=rf"reward {file}:returns returned .* for a response to s/7; it must"):
                verdict(pool, text, row)
        with pytest.raises(UserError, match="returned None for"):
            verdict(pool, "None", row)
        assert verdict(pool, "1", row).reward == 1.0  # the judge lives on
    finally:
        pool.close()


def test_a_function_that_raises_or_hangs(file: str) -> None:
    raising, hanging = pool_of(reward=f"{file}:raises"), pool_of(2.0, reward=f"{file}:hangs")
    try:
        with pytest.raises(UserError, match=r"raises raised KeyError: 'key' \(.*my.py line \d+\), for a .* s/7"):
            verdict(raising, "1", {"answer": "1"})
        assert verdict(hanging, "hang", {"answer": "1"}).failed  # and not an error: the response may be to blame
        assert verdict(hanging, "1", {"answer": "1"}).reward == 1.0
    finally:
        raising.close()
        hanging.close()


def test_functions_keep_the_environment_and_other_judges_do_not(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "x")
    pool = pool_of(reward=f"{file}:returns")
    try:
        assert verdict(pool, "__import__('os').environ.get('MY_KEY') == 'x'", {"answer": "1"}).reward == 1.0
    finally:
        pool.close()


def test_weighted_rewards_sum_and_are_told_apart(file: str) -> None:
    rewards = (
        WeightedReward("exact", 0.8),
        WeightedReward(f"{file}:short", 0.1),
        WeightedReward(f"{file}:hangs", 0.0),
    )
    pool = pool_of(2.0, rewards=rewards, answer_tag="a")
    row = {"answer": "yes"}
    answer = pool.rewards["s"].read(row, "p")[1]
    examples = [Example("s/0", "s", "p", [1], answer)]
    texts = {1: "<a>yes</a>", 2: "no", 3: "hang"}
    try:
        grading = Grading(pool.submit, lambda batch: [texts[ids[0]] for ids in batch], (9,), examples, truncated=False)
        ends = [(1, "stop"), (2, "stop"), (3, "stop"), (1, "length")]
        grading.add(0, [Completion([i, 9], [0.0, 0.0], end, 1) for i, end in ends])
        graded = grading.finish()
    finally:
        pool.close()
    assert graded.rewards_PG.tolist() == [[pytest.approx(0.8 - 1.0), pytest.approx(-0.2), 0.0, 0.0]]
    assert graded.correctness_PG.tolist() == [[1.0, 0.0, 0.0, 0.0]]  # the first one's, for pass@1
    assert graded.ungraded_PG.tolist() == [[False, False, True, False]]  # one part hung: no verdict
    assert graded.parts == {"exact": [1.0, 0.0], "short": [-10.0, -2.0], "hangs": [1.0, 1.0]}
    assert part_means([graded.parts, {"short": [0.0]}]) == {
        "reward/exact": 0.5,
        "reward/hangs": 1.0,
        "reward/short": -4,
    }


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (
            {"reward": "exact", "percent_as_unit": True},
            "percent_as_unit is for reward = 'math', and .* has exact",
        ),
        ({"reward": "math", "code_score": "fraction"}, "code_score is for reward = 'code'"),
        ({"reward": "math", "answer_tag": "a"}, "answer_tag is for reward = 'task'"),
        ({"reward": "task"}, r"\[sources.s\] reward = 'task' is for reasoning_gym"),
    ],
)
def test_settings_that_no_reward_reads_are_refused(source: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        pool_of(**source)


def test_keys_of_code_reach_the_tests() -> None:
    table = {"answer": {"inputs": [""], "outputs": ["0.5"]}}
    for tolerance, found in ((-1.0, 1e-6), (0.0, 0.0), (0.25, 0.25)):
        reward = pool_of(reward="code", code_tolerance=tolerance).rewards["s"]
        assert reward.unpack(reward.read(table, "p")[1]).tolerance == found


def test_exact_and_math_judge_generated_problems_too() -> None:
    """The answer is that of the entry; the words differ from "task" in what they accept."""
    source = SourceSettings(kind="reasoning_gym", dataset="chain_sum", eval_rows=4, reward="exact")
    sources = {"s": source}
    pool = RewardPool(RewardSettings(workers=1), sources)
    (example,) = build_task(TaskSettings(train=("s",)), sources, pool.rewards, TOKENIZER, seed=0).batch(0, 1)
    assert example.answer.lstrip("-").isdigit()
    assert [pool.submit(example, text).result().reward for text in (example.answer, "x")] == [1.0, 0.0]


def test_the_trainer_never_imports_the_file(file: str) -> None:
    Path("mine/my.py").write_text("import os, pathlib\npathlib.Path('who').write_text(str(os.getpid()))\n" + FUNCTIONS)
    pool = pool_of(reward=f"{file}:short")
    pool.check()
    pool.close()
    assert int(Path("who").read_text()) != os.getpid()


def test_judges_import_no_torch() -> None:
    modules = ", ".join(f"quads.rl.rewards.{name}" for name in ("judge", "math", "task", "function"))
    code = f"import sys, {modules}; print('torch' in sys.modules)"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=REPOSITORY).stdout
    assert printed.strip() == "False"
