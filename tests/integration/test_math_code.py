"""End to end on a CPU: chat template, two sources mixed by weight, math and code rewards, resume, evaluation.

The model is random, but its tokens are whole answers and whole programs: chance alone earns rewards of both kinds.
"""

import dataclasses
import json
import re
import shutil
from itertools import product
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

import train
from quads.rl import evaluate
from quads.run.folder import read_rows
from tests.helpers import REPOSITORY
from tests.integration.test_train_resume import crash_after
from tests.tiny_run import CONFIG, computed, make_model, options, write_jsonl

EXAMPLE = REPOSITORY / "examples" / "math_code.toml"
WORDS = ["?", "1", "2", "+", "-", r"\boxed{1}", r"\boxed{0.5}", "\n```\nprint(1)\n```\n", "\n```\nprint(2)\n```\n"]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("math_code")
    shutil.copytree(REPOSITORY / "examples" / "tokenizer", folder / "model")
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    tokenizer.save(str(folder / "model" / "tokenizer.json"))
    ids = [tokenizer.token_to_id(token) for token in ("<|im_end|>", "<|endoftext|>")]
    (folder / "model" / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    make_model(folder / "model", dataclasses.replace(CONFIG, vocab_size=12, max_position=512))
    signs = ["".join(s) for s in product("+-", "+-", "+-", "12")]
    write_jsonl(folder / "math.jsonl", [{"problem": s, "answer": r"\frac{1}{2}" if "-" in s else "1"} for s in signs])
    tests = [[{"input": "", "output": "1\n"}], [{"input": "", "output": "2\n"}, {"input": "x", "output": "2"}]]
    write_jsonl(folder / "code.jsonl", [{"problem": f"{s}{s}", "tests": tests["-" in s]} for s in signs])
    return folder


def arguments(world: Path, out: Path, **values: object) -> list[str]:
    return [
        "--config", str(EXAMPLE), "--model.arch", "", "--model.path", str(world / "model"),
        "--model.tokenizer", str(world / "model"), "--sources.math.path", str(world / "math.jsonl"),
        "--sources.code.path", str(world / "code.jsonl"), "--sources.math.eval_rows", "2",
        "--sources.code.eval_rows", "2", "--rollout.max_new_tokens", "8", "--train.out", str(out), "--task.system", "?",
        "--task.weights", "1,1", "--rl.group_size", "8",
        "--sources.math.prompt_template", "{prompt}", "--sources.code.prompt_template", "{prompt}",
        "--log.samples_every", "1", "--checkpoint.keep", "0", "--checkpoint.every", "1", *options(**values),
    ]  # fmt: skip


def test_train_resume_and_evaluate(world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train.main(arguments(world, tmp_path / "straight", train__steps=2, log__samples=8))
    straight = read_rows(tmp_path / "straight" / "metrics.jsonl")
    assert [row["step"] for row in straight] == [1, 2]
    assert all(0 < row["reward/mean"] < 1 for row in straight)

    samples = [json.loads(line) for line in (tmp_path / "straight" / "samples.jsonl").read_text().splitlines()]
    rewards: dict[str, set[float]] = {"math": set(), "code": set()}
    for sample in samples:
        rewards[sample["source"]] |= {response["reward"] for response in sample["responses"]}
    assert rewards == {"math": {0.0, 1.0}, "code": {0.0, 1.0}}  # both kinds were judged, both ways

    shutil.copytree(tmp_path / "straight", tmp_path / "resumed")
    crash_after(tmp_path / "resumed", 1)
    resumed = arguments(world, tmp_path / "resumed", train__steps=2, log__samples=8)
    train.main([*resumed, "--checkpoint.resume"])
    assert computed(read_rows(tmp_path / "resumed" / "metrics.jsonl")) == computed(straight)

    capsys.readouterr()
    report = tmp_path / "eval.json"
    evaluate.main([*arguments(world, tmp_path / "e"), "--checkpoint", str(tmp_path / "straight"), "--out", str(report)])
    results = {result["source"]: result for result in json.loads(report.read_text())["results"]}
    assert set(results) == {"math", "code"}
    assert all(result["prompts"] == 2 and 0 <= result["pass_at_1"] <= 1 for result in results.values())
    printed = capsys.readouterr().out
    assert "math" in printed and "code" in printed


def test_the_example_with_bad_rows_stops_with_a_message(capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    with pytest.raises(SystemExit) as stop:
        train.main(["--config", "examples/bad_rows.toml", "--dry-run"])
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert "2 of 6 rows cannot be used" in error and "line 3" in error and "line 5" in error


def test_the_example_passes_a_dry_run(capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    train.main(["--config", "examples/math_code.toml", "--dry-run"])
    printed = capsys.readouterr().out
    assert "math: train 49 prompts; left out: 8 held out for the test" in printed
    assert re.search("generated programs and answers run in a sandbox: (namespaces\n|landlock; )", printed)


def test_without_isolation_a_run_says_so(capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    train.main(["--config", "examples/math_code.toml", "--dry-run", "--reward.sandbox", "none"])
    assert "generated programs and answers run WITHOUT isolation" in capsys.readouterr().out
