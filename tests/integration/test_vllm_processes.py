"""vLLM as the rollout engine of whole processes: under torchrun, and in the real training loop."""

import json
from pathlib import Path

import pytest
import torch

from quads.model.hf import save_hf
from tests.helpers import REPOSITORY, run_command, run_torchrun
from tests.vllm_models import CONFIG, LOGPROB_TOLERANCE, make_learner

pytestmark = pytest.mark.vllm

QUIET = {"VLLM_LOGGING_LEVEL": "ERROR", "TORCH_COMPILE_DISABLE": "1"}


def test_two_processes_learn_and_roll_out() -> None:
    """FSDP2 learner and an engine a rank; two steps; engines closed and made again; the trainer's group lives on."""
    result = run_torchrun(["tests/integration/vllm_worker.py"], num_processes=2, timeout_s=280, **QUIET)
    assert result.returncode == 0, result.stderr[-4000:]
    assert "engines opened, synced and closed twice on 2 processes" in result.stdout


def test_two_processes_share_one_engine() -> None:
    """Tensor parallelism: half of each matrix a rank, same tokens on both, log-probs and bytes of the learner."""
    result = run_torchrun(["tests/integration/vllm_tp_worker.py"], num_processes=2, timeout_s=280, **QUIET)
    assert result.returncode == 0, result.stderr[-4000:]
    assert "two ranks shared one engine, twice" in result.stdout


def run_loop(folder: Path, out: Path, *arguments: str) -> list[dict]:
    """Three steps of train.py with the vLLM engine; returns the rows of metrics.jsonl."""
    command = ["train.py", "--config", "configs/tiny_quads.toml", "--model.path", str(folder)]
    command += ["--model.tokenizer", "assets/tiny_moe", "--rollout.engine", "vllm", "--rollout.max_batch", "16"]
    command += ["--rl.prompts_per_step", "4", "--rl.minibatch_prompts", "4", "--rl.group_size", "4"]
    command += ["--eval.every", "0", "--train.steps", "3", "--train.out", str(out), *arguments]
    result = run_command(command, timeout_s=200, **QUIET)
    assert result.returncode == 0, result.stderr[-4000:]
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The test model with the vocabulary of the tiny tokenizer."""
    size = len(json.loads((REPOSITORY / "assets/tiny_moe/tokenizer.json").read_text())["model"]["vocab"])
    assert size <= CONFIG.vocab_size
    save_hf(tmp_path / "model", CONFIG, make_learner(), torch.float32)
    return tmp_path / "model"


def test_the_loop_without_learning_stays_at_rounding(folder: Path, tmp_path: Path) -> None:
    """lr = 0 and a rollout that multiplies what the learner multiplies: no gap, three versions, same weights."""
    rows = run_loop(folder, tmp_path / "run", "--quant.rollout", "w4a16", "--optim.lr", "0")
    assert [row["policy/version"] for row in rows] == [1, 2, 3]
    assert max(row["mismatch/logprob_abs_max"] for row in rows) < LOGPROB_TOLERANCE
    assert all(row["policy/ratio_clip_frac"] == 0 for row in rows)


def test_the_loop_follows_a_moving_policy(folder: Path, tmp_path: Path) -> None:
    """Weights that shrink by a fifth a step, rewarded or not: a rollout of old ones would show at once."""
    moving = ("--optim.lr", "0.02", "--optim.weight_decay", "10")
    moving += ("--rl.old_logprobs", "learner", "--rl.score_centering", "30")  # an engine that was not told refuses
    rows = run_loop(folder, tmp_path / "run", "--quant.rollout", "w4a16", *moving)
    assert max(row["mismatch/logprob_abs_max"] for row in rows) < LOGPROB_TOLERANCE
    entropies = [row["policy/entropy"] for row in rows]
    assert entropies[1] > entropies[0] + 0.04 and entropies[2] > entropies[1] + 0.02, entropies  # ln 517 = 6.25
