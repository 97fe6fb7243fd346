"""Losses that are not finite, through the loop: the update is skipped and counted, the third in a row ends the run."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import train
from quads.model.hf import load_model
from quads.model.model import MoEDecoder
from quads.rl.grading import Grading
from quads.run.checkpoint import latest_checkpoint, load_model_weights
from quads.run.folder import read_rows
from tests.tiny_run import make_world, options, train_rows

EVERY_STEP: dict[str, Any] = {"checkpoint__every": 1, "checkpoint__keep": 0, "eval__every": 0}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_world(tmp_path_factory.mktemp("nonfinite") / "world")


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Steps of the next run in which every reward is NaN."""
    steps, calls, finish = set(), iter(range(1, 1000)), Grading.finish

    def poisoned(grading: Grading) -> tuple[Tensor, Tensor]:
        rewards_PG, ungraded_PG = finish(grading)
        return (rewards_PG * torch.nan if next(calls) in steps else rewards_PG), ungraded_PG

    monkeypatch.setattr(Grading, "finish", poisoned)
    return steps


def weights(config: Path, out: Path, step: int) -> Tensor:
    model: MoEDecoder = load_model(config.parent / "model")
    load_model_weights(out / "checkpoints" / f"step_{step}", model)
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def stopped_with_2(config: Path, out: Path, **values: Any) -> None:
    with pytest.raises(SystemExit) as ended:
        train.main(["--config", str(config), *options(train__out=out, **values)])
    assert ended.value.code == 2


def test_one_bad_step_is_skipped_and_counted(config: Path, tmp_path: Path, poison: set[int]) -> None:
    poison.add(2)
    rows = train_rows(config, tmp_path, train__steps=3, **EVERY_STEP)
    assert [row["train/skipped_updates"] for row in rows] == [0, 1, 0]
    assert [row["reward/mean"] is None for row in rows] == [False, True, False]  # NaN is not JSON
    assert rows[2]["mismatch/logprob_abs_max"] < 1
    first, second, third = (weights(config, tmp_path, step) for step in (1, 2, 3))
    assert torch.equal(first, second) and not torch.equal(second, third)
    assert (tmp_path / "plots" / "curves.png").exists()  # with a hole


def test_three_in_a_row_end_the_run_and_the_last_checkpoint_is_good(
    config: Path, tmp_path: Path, poison: set[int], capsys: pytest.CaptureFixture[str]
) -> None:
    poison.update((2, 4, 5, 6))  # two apart do not count as one row of three
    stopped_with_2(config, tmp_path, train__steps=8, **EVERY_STEP)
    message = capsys.readouterr().err
    assert message.startswith(
        "error: loss or gradient was not finite in 3 updates in a row; the last checkpoint is kept"
    )
    assert len(message.splitlines()) == 1
    rows = read_rows(tmp_path / "metrics.jsonl")
    assert [row["train/skipped_updates"] for row in rows] == [0, 1, 0, 1, 1]
    assert latest_checkpoint(tmp_path / "checkpoints") == tmp_path / "checkpoints" / "step_5"
    assert torch.equal(weights(config, tmp_path, 3), weights(config, tmp_path, 5))

    poison.clear()  # whatever it was is gone: the run goes on from there
    rows = train_rows(config, tmp_path, train__steps=8, checkpoint__resume="latest", **EVERY_STEP)
    assert [row["train/skipped_updates"] for row in rows] == [0, 1, 0, 1, 1, 0, 0, 0]
    assert not torch.equal(weights(config, tmp_path, 5), weights(config, tmp_path, 6))


def test_minibatches_of_one_step_count_one_by_one(config: Path, tmp_path: Path, poison: set[int]) -> None:
    poison.add(2)
    stopped_with_2(config, tmp_path, rl__minibatch_prompts=2, **EVERY_STEP)  # four updates a step
    assert len(read_rows(tmp_path / "metrics.jsonl")) == 1
    assert latest_checkpoint(tmp_path / "checkpoints") == tmp_path / "checkpoints" / "step_1"
