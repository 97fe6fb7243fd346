"""The evaluation command judges one checkpoint under several rollout precisions side by side."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quads.rl import evaluate
from tests.helpers import run_torchrun
from tests.tiny_run import CONFIG, make_world, options, train_rows

ROLLOUTS = ("bf16", "w4a4", "w4a4_residual")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A config and, beside it, the run it names."""
    config = make_world(tmp_path_factory.mktemp("rollouts") / "world")
    train_rows(config, config.parent / "run", train__steps=1, eval__every=0)
    return config


def judge(world: Path, out: Path, *more: str, prompts: int = 8) -> list[dict[str, Any]]:
    settings = options(train__out=out.parent / "none", eval__prompts=prompts, eval__samples=4)
    evaluate.main(
        ["--config", str(world), "--checkpoint", str(world.parent / "run"), "--out", str(out), *more, *settings]
    )
    return json.loads(out.read_text())["results"]


def test_each_precision_gives_what_it_gives_alone(
    world: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    together = judge(world, tmp_path / "all.json", "--rollouts", ",".join(ROLLOUTS))
    printed = capfd.readouterr().out
    assert [row["rollout"] for row in together] == list(ROLLOUTS)
    assert all(0 < row["pass_at_1"] < 1 and len(row["pass_at_1_prompts"]) == 8 for row in together)
    assert len({json.dumps(row["length_mean"]) for row in together}) > 1  # they are different policies
    for row in together:
        (alone,) = judge(world, tmp_path / f"{row['rollout']}.json", "--quant.rollout", row["rollout"])
        assert alone == row
    head = printed.splitlines()[-2]
    assert head.split()[3:] == [*ROLLOUTS, "w4a4", "-", "bf16", "w4a4_residual", "-", "bf16"]
    assert "experts w13 (gate, up)" in printed.split("rollout bf16")[0]  # the banner of each precision came first
    assert printed.count("layer group") == 3
    assert not (tmp_path / "none").exists()  # evaluating makes no run


def test_two_processes_judge_the_same(world: Path, tmp_path: Path) -> None:
    """An odd number of prompts, so that shares differ; results in the order of the test set."""
    alone = judge(world, tmp_path / "one.json", "--rollouts", "bf16,w4a4", prompts=7)
    settings = options(train__out=tmp_path / "none", eval__prompts=7, eval__samples=4)
    inputs = ["--config", str(world), "--checkpoint", str(world.parent / "run"), "--rollouts", "bf16,w4a4"]
    command = ["-m", "quads.rl.evaluate", *inputs, "--out", str(tmp_path / "two.json"), *settings]
    result = run_torchrun(command, num_processes=2)
    assert result.returncode == 0, result.stderr
    assert json.loads((tmp_path / "two.json").read_text())["results"] == alone


@pytest.mark.parametrize(
    ("out", "rollouts", "message"),
    [
        ("x.json", "bf16,w4a3", "[quant] rollout = 'w4a3'"),
        ("x.json", "bf16,", "precisions separated by commas"),
        ("nowhere/x.json", "bf16", "x.json: the folder does not exist"),
    ],
)
def test_mistakes_stop_it_before_anything_runs(
    world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], out: str, rollouts: str, message: str
) -> None:
    with pytest.raises(SystemExit) as stop:
        judge(world, tmp_path / out, "--rollouts", rollouts)
    assert stop.value.code == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.out == ""


def test_one_prompt_has_no_error_and_the_file_is_json(world: Path, tmp_path: Path) -> None:
    (row,) = judge(world, tmp_path / "x.json", "--rollouts", "bf16,bf16", prompts=1)
    assert row["standard_error"] is None and row["prompts"] == 1


@pytest.mark.vllm
def test_the_vllm_engine_too(tmp_path: Path) -> None:
    """The head_dim is one that vLLM has on a CPU."""
    config = make_world(tmp_path / "world", replace(CONFIG, head_dim=32))
    train_rows(config, config.parent / "run", train__steps=1, eval__every=0)
    rows = judge(config, tmp_path / "vllm.json", "--rollouts", "bf16,w4a4_residual", "--rollout.engine", "vllm")
    assert [row["rollout"] for row in rows] == ["bf16", "w4a4_residual"]


def test_help_names_its_own_options_first(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        evaluate.main(["--help"])
    assert stop.value.code == 0
    printed = capsys.readouterr().out
    assert printed.index("--rollouts LIST") < printed.index("--model.path")
