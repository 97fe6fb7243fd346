"""Two GPUs over NCCL compute what one does, and moments are sharded in 8 bits or CPU memory: see nccl_worker.py."""

from pathlib import Path

import pytest

from tests.helpers import run_torchrun

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
