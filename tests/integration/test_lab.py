"""The analyses on the tiny model that ships with the repository: identities that must hold whatever the numbers are."""

import argparse
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from quads.errors import UserError
from quads.lab import channels, decompose, drift, gap, layers, ratio
from quads.lab.capture import capture
from quads.lab.decode import decode, decoded_inputs
from quads.lab.policies import evaluate, gap_statistics, learner, rollout
from quads.lab.report import build as report
from quads.lab.subject import Subject, build_subject, subject_parser
from tests.helpers import REPOSITORY, assert_close, run_command

CONFIG = str(REPOSITORY / "configs" / "tiny_quads.toml")
MODEL = ["--model.path", str(REPOSITORY / "assets" / "tiny_moe")]
FLOOR = 2e-5  # nats: float64 rollout against fp32 learner; rounding of fp32 log-probs is about 1e-6


def arguments(*extra: str) -> tuple[argparse.Namespace, list[str]]:
    parser = subject_parser("test", "")
    return parser.parse_known_args(["--config", CONFIG, "--prompts", "6", "--samples", "2", *MODEL, *extra])


@pytest.fixture(scope="module")
def subject() -> Subject:
    return build_subject(*arguments())


def logprobs(subject: Subject, **changes):
    return evaluate(rollout(subject, replace(subject.spec, **changes)), subject.sequences, 4096).logprobs


@pytest.fixture(scope="module")
def weight_qdq(subject):
    return evaluate(learner(subject, "nvfp4", "bf16"), subject.sequences, 4096)


def test_plain_sides_agree_to_rounding_and_with_what_was_sampled(subject):
    plain = evaluate(learner(subject, "bf16", "bf16"), subject.sequences, 4096)
    assert gap_statistics(plain.logprobs - logprobs(subject, rollout="bf16"))["max"] < FLOOR
    assert gap_statistics(plain.logprobs - subject.sequences.sampled_logprobs)["max"] < FLOOR


def test_how_the_batch_is_cut_does_not_matter(subject):
    model = learner(subject, "bf16", "bf16")
    whole, cut = (evaluate(model, subject.sequences, size) for size in (4096, 16))
    assert_close(whole.logprobs, cut.logprobs, atol=FLOOR)
    assert (whole.experts == cut.experts).all()


def test_weight_qdq_closes_the_w4a16_gap(subject, weight_qdq):
    shipped = logprobs(subject, rollout="w4a16")
    plain = evaluate(learner(subject, "bf16", "bf16"), subject.sequences, 4096).logprobs
    assert gap_statistics(weight_qdq.logprobs - shipped)["max"] < FLOOR
    assert gap_statistics(plain - shipped)["mean"] > 100 * FLOOR


def test_ratio_zero_is_plain_w4a4_and_ratio_one_is_every_channel(subject, weight_qdq):
    sites = ("w13", "w2", "qkv", "o")
    plain = logprobs(subject, rollout="w4a4")
    for selection in ratio.SELECTIONS:
        changes = dict(rollout="w4a4_residual", residual_sites=sites, selection=selection)
        assert_close(logprobs(subject, ratio=0.0, **changes), plain, atol=0.0)
    full = [
        logprobs(subject, rollout="w4a4_residual", residual_sites=sites, selection=s, ratio=1.0)
        for s in ratio.SELECTIONS
    ]
    assert_close(full[1], full[0], atol=0.0)
    assert_close(full[2], full[0], atol=0.0)
    before, after = (gap_statistics(weight_qdq.logprobs - side)["mean"] for side in (plain, full[0]))
    assert after < before / 4


def test_gap_command_writes_tables_that_add_up(tmp_path):
    gap.main(
        ["--config", CONFIG, "--prompts", "4", "--samples", "2", "--out", str(tmp_path), "--drift", "0,0.01", *MODEL]
    )
    data = json.loads((tmp_path / "gap.json").read_text())
    assert data["sides"]["w4a16"]["weight QDQ"]["max"] < FLOOR
    assert data["factors"]["engine"]["max"] < FLOOR and data["factors"]["total"]["mean"] > 100 * FLOOR
    assert data["ratios"][0]["mean"] == data["sides"]["w4a4"]["weight QDQ"]["mean"]  # ratio 0
    still, moved = data["drift"]
    assert still["bf16/no QDQ"] == data["sides"]["bf16"]["no QDQ"]["mean"] < moved["bf16/no QDQ"]
    assert data["about"]["seeds"] == [0] and "[quant]" in data["about"]["config"]
    assert (tmp_path / "gap.png").stat().st_size > 10_000


def test_decoding_token_by_token_is_the_packed_forward(subject):
    """Batch-independent precisions agree to fp32 rounding; so do expert choices and the inputs of a mixture."""
    for precision in ("bf16", "w4a4"):
        model = rollout(subject, replace(subject.spec, rollout=precision))
        packed, stepped = evaluate(model, subject.sequences, 4096), decode(model, subject.sequences)
        assert_close(stepped.logprobs, packed.logprobs, atol=1e-9)  # float64 activations
        assert (stepped.experts == packed.experts).all()
    inputs = capture(model, subject.sequences, 4096).moe_in[1]
    assert_close(decoded_inputs(model, subject.sequences, 1), inputs, atol=1e-9)


def test_layers_terms_add_up_and_weight_qdq_removes_the_weight_term(subject):
    pairs = {pair["label"]: pair for pair in layers.measure(subject, 4096)["pairs"]}
    for pair in pairs.values():
        for site, terms in pair["terms"].items():
            assert max(terms["sum_error"]) < 1e-12, (pair["label"], site)
    for site in ("qkv", "o", "w13", "w2"):
        assert max(pairs["weight QDQ / W4A4"]["terms"][site]["weight"]) == 0.0
        assert min(pairs["no QDQ / W4A4"]["terms"][site]["weight"]) > 1e-3
        assert max(pairs["no QDQ / W4A16"]["terms"][site]["activation"]) == 0.0
    assert max(pairs["plain / plain"]["moe_out"]) < 1e-5 < min(pairs["no QDQ / W4A4"]["moe_out"])
    assert max(pairs["weight QDQ / W4A16"]["moe_out"]) < 1e-5
    residual, without = (pairs[f"weight QDQ / W4A4{name}"]["terms"]["w13"]["activation"] for name in ("+res", ""))
    assert all(a < b for a, b in zip(residual, without, strict=True))


def test_eq_10_is_what_the_rollout_layer_computes(subject):
    """Y_infer rebuilt from the weights and inputs of the analysis is the output of the rollout's own layer."""
    spec = replace(subject.spec, rollout="w4a4")
    model = rollout(subject, spec)
    x = capture(model, subject.sequences, 4096).sites["o"][1]
    expected = model.model.layers[1].self_attn.o_proj(x)
    weight = layers.SiteWeights(subject).get(1, "o", quantized=True)
    assert_close(layers.multiplied(x, "", spec, "o") @ weight.T, expected, atol=1e-12)


def test_decompose_adds_up_for_every_site(subject):
    rows = decompose.measure(subject, 4096)["rows"]
    assert {(row["kind"], row["site"]) for row in rows} == {
        (k, s) for k in ("weight", "activation") for s in ("w13", "w2", "qkv", "o")
    }
    for row in rows:
        assert abs(row["scale_bias"] + row["dead_zone"] + row["grid_noise"] + row["cross"] - row["total"]) < 1e-12
        assert 0 < row["total"] < 0.1


def test_drift_without_quantization_is_rounding(subject):
    data = drift.measure(subject, 4096, 1)
    assert max(pair["max"] for pair in data["pairs"]) < FLOOR
    assert data["routing_flips"] == 0.0 and data["map"]["relative"] < 1e-5


def test_channels_shares_are_cumulative(subject):
    data = channels.measure(subject, 4096, 1)
    for layer in data["layers"]:
        assert layer["shares"] == sorted(layer["shares"]) and layer["shares"][4] >= 0.5
        assert layer["captured"]["token"] >= layer["captured"]["batch"] >= 0.5
    for i, row in enumerate(data["between_layers"]):
        assert row[i] == 1.0


@pytest.mark.parametrize("module", [layers, channels, decompose, drift])
def test_commands_write_json_and_picture(module, tmp_path, capsys):
    name = module.__name__.rpartition(".")[2]
    module.main(["--config", CONFIG, "--prompts", "3", "--samples", "1", "--out", str(tmp_path), *MODEL])
    data = json.loads((tmp_path / f"{name}.json").read_text())
    assert data["batch"]["prompts"] == 3 and data["about"]["command"].startswith(f"python -m quads.lab {name}")
    assert (tmp_path / f"{name}.png").stat().st_size > 10_000
    assert "| --" in capsys.readouterr().out


@pytest.mark.slow
def test_recipes_command_trains_compares_and_does_not_repeat_finished_runs(tmp_path):
    command = ["-m", "quads.lab", "recipes", "--config", CONFIG, "--recipes", "bf16,naive", "--out", str(tmp_path)]
    small = ["--train.steps", "2", "--rl.prompts_per_step", "4", "--rl.minibatch_prompts", "4", "--rl.group_size", "4"]
    small += ["--eval.every", "2", "--eval.prompts", "4", *MODEL]
    first = run_command([*command, *small], timeout_s=400)
    assert first.returncode == 0, first.stderr
    assert "| naive" in first.stdout and (tmp_path / "recipes.png").exists()
    stamp = (tmp_path / "naive_seed0" / "metrics.jsonl").stat().st_mtime_ns
    again = run_command([*command, *small], timeout_s=400)
    assert "2 of them done already" in again.stderr and again.stdout == first.stdout
    assert (tmp_path / "naive_seed0" / "metrics.jsonl").stat().st_mtime_ns == stamp
    failed = run_command([*command, *small, "--rollout.max_prompt_tokens", "1"], timeout_s=400)
    assert (
        failed.returncode == 2
        and "Traceback" not in failed.stderr
        and "bf16_seed0 ended with status 2" in failed.stderr
    )


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_runs_that_are_stopped_leave_rows_and_go_on_where_they_were(tmp_path):
    command = ["-m", "quads.lab", "recipes", "--config", CONFIG, "--recipes", "bf16", "--jobs", "2"]
    command += ["--arm", "token", "--quant.recipe quads --quant.residual_selection token", "--out", str(tmp_path)]
    small = ["--train.steps", "500", "--rl.prompts_per_step", "4", "--rl.minibatch_prompts", "4", *MODEL]
    small += ["--eval.every", "0", "--checkpoint.every", "0"]
    stopped = run_command([*command, *small, "--minutes", "1.5"], timeout_s=300)
    assert stopped.returncode == 0, stopped.stderr
    made = {run["arm"]: run["steps_made"] for run in json.loads((tmp_path / "recipes.json").read_text())["runs"]}
    assert set(made) == {"bf16", "token"} and f"at step {min(made.values())};" in stopped.stdout
    assert all(0 < steps < 500 for steps in made.values())
    again = run_command([*command, *small, "--minutes", "1.5"], timeout_s=300)
    after = {run["arm"]: run["steps_made"] for run in json.loads((tmp_path / "recipes.json").read_text())["runs"]}
    assert again.returncode == 0 and all(after[arm] > made[arm] for arm in made)
    drawn = run_command([*command, *small, "--minutes", "0"], timeout_s=200)
    assert drawn.returncode == 0 and drawn.stdout == again.stdout


def test_commands_explain_themselves_and_unknown_ones_are_named():
    shown = run_command(["-m", "quads.lab"])
    assert shown.returncode == 0 and "recipes" in shown.stdout and "gap" in shown.stdout
    wrong = run_command(["-m", "quads.lab", "gaps"])
    assert wrong.returncode == 2 and "unknown command 'gaps'" in wrong.stderr
    assert Path(CONFIG).exists()


def test_a_switched_rollout_is_a_fresh_one(subject):
    """w4a16 -> w4a4_residual keeps the weights; w16a4 has other ones and must be built anew."""
    model = rollout(subject, replace(subject.spec, rollout="w4a16"))
    spec = replace(subject.spec, rollout="w4a4_residual", residual_sites=("w2", "o"), ratio=0.25, selection="token")
    switched = rollout(subject, spec, reuse=model)
    assert switched is model
    fresh = evaluate(rollout(subject, spec), subject.sequences, 4096)
    assert_close(evaluate(switched, subject.sequences, 4096).logprobs, fresh.logprobs, atol=0.0)
    for other in (
        replace(spec, rollout="w16a4"),
        replace(spec, rollout="w4a4", targets=("experts",)),
        replace(spec, rollout="bf16"),
    ):
        assert rollout(subject, other, reuse=switched) is not switched


def test_report_runs_every_analysis_and_writes_one_page(tmp_path):
    argv = ["--config", CONFIG, "--prompts", "2", "--samples", "1", "--out", str(tmp_path), *MODEL]
    report.main(argv)
    page = (tmp_path / "report.html").read_text()
    for name in report.ANALYSES:
        assert f'<section id="{name}">' in page and (tmp_path / f"{name}.json").exists()
    assert not re.search(r"\bnan\b", re.sub(r"data:[^\"]+", "", page).lower())
    for name in report.ANALYSES:
        words = report.analysis_argv(name, CONFIG, tmp_path, "", ["--prompts", "2", "--samples", "1"], MODEL)
        about = json.loads((tmp_path / f"{name}.json").read_text())["about"]
        assert report.is_fresh(tmp_path / f"{name}.json", about["config"], words)


def test_layers_that_differ_are_refused_by_the_analysis_of_all_layers(tmp_path):
    with pytest.raises(UserError, match=r'set quant\.bf16_layers = "none"'):
        layers.main(["--config", CONFIG, "--quant.bf16_layers", "last 1", "--out", str(tmp_path)])
