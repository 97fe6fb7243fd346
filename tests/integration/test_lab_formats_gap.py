"""`lab formats` without --rl: cells by hand, the parts of a gap, and the order that compensation gives."""

import json
from dataclasses import replace

import pytest

from quads.errors import UserError
from quads.lab.formats import command, gaps
from quads.lab.policies import evaluate, gap_statistics, rollout
from quads.lab.subject import as_learner, build_subject, subject_parser
from quads.quant.recipes import resolve

CONFIG = "configs/tiny_quads.toml"
FEW = ["--config", CONFIG, "--prompts", "8", "--samples", "1"]
ROWS = "naive; qat; symmetric; quads; quads, token; quads, all"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    out = tmp_path_factory.mktemp("formats")
    command.main([*FEW, "--rows", ROWS, "--columns", "nvfp4,hif4", "--out", str(out)])
    assert {path.suffix for path in out.iterdir()} == {".json", ".md", ".png"}
    assert "| quads, token" in (out / "formats.md").read_text()
    return json.loads((out / "formats.json").read_text())


def test_a_cell_is_its_recipe_with_its_format(data):
    args, others = subject_parser("formats", "").parse_known_args(FEW)
    subject = build_subject(args, others)
    spec = resolve(gaps.cell_config(CONFIG, [], "quads, all", "hif4").quant)
    assert (spec.format, spec.selection, spec.rollout) == ("hif4", "all", "w4a4_residual")
    learned = evaluate(as_learner(subject.master, spec), subject.sequences, args.batch_tokens).logprobs
    rolled = evaluate(rollout(replace(subject, spec=spec), spec), subject.sequences, args.batch_tokens).logprobs
    expected = gap_statistics(learned - rolled)
    cell = data["cells"]["quads, all"]["hif4"]
    assert {key: cell[key] for key in expected} == pytest.approx(expected, rel=1e-4)


def test_parts_and_order(data):
    for column in ("nvfp4", "hif4"):
        cells = {row: of[column] for row, of in data["cells"].items()}
        assert cells["symmetric"]["mean"] < 1e-4  # both sides compute the same
        assert cells["qat"]["weights"] < 1e-4 < cells["naive"]["weights"]  # the learner of qat has the weights' error
        assert cells["qat"]["activations"] == pytest.approx(cells["qat"]["mean"], rel=1e-3)
        assert cells["quads, all"]["mean"] < cells["quads, token"]["mean"] < cells["qat"]["mean"]
    assert data["cells"]["qat"]["nvfp4"]["mean"] != data["cells"]["qat"]["hif4"]["mean"]
    errors = data["errors"]
    assert all(errors[name][part] > 0 for name in errors for part in ("scale_bias", "dead_zone", "grid_noise"))
    assert 15 < errors["nvfp4"]["snr_db"] < 25


def test_names_that_do_not_exist_are_refused_before_anything_is_loaded(tmp_path):
    with pytest.raises(UserError, match="--rows quadz: use names of naive; "):
        command.main([*FEW, "--rows", "quadz", "--out", str(tmp_path)])
    with pytest.raises(UserError, match="--columns nvfp5"):
        command.main([*FEW, "--columns", "nvfp5", "--out", str(tmp_path)])
