"""Pieces of the lab that need no model run: batches, parts of a gap, costs, tables, run summaries."""

import json
from dataclasses import replace

import pytest
import torch
from matplotlib.text import Text

from quads.config import config_to_toml
from quads.errors import UserError
from quads.lab import channels, layers, ratio, style
from quads.lab.gap import additivity, factors
from quads.lab.results import markdown, number, write_result
from quads.lab.runs import curves, recipes
from quads.lab.runs.arms import Arm, plan
from quads.lab.subject import Sequences
from quads.model.config import ModelConfig
from quads.quant.recipes import QuantSpec
from quads.run.folder import run_header
from tests.helpers import REPOSITORY, assert_close

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
    assert ratio.extra_mma(config, spec, ratio.ratio_at(config, spec, 0.1)) == pytest.approx(0.1)
    assert ratio.ratio_at(config, replace(spec, residual_sites=("o",)), 0.9) == 1.0
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
    token = Arm.parse("token", "--quant.recipe quads --quant.residual_selection token")
    runs = plan("x.toml", [], [Arm.recipe("bf16"), token], range(2), REPOSITORY)
    assert [run.out.name for run in runs] == ["bf16_seed0", "token_seed0", "bf16_seed1", "token_seed1"]
    chosen = ("--quant.recipe", "quads", "--quant.residual_selection", "token")
    assert runs[3].argv[-8:] == (*chosen, "--train.seed", "1", "--train.out", str(runs[3].out))
    summary = recipes.summarize(runs, [{"v": 1.0}, {"v": 2.0}, {"v": 3.0}, {"v": 4.0}])
    assert summary["bf16"]["v"] == {"mean": 2.0, "low": 1.0, "high": 3.0}


def test_a_peak_is_the_best_mean_of_neighbours():
    rows = [{"step": i, "reward/mean": r} for i, r in enumerate([0.0] * 5 + [1.0] * 10 + [0.2] * 5, 1)]
    measured = recipes.measure(rows)
    assert measured["reward_peak"] == 1.0 and measured["reward_last"] == pytest.approx(0.2)
    assert recipes.measure(rows[:4])["reward_peak"] == 0.0


def test_runs_of_different_length_are_compared_at_one_step(tmp_path):
    config = REPOSITORY / "configs" / "tiny_quads.toml"
    runs = plan(str(config), [], [Arm.recipe("bf16"), Arm.recipe("quads")], [0], tmp_path)
    for run, steps in zip(runs, (9, 4), strict=True):
        run.out.mkdir()
        (run.out / "config.toml").write_text(f"{run_header()}\n{config_to_toml(run.config())}")
        rows = [{"step": i, "reward/mean": i / 10, "time/step_s": 1.0} for i in range(1, steps + 1)]
        (run.out / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    last, rows = recipes.cut(runs)
    assert last == 4 and [len(of_run) for of_run in rows.values()] == [4, 4]
    last, rows = recipes.cut(runs, at=8)
    assert last == 8 and {run.arm: len(of_run) for run, of_run in rows.items()} == {"bf16": 8}
    shown = recipes.compare(tmp_path / "recipes.json", runs, [Arm.recipe("bf16"), Arm.recipe("quads")], {}, at=8)
    data = json.loads((tmp_path / "recipes.json").read_text())
    assert data["paired"] == {}  # one arm is left
    recipes.compare(tmp_path / "recipes.json", runs, [Arm.recipe("bf16"), Arm.recipe("quads")], {})
    same_steps = json.loads((tmp_path / "recipes.json").read_text())["paired"]
    assert same_steps == {"bf16 - quads": [{"seed": 0, "steps": 4, "mean": 0.0, "error": 0.0}]}
    assert set(data["runs"][0]["made"]) == {"started", "commit", "machine"}
    assert data["left_out"] == {"quads_seed0": 4} and "left out: quads_seed0 with 4 steps" in shown
    assert max(data["curves"]["bf16"]["curves"]["reward/mean"]["steps"]) == 8
    with pytest.raises(UserError, match="the longest one has 9"):
        recipes.cut(runs, at=10)
    other = plan(str(config), ["--optim.lr", "1"], [Arm.recipe("bf16")], [0], tmp_path)
    assert other[0].rows() == []  # of another config


def test_unknown_recipes_are_refused_before_anything_runs(tmp_path):
    with pytest.raises(UserError, match="bf17"):
        recipes.main(["--config", "configs/tiny_quads.toml", "--recipes", "bf17", "--out", str(tmp_path / "out")])
    for arm in (["two words", "--quant.recipe quads"], ["quads", "recipe=quads"], ["bf16", "--quant.recipe quads"]):
        with pytest.raises(UserError, match=arm[0]):
            recipes.main(["--config", "configs/tiny_quads.toml", "--arm", *arm, "--out", str(tmp_path / "out")])
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


def test_terms_of_eq_11_add_up_and_vanish_where_they_must():
    w_train, x_train, eta = torch.randn(5, 8).double(), torch.randn(3, 8).double(), 0.1 * torch.randn(3, 8).double()
    w_infer, x_infer = w_train + 0.1 * torch.randn(5, 8), x_train + eta + 0.2 * torch.randn(3, 8)
    terms = layers.error_terms(w_train, w_infer, x_train, x_infer, eta)
    assert_close(sum(terms[t] for t in layers.TERMS), x_infer @ w_infer.T - x_train @ w_train.T, atol=1e-12)
    assert_close(terms["total"], x_infer @ w_infer.T - x_train @ w_train.T, atol=0.0)
    aligned = layers.error_terms(w_train, w_train, x_train, x_train + eta, eta)
    for term in ("weight", "second_order"):
        assert float(aligned[term].abs().max()) == 0.0
    assert_close(aligned["total"], aligned["drift"], atol=1e-12)  # only eta is left (Eq. 17)


def test_channel_measures_by_hand():
    r = torch.zeros(4, 16)
    r[:, 3], r[0, 7] = 3.0, 8.0  # energies 36 and 64
    r[:, 0] = 1e-3
    shares = dict(zip(channels.SHARES, channels.channel_shares(r), strict=True))
    assert shares[0.05] == pytest.approx(0.64, abs=1e-4) and shares[0.125] == pytest.approx(1.0, abs=1e-4)
    assert channels.top_channels(r).nonzero().flatten().tolist() == [3, 7]
    assert channels.overlap(channels.top_channels(r), channels.top_channels(r[1:])) == 0.5  # there 3 and 0 lead
    one = channels.captured_share(r, 1 / 16, 16)
    assert one["batch"] == pytest.approx(0.64, abs=1e-4) and one["block"] == 0.0
    assert one["token"] == pytest.approx((64 + 3 * 9) / 100, abs=1e-4)


def test_heat_map_keeps_the_largest_of_merged_channels():
    r = torch.zeros(100, 1024)
    r[2, 513] = -5.0
    picture = torch.tensor(channels.heat_map(r))
    assert picture.shape == (channels.MAP_TOKENS, channels.MAP_CHANNELS)
    assert picture.nonzero().tolist() == [[2, 128]] and picture.max() == 5.0


def test_curves_merge_seeds_and_name_what_is_missing(tmp_path):
    for seed, shift in ((0, 0.0), (1, 1.0)):
        folder = tmp_path / f"quads_seed{seed}"
        folder.mkdir()
        rows = [{"step": i, "reward/mean": i + shift, "eval/pass@1": 0.5 if i == 2 else None} for i in range(1, 4)]
        (folder / "metrics.jsonl").write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    arms = curves.collect(sorted(tmp_path.iterdir()))
    assert arms["quads"]["seeds"] == 2
    reward = {"steps": [1, 2, 3], "mean": [1.5, 2.5, 3.5], "low": [1.0, 2.0, 3.0], "high": [2.0, 3.0, 4.0]}
    assert arms["quads"]["curves"]["reward/mean"] == reward
    assert arms["quads"]["curves"]["eval/pass@1"]["steps"] == [2]
    assert "2.5 -> 2.5" in curves.tables(arms)
    with pytest.raises(UserError, match="has no row"):
        curves.collect([tmp_path / "nothing"])


def test_a_dark_figure_has_no_dark_ink_left():
    figure, (ax,) = style.new_figure()
    ax.plot([1, 2], [1, 2], label="line")
    style.finish(ax, "title", "x", "y", legend=True)
    style.darken(figure)
    inks = {text.get_color() for text in figure.findobj(Text) if text.get_text()}
    assert inks == {style.DARK_INK} and figure.get_facecolor()[:3] == pytest.approx(
        (0x14 / 255, 0x18 / 255, 0x1D / 255)
    )
