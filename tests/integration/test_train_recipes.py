"""The loop of train.py on a tiny model: every recipe, what a run's folder holds, and what every option of it does."""

import fnmatch
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quads.config import load_config
from quads.rl import evaluate
from quads.run.checkpoint import latest_checkpoint
from tests.helpers import REPOSITORY, run_command
from tests.tiny_run import computed, make_world, options, train_rows

KEYS = """
step reward/mean reward/std response/length_mean response/truncated_frac
mismatch/logprob_abs_max mismatch/logprob_abs_mean mismatch/logprob_abs_p99 mismatch/kl_k3 mismatch/nonfinite_tokens
policy/ratio_clip_frac policy/entropy group/zero_std_frac train/loss train/grad_norm train/lr policy/version
time/rollout_s time/reward_s time/learn_s time/sync_s time/eval_s time/step_s
rollout/tokens_per_s learn/tokens_per_s memory/rollout_gib memory/learn_gib memory/sync_gib
""".split()
# Both sides compute the same numbers in another order: float32 sums of the learner against float64 of the engine.
ROUNDING = 1e-5
# Where activations are quantized on both sides, that rounding may put a value on the other side of a boundary of two
# codes. The token's log-prob then moves by what one code makes of it, far more than ROUNDING, but few tokens do so.
# Recipes whose sides do not agree have a mean of 0.02 or more on this model.
ROUNDING_OF_CODES = 1e-3


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_world(tmp_path_factory.mktemp("recipes") / "world")


@pytest.fixture(scope="module")
def base(config: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Two steps of the recipe quads with the options of the config: what others are compared with."""
    return train_rows(config, tmp_path_factory.mktemp("base"), train__steps=2)


@pytest.mark.parametrize(
    ("recipe", "sides_agree"),
    [("bf16", True), ("fp8", True), ("naive", False), ("qat", False), ("symmetric", True), ("quads", False)],
)
def test_every_recipe_trains_three_steps(config: Path, tmp_path: Path, recipe: str, sides_agree: bool) -> None:
    rows = train_rows(config, tmp_path, quant__recipe=recipe)
    assert [row["step"] for row in rows] == [row["policy/version"] for row in rows] == [1, 2, 3]
    for row in rows:
        assert set(KEYS) <= row.keys()
        assert all(isinstance(row[key], int | float) and math.isfinite(row[key]) for key in KEYS)
        assert (
            0 < row["mismatch/logprob_abs_mean"] <= row["mismatch/logprob_abs_p99"] <= row["mismatch/logprob_abs_max"]
        )
        assert row["train/grad_norm"] > 0 and row["train/skipped_updates"] == row["mismatch/nonfinite_tokens"] == 0
        if recipe in ("fp8", "symmetric"):
            assert row["mismatch/logprob_abs_mean"] < ROUNDING_OF_CODES
        else:
            assert (row["mismatch/logprob_abs_max"] < ROUNDING) == sides_agree
    assert ["eval/pass@1" in row for row in rows] == [False, True, True]  # every second step, and the last


def test_another_format_trains_and_resumes(config: Path, tmp_path: Path) -> None:
    """MXFP4 by every road of a run: the learner, the residual in the rollout, checked syncs, a checkpoint, a resume."""
    options = {"quant__format": "mxfp4", "quant__scale_rule": "even", "rollout__verify_sync": True}
    rows = train_rows(config, tmp_path / "whole", train__steps=3, **options)
    assert all(ROUNDING < row["mismatch/logprob_abs_mean"] < 1 for row in rows)
    train_rows(config, tmp_path / "parts", train__steps=2, **options)
    resumed = train_rows(config, tmp_path / "parts", train__steps=3, checkpoint__resume="latest", **options)
    for key in ("train/loss", "train/grad_norm", "mismatch/logprob_abs_mean", "reward/mean"):
        assert resumed[-1][key] == rows[-1][key], key


def test_the_readme_lists_every_metric(config: Path, tmp_path: Path) -> None:
    options_that_add_some = {"rl__kl_coef": 0.1, "log__router_agreement": True}
    (row,) = train_rows(config, tmp_path, train__steps=1, **options_that_add_some)
    table = (
        (REPOSITORY / "README.md").read_text(encoding="utf-8").partition("| metrics.jsonl |")[2].partition("\n\n")[0]
    )
    listed: list[str] = []
    first_column = " ".join(re.findall(r"^\| (.*?) \|", table, re.MULTILINE))
    for name in re.findall(r"`(.*?)`", first_column):
        listed.append(listed[-1].rpartition("_")[0] + name if name.startswith("_") else name)
    assert {"policy/kl", "mismatch/router_agreement", "eval/pass@1"} <= row.keys()
    assert [key for key in row if key != "step" and not any(fnmatch.fnmatch(key, name) for name in listed)] == []


def test_a_run_without_checkpoints(config: Path, base: list[dict[str, Any]], tmp_path: Path) -> None:
    rows = train_rows(config, tmp_path, train__steps=2, checkpoint__every=0, checkpoint__final=False)
    assert computed(rows) == computed(base)
    assert not list((tmp_path / "checkpoints").glob("*"))


def test_what_each_side_adds_shows_in_the_first_gap(config: Path, tmp_path: Path) -> None:
    """Before any update the weights are the same for all; a bf16 learner sees the errors of weights and activations."""
    gap = {}
    for recipe in ("naive", "qat"):
        (row,) = train_rows(config, tmp_path / recipe, quant__recipe=recipe, train__steps=1)
        gap[recipe] = row["mismatch/logprob_abs_mean"]
    for ratio in (0.0, 1.0):
        values = {"quant__residual_ratio": ratio, "quant__residual_sites": "w13,w2,qkv,o", "train__steps": 1}
        (row,) = train_rows(config, tmp_path / str(ratio), **values)
        gap[ratio] = row["mismatch/logprob_abs_mean"]
    assert gap["qat"] < 0.7 * gap["naive"]  # measured: 0.055 against 0.109
    assert gap[0.0] == gap["qat"]  # no channel in the residual pass: plain W4A4
    assert gap[1.0] < 0.2 * gap["qat"]  # every channel twice: an error of about 0.0088 instead of 0.095 in activations


def test_the_folder_of_a_run(config: Path, tmp_path: Path) -> None:
    """As a user starts it: a process of its own."""
    out = tmp_path / "run"
    args = ["--config", str(config), "--train.out", str(out), "--log.tensorboard", "true", "--log.samples", "2"]
    done = run_command(["train.py", *args])
    assert done.returncode == 0, done.stderr
    printed = [line for line in done.stdout.splitlines() if line.startswith("step ")]
    assert len(printed) == 3 and printed[2].startswith("step 3/3  reward 0.")
    banner = next(line for line in done.stdout.splitlines() if line.startswith("experts w13"))
    assert banner.split("  ")[-1] == "reference (plain torch)" and "residual of 0.5" in banner
    assert "memory estimate" in done.stdout
    assert f"ended at step 3 of 3; metrics, samples, checkpoints, plots are in {out}" in done.stdout

    assert {path.name for path in out.iterdir()} == {
        "config.toml", "metrics.jsonl", "samples.jsonl", "checkpoints", "tb", "plots"
    }  # fmt: skip
    # What "auto" was is written down: on a CPU the residual is a second operand.
    written, asked = load_config(["--config", str(out / "config.toml")]), load_config(args)
    assert written == replace(asked, quant=replace(asked.quant, residual_operand="two"))
    assert "# commit: " in (out / "config.toml").read_text()
    samples = [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]
    assert [row["step"] for row in samples] == [1, 1] and samples[0]["policy_version"] == 0
    assert len(samples[0]["responses"]) == 8 and samples[0]["prompt"].endswith("=")
    for response in samples[0]["responses"]:
        assert response["reward"] in (0.0, 1.0) and 1 <= response["tokens"] <= 6
        assert response["finish"] == "stop" or response["tokens"] == 6
        assert set(response["text"]) <= set("01=")  # the stop token is not part of the text
    assert latest_checkpoint(out / "checkpoints") == out / "checkpoints" / "step_3"
    assert (out / "plots" / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert list((out / "tb").iterdir())


# option values -> the first step whose row differs from that of the plain run; None: equal rows
OPTIONS: dict[str, tuple[dict[str, Any], int | None]] = {
    "learner log-probs": ({"rl__old_logprobs": "learner", "rl__correction_cap": 1.02}, 1),
    "token average": ({"rl__loss_average": "token"}, 1),
    "KL": ({"rl__kl_coef": 1.0}, 2),  # at step 1 the policy is the reference
    "truncated masked": ({"rl__truncated": "mask"}, 1),
    "routing replay": ({"rl__routing_replay": "true"}, 1),
    "two epochs": ({"rl__epochs": 2}, 1),
    "four mini-batches": ({"rl__minibatch_prompts": 2}, 1),
    "cumulative clip": ({"rl__cumulative_ratio_clip": 1.1}, 1),
    "group mean": ({"rl__advantage": "group_mean"}, 1),
    "block selection": ({"quant__residual_selection": "block"}, 1),
    "token selection": ({"quant__residual_selection": "token"}, 1),
    "bf16 compute": ({"model__dtype": "bfloat16"}, 1),
    "warm-up": ({"optim__warmup_steps": 2}, 1),
    "another seed": ({"train__seed": 1}, 1),
    "background saves": ({"checkpoint__async_save": "true", "checkpoint__every": 1}, None),
    "no verification": ({"rollout__verify_sync": "false"}, None),
    "TensorBoard": ({"log__tensorboard": "true"}, None),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options_of_the_loop(config: Path, base: list[dict[str, Any]], tmp_path: Path, name: str) -> None:
    values, first = OPTIONS[name]
    rows = train_rows(config, tmp_path, train__steps=2, **values)
    if name == "KL":
        at_the_reference, moved_on = (row.pop("policy/kl") for row in rows)  # other runs have no such key
        assert at_the_reference == 0.0 < moved_on
    same = [mine == theirs for mine, theirs in zip(computed(rows), computed(base), strict=True)]
    assert same == [first is None or step < first for step in (1, 2)]
    assert all(math.isfinite(row["train/loss"]) and row["train/grad_norm"] > 0 for row in rows)
    if "train__seed" not in values and "model__dtype" not in values and "residual_selection" not in str(values):
        assert rows[0]["reward/mean"] == base[0]["reward/mean"]  # the first rollout is the same for all
    assert latest_checkpoint(tmp_path / "checkpoints") == tmp_path / "checkpoints" / "step_2"


def test_batch_sizes_and_recomputation_change_only_rounding(config: Path, tmp_path: Path) -> None:
    token = {"quant__residual_selection": "token", "train__steps": 1}  # the only one that no batch size enters
    (whole,) = train_rows(config, tmp_path / "whole", **token)
    for number, values in enumerate(
        [{"rl__microbatch_tokens": 40}, {"parallel__activation_checkpointing": "full"}, {"rollout__max_batch": 7}]
    ):
        (row,) = train_rows(config, tmp_path / str(number), **token, **values)
        assert row["reward/mean"] == whole["reward/mean"]
        for key in ("train/loss", "train/grad_norm", "mismatch/logprob_abs_mean", "policy/entropy"):
            assert row[key] == pytest.approx(whole[key], abs=1e-5), (values, key)  # fp32 sums in another order


def test_a_run_can_be_evaluated_afterwards(config: Path, tmp_path: Path) -> None:
    """`python -m quads.rl.evaluate` on the last checkpoint."""
    train_rows(config, tmp_path / "run", train__steps=1)
    report = tmp_path / "eval.json"
    evaluate.main(
        ["--config", str(config), "--checkpoint", str(tmp_path / "run"), "--out", str(report)]
        + options(eval__prompts=8, eval__samples=4)
    )
    (result,) = json.loads(report.read_text())["results"]
    assert (result["source"], result["prompts"], result["samples"]) == ("parity", 8, 4)
    assert 0 <= result["pass_at_1"] <= 1 and result["pass_at_k"]["4"] >= result["pass_at_1"]
