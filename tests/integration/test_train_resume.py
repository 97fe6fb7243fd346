"""A run that stops and goes on leaves what a straight run leaves: after a crash, a SIGTERM, or kills at any moment."""

import multiprocessing
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import train
from quads.run.checkpoint import latest_checkpoint
from quads.run.folder import read_rows
from tests.helpers import REPOSITORY, command_env
from tests.tiny_run import computed, make_world, options, train_rows

# Everything that carries state from step to step, and every log.
STATEFUL: dict[str, Any] = {
    "train__steps": 6,
    "rl__minibatch_prompts": 4,
    "rl__old_logprobs": "learner",
    "rl__kl_coef": 0.1,  # to the starting model, which the resumed run must find again
    "optim__warmup_steps": 2,
    "optim__schedule": "cosine",
    "checkpoint__every": 3,
    "checkpoint__keep": 0,
    "log__samples_every": 1,
    "log__tensorboard": "true",
}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_world(tmp_path_factory.mktemp("resume") / "world")


def crash_after(out: Path, step: int) -> None:
    """Leave the folder as a run that died later, when `step` was its last complete checkpoint."""
    for path in (out / "checkpoints").iterdir():
        if int(path.name.removeprefix("step_")) > step:
            path.rename(path.with_suffix(".partial"))
            (path.with_suffix(".partial") / "COMPLETE").unlink()


@pytest.mark.parametrize("values", [{"train__steps": 4}, STATEFUL], ids=["plain", "stateful"])
def test_a_resumed_run_equals_the_straight_one(config: Path, tmp_path: Path, values: dict[str, Any]) -> None:
    straight = train_rows(config, tmp_path / "straight", **values)
    saved = straight[-1]["step"] // 2
    shutil.copytree(tmp_path / "straight", tmp_path / "resumed")
    crash_after(tmp_path / "resumed", saved)
    train.main(["--config", str(config), *options(train__out=tmp_path / "resumed", **values), "--checkpoint.resume"])
    resumed = read_rows(tmp_path / "resumed" / "metrics.jsonl")
    assert computed(resumed) == computed(straight)
    assert resumed[saved - 1] == straight[saved - 1]  # kept, with its times
    assert resumed[saved]["time/step_s"] != straight[saved]["time/step_s"]  # run again
    samples = [(tmp_path / name / "samples.jsonl").read_bytes() for name in ("straight", "resumed")]
    assert samples[0] == samples[1]


def test_resuming_a_finished_run_changes_nothing(config: Path, tmp_path: Path) -> None:
    train_rows(config, tmp_path, train__steps=2)
    before = (tmp_path / "metrics.jsonl").read_bytes()
    train_rows(config, tmp_path, train__steps=2, checkpoint__resume="latest")
    assert (tmp_path / "metrics.jsonl").read_bytes() == before
    assert latest_checkpoint(tmp_path / "checkpoints") == tmp_path / "checkpoints" / "step_2"


def test_a_longer_run_goes_on_from_a_finished_one(config: Path, tmp_path: Path) -> None:
    straight = train_rows(config, tmp_path / "straight", train__steps=4)
    train_rows(config, tmp_path / "longer", train__steps=2)
    longer = train_rows(config, tmp_path / "longer", train__steps=4, checkpoint__resume="latest")
    assert computed(longer) == computed(straight)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_finishes_the_step_saves_and_the_run_resumes(
    config: Path, tmp_path: Path, number: signal.Signals
) -> None:
    out, values = tmp_path / "run", {"train__steps": 5, "checkpoint__every": 0}
    args = ["--config", str(config), *options(train__out=out, **values)]
    command = [sys.executable, "-u", "train.py", *args]
    process = subprocess.Popen(command, cwd=REPOSITORY, env=command_env(), stdout=subprocess.PIPE, text=True)
    assert process.stdout
    for line in process.stdout:
        if line.startswith("step 2/5"):
            process.send_signal(number)
            break
    process.stdout.read()
    assert process.wait(60) == 0
    stopped = read_rows(out / "metrics.jsonl")
    assert 2 <= len(stopped) < 5  # the step it was in is whole, and no other was begun
    assert latest_checkpoint(out / "checkpoints") == out / "checkpoints" / f"step_{len(stopped)}"
    resumed = train_rows(config, out, checkpoint__resume="latest", **values)
    assert computed(resumed) == computed(train_rows(config, tmp_path / "straight", **values))


@pytest.mark.parametrize("async_save", ["false", "true"])
def test_kills_at_random_moments_never_prevent_a_resume(config: Path, tmp_path: Path, async_save: str) -> None:
    values = {"train__steps": 5, "checkpoint__every": 1, "checkpoint__async_save": async_save, "log__samples_every": 1}
    straight = train_rows(config, tmp_path / "straight", **values)
    out = tmp_path / "killed"
    args = ["--config", str(config), *options(train__out=out, **values), "--checkpoint.resume"]
    context = multiprocessing.get_context("forkserver")  # imports once: a start then takes no time
    context.set_forkserver_preload(["train"])
    start = random.Random(f"kills, async_save = {async_save}")
    reached, kills = [], 0
    for _ in range(8):
        process = context.Process(target=train.main, args=(args,))
        process.start()
        wait_for_a_row_after(out, reached[-1] if reached else 0, process)
        time.sleep(start.uniform(0.0, 1.2 * max(row["time/step_s"] for row in straight)))
        if process.is_alive():
            kills += 1
        process.kill()
        process.join()
        latest = latest_checkpoint(out / "checkpoints")
        reached.append(int(latest.name.removeprefix("step_")) if latest else 0)
    assert kills >= 2 and reached == sorted(reached)  # no kill hid an earlier checkpoint
    process = context.Process(target=train.main, args=(args,))
    process.start()
    process.join()
    assert process.exitcode == 0
    assert computed(read_rows(out / "metrics.jsonl")) == computed(straight)
    assert (out / "samples.jsonl").read_bytes() == (tmp_path / "straight" / "samples.jsonl").read_bytes()
    assert not list((out / "checkpoints").glob("*.partial"))


def wait_for_a_row_after(out: Path, step: int, process: Any) -> None:
    """Until the run has written the row of a later step, or has ended."""
    deadline = time.monotonic() + 60
    while process.is_alive() and time.monotonic() < deadline:
        file = out / "metrics.jsonl"
        rows = read_rows(file) if file.exists() else []
        if rows and rows[-1]["step"] > step:
            return
        time.sleep(0.01)
