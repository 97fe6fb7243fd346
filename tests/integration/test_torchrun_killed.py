"""`kill -9` of torchrun takes its processes with it, and the folder is free for the next run."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.helpers import REPOSITORY, command_env, free_port
from tests.tiny_run import make_world, options, train_rows


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's word for it is prctl")
def test_no_process_outlives_torchrun(tmp_path: Path) -> None:
    config, out = make_world(tmp_path / "world"), tmp_path / "run"
    launch = ["-m", "torch.distributed.run", "--nproc_per_node=2", f"--master_port={free_port()}", "train.py"]
    args = ["--config", str(config), *options(train__out=out, train__steps=10_000, eval__every=0)]
    command = [sys.executable, *launch, *args]
    with open(tmp_path / "output", "w") as output:
        torchrun = subprocess.Popen(command, cwd=REPOSITORY, env=command_env(), stdout=output, stderr=output)
    ranks: list[int] = []
    try:
        deadline = time.monotonic() + 120
        while not (out / "metrics.jsonl").exists() or not (out / "metrics.jsonl").stat().st_size:
            assert torchrun.poll() is None and time.monotonic() < deadline, (tmp_path / "output").read_text()[-3000:]
            time.sleep(0.1)
        ranks = children(torchrun.pid)
        assert len(ranks) == 2 and all(map(runs, ranks))
        torchrun.kill()
        torchrun.wait()
        deadline = time.monotonic() + 10
        while any(map(runs, ranks)):
            assert time.monotonic() < deadline, "a rank lives on"
            time.sleep(0.05)
    finally:
        for pid in filter(runs, ranks):
            os.kill(pid, signal.SIGKILL)
        torchrun.kill()
    assert (out / ".lock").exists()
    assert len(train_rows(config, out, train__steps=1, eval__every=0)) == 1
