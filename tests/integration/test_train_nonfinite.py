"""Losses that are not finite, through the loop: the update is skipped and counted, the third in a row ends the run."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import train
from quads.model.hf import load_model
from quads.model.model import MoEDecoder
from quads.rl.grading import Graded, Grading
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

    def poisoned(grading: Grading) -> Graded:
        graded = finish(grading)
        return replace(graded, rewards_PG=graded.rewards_PG * torch.nan) if next(calls) in steps else graded

    monkeypatch.setattr(Grading, "finish", poisoned)
    return steps


def weights(config: Path, out: Path, step: int) -> Tensor:
    model: MoEDecoder = load_model(config.parent / "model")
    load_model_weights(out / "checkpoints" / f"step_{step}", model)
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def saved(out: Path) -> list[str]:
    return sorted(path.name for path in (out / "checkpoints").iterdir())


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
    assert saved(tmp_path) == ["step_1", "step_3"]
    assert not torch.equal(weights(config, tmp_path, 1), weights(config, tmp_path, 3))
    assert (tmp_path / "plots" / "curves.png").exists()  # with a hole


def test_three_in_a_row_end_the_run_and_the_last_checkpoint_is_good(
    config: Path, tmp_path: Path, poison: set[int], capsys: pytest.CaptureFixture[str]
) -> None:
    poison.update((2, 4, 5, 6))  # two apart do not count as one row of three
    stopped_with_2(config, tmp_path, train__steps=8, **EVERY_STEP)
    message = capsys.readouterr().err
    assert message == (
        "error: loss or gradient was not finite in 3 updates in a row, which were skipped; lower optim.lr, or resume "
        "from an earlier checkpoint with --checkpoint.resume PATH; the last good checkpoint is "
        f"{tmp_path}/checkpoints/step_3\n"
    )
    assert len(message.splitlines()) == 1
    rows = read_rows(tmp_path / "metrics.jsonl")
    assert [row["train/skipped_updates"] for row in rows] == [0, 1, 0, 1, 1]
    assert saved(tmp_path) == ["step_1", "step_3"]

    poison.clear()  # whatever it was is gone: the run goes on from there
    rows = train_rows(config, tmp_path, train__steps=8, checkpoint__resume="latest", **EVERY_STEP)
    assert [row["train/skipped_updates"] for row in rows] == [0, 1, 0, 0, 0, 0, 0, 0]
    assert not torch.equal(weights(config, tmp_path, 3), weights(config, tmp_path, 4))


def test_minibatches_of_one_step_count_one_by_one(config: Path, tmp_path: Path, poison: set[int]) -> None:
    poison.add(2)
    stopped_with_2(config, tmp_path, rl__minibatch_prompts=2, **EVERY_STEP)  # four updates a step
    assert len(read_rows(tmp_path / "metrics.jsonl")) == 1
    assert latest_checkpoint(tmp_path / "checkpoints") == tmp_path / "checkpoints" / "step_1"


@pytest.mark.parametrize(("lr", "recipe"), [(1e20, "bf16"), (1e20, "quads"), (1e10, "quads")])
def test_a_learning_rate_that_breaks_the_weights_stops_the_run_and_keeps_what_was_saved(
    tmp_path: Path, config: Path, capsys: pytest.CaptureFixture[str], lr: float, recipe: str
) -> None:
    """The first step is healthy, its update is not: everything that the new weights draw or compute is NaN."""
    values = {"optim__lr": lr, "quant__recipe": recipe, "train__steps": 40, **EVERY_STEP, "checkpoint__keep": 2}
    stopped_with_2(config, tmp_path, **values)
    message = capsys.readouterr().err
    assert "not finite in 3 updates in a row" in message and len(message.splitlines()) == 1
    assert message.endswith(f"; the last good checkpoint is {tmp_path}/checkpoints/step_1\n")
    assert saved(tmp_path) == ["step_1"]
    assert [row["train/skipped_updates"] for row in read_rows(tmp_path / "metrics.jsonl")] == [0, 1, 1]


def test_weights_that_an_update_makes_infinite_are_named_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_world(tmp_path / "world")
    file = config.parent / "model" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.embed_tokens.weight"] *= 1e5  # which the first norm takes out again
    save_file(tensors, file, metadata={"format": "pt"})
    decay = {"optim__lr": 1e30, "optim__weight_decay": 1e6}  # the two multiply
    stopped_with_2(config, tmp_path / "run", train__steps=40, **decay, **EVERY_STEP)
    message = capsys.readouterr().err
    assert "weight sync of version 1: weight model.embed_tokens.weight is not finite in bf16" in message
    assert message.endswith("; no checkpoint was saved\n") and len(message.splitlines()) == 1
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_a_picture_that_cannot_be_drawn_does_not_fail_a_run(
    tmp_path: Path, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train_rows(config, tmp_path, train__steps=1)
    (tmp_path / "plots" / "curves.png").unlink()
    (tmp_path / "plots" / "curves.png").mkdir()  # a folder where the picture should be
    train_rows(config, tmp_path, train__steps=2, checkpoint__resume="latest")
    assert "the curves were not drawn (" in capsys.readouterr().out
