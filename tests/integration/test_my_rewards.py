"""The example with reward functions runs for two steps; a bad function ends a run with a message."""

import json
from pathlib import Path

import pytest

import train
from quads.run.folder import read_rows
from tests.helpers import REPOSITORY

CONFIG = ["--config", "examples/my_rewards.toml"]


def test_the_example_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    train.main([*CONFIG, "--train.steps", "2", "--train.out", str(tmp_path / "run"), "--reward.workers", "1"])
    rows = read_rows(tmp_path / "run" / "metrics.jsonl")
    assert len(rows) == 2
    for row in rows:
        assert 0 <= row["reward/task"] <= row["reward/close"] <= 1 and -8 * 4 <= row["reward/short"] < 0
        assert row["reward/ungraded"] == 0 and row["train/grad_norm"] > 0
        if row["response/truncated_frac"] == 0:
            total = 0.8 * row["reward/task"] + 0.2 * row["reward/close"] + 0.01 * row["reward/short"]
            assert row["reward/mean"] == pytest.approx(total, abs=1e-5)
    assert 0 <= rows[-1]["eval/pass@1"] <= 1


def test_no_verdict_is_not_a_wrong_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every graded response earns 1, so nothing can be learned; were a hung grader's response worth 0, it could."""
    monkeypatch.chdir(REPOSITORY)
    lines = ["import time", "def score(prompt, response, answer, row):", "    while '1' in response: time.sleep(1)"]
    (tmp_path / "hangs.py").write_text("\n".join([*lines, "    return 1"]))
    source = ["--sources.chain_sum.rewards", "[]", "--sources.chain_sum.reward", f"{tmp_path}/hangs.py:score"]
    small = ["--rl.prompts_per_step", "4", "--rl.minibatch_prompts", "4", "--rl.group_size", "4", "--eval.every", "0"]
    times = ["--reward.judge_time_s", "0.3", "--reward.workers", "2", "--train.steps", "1", "--log.samples_every", "1"]
    train.main([*CONFIG, *source, *small, *times, "--train.out", str(tmp_path / "run"), "--checkpoint.final", "false"])
    (row,) = read_rows(tmp_path / "run" / "metrics.jsonl")
    assert 0 < row["reward/ungraded"] < 16
    assert row["reward/mean"] == 1.0 and row["reward/std"] == 0.0 and row["group/zero_std_frac"] == 1.0
    assert row["train/grad_norm"] == 0.0
    samples = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    rewards = {response["reward"] for sample in samples for response in sample["responses"]}
    assert None in rewards and rewards <= {None, 0.0, 1.0}  # 0: cut


def test_a_bad_function_stops_a_dry_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(REPOSITORY)
    source = ["--sources.chain_sum.rewards", "[]", "--sources.chain_sum.reward", "examples/my_rewards.py:long"]
    with pytest.raises(SystemExit) as stop:
        train.main([*CONFIG, *source, "--dry-run"])
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert (
        error.startswith("error: [sources.chain_sum] reward examples/my_rewards.py:long: ") and error.count("\n") == 1
    )


def test_a_wrong_value_stops_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(REPOSITORY)
    (tmp_path / "bad.py").write_text("def score(prompt, response, answer, row):\n    return None\n")
    source = ["--sources.chain_sum.rewards", "[]", "--sources.chain_sum.reward", f"{tmp_path}/bad.py:score"]
    with pytest.raises(SystemExit) as stop:
        train.main([*CONFIG, *source, "--train.out", str(tmp_path / "run")])
    assert stop.value.code == 2
    assert "bad.py:score returned None for a response to chain_sum/train/" in capsys.readouterr().err
