"""The benchmark of whole GRPO steps runs without weights and data, learns by lot, and times every phase."""

import re
from pathlib import Path

from tests.helpers import run_torchrun

SMALL = (
    "--layers 2 --model.arch tiny --model.dtype float32 --parallel.ep 1 --parallel.compile false "
    "--rollout.engine native --rollout.max_prompt_tokens 256 --rollout.max_new_tokens 8 --rollout.max_batch 16 "
    "--rl.prompts_per_step 2 --rl.minibatch_prompts 2 --rl.group_size 4 --rl.microbatch_tokens 512 "
    "--train.threads 1 --train.steps 2"
)


def test_steps_are_timed(tmp_path: Path) -> None:
    command = ["-m", "benchmarks.bench_grpo", *SMALL.split(), "--train.out", str(tmp_path / "run")]
    done = run_torchrun(command, num_processes=1)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    rows = dict(re.findall(r"^\| (.+?) \| ([\d.e+-]+) \|$", done.stdout, re.M))
    assert "CPU x 1, 2 layers, recipe quads, 2 steps" in done.stdout
    assert float(rows["gradient norm"]) > 0, "rewards by lot leave no group without spread"
    phases = [float(rows[f"{name}, s"]) for name in ("rollout", "reward beyond it", "learn", "sync")]
    assert all(phases) and sum(phases) <= float(rows["step, s"])
    assert float(rows["checkpoint: save, s"]) + float(rows["checkpoint: wait, s"]) > 0
    assert (tmp_path / "run" / "checkpoints" / "step_2" / "COMPLETE").exists()
