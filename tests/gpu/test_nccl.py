"""Two GPUs over NCCL compute what one does, keep moments in 8 bits or CPU memory (see nccl_worker.py), and a run on
them survives a kill."""

import json
import signal
from pathlib import Path

import pytest

from quads.run.folder import read_rows
from tests.helpers import run_torchrun
from tests.tiny_run import computed, make_world, signal_after_row, start_two

WORKER = str(Path(__file__).with_name("nccl_worker.py"))


@pytest.mark.multi_gpu
@pytest.mark.parametrize(
    ("checks", "count"), [(["equal", "gathers", "shipped", "checkpoint"], 11), (["moments"], 2), (["compile"], 1)]
)
def test_two_gpus(checks: list[str], count: int, tmp_path: Path) -> None:
    done = run_torchrun([WORKER, "cuda", str(tmp_path), *checks], num_processes=2, timeout_s=280)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert done.stdout.count("ok ") == count, done.stdout


@pytest.mark.slow
def test_moments_over_two_processes(tmp_path: Path) -> None:
    done = run_torchrun([WORKER, "cpu", str(tmp_path), "moments"], num_processes=2, timeout_s=280)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert done.stdout.count("ok ") == 2, done.stdout


@pytest.mark.parametrize(
    "device", [pytest.param("cuda", marks=pytest.mark.multi_gpu), pytest.param("cpu", marks=pytest.mark.slow)]
)
def test_killed_run_goes_on(device: str, tmp_path: Path) -> None:
    """Steps after the kill are those of a run that nobody killed, to the last digit."""
    config = make_world(tmp_path / "world")
    values = {
        "train__device": device, "train__steps": 5, "model__dtype": "bfloat16", "quant__recipe": "qat",
        "quant__all_gather": "packed", "parallel__ep": 2, "rollout__kernel": "reference", "checkpoint__every": 1,
    }  # fmt: skip
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    undisturbed = start_two(config, straight, **values)
    signal_after_row(start_two(config, killed, **values), killed, 2, signal.SIGKILL)
    assert len(read_rows(killed / "metrics.jsonl")) < 5, "the kill came too late to test anything"
    for processes in (undisturbed, start_two(config, killed, **values)):
        output = [process.communicate(timeout=200)[0] for process in processes]
        assert all(process.returncode == 0 for process in processes), output
    expected, actual = (read_rows(out / "metrics.jsonl") for out in (straight, killed))
    assert computed(actual) == computed(expected)
    print("ok", json.dumps({key: actual[-1][key] for key in ("step", "train/loss", "train/grad_norm")}))
