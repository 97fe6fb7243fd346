"""The example with reward functions runs for two steps; a bad function ends a run with a message."""

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
