"""Every correction of the loss in the loop of train.py: alone, by level, under each surrogate, with each recipe."""

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import train
from quads.quant.recipes import RECIPES
from quads.rl.learner import Learner
from quads.rollout.native.engine import NativeEngine
from quads.types import Completion, Sampling
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
    **{f"centered {word}": words(word) | {"rl__score_centering": 3} for word in ("none", "tis", "mis", "ais")},
    "centered by all tokens": words("none") | {"rl__score_centering": 4},
    "centered acr": words("tis", "token", "acr") | {"rl__score_centering": 3},
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


def test_the_rollout_is_asked_for_the_candidates(config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training rollouts return as many as the key says, evaluations none, and the learner gets what they returned."""
    generated: list[Completion] = []
    asked, updated = [], []
    generate, update = NativeEngine.generate, Learner.update

    def note_request(self: Any, prompts: Any, n: int, sampling: Sampling, seeds: Any, **named: Any) -> Any:
        groups = generate(self, prompts, n, sampling, seeds, **named)
        asked.append((n, sampling.top_logprobs))
        generated.extend(c for group in groups for c in group if sampling.top_logprobs)
        return groups

    def note_update(self: Learner, microbatches: Any, denominator: float) -> Any:
        updated.extend(microbatches)
        return update(self, microbatches, denominator)

    monkeypatch.setattr(NativeEngine, "generate", note_request)
    monkeypatch.setattr(Learner, "update", note_update)
    values = COMMON | words("mis") | {"rl__score_centering": 3, "eval__every": 1, "rl__microbatch_tokens": 50}
    train_rows(config, tmp_path, **values, train__steps=1)
    assert asked == [(8, 3), (2, 0)] and len(updated) > 4

    def candidates(of: list[Any], ids: str, logprobs: str) -> set[tuple[float, ...]]:
        return {
            (*row_ids, *row_logprobs)
            for one in of
            for row_ids, row_logprobs in zip(getattr(one, ids).tolist(), getattr(one, logprobs).tolist(), strict=True)
        }

    packed = candidates(updated, "top_ids_Nk", "top_logprobs_Nk")
    assert packed == candidates(generated, "top_ids", "top_logprobs")
    assert sum(len(mb.targets_N) for mb in updated) == sum(len(c.token_ids) for c in generated)
    for mb in updated:  # where the token that was drawn is among the candidates, so is its log-prob
        drawn_Nk = mb.top_ids_Nk == mb.targets_N[:, None]
        assert drawn_Nk.any()
        torch.testing.assert_close(
            mb.top_logprobs_Nk[drawn_Nk], mb.rollout_logprobs_N[drawn_Nk.any(-1)], atol=1e-6, rtol=0
        )


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
        assert 0.9 < row["mismatch/ess"] <= 1.0
        if recipe in ("bf16", "fp8", "symmetric"):  # sides agree, but for rounding at the boundary of two codes
            assert row["policy/weight_capped_frac"] < 0.05 and row["mismatch/m2"] < 1e-4
        if recipe in ("naive", "qat", "quads"):
            assert row["policy/weight_capped_frac"] > 0.1 and row["mismatch/m2"] > 1e-4
