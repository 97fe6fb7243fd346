"""A run on two processes computes what one process does, through SIGTERM, a kill, and a change of their number."""

import signal
from pathlib import Path
from typing import Any

import train
from quads.run.checkpoint import latest_checkpoint
from quads.run.folder import read_rows
from tests.tiny_run import MEASURED, make_world, options, signal_after_row, start_two, train_rows

STEPS = 6
VALUES: dict[str, Any] = {
    "train__steps": STEPS,
    "quant__recipe": "qat",  # W4A4 without residual: the codes of a token do not depend on its batch mates
    "rl__minibatch_prompts": 4,
    "rl__old_logprobs": "learner",
    "rl__correction": "ais",  # by the effective sample size of all processes' tokens
    "rl__score_centering": 3,
    "rl__correction_cap": 1.05,
    "rl__routing_replay": "true",
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


def test_two_processes_train_as_one_and_resume_anywhere(tmp_path: Path) -> None:
    config = make_world(tmp_path / "world")
    straight = train_rows(config, tmp_path / "straight", **VALUES)
    assert any(0 < row["policy/weight_capped_frac"] < 1 for row in straight)

    out = tmp_path / "parallel"
    processes = start_two(config, out, **VALUES, **PARALLEL)
    output = signal_after_row(processes, out, 1, signal.SIGTERM)
    assert [process.returncode for process in processes] == [0, 0], output
    assert "KV cache" in output[0] and "KV cache" not in output[1], "one process speaks for all"
    stopped = latest_checkpoint(out / "checkpoints")
    assert stopped is not None and len(read_rows(out / "metrics.jsonl")) == int(stopped.name.removeprefix("step_"))

    signal_after_row(start_two(config, out, **VALUES, **PARALLEL), out, 3, signal.SIGKILL)
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
