"""Every recipe word with every 4-bit format in the loop of train.py, with the sync verified: three steps that train."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quads.config.sections import QuantSettings
from quads.errors import UserError
from quads.quant.formats import FOUR_BITS
from quads.quant.recipes import RECIPES, resolve
from tests.tiny_run import CONFIG, make_world, train_rows

# Whole blocks of HiF4, heads that vLLM's attention has on a CPU.
MODEL = replace(CONFIG, hidden_size=64, head_dim=32, moe_intermediate_size=64)
QUICK: dict[str, Any] = {"eval__every": 0, "checkpoint__every": 0, "checkpoint__final": "false", "train__steps": 3}
PAIRS = [(recipe, format) for recipe in RECIPES for format in FOUR_BITS if recipe not in ("bf16", "fp8")]
SAME = 0.02  # sums in another order move a value over the boundary of two codes now and then
SAME_ON_BOTH_SIDES = {"symmetric", "4bitter", "qarl", "qerl"}  # learner and rollout multiply the same values


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_world(tmp_path_factory.mktemp("recipes") / "world", MODEL)


@pytest.mark.parametrize(("recipe", "format"), PAIRS)
def test_trains(config: Path, tmp_path: Path, recipe: str, format: str) -> None:
    """verify_sync compares a checksum of every tensor, of packed bytes: the sync ships codes, as the learner made
    them. Quantizing the values again would give other codes in HiF4 and with four over six."""
    rows = train_rows(config, tmp_path, **QUICK, quant__recipe=recipe, quant__format=format)
    assert len(rows) == 3 and any(row["train/grad_norm"] > 0 for row in rows)
    for row in rows:
        assert math.isfinite(row["train/loss"]) and row["train/skipped_updates"] == 0
        gap = row["mismatch/logprob_abs_mean"]
        assert gap < SAME if recipe in SAME_ON_BOTH_SIDES else 1e-3 < gap < 2.0


# An engine takes ten seconds to start: each word with one format, each format at least once; the rest with --slow.
ONE_EACH = {(recipe, FOUR_BITS[i % len(FOUR_BITS)]) for i, recipe in enumerate(dict(PAIRS))}
VLLM_PAIRS = [pair if pair in ONE_EACH else pytest.param(*pair, marks=pytest.mark.slow) for pair in PAIRS]


@pytest.mark.vllm
@pytest.mark.parametrize(("recipe", "format"), VLLM_PAIRS)
def test_trains_with_vllm(config: Path, tmp_path: Path, recipe: str, format: str) -> None:
    rows = train_rows(config, tmp_path, **QUICK, quant__recipe=recipe, quant__format=format, rollout__engine="vllm")
    for row in rows:
        assert math.isfinite(row["train/loss"]) and row["train/skipped_updates"] == 0
        gap = row["mismatch/logprob_abs_mean"]
        assert gap < SAME if recipe in SAME_ON_BOTH_SIDES else 1e-3 < gap < 2.0


REFUSED = [
    ({"recipe": "fp8", "format": "hif4", "scale_rule": "floor"}, "scale_rule"),
    ({"recipe": "4bitter", "format": "mxfp4", "four_over_six": "mse"}, "is a rule of nvfp4"),
    ({"recipe": "resq", "residual_ratio": 0.25}, '"2:4" keeps half of the channels'),
    ({"recipe": "resq", "targets": ("experts",)}, "residual_sites has qkv, o, which targets"),
    ({"recipe": "quads", "format": "hif4", "residual_operand": "folded"}, "needs a scale of each row"),
    ({"recipe": "naive", "backward": "high_precision"}, "has no effect"),
    ({"recipe": "quads", "format": "mxfp4", "global_scale": "amax"}, "is of formats with a shared scale"),
]


@pytest.mark.parametrize(("settings", "message"), REFUSED)
def test_what_does_not_go_together_is_refused_by_a_line(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as refused:
        resolve(QuantSettings(**settings))
    assert message in str(refused.value) and "\n" not in str(refused.value)
