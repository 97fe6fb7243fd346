"""Tasks: the order is a pure function of the step, sources mix by weight, test prompts are never trained on."""

import json
from collections import Counter
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from quads.config.sections import RewardSettings, SourceSettings, TaskSettings
from quads.data.order import Mixture, Shuffled, permutation, stable_seed
from quads.data.prompts import PromptBuilder
from quads.data.rows import number_text
from quads.data.tasks import Task, build_task
from quads.data.tokenizer import Tokenizer
from quads.errors import UserError
from quads.rl.rewards.pool import RewardPool
from tests.helpers import REPOSITORY

TOKENIZER = Tokenizer(REPOSITORY / "examples" / "tokenizer")
SUMS = SourceSettings(
    kind="reasoning_gym",
    dataset="chain_sum",
    params={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2},
    eval_rows=32,
)


def jsonl(path: Path, rows: list[Any]) -> SourceSettings:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return SourceSettings(kind="jsonl", path=str(path), reward="exact", eval_rows=4)


def numbered(path: Path, name: str, n: int) -> SourceSettings:
    return jsonl(path, [{"prompt": f"{name} {i}", "answer": str(i)} for i in range(n)])


def build(sources: dict[str, SourceSettings], seed: int = 0, limit: int = 3072, **task: Any) -> Task:
    settings = TaskSettings(**{"train": tuple(sources), **task})
    readers = RewardPool(RewardSettings(workers=2), sources).rewards
    return build_task(settings, sources, readers, TOKENIZER, seed, limit)


def prompts(task: Task, step: int, n: int = 8) -> list[Any]:
    return [example.prompt for example in task.batch(step, n)]


# ---- order


def test_permutation_is_fixed_for_all_time() -> None:
    """A resumed run must see the order of the first, whatever versions it runs under."""
    assert permutation(8, stable_seed(0, "train")).tolist() == [4, 6, 2, 1, 3, 0, 5, 7]


def test_shuffled_passes() -> None:
    order = Shuffled(5, seed=1)
    passes = [[order[epoch * 5 + i] for i in range(5)] for epoch in range(6)]
    assert all(sorted(rows) == [0, 1, 2, 3, 4] for rows in passes)
    assert len({tuple(rows) for rows in passes}) > 1
    assert [Shuffled(5, seed=1)[i] for i in (29, 3, 17)] == [order[i] for i in (29, 3, 17)]  # any access order


def test_mixture_shares_and_ranks() -> None:
    mixture = Mixture([3.0, 1.0], seed=0)
    seen = [mixture[position] for position in range(4096)]
    counts = Counter(source for source, _ in seen)
    assert counts == {0: 3072, 1: 1024}
    for source in (0, 1):  # each source's rows come in its own order, none left out
        assert [rank for s, rank in seen if s == source] == list(range(counts[source]))
    assert Mixture([3.0, 1.0], seed=0)[3000] == seen[3000]


def test_a_small_share_is_not_rounded_away() -> None:
    mixture = Mixture([1e6, 1.0], seed=0)
    assert Counter(mixture[position][0] for position in range(1025)) == {0: 1024, 1: 1}


# ---- reasoning-gym


def test_batches_depend_on_the_step_alone() -> None:
    straight = build({"sums": SUMS})
    order = [prompts(straight, step) for step in range(6)]
    resumed = build({"sums": SUMS})
    assert prompts(resumed, 5) == order[5]
    assert prompts(resumed, 2) == order[2]
    assert prompts(build({"sums": SUMS}, seed=1), 0) != order[0]
    twice = straight.batch(1, 16)  # a batch of twice the size covers two of the smaller ones
    assert [example.prompt for example in twice] == order[2] + order[3]
    assert len({prompt for batch in order for prompt in batch}) > 40


def test_train_and_test_never_overlap_even_where_problems_are_few() -> None:
    few = replace(SUMS, params={**SUMS.params, "max_digits": 1}, eval_rows=64)  # about 200 different problems
    task = build({"sums": few})
    test = {example.prompt for example in task.eval_set(0)}
    trained = {prompt for step in range(60) for prompt in prompts(task, step, 16)}
    assert len(test) == 64
    assert len(trained) > 50
    assert not test & trained


def test_a_task_with_hardly_any_problems_leaves_half_to_training() -> None:
    tiny = SourceSettings(kind="reasoning_gym", dataset="coin_flip", params={"min_trials": 3, "max_trials": 3})
    task = build({"coins": tiny})
    test = {example.prompt for example in task.eval_set(0)}
    trained = {prompt for step in range(20) for prompt in prompts(task, step)}
    assert test and trained and not test & trained


def test_size_limits_the_training_problems() -> None:
    task = build({"sums": replace(SUMS, size=10)})
    ids = [example.id for step in range(5) for example in task.batch(step, 10)]
    assert all(len(set(ids[i : i + 10])) == 10 for i in range(0, 50, 10))  # each pass has all ten
    assert len(set(ids)) == 10


def test_examples_carry_what_their_scorer_needs() -> None:
    (example,) = build({"sums": SUMS}).batch(0, 1)
    assert example.source == "sums"
    assert example.answer["question"] in example.prompt
    assert example.prompt_ids == TOKENIZER.encode(example.prompt)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dataset": "chain_sums"}, "'chain_sums' is not in reasoning-gym; nearest: chain_sum"),
        ({"params": {"min_term": 2}}, "params.min_term is no setting of 'chain_sum'; nearest: min_terms"),
        ({"params": {"min_terms": 5, "max_terms": 2}}, "do not suit 'chain_sum'"),
        ({"params": {"seed": 3}}, "seeds come from"),
    ],
)
def test_bad_reasoning_gym_settings(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        build({"sums": replace(SUMS, **change)})


def test_composite_takes_tables() -> None:
    mixed = SourceSettings(
        kind="reasoning_gym",
        dataset="composite",
        params={"datasets": [{"name": "chain_sum", "weight": 1.0}, {"name": "leg_counting", "weight": 1.0}]},
        eval_rows=8,
    )
    sources = {example.answer["metadata"]["source_dataset"] for example in build({"mixed": mixed}).batch(0, 20)}
    assert sources == {"chain_sum", "leg_counting"}


# ---- files


def test_held_out_rows_are_not_trained_on(tmp_path: Path) -> None:
    task = build({"rows": numbered(tmp_path / "a.jsonl", "row", 40)})
    test = {example.prompt for example in task.eval_set(0)}
    trained = {prompt for step in range(20) for prompt in prompts(task, step)}
    assert len(test) == 4 and len(trained) == 36 and not test & trained
    assert "rows: train 36 prompts; left out: 4 held out for the test" in task.report


def test_adding_rows_moves_few_held_out_ones(tmp_path: Path) -> None:
    before = {e.prompt for e in build({"rows": numbered(tmp_path / "a.jsonl", "row", 40)}).eval_set(0)}
    after = {e.prompt for e in build({"rows": numbered(tmp_path / "a.jsonl", "row", 44)}).eval_set(0)}
    assert len(before & after) >= 2


def test_test_rows_of_any_source_leave_training(tmp_path: Path) -> None:
    train = jsonl(tmp_path / "t.jsonl", [{"prompt": f"q{i}", "answer": "1"} for i in range(10)])
    test = jsonl(tmp_path / "e.jsonl", [{"prompt": " q3\n", "answer": "1"}, {"prompt": "other", "answer": "2"}])
    sources = {"train": train, "test": test}
    task = build(sources, train=("train",), eval=("test",))
    assert {prompt for step in range(5) for prompt in prompts(task, step)} == {f"q{i}" for i in range(10)} - {"q3"}
    assert "train: train 9 prompts; left out: 1 also a test prompt" in task.report
    assert [example.prompt for example in task.eval_set(1)] == [" q3\n"]


def test_duplicates_go_within_and_across_sources(tmp_path: Path) -> None:
    first = jsonl(tmp_path / "1.jsonl", [{"prompt": p, "answer": "1"} for p in ("a", "b", "a", " a ")])
    second = jsonl(tmp_path / "2.jsonl", [{"prompt": p, "answer": "1"} for p in ("b", "c")])
    test = jsonl(tmp_path / "3.jsonl", [{"prompt": "z", "answer": "1"}])
    task = build({"first": first, "second": second, "test": test}, train=("first", "second"), eval=("test",))
    assert task.report[1:] == [
        "first: train 2 prompts; left out: 2 repeated prompt",
        "second: train 1 prompts; left out: 1 prompt of an earlier source",
    ]


def test_weights_mix_sources(tmp_path: Path) -> None:
    sources = {"a": numbered(tmp_path / "a.jsonl", "a", 30), "b": numbered(tmp_path / "b.jsonl", "b", 30)}
    task = build(sources, weights=(3.0, 1.0))
    counts = Counter(example.source for step in range(128) for example in task.batch(step, 8))
    assert counts == {"a": 768, "b": 256}


def test_filters_count_what_they_drop(tmp_path: Path) -> None:
    rows = [
        {"prompt": "one", "answer": "1", "level": 1},
        {"prompt": "two", "answer": None, "level": 1},
        {"prompt": "three", "answer": " ", "level": 1},
        {"prompt": "four", "answer": "4", "level": 3},
        {"prompt": "求一个数的平方根等于九", "answer": "81", "level": 2},
        {"prompt": "x" * 100, "answer": "5", "level": 2},
        {"prompt": "six", "answer": "6", "level": 2},
    ]
    source = replace(
        jsonl(tmp_path / "a.jsonl", rows), where={"level": [1, 2]}, language="en", max_prompt_tokens=50, eval_rows=1
    )
    task = build({"a": source})
    assert task.report[0] == (
        "a: test 1 prompts; left out: 1 filtered by `where`, 2 answer missing, 1 not in language en, "
        "1 prompt longer than 50 tokens"
    )
    chinese = build({"a": replace(source, language="zh", eval_rows=0)})
    assert prompts(chinese, 0, 2) == [rows[4]["prompt"]] * 2


def test_one_prompt_with_two_answers_is_counted_apart(tmp_path: Path) -> None:
    """The spellings of an accent in Unicode and white space make no other prompt."""
    rows = [("a", "1"), ("a ", "1"), ("a", "2"), ("caf\u00e9", "1"), ("cafe\u0301", "1"), ("cafe", "1")]
    settings = jsonl(tmp_path / "r", [{"prompt": prompt, "answer": answer} for prompt, answer in rows])
    task = build({"a": replace(settings, eval_rows=0)}, eval=("a",))
    assert task.report[0].endswith("left out: 2 repeated prompt, 1 repeated prompt with another answer")
    assert task.report[1] == "a: train 3 prompts"


def test_a_key_given_twice_is_no_row(tmp_path: Path) -> None:
    settings = jsonl(tmp_path / "r", ['{"prompt": "p", "answer": "1", "prompt": "q"}'])
    with pytest.raises(UserError, match="line 1: has the key 'prompt' twice"):
        build({"a": settings})


def test_numbers_as_answers(tmp_path: Path) -> None:
    missing = ["NaN", "Infinity", "-Infinity", "1e400"]
    stored = ["1.0", "0.5", "-0.0", "1e22", "0.1", *missing, "7", "123456789012345678901"]
    rows = [f'{{"prompt": "p{i}", "answer": {number}}}' for i, number in enumerate(stored)]
    task = build({"a": replace(jsonl(tmp_path / "r", rows), eval_rows=0)}, eval=("a",))
    examples = {example.prompt: example.answer for example in task.batch(0, 7)}
    assert [examples[f"p{i}"] for i in (0, 1, 2, 3, 4, 9, 10)] == [
        "1", "0.5", "0", "1e+22", "0.1", "7", "123456789012345678901",
    ]  # fmt: skip
    assert "4 answer missing" in task.report[0]
    decimals = [Decimal(text) for text in ("1.50", "4.00", "100", "-0.0", "1E+3", "NaN")]
    assert [number_text(value) for value in decimals] == ["1.5", "4", "100", "0", "1000", None]


def test_a_huge_prompt_is_left_out_without_tokenizing_it(tmp_path: Path) -> None:
    """Ten megabytes took minutes. Only what tells that it is too long reaches the tokenizer."""
    huge = jsonl(tmp_path / "r", [{"prompt": text, "answer": "1"} for text in ("9 " * 5_000_000, "1 + 1 =", "x " * 40)])
    sources = {"a": replace(huge, eval_rows=0)}
    builder = PromptBuilder(TaskSettings(), TOKENIZER)
    builder.tokenizer = counting = CountingTokenizer()
    assert builder.far_longer("9 " * 5_000_000, 64) and counting.characters <= 16 * 64 + 4096
    assert builder.far_longer([{"role": "user", "content": "9 " * 5_000_000}], 64)
    assert not builder.far_longer("9 " * 100, 64)
    task = build(sources, limit=64, eval=("a",))
    assert "2 prompt longer than 64 tokens" in task.report[0]


class CountingTokenizer:
    characters = 0

    def encode(self, text: str) -> list[int]:
        self.characters += len(text)
        return TOKENIZER.encode(text)


def test_overlong_prompts_follow_the_rollout_limit(tmp_path: Path) -> None:
    rows = [{"prompt": "x" * n, "answer": "1"} for n in (5, 20, 21, 60)]
    task = build({"a": replace(jsonl(tmp_path / "a.jsonl", rows), eval_rows=1)}, limit=20)
    assert "2 prompt longer than 20 tokens" in task.report[0]
    assert {len(prompt) for step in range(4) for prompt in prompts(task, step)} | {
        len(example.prompt) for example in task.eval_set(0)
    } == {5, 20}


def test_unreadable_gold_answers_drop_the_row(tmp_path: Path) -> None:
    rows = [
        {"prompt": f"q{i}", "answer": a} for i, a in enumerate(["1", r"\frac{1}{2}", r"\frac{", "{", 3, 0.5, "$x$"])
    ]
    task = build({"a": replace(jsonl(tmp_path / "a.jsonl", rows), reward="math", eval_rows=1)})
    assert task.report[0] == "a: test 1 prompts; left out: 2 answer that cannot be read as mathematics"


def test_answer_pattern_takes_the_last_match(tmp_path: Path) -> None:
    rows = [{"prompt": "p", "answer": "#### 3\nno\n#### 18 "}, {"prompt": "q", "answer": "none here"}]
    source = replace(jsonl(tmp_path / "a.jsonl", rows), answer_pattern=r"####\s*(.+)", eval_rows=0)
    task = build({"a": source})
    assert [example.answer for example in task.batch(0, 2)] == ["18", "18"]
    assert "1 answer missing" in "\n".join(task.report)


def test_templates_and_chat(tmp_path: Path) -> None:
    rows = [{"prompt": r"What is $\boxed{\frac{1}{2}}$ {prompt}?", "answer": "1"}]
    source = replace(jsonl(tmp_path / "a.jsonl", rows), eval_rows=0)
    (plain,) = build({"a": source}, prompt_template="Q: {prompt}\nA:").batch(0, 1)
    assert plain.prompt == f"Q: {rows[0]['prompt']}\nA:"
    assert plain.prompt_ids == TOKENIZER.encode(plain.prompt)
    own = replace(source, prompt_template="{prompt} Box it.", system="Own.")
    (chat,) = build({"a": own}, chat=True, system="Global.", prompt_template="unused {prompt}").batch(0, 1)
    assert chat.prompt == [
        {"role": "system", "content": "Own."},
        {"role": "user", "content": f"{rows[0]['prompt']} Box it."},
    ]
    assert chat.prompt_ids == TOKENIZER.encode(TOKENIZER.apply_chat_template(chat.prompt))
    assert TOKENIZER.decode(chat.prompt_ids, skip_special=False).endswith("<|im_end|>\n<|im_start|>assistant\n")


def test_chat_message_prompts(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]
    source = replace(jsonl(tmp_path / "a.jsonl", [{"prompt": messages, "answer": "1"}]), eval_rows=0)
    (chat,) = build({"a": source}, chat=True, system="not used", prompt_template="{prompt}!").batch(0, 1)
    assert chat.prompt == [messages[0], {"role": "user", "content": "U!"}]
    with pytest.raises(UserError, match="line 1 of .*a.jsonl has chat messages for a prompt; set .* chat = true"):
        build({"a": source})


# ---- bad data


BAD = {
    "not JSON": ('{"prompt": ', r"line 2: is not JSON"),
    "no object": ("[1]", r"line 2: a row must be an object of columns, this one is a list"),
    "missing prompt": ('{"answer": "1"}', r"line 2: no column 'prompt'; there is: answer"),
    "missing answer column": ('{"prompt": "p"}', r"line 2: no column 'answer'; there is: prompt"),
    "prompt of wrong type": ('{"prompt": 5, "answer": "1"}', r"line 2: .* must hold text or chat messages, has a num"),
    "answer of wrong type": ('{"prompt": "p", "answer": [1]}', r"line 2: .* must hold text or a number, has a list"),
    "truth value for an answer": ('{"prompt": "p", "answer": true}', r"line 2: .* has a truth value"),
    "empty prompt": ('{"prompt": " ", "answer": "1"}', r"line 2: column 'prompt' is empty"),
    "null prompt": ('{"prompt": null, "answer": "1"}', r"line 2: column 'prompt' is empty"),
    "empty messages": ('{"prompt": [], "answer": "1"}', r"line 2: column 'prompt' is empty"),
    "bad message": ('{"prompt": [{"role": "user"}], "answer": "1"}', r"line 2: .* must have role and content"),
    "model speaks last": ('{"prompt": [{"role": "x", "content": "x"}], "answer": "1"}', r"line 2: .* last chat"),
    "lone surrogate": (r'{"prompt": "\ud800", "answer": "1"}', r"line 2: column 'prompt' is not valid UTF-8"),
    "duplicate id": ('{"id": "a", "prompt": "p", "answer": "1"}', r"line 2: id 'rows/a' is already that of line 1"),
    "id of wrong type": ('{"id": [1], "prompt": "p", "answer": "1"}', r"line 2: .* must hold text or an integer"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_rows_are_named_by_file_and_line(tmp_path: Path, name: str) -> None:
    bad, message = BAD[name]
    rows = ['{"id": "a", "prompt": "fine", "answer": "1"}', bad, '{"id": "c", "prompt": "also fine", "answer": "1"}']
    source = jsonl(tmp_path / "data.jsonl", rows)
    with pytest.raises(UserError, match=rf"(?s)\[sources.rows\] .*data.jsonl: 1 of 3 rows cannot be used.*{message}"):
        build({"rows": source})
    dropped = build({"rows": replace(source, bad_rows="drop", eval_rows=0)})
    assert "1 unusable row" in "\n".join(dropped.report)


def test_bytes_that_are_not_utf8(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "a.jsonl", ['{"prompt": "a", "answer": "1"}'])
    Path(source.path).write_bytes(b'{"prompt": "a", "answer": "1"}\n\n{"prompt": "\xff", "answer": "1"}\n')
    with pytest.raises(UserError, match="line 3: is not UTF-8 text"):
        build({"a": source})


def test_many_bad_rows_are_cut_to_ten(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"(?s)15 of 15 rows.*line 10: .*  \.\.\. and 5 more") as error:
        build({"a": jsonl(tmp_path / "a.jsonl", ["{"] * 15)})
    assert "line 11" not in str(error.value)


def test_the_example_with_two_bad_rows() -> None:
    source = SourceSettings(
        kind="jsonl", path=str(REPOSITORY / "examples/bad_rows.jsonl"), prompt_column="problem", reward="math"
    )
    with pytest.raises(UserError, match=r"(?s)2 of 6 rows.*line 3: is not JSON.*line 5: no column 'problem'"):
        build({"a": source})


def test_missing_and_empty_files(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="path = .* cannot be read: No such file"):
        build({"a": SourceSettings(kind="jsonl", path=str(tmp_path / "no.jsonl"), reward="exact")})
    with pytest.raises(UserError, match="has no usable test rows.*loosen what left them out"):
        build({"a": jsonl(tmp_path / "empty.jsonl", [])})


def test_system_without_chat(tmp_path: Path) -> None:
    source = replace(numbered(tmp_path / "a.jsonl", "row", 5), system="S")
    with pytest.raises(UserError, match="system is set but .* chat is false"):
        build({"a": source})
