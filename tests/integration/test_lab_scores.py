"""`lab scores`: what a policy scores under other precisions, on runs that take a second."""

import json

import pytest

from quads.errors import UserError
from quads.lab.report import build as report
from quads.lab.runs import scores
from tests.tiny_run import make_world, train_rows

FEW = {"train__steps": 1, "eval__every": 0, "checkpoint__every": 0}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Three arms of one model: trained with and without residual, and one that has not moved."""
    folder = tmp_path_factory.mktemp("runs")
    config = make_world(folder / "world")
    train_rows(config, folder / "quads_seed0", quant__recipe="quads", quant__residual_ratio=1.0, **FEW)
    train_rows(config, folder / "naive_seed0", quant__recipe="naive", **FEW)
    train_rows(config, folder / "still_seed3", quant__recipe="bf16", optim__lr=0.0, train__seed=3, **FEW)
    return folder


def judge(out, folders, *extra):
    scores.main(["--out", str(out), "--prompts", "8", "--samples", "16", *extra, "--runs", *map(str, folders)])
    data = json.loads((out / "scores.json").read_text())
    return data, {(row["arm"], row["rollout"]): row for row in data["rows"]}


def test_cells_are_of_the_right_weights_and_precision(runs, tmp_path, capsys):
    folders = [runs / "quads_seed0", runs / "naive_seed0", runs / "still_seed3"]
    data, cells = judge(tmp_path / "one", folders, "--rollouts", "own,bf16,w4a4")
    assert {(arm, rollout) for arm in ("quads", "naive", "still") for rollout in ("own", "bf16", "w4a4")} | {
        ("start", "bf16"), ("start", "w4a4")
    } == set(cells)  # fmt: skip
    assert [cells[arm, "own"]["precision"] for arm in ("quads", "naive", "still")] == ["w4a4_residual", "w4a4", "bf16"]
    assert cells["naive", "own"]["pass@1"] == cells["naive", "w4a4"]["pass@1"]
    assert cells["naive", "w4a4"]["over_own"] == 0.0 and "over_own" not in cells["naive", "own"]
    for rollout in ("bf16", "w4a4"):  # a learning rate of 0: the starting weights
        assert cells["still", rollout]["pass@1"] == cells["start", rollout]["pass@1"]
        assert cells["quads", rollout]["pass@1"] != cells["start", rollout]["pass@1"]
    assert cells["start", "bf16"]["pass@1"] != cells["start", "w4a4"]["pass@1"]
    quads = cells["quads", "bf16"]
    assert quads["over_own"] == pytest.approx(
        quads["pass@1"] - cells["quads", "own"]["pass@1"], abs=3e-6
    )  # six digits are stored
    assert all(0 <= row["truncated"] <= 1 for row in data["rows"]) and cells["start", "bf16"]["truncated"] > 0
    assert data["prompts"] == 8 and cells["still", "own"]["seed"] == 3
    assert (tmp_path / "one" / "scores.png").stat().st_size > 10_000 and "| quads" in capsys.readouterr().out

    report.main(["--only-page", "--out", str(tmp_path / "one")])
    page = (tmp_path / "one" / "report.html").read_text()
    assert "Is the policy bad" in page and f"still {cells['still', 'bf16']['pass@1']:.3f} in bf16" in page

    several, _ = judge(tmp_path / "two", folders, "--rollouts", "own,bf16,w4a4", "--jobs", "2")
    assert several["rows"] == data["rows"]


def test_messages_name_what_is_wrong(runs, tmp_path):
    with pytest.raises(UserError, match="no config.toml"):
        judge(tmp_path, [tmp_path / "nothing"])
    with pytest.raises(UserError, match="name own or"):
        judge(tmp_path, [runs / "naive_seed0"], "--rollouts", "own,w3a3")
    config = make_world(tmp_path / "other")
    train_rows(config, tmp_path / "other_seed0", **FEW)
    with pytest.raises(UserError, match=r"other_seed0: \[model\] differs"):
        judge(tmp_path, [runs / "naive_seed0", tmp_path / "other_seed0"])
    train_rows(runs / "world" / "tiny.toml", tmp_path / "unsaved_seed0", checkpoint__final=False, **FEW)
    with pytest.raises(UserError, match="checkpoint"):
        judge(tmp_path, [tmp_path / "unsaved_seed0"])
