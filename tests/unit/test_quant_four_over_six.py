"""NVFP4 with four-over-six: its vectors, its promise, and its key of the config."""

import json

import pytest
import torch

from quads.config.sections import QuantSettings
from quads.errors import UserError
from quads.quant import backend, conformance, four_over_six, nvfp4
from quads.quant.banner import banner
from quads.quant.recipes import resolve
from tests.helpers import REPOSITORY

FILE = REPOSITORY / "tests" / "golden" / "golden_nvfp4_46.json"


def test_vectors(tmp_path, capsys):
    assert conformance.main([str(FILE)]) == 0
    assert capsys.readouterr().out == "reference: 60 cases, 0 mismatches\n"
    cases = json.loads(FILE.read_text())
    cases[5]["block_scale"][0] ^= 1
    (tmp_path / "bad.json").write_text(json.dumps(cases))
    assert conformance.main([str(tmp_path / "bad.json")]) == 1


@pytest.mark.parametrize("rule", ["pow2+mse", "amax+mse"])
def test_no_block_errs_more_than_with_six_alone(rule):
    """By construction, against NVFP4's own rounding at the range of 1536; a good part of the blocks takes 4."""
    w = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    g, gs = four_over_six.global_scale(nvfp4.finite_amax(w), rule)
    values, sf = four_over_six.round_blocks(w, g, gs, "mse")
    six = nvfp4.qdq(w, g, gs=gs)
    ours = (values * sf.float().unsqueeze(-1)).flatten(-2) * g
    block = lambda x: (x - w).square().unflatten(-1, (-1, 16)).sum(-1)  # noqa: E731
    assert (block(ours) <= block(six) * (1 + 1e-6)).all()
    fours = (values.abs().amax(-1) == 4).float().mean()
    assert 0.3 < fours < 0.6 and block(ours).sum() < 0.88 * block(six).sum()


def test_one_key_sets_the_format_and_its_rule():
    spec = resolve(QuantSettings(four_over_six="mae"))
    assert (spec.format, spec.learner_weights, spec.rule("nvfp4_46")) == ("nvfp4_46", "nvfp4_46", "pow2+mae")
    assert resolve(QuantSettings(four_over_six="mse", global_scale="amax")).rule("nvfp4_46") == "amax+mse"
    assert resolve(QuantSettings(format="nvfp4_46")).rule("nvfp4_46") == "pow2+mse"
    assert resolve(QuantSettings()).rule("nvfp4") == "pow2"
    with pytest.raises(UserError, match="four_over_six = 'mse' is a rule of nvfp4"):
        resolve(QuantSettings(four_over_six="mse", format="mxfp4"))


def test_no_kernel_quantizes_by_it_and_the_banner_says_so():
    spec = resolve(QuantSettings(four_over_six="mse"))
    assert "nvfp4_46: 4.5 bits a weight, blocks of 16, scale rule pow2+mse; activations" in banner(spec)
    assert "nvfp4_46 has no kernel: widened to bf16 values" in banner(spec, device="cuda")
    with pytest.raises(UserError, match="has no kernels for nvfp4_46"):
        backend.choose_kernel("triton", torch.device("cuda"), "w4a4", "nvfp4_46")
