"""Rows through Hugging Face datasets, in every local form, and the ready-made sources on files of their schema."""

import base64
import json
import pickle
import zlib
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from quads.config.sections import RewardSettings, SourceSettings, TaskSettings
from quads.config.sources import REPOSITORY_CONFIGS, read_toml
from quads.config.values import check_table
from quads.data.sources import StreamRows
from quads.data.tasks import Task, build_task
from quads.data.tokenizer import Tokenizer
from quads.errors import UserError
from quads.rl.rewards.pool import RewardPool
from tests.helpers import REPOSITORY

TOKENIZER = Tokenizer(REPOSITORY / "examples" / "tokenizer")
ROWS = [{"id": f"r{i}", "question": f"What is {i} + {i}?", "extra": {"gold": str(2 * i)}} for i in range(12)]
SETTINGS = SourceSettings(
    kind="datasets", prompt_column="question", answer_column="extra.gold", reward="exact", eval_rows=2
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


def build(settings: SourceSettings, **task: Any) -> Task:
    return read_task(TaskSettings(**{"train": ("data",), **task}), {"data": settings})


def read_task(task: TaskSettings, sources: dict[str, SourceSettings]) -> Task:
    return build_task(task, sources, RewardPool(RewardSettings(workers=2), sources).rewards, TOKENIZER, seed=0)


def store(folder: Path, form: str) -> str:
    """ROWS in one of the forms that people have data in."""
    folder.mkdir(exist_ok=True)
    data = datasets.Dataset.from_list(ROWS)
    if form == "parquet":
        data.select(range(5)).to_parquet(folder / "train-0.parquet")
        data.select(range(5, 12)).to_parquet(folder / "train-1.parquet")
        return str(folder / "train-*.parquet")
    if form == "jsonl":
        data.to_json(folder / "data.jsonl")
        return str(folder / "data.jsonl")
    if form == "json":
        (folder / "data.json").write_text(json.dumps(ROWS))
        return str(folder / "data.json")
    if form == "arrow":
        data.save_to_disk(folder / "saved")
        return str(next((folder / "saved").glob("*.arrow")))
    if form == "saved":
        data.save_to_disk(folder / "saved")
        return str(folder / "saved")
    if form == "saved dict":
        datasets.DatasetDict({"train": data, "test": data.select([0])}).save_to_disk(folder / "saved")
        return str(folder / "saved")
    (folder / "data").mkdir()  # the layout of a clone from the hub
    data.to_parquet(folder / "data" / "train-00000-of-00001.parquet")
    return str(folder)


@pytest.mark.parametrize("form", ["parquet", "jsonl", "json", "arrow", "saved", "saved dict", "clone"])
@pytest.mark.parametrize("streaming", [False, True])
def test_local_forms(tmp_path: Path, form: str, streaming: bool) -> None:
    task = build(replace(SETTINGS, dataset=store(tmp_path / "d", form), streaming=streaming))
    test = {(example.prompt, example.answer) for example in task.eval_set(0)}
    train = {(example.prompt, example.answer) for example in task.batch(0, 10)}
    assert len(test) == 2 and len(train) == 10
    assert test | train == {(row["question"], row["extra"]["gold"]) for row in ROWS}
    assert all(example.id.startswith("data/r") for example in task.batch(0, 10))


def test_csv(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('question,answer\n"1, 2?",3\n"x",4.5\n')
    task = build(replace(SETTINGS, dataset=str(tmp_path / "a.csv"), answer_column="answer", eval_rows=0))
    assert {(e.prompt, e.answer) for e in task.batch(0, 2)} == {("1, 2?", "3"), ("x", "4.5")}


def test_what_a_file_format_complains_about_is_said(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"question": "x", "extra": {"gold": "1"}}\n{bad\n')
    with pytest.raises(UserError, match=r"a.json' split 'train' cannot be loaded: JSON parse error: .* in row 1; "):
        build(replace(SETTINGS, dataset=str(tmp_path / "a.json")))


def test_streams_resume_anywhere(tmp_path: Path) -> None:
    settings = replace(SETTINGS, dataset=store(tmp_path / "d", "parquet"), streaming=True)
    straight = build(settings)
    order = [[example.id for example in straight.batch(step, 4)] for step in range(6)]
    assert len(set(order[0] + order[1] + order[2][:2])) == 10  # one pass
    assert order[0] + order[1] + order[2][:2] != order[2][2:] + order[3] + order[4]  # another order in the next
    resumed = build(settings)
    assert [example.id for example in resumed.batch(5, 4)] == order[5]
    assert [example.id for example in resumed.batch(1, 4)] == order[1]


def test_a_stream_without_rows() -> None:
    with pytest.raises(UserError, match="no usable rows"):
        StreamRows(lambda epoch: iter(()), "data")[0]


def test_test_split_and_file(tmp_path: Path) -> None:
    folder = tmp_path / "d"
    folder.mkdir()
    data = datasets.Dataset.from_list(ROWS)
    datasets.DatasetDict({"train": data.select(range(8)), "test": data.select(range(6, 12))}).save_to_disk(folder / "s")
    task = build(replace(SETTINGS, dataset=str(folder / "s"), eval_split="test"))
    assert len(task.eval_set(0)) == 6
    assert "data: train 6 prompts; left out: 2 also a test prompt" in task.report
    data.select(range(6, 12)).to_json(folder / "test.jsonl")
    data.select(range(8)).to_json(folder / "train.jsonl")
    task = build(replace(SETTINGS, dataset=str(folder / "train.jsonl"), eval_path=str(folder / "test.jsonl")))
    assert "data: train 6 prompts; left out: 2 also a test prompt" in task.report


def test_bad_rows_of_tables_are_named(tmp_path: Path) -> None:
    rows = [{"question": "a", "answer": "1"}, {"question": None, "answer": "1"}, {"question": "c", "answer": "2"}]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "a.parquet")
    settings = replace(SETTINGS, dataset=str(tmp_path / "a.parquet"), answer_column="answer")
    with pytest.raises(UserError, match=r"(?s)a.parquet: 1 of 3 rows .*row 1: column 'question' is empty"):
        build(settings)
    with pytest.raises(UserError, match=r"a.parquet has no column 'gold'; there is: question, answer"):
        build(replace(settings, answer_column="gold"))


@pytest.mark.parametrize("streaming", [False, True])
def test_numbers_of_narrow_columns(tmp_path: Path, streaming: bool) -> None:
    """A float32 0.1 is written 0.1, as whoever made the table wrote it, also inside lists and objects."""
    narrow = pa.array([0.1, 2.5, 4.0, float("nan")], pa.float32())
    nested = pa.array([{"gold": [x]} for x in (0.1, 2.5, 4.0, 1.0)], pa.struct([("gold", pa.list_(pa.float32()))]))
    money = pa.array([Decimal("1.50"), Decimal("2.00"), Decimal("0.25"), None], pa.decimal128(8, 2))
    table = {"question": ["p1", "p2", "p3", "p4"], "narrow": narrow, "nested": nested, "money": money}
    pq.write_table(pa.table(table), tmp_path / "a.parquet")
    settings = replace(SETTINGS, dataset=str(tmp_path / "a.parquet"), eval_rows=0, streaming=streaming)
    for column, texts in (
        ("narrow", ["0.1", "2.5", "4"]),
        ("nested.gold.0", ["0.1", "2.5", "4", "1"]),
        ("money", ["1.5", "2", "0.25"]),
    ):
        task = build(replace(settings, answer_column=column))
        found = {example.prompt: example.answer for example in task.batch(0, 4)}
        assert [found[prompt] for prompt in sorted(found)] == texts


def test_parquet_text_that_is_not_utf8(tmp_path: Path) -> None:
    column = pa.array([b"fine", b"bad \xff", b"fine too"], pa.binary()).view(pa.string())
    answers = pa.array(["1", "2", "3"])
    pq.write_table(pa.table({"question": column, "answer": answers}), tmp_path / "a.parquet")
    settings = replace(SETTINGS, dataset=str(tmp_path / "a.parquet"), answer_column="answer")
    with pytest.raises(UserError, match=r"row 1: is not UTF-8 text"):
        build(settings)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dataset": "no/such-dataset"}, r"dataset = 'no/such-dataset' split 'train' cannot be loaded: .*local copy"),
        ({"dataset": "/nowhere/a.parquet"}, "no such file"),
        ({"split": "validation"}, "split 'validation' cannot be loaded"),
    ],
)
def test_data_that_is_not_there(tmp_path: Path, change: dict[str, str], message: str) -> None:
    settings = replace(SETTINGS, dataset=store(tmp_path / "d", "clone"))
    with pytest.raises(UserError, match=message):
        build(replace(settings, **change))


# ---- ready-made sources, on rows of the published schema (contents are ours)


def _packed(tests: list[dict[str, str]]) -> str:
    return base64.b64encode(zlib.compress(pickle.dumps(json.dumps(tests)))).decode()


STDIN_TESTS = [{"input": "3 4\n", "output": "7\n", "testtype": "stdin"}]
CALL_TESTS = [{"input": '[1, 2]\n"x"', "output": "[2, 1]", "testtype": "functional"}]
LCB = {
    "question_title": "t", "platform": "atcoder", "contest_id": "c", "contest_date": "2025-02-01T00:00:00",
    "difficulty": "easy",
}  # fmt: skip

READY_MADE: dict[str, tuple[list[dict[str, Any]], list[Any]]] = {
    "deepmath_103k": (
        [{"question": "Q", "final_answer": r"\frac{\pi}{2}", "difficulty": 5.0, "topic": "x", "r1_solution_1": "y"}],
        [r"\frac{\pi}{2}"],
    ),
    "dapo_math_17k": (
        [
            {
                "data_source": "math_dapo",
                "prompt": [{"content": "Solve it.", "role": "user"}],
                "ability": "MATH",
                "reward_model": {"ground_truth": "34", "style": "rule-lighteval/MATH_v2"},
                "extra_info": {"index": "9a9b6eb4"},
            }
        ]
        * 3,
        ["34"],
    ),
    "gsm8k": ([{"question": "How many?", "answer": "9 * 2 = <<9*2=18>>18\n#### 18"}], ["18"]),
    "math_500": (
        [{"problem": "P", "solution": "S", "answer": r"\left( 3, \frac{\pi}{2} \right)", "subject": "Precalculus",
          "level": 2, "unique_id": "test/precalculus/807.json"}],
        [r"\left( 3, \frac{\pi}{2} \right)"],
    ),
    "aime_2024": (
        [{"id": 60, "problem": "P", "solution": "S", "answer": "204", "url": "https://x", "year": "2024"}],
        ["204"],
    ),
    "aime_2025": ([{"problem_idx": 1, "problem": "P", "answer": 70, "problem_type": ["Algebra"]}], ["70"]),
    "hmmt_feb_2025": ([{"problem_idx": 1, "answer": r"\frac{1}{576}", "problem_type": ["Geometry"], "problem": "P"}],
                      [r"\frac{1}{576}"]),
    "livecodebench": (
        [
            {**LCB, "question_content": "Add.", "question_id": "abc1", "starter_code": "", "metadata": "{}",
             "public_test_cases": json.dumps(STDIN_TESTS), "private_test_cases": _packed(STDIN_TESTS * 2)},
            {**LCB, "question_content": "Reverse.", "question_id": "3001",
             "starter_code": "class Solution:\n    def rev(self, a: List[int], b: str) -> List[int]:\n",
             "metadata": json.dumps({"func_name": "rev"}), "public_test_cases": json.dumps(CALL_TESTS),
             "private_test_cases": json.dumps(CALL_TESTS)},
        ],
        [("", 3), ("rev", 2)],
    ),
    "deepcoder": (
        [
            {"problem": "Add.", "tests": json.dumps([{"type": "stdin_stdout", "input": "1 2\n", "output": "3\n"}])},
            {"problem": "Twice.",
             "tests": json.dumps([{"type": "function_call", "fn_name": "twice", "input": [2], "output": [4]}])},
            {"problem": "Taco.", "tests": json.dumps({"inputs": ["1\n"], "outputs": ["2\n"]})},
            {"problem": "Broken.", "tests": "[]"},
        ],
        [("", 1), ("twice", 1), ("", 1)],
    ),
}  # fmt: skip


def ready_made(name: str) -> SourceSettings:
    return check_table(SourceSettings, name, read_toml(REPOSITORY_CONFIGS / "sources" / f"{name}.toml"))


def test_every_ready_made_source_is_tested() -> None:
    assert {file.stem for file in (REPOSITORY_CONFIGS / "sources").glob("*.toml")} == set(READY_MADE)


@pytest.mark.parametrize("name", READY_MADE)
def test_ready_made_sources_read_their_schema(tmp_path: Path, name: str) -> None:
    rows, answers = READY_MADE[name]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "data.parquet")
    settings = replace(ready_made(name), dataset=str(tmp_path / "data.parquet"), eval_split="")
    task = read_task(TaskSettings(train=(name,), eval=(name,), chat=True), {name: replace(settings, eval_rows=0)})
    examples = {example.id: example for example in task.batch(0, 8)}.values()
    if settings.reward == "code":
        found = [(example.answer.function, len(example.answer.inputs)) for example in examples]
    else:
        found = [example.answer for example in examples]
    assert sorted(found) == sorted(answers)
    for example in examples:
        text = example.prompt[-1]["content"]
        assert "{prompt}" not in text and text.strip()
        if settings.reward == "math" and name != "dapo_math_17k":
            assert text.endswith(r"put your final answer within \boxed{}.")


def test_livecodebench_prompts_show_the_starter_code(tmp_path: Path) -> None:
    rows, _ = READY_MADE["livecodebench"]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "data.parquet")
    settings = replace(ready_made("livecodebench"), dataset=str(tmp_path / "data.parquet"))
    task = read_task(TaskSettings(train=("l",), eval=("l",)), {"l": replace(settings, eval_rows=0)})
    by_id = {example.id: example for example in task.batch(0, 4)}
    assert "Read from standard input" in by_id["l/abc1"].prompt
    assert "class Solution:\n    def rev(self" in by_id["l/3001"].prompt
    assert by_id["l/3001"].answer.inputs[0] == [[1, 2], "x"]
    assert by_id["l/3001"].answer.outputs[0] == [2, 1]
