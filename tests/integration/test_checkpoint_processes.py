"""Checkpoints of several processes: another number of them, sharded otherwise, resumes; a failing rank ends the job."""

import re
import time
from pathlib import Path

import quads
from quads.run.checkpoint import latest_checkpoint
from tests.helpers import REPOSITORY, run_command, run_torchrun

WORKER = str(REPOSITORY / "tests" / "integration" / "checkpoint_worker.py")


def losses(num_processes: int, folder: Path, steps: int, ep: int) -> dict[int, float]:
    args = [WORKER, str(folder), str(steps), str(ep)]
    done = run_torchrun(args, num_processes=num_processes) if num_processes > 1 else run_command(args)
    assert done.returncode == 0, done.stderr[-3000:]
    return {int(step): float(loss) for step, loss in re.findall(r"step (\d+) loss ([\d.]+)", done.stdout)}


def test_four_processes_save_two_resume_then_one(tmp_path: Path) -> None:
    straight = losses(1, tmp_path / "straight", steps=5, ep=1)
    resharded = (
        losses(4, tmp_path / "moved", steps=2, ep=2)
        | losses(2, tmp_path / "moved", steps=4, ep=2)
        | losses(1, tmp_path / "moved", steps=5, ep=1)
    )
    assert list(resharded) == [1, 2, 3, 4, 5]
    assert straight[1] - straight[5] > 0.1  # it learns, so equal losses mean equal weights and moments
    for step, loss in straight.items():
        assert abs(resharded[step] - loss) < 2e-5, step  # fp32 sums in another order, through five updates


def test_a_rank_that_fails_ends_the_job_with_one_message(tmp_path: Path) -> None:
    start = time.monotonic()
    done = run_torchrun([WORKER, str(tmp_path), "3", "1", "fail"], num_processes=2)
    assert done.returncode != 0
    assert time.monotonic() - start < 60  # seconds; the other rank is in a collective and must not hang there
    assert done.stderr.count("the disk of this machine is full") == 1
    assert "error: the disk of this machine is full; free some space (rank 1 of 2)" in done.stderr
    package = str(Path(quads.__file__).parent)
    assert package not in "".join(re.findall(r'File "(.*)"', done.stderr)), "a traceback of ours"
    # the save in flight may or may not have completed; what is there can be resumed
    first = latest_checkpoint(tmp_path)
    resumed = losses(1, tmp_path, steps=2, ep=1)
    assert list(resumed) == ([2] if first else [1, 2])
