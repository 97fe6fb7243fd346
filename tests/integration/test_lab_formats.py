"""`lab formats --rl`: cells that share processes and engines, are filled in parts, and say what is missing."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from quads.errors import UserError
from quads.lab.formats import command
from quads.lab.formats.axes import Axes, Cell
from tests.helpers import REPOSITORY, command_env
from tests.tiny_run import make_world

ROWS = ["--rows", "naive,qat,quads", "--columns", "nvfp4,hif4", "--corrections", "none", "--seeds", "1", "--steps", "2"]
MANY = ["--eval.samples", "32", "--optim.lr", "1e-2"]  # one guess in sixteen is right: scores that can tell apart


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return str(make_world(tmp_path_factory.mktemp("world") / "world"))


def argv(config, out, *extra):
    return ["--rl", "--config", config, "--out", str(out), *ROWS, *MANY, *extra]


def read(out):
    return json.loads((out / "formats_rl.json").read_text())


def numbers(data):
    """Cells without what was measured by the clock."""
    return {key: {k: cell[k] for k in ("steps", "own", "bf16", "curves")} for key, cell in data["cells"].items()}


@pytest.fixture(scope="module")
def whole(config, tmp_path_factory):
    out = tmp_path_factory.mktemp("whole")
    command.main(argv(config, out, "--jobs", "2"))
    return out


def test_every_cell_is_trained_and_judged_twice(whole):
    data = read(whole)
    cells = Axes(["naive", "qat", "quads"], ["nvfp4", "hif4"], ["none"], 1).cells()
    assert {cell.key for cell in cells} == set(data["cells"]) and len(cells) == 14 and not data["failed"]
    trained = data["cells"]["quads/hif4/none/0"]
    assert trained["steps"] == 2 and len(trained["curves"]["reward"]) == 2 and trained["curves"]["gap"][0] > 0
    assert data["cells"]["naive/hif4/start/0"]["steps"] == 0
    # What cells start from: one policy, one W4A4 rollout whether the learner quantizes or not.
    starts = {cell.key: data["cells"][cell.key] for cell in cells if cell.correction == "start"}
    assert len({cell["bf16"]["pass@1"] for cell in starts.values()}) == 1
    assert starts["naive/nvfp4/start/0"]["own"] == starts["qat/nvfp4/start/0"]["own"]
    assert starts["bf16/-/start/0"]["own"] == starts["bf16/-/start/0"]["bf16"]
    gaps = {key: cell["curves"]["gap"][0] for key, cell in data["cells"].items() if cell["steps"]}
    assert gaps["naive/nvfp4/none/0"] != gaps["naive/hif4/none/0"] and gaps["bf16/-/none/0"] < 1e-5
    assert gaps["qat/nvfp4/none/0"] < gaps["naive/nvfp4/none/0"] and gaps["quads/hif4/none/0"] < gaps["qat/hif4/none/0"]
    assert all(cell[judged]["pass@1"] > 0 for cell in data["cells"].values() for judged in ("own", "bf16"))
    assert all(cell["bf16"] != starts["bf16/-/start/0"]["bf16"] for cell in data["cells"].values() if cell["steps"])
    assert data["about"]["seeds"] == [] and "missing" not in (whole / "formats_rl.md").read_text()


def test_a_killed_part_goes_on_and_ends_in_the_same_numbers(config, whole, tmp_path, capsys):
    part = subprocess.Popen(
        [sys.executable, "-m", "quads.lab", "formats", *argv(config, tmp_path)],
        env=command_env(), cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    file = tmp_path / "formats_rl.json"
    deadline = time.monotonic() + 120
    while not file.exists() or sum(cell["steps"] for cell in read(tmp_path)["cells"].values()) < 2:
        assert part.poll() is None and time.monotonic() < deadline, part.communicate()
        time.sleep(0.1)
    os.kill(part.pid, signal.SIGKILL)
    part.communicate()
    kept = numbers(read(tmp_path))
    assert 6 <= len(kept) < 14

    command.main(argv(config, tmp_path, "--seconds", "0"))
    said = capsys.readouterr().out
    assert "missing" in (tmp_path / "formats_rl.md").read_text() and f"{14 - len(kept)} of 14 cells are missing" in said
    assert (tmp_path / "formats_rl.png").stat().st_size > 10_000 and numbers(read(tmp_path)) == kept

    command.main(argv(config, tmp_path))
    assert numbers(read(tmp_path)) == numbers(read(whole))
    assert f"14 cells, {14 - len(kept)} to fill" in capsys.readouterr().err


def test_a_part_without_time_begins_nothing(config, tmp_path, capsys):
    command.main(argv(config, tmp_path, "--seconds", "0.01"))
    assert "14 of 14 cells are missing" in capsys.readouterr().out and not read(tmp_path)["cells"]


def test_what_a_recipe_refuses_is_shown_as_failed_and_the_rest_is_filled(config, tmp_path, capsys):
    few = ["--rows", "naive", "--columns", "nvfp4,hif4"]
    command.main(argv(config, tmp_path, *few, "--quant.global_scale", "amax"))
    data = read(tmp_path)
    assert data["failed"].keys() == {"naive/hif4/start/0", "naive/hif4/none/0"}
    assert data["cells"].keys() == {"bf16/-/start/0", "bf16/-/none/0", "naive/nvfp4/start/0", "naive/nvfp4/none/0"}
    assert "global_scale" in data["failed"]["naive/hif4/none/0"] and "failed: naive/hif4" in capsys.readouterr().out


def test_other_settings_are_not_mixed(config, whole):
    for other in (["--steps", "3"], ["--optim.lr", "1e-4"]):
        with pytest.raises(UserError, match="other settings"):
            command.main(argv(config, whole, *other))


@pytest.mark.parametrize("option", ["--rows", "--columns", "--corrections"])
def test_unknown_names_are_refused(config, tmp_path, option):
    with pytest.raises(UserError, match=f"{option} nonsense"):
        command.main(["--rl", "--config", config, "--out", str(tmp_path), option, "nonsense"])


def test_keys_of_cells():
    assert Cell("quads", "hif4", "tis", 1).key == "quads/hif4/tis/1"
