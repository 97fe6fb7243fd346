"""Pieces of the lab that need no model run: batches, parts of a gap, costs, tables, run summaries."""

import json

import pytest
import torch

from quads.errors import UserError
from quads.lab import ratio, recipes
from quads.lab.gap import additivity, factors
from quads.lab.results import markdown, number, write_result
from quads.lab.subject import Sequences
from quads.model.config import ModelConfig
from quads.quant.recipes import QuantSpec
from tests.helpers import assert_close

SEQUENCES = Sequences([[1, 2, 3], [4], [5, 6]], [[7, 8], [9], [10, 11, 12]], torch.zeros(6), 1.0)


def test_chunks_hold_whole_sequences_and_mark_the_rows_that_predict_responses():
    chunks = list(SEQUENCES.chunks(5))
    assert [lengths for _, lengths, _ in chunks] == [[4, 1], [4]]
    assert chunks[0][0].tolist() == [1, 2, 3, 7, 4] and chunks[1][0].tolist() == [5, 6, 10, 11]
    assert chunks[0][2].tolist() == [False, False, True, True, True]
    assert chunks[1][2].tolist() == [False, True, True, True]
    assert SEQUENCES.targets.tolist() == [7, 8, 9, 10, 11, 12] and SEQUENCES.num_tokens == 9
    assert sum(int(rows.sum()) for _, _, rows in chunks) == 6


def test_a_sequence_longer_than_the_limit_stands_alone():
    assert [lengths for _, lengths, _ in SEQUENCES.chunks(1)] == [[4], [1], [4]]


def test_parts_of_the_gap_add_up_and_additive_errors_leave_no_rest():
    plain, weight, activation = torch.randn(3, 50, dtype=torch.float64)
    engine = 1e-3 * torch.randn(50, dtype=torch.float64)
    sides = {"bf16": plain, "w4a16": plain + weight, "w16a4": plain + activation, "w4a4": plain + weight + activation}
    terms = factors(plain + engine, sides)
    assert_close(terms["engine"] + terms["weight"] + terms["activation"] + terms["rest"], terms["total"], atol=1e-14)
    assert_close(terms["weight"], -weight, atol=1e-14)
    how = additivity(terms)
    assert how["rest_over_total"] < 1e-12 and how["correlation"] > 1 - 1e-12
    sides["w4a4"] = plain + 3.0  # an error that the parts do not tell
    assert additivity(factors(plain + engine, sides))["rest_over_total"] > 0.2


def test_cost_of_the_residual_pass_by_hand():
    config = ModelConfig(
        vocab_size=8, hidden_size=16, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=8, moe_intermediate_size=32,
        num_experts=4, top_k=2,
    )  # fmt: skip
    macs = {"w13": 2 * 16 * 32 * 2, "w2": 32 * 16 * 2, "qkv": 16 * (32 + 16 + 16), "o": 32 * 16}
    assert ratio.site_macs(config) == macs
    spec = QuantSpec("nvfp4", "bf16", "w4a4_residual")
    assert ratio.extra_mma(config, spec, 0.5) == 0.5 * macs["w13"] / sum(macs.values())
    experts_only = QuantSpec("nvfp4", "bf16", "w4a4_residual", targets=("experts",), residual_sites=("w13", "w2"))
    assert ratio.extra_mma(config, experts_only, 1.0) == 1.0


def test_summary_of_runs():
    rows = [
        {"step": i, "reward/mean": float(i), "mismatch/logprob_abs_mean": 0.1, "mismatch/logprob_abs_max": i / 2,
         "mismatch/kl_k3": None, "time/step_s": 2.0, **({"eval/pass@1": i / 10} if i % 5 == 0 else {})}
        for i in range(1, 13)
    ]  # fmt: skip
    measured = recipes.measure(rows)
    assert measured["reward_first"] == 3.0 and measured["reward_last"] == 10.0
    assert measured["pass_at_1"] == 1.0 and measured["gap_max"] == 6.0 and measured["time_s"] == 24.0
    runs = recipes.plan("x.toml", [], ["bf16", "quads"], range(2), recipes.TRAIN.parent)
    assert [run.out.name for run in runs] == ["bf16_seed0", "quads_seed0", "bf16_seed1", "quads_seed1"]
    assert runs[3].argv[-6:] == ("--quant.recipe", "quads", "--train.seed", "1", "--train.out", str(runs[3].out))
    summary = recipes.summarize(runs, [{"v": 1.0}, {"v": 2.0}, {"v": 3.0}, {"v": 4.0}])
    assert summary["bf16"]["v"] == {"mean": 2.0, "low": 1.0, "high": 3.0}


def test_unknown_recipes_are_refused_before_anything_runs(tmp_path):
    with pytest.raises(UserError, match="bf17"):
        recipes.main(["--config", "configs/tiny_quads.toml", "--recipes", "bf17", "--out", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


def test_results_are_valid_json_with_short_numbers(tmp_path):
    path = write_result(tmp_path / "new", "name", {"commit": "abc"}, {"x": 1 / 3, "nan": float("nan"), "n": (1, 2)})
    assert json.loads(path.read_text()) == {"about": {"commit": "abc"}, "x": 0.333333, "nan": None, "n": [1, 2]}
    table = markdown(["a", "value"], [["long name", "1"], ["b", "22.5"]])
    assert table.splitlines()[3] == "| b         |  22.5 |" and len({len(line) for line in table.splitlines()}) == 1
    assert [number(v) for v in (0.0, 0.12345, 1.5e-7, 123456.0, float("nan"))] == [
        "0",
        "0.123",
        "1.50e-07",
        "1.23e+05",
        "-",
    ]
