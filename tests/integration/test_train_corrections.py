"""Every correction of the loss in the loop of train.py: alone, by level, under each surrogate, with each recipe."""

import itertools
import math
from pathlib import Path
from typing import Any

import pytest

import train
from quads.quant.recipes import RECIPES
from tests.tiny_run import computed, make_world, train_rows

# Two updates a step, so that the second sees ratios off 1; a cap that the gap of this model reaches.
COMMON: dict[str, Any] = {
    "quant__recipe": "qat",
    "rl__minibatch_prompts": 4,
    "rl__old_logprobs": "learner",
    "rl__correction_cap": 1.05,
    "optim__lr": 0.01,
    "eval__every": 0,
    "rollout__verify_sync": "false",
    "checkpoint__every": 0,
    "checkpoint__final": "false",
}
LEVELS = ("token", "sequence", "geometric")


def words(correction: str, level: str = "token", surrogate: str = "ppo", dual_clip: float = 0.0) -> dict[str, Any]:
    values = {"correction": correction, "correction_level": level, "surrogate": surrogate, "dual_clip": dual_clip}
    return {f"rl__{name}": value for name, value in values.items()}


CASES: dict[str, dict[str, Any]] = {
    "none": words("none"),
    **{f"{word} {level}": words(word, level) for word in ("tis", "mis", "ais") for level in LEVELS},
    **{f"acr {level}": words("tis", level, "acr") for level in LEVELS},
    **{f"tbpo {word}": words(word, "token", "tbpo") for word in ("none", "tis", "mis", "ais")},
    "dual clip": words("none", dual_clip=1.05),
    "dual clip, acr": words("tis", "token", "acr", 1.05),
    "cumulative clip, mis": words("mis") | {"rl__cumulative_ratio_clip": 1.05},
    "the rollout's, tbpo": words("", "token", "tbpo") | {"rl__old_logprobs": "rollout"},
    "the rollout's, dual clip": words("", dual_clip=1.05) | {"rl__old_logprobs": "rollout"},
}
# The share that shows that an option acted -> the cases of which it is above 0 in some step; in all others it is 0.
ACTED = {
    "policy/weight_capped_frac": {name for name, case in CASES.items() if case["rl__correction"] in ("tis", "ais")},
    "policy/weight_masked_frac": {name for name, case in CASES.items() if case["rl__correction"] == "mis"},
    "policy/tbpo_dropped_frac": {name for name in CASES if "tbpo" in name},
    "policy/dual_clip_frac": {name for name in CASES if "dual clip" in name},
    "policy/cumulative_masked_frac": {"cumulative clip, mis"},
}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_world(tmp_path_factory.mktemp("corrections") / "world")


@pytest.fixture(scope="module")
def runs(config: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Three steps of every case."""
    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "draw_curves", lambda out: None)  # takes longer than the three steps
        return {name: train_rows(config, folder / name, **COMMON | case) for name, case in CASES.items()}


@pytest.mark.parametrize("name", CASES)
def test_each_of_them_trains_three_steps(runs: dict[str, list[dict[str, Any]]], name: str) -> None:
    rows = runs[name]
    assert len(rows) == 3
    for row in rows:
        assert math.isfinite(row["train/loss"]) and row["train/grad_norm"] > 0 and row["train/skipped_updates"] == 0
    for share, cases in ACTED.items():
        assert all(0 <= row[share] <= 1 for row in rows)
        assert any(row[share] > 0 for row in rows) == (name in cases), share


def test_no_two_of_them_train_alike(runs: dict[str, list[dict[str, Any]]]) -> None:
    """A word that did not reach the loss would leave the run of another."""
    for one, other in itertools.combinations(CASES, 2):
        assert computed(runs[one]) != computed(runs[other]), (one, other)


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_trains_with_importance_sampling_and_routing_replay(
    config: Path, tmp_path: Path, recipe: str
) -> None:
    """What `old_logprobs = "learner"` alone asks for: the truncated weight of each token."""
    values = {**COMMON, "quant__recipe": recipe, "rl__routing_replay": "true", "rl__correction_cap": 1.001}
    rows = train_rows(config, tmp_path, **values, train__steps=2)
    for row in rows:
        assert math.isfinite(row["train/loss"]) and row["train/grad_norm"] > 0 and row["train/skipped_updates"] == 0
        assert "mismatch/router_agreement" in row
        # Sides that agree leave nothing to truncate, but for rounding at the boundary of two codes.
        assert row["policy/weight_capped_frac"] < 0.05 if recipe in ("bf16", "fp8", "symmetric") else 0.1
        assert 0.9 < row["mismatch/ess"] <= 1.0
        assert (row["mismatch/m2"] < 1e-6) == (recipe in ("bf16", "fp8", "symmetric"))
