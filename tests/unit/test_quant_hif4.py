"""HiF4: its vectors, a block by hand, and why codes are shipped and never values."""

import json

import pytest
import torch

from quads.config.sections import QuantSettings
from quads.errors import UserError
from quads.quant import conformance, hif4
from quads.quant.banner import banner
from quads.quant.formats import FORMATS
from quads.quant.recipes import resolve
from tests.helpers import REPOSITORY

GOLDEN = REPOSITORY / "tests" / "golden"


def test_vectors(tmp_path, capsys):
    assert conformance.main([str(GOLDEN / "golden_hif4.json")]) == 0
    assert capsys.readouterr().out == "reference: 60 cases, 0 mismatches\n"
    cases = json.loads((GOLDEN / "golden_hif4.json").read_text())
    for field in ("packed", "level2", "level3", "block_scale", "dequant_bits"):
        cases[3][field][-1] ^= 1
        (tmp_path / "bad.json").write_text(json.dumps(cases))
        assert conformance.main([str(tmp_path / "bad.json")]) == 1, field
        cases[3][field][-1] ^= 1


def test_vectors_of_the_residual():
    cases = [case for case in json.loads((GOLDEN / "golden_residual.json").read_text()) if case["format"] == "hif4"]
    assert len(cases) == 30 and {case["selection"] for case in cases} == {"batch", "block", "token", "2:4"}
    assert conformance.check(cases, conformance.run_reference) == []


def test_a_block_by_hand():
    """amax 7: level 1 is 1.0 (byte 0xC0). The group of the 7 is doubled twice, so 7 is 1.75 * 4; 0.3 in another group
    of eight is not doubled, and rounds to 0.25."""
    x = torch.zeros(64)
    x[0], x[1], x[8], x[9] = 7.0, 0.9, 0.3, -0.1
    packed, levels = hif4.pack(x.unsqueeze(0), "half_away", None, False)
    assert levels.tolist() == [[0xC0, 0b00000001, 0b00000001, 0]]
    values = hif4.qdq_rows(x, "half_away", torch.float32)
    assert values[[0, 1, 8]].tolist() == [7.0, 1.0, 0.25]
    assert values[9] == 0.0 and values[9].signbit()  # it rounds to zero and keeps its sign
    assert packed[0, :5].tolist() == [0x17, 0, 0, 0, 0x81]


@pytest.mark.parametrize("value", [2.0**-60, 2.0**-48, 1.0, 7.0 * 49152, 3e5, 1e30])
def test_the_range_of_level_1(value):
    """Below 2**-48 level 1 stays there and codes vanish; above 7 * 49152 they saturate."""
    x = torch.zeros(64)
    x[5] = value
    got = float(hif4.qdq_rows(x, "half_away", torch.float32)[5])
    if value < 2.0**-50:
        assert got == 0.0
    elif value > 7 * 49152:
        assert got == 7 * 49152
    else:
        assert got == pytest.approx(value, rel=0.08)


def test_quantizing_twice_is_not_the_identity():
    """So a pipeline that ships values and quantizes them again in the engine runs another policy."""
    x = torch.randn(500, 128, generator=torch.Generator().manual_seed(0))
    once = hif4.qdq_rows(x, "half_away", torch.float32)
    twice = hif4.qdq_rows(once, "half_away", torch.float32)
    changed = int((once != twice).any(dim=1).sum())
    assert 100 < changed < 400


def test_words_and_banner():
    spec = resolve(QuantSettings(format="hif4"))
    assert (spec.learner_weights, spec.rollout_weights("w2"), spec.rule("hif4")) == ("hif4", "hif4", "half_away")
    assert FORMATS["hif4"].bits_per_weight == 4.5 and FORMATS["hif4"].row_bytes(65) == 72
    assert any(line.startswith("hif4: 4.5 bits a weight, blocks of 64") for line in banner(spec).splitlines())
    with pytest.raises(UserError, match="scale_rule = 'ceil' is none of hif4; use half_away"):
        resolve(QuantSettings(format="hif4", scale_rule="ceil"))
