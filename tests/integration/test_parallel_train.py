"""A run on two processes computes what one process does, through SIGTERM, a kill, and a change of their number."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import train
from quads.checkpoint import latest_checkpoint
from quads.run_folder import read_rows
from tests.helpers import REPOSITORY, command_env, free_port
from tests.tiny_run import MEASURED, make_world, options, train_rows

STEPS = 6
VALUES: dict[str, Any] = {
    "train__steps": STEPS,
    "quant__recipe": "qat",  # W4A4 without residual: the codes of a token do not depend on its batch mates
    "rl__minibatch_prompts": 4,
    "rl__old_logprobs": "learner",
    "rl__kl_coef": 0.1,
    "rl__microbatch_tokens": 64,
    "rl__loss_average": "token",
    "checkpoint__every": 1,
}
PARALLEL: dict[str, Any] = {
    "parallel__ep": 2,
    "parallel__activation_checkpointing": "moe",
    "quant__all_gather": "packed",
    "optim__moments": "cpu",
}
# fp32 sums in another order, through up to 12 updates of a model that samples the same tokens throughout; Adam turns
# noise of tiny gradients into larger steps.
RELATIVE = 2e-3


def start(config: Path, out: Path) -> list[subprocess.Popen[str]]:
    """Both processes, resuming where there is something to resume; no torchrun between them and a test that kills."""
    command = [sys.executable, str(REPOSITORY / "train.py"), "--config", str(config), "--checkpoint.resume", "latest"]
    command += options(train__out=out, **VALUES, **PARALLEL)
    port = str(free_port())
    started = []
    for rank in ("0", "1"):
        env = command_env(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", MASTER_PORT=port)
        env["MASTER_ADDR"] = "127.0.0.1"
        started.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
    return started


def signal_after_row(processes: list[subprocess.Popen[str]], out: Path, step: int, number: int) -> list[str]:
    """Signal both once metrics.jsonl has the row of `step`; their output when they have ended."""
    metrics = out / "metrics.jsonl"
    while not metrics.exists() or len(metrics.read_bytes().splitlines()) < step:
        assert all(p.poll() is None for p in processes), [p.communicate()[0] for p in processes]
        time.sleep(0.05)
    for process in processes:
        os.kill(process.pid, number)
    return [process.communicate(timeout=60)[0] for process in processes]


def test_two_processes_train_as_one_and_resume_anywhere(tmp_path: Path) -> None:
    config = make_world(tmp_path / "world")
    straight = train_rows(config, tmp_path / "straight", **VALUES)

    out = tmp_path / "parallel"
    processes = start(config, out)
    output = signal_after_row(processes, out, 1, signal.SIGTERM)
    assert [process.returncode for process in processes] == [0, 0], output
    stopped = latest_checkpoint(out / "checkpoints")
    assert stopped is not None and len(read_rows(out / "metrics.jsonl")) == int(stopped.name.removeprefix("step_"))

    signal_after_row(start(config, out), out, 3, signal.SIGKILL)
    assert not (out / "checkpoints" / f"step_{STEPS}").exists(), "the kill came too late to test anything"
    arguments = ["--config", str(config), *options(train__out=out, **VALUES), "--checkpoint.resume"]
    train.main(arguments)  # one process reads what two wrote

    rows = read_rows(out / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert rows[-1]["policy/version"] == STEPS
    for row, expected in zip(rows, straight, strict=True):
        for key, value in expected.items():
            if value is None or key.startswith(MEASURED):
                continue
            assert abs(row[key] - value) <= RELATIVE * abs(value) + 1e-5, (row["step"], key, row[key], value)
