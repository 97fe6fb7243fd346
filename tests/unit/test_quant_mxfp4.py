"""MXFP4: its vectors, blocks by hand, and what every format promises (each row of the table is asked)."""

import json
import math

import pytest
import torch

from quads.config.sections import QuantSettings, RolloutSettings
from quads.errors import UserError
from quads.quant import backend, conformance, mxfp4
from quads.quant.banner import banner
from quads.quant.formats import FORMATS
from quads.quant.recipes import resolve
from quads.rollout.vllm.setup import check_settings
from tests.helpers import REPOSITORY

GOLDEN = REPOSITORY / "tests" / "golden"
RULES = ("floor", "even", "ceil")


def test_vectors(tmp_path, capsys):
    assert conformance.main([str(GOLDEN / "golden_mxfp4.json")]) == 0
    assert capsys.readouterr().out == "reference: 60 cases, 0 mismatches\n"
    cases = json.loads((GOLDEN / "golden_mxfp4.json").read_text())
    cases[7]["packed"][0] ^= 1
    (tmp_path / "bad.json").write_text(json.dumps(cases))
    assert conformance.main([str(tmp_path / "bad.json")]) == 1
    assert f"{cases[7]['name']} [mxfp4 {cases[7]['mode']}]: packed: 1 of" in capsys.readouterr().out


def test_vectors_of_the_residual():
    """All selections, 2:4 among them, and K that is no multiple of 32."""
    cases = [case for case in json.loads((GOLDEN / "golden_residual.json").read_text()) if case["format"] == "mxfp4"]
    assert len(cases) == 30 and {case["selection"] for case in cases} == {"batch", "block", "token", "2:4"}
    assert conformance.check(cases, conformance.run_reference) == []


@pytest.mark.parametrize(("rule", "exponent"), [("floor", 0), ("even", 1), ("ceil", 1)])
def test_a_block_by_hand(rule, exponent):
    """amax 7: floor saturates it at 6; even rounds 7 up to 8, ceil needs 7 / 6 <= 2."""
    x = torch.tensor([7.0, -5.0, 2.5, -0.25, 0.0, -0.0] + 26 * [0.0])
    _, byte = mxfp4.pack(x, rule, None, False)
    values = mxfp4.qdq_rows(x, rule, torch.float32)
    assert byte.tolist() == [127 + exponent]
    by_rule = {0: [6.0, -4.0, 2.0, 0.0], 1: [8.0, -4.0, 2.0, 0.0]}
    assert values[:4].tolist() == by_rule[exponent]


def test_exponents_next_to_powers_of_two():
    """Every rule against its definition in exact arithmetic, where logarithms in fp32 err."""
    powers = torch.tensor([2.0**e for e in range(-126, 127, 7)] + [6 * 2.0**e for e in range(-120, 120, 7)])
    infinity = torch.tensor(math.inf)
    for amax in torch.cat([powers, powers.nextafter(infinity), powers.nextafter(-infinity)]):
        mantissa, exponent = math.frexp(amax.item())  # amax = mantissa * 2**exponent, mantissa in [.5, 1)
        sixth_mantissa, sixth = math.frexp((amax / torch.tensor(6.0)).item())
        expected = {
            "floor": exponent - 1 - 2,
            "even": exponent - 1 - 2 + (mantissa >= 0.875),
            "ceil": sixth - (sixth_mantissa == 0.5),
        }
        for rule in RULES:
            byte = int(mxfp4.scale_bytes(amax, rule))
            assert byte == min(max(expected[rule] + 127, 0), 254), (rule, amax.item())


@pytest.mark.parametrize(("name", "rule"), [(name, rule) for name, row in FORMATS.items() for rule in row.rules])
def test_what_every_format_promises(name, rule):
    """Rows are independent, the bytes alone give the values, a tail changes nothing, NaN stays in its block, zero is
    zero, and powers of two pass through."""
    row = FORMATS[name]
    x = torch.randn(5, 2 * row.block + 7, generator=torch.Generator().manual_seed(0))
    together = row.qdq_rows(x, rule, torch.float32)
    assert torch.equal(together, torch.cat([row.qdq_rows(each, rule, torch.float32) for each in x.split(1)]))
    assert not row.qdq_rows(torch.zeros(2, row.block), rule, torch.float32).any()
    assert rule == "amax" or torch.equal(together.bfloat16().float(), together)
    if "amax" not in rule:
        assert torch.equal(row.qdq_rows(x * 2.0**9, rule, torch.float32), together * 2.0**9)
    x[0, 3] = torch.nan
    damaged = row.qdq_rows(x, rule, torch.float32)
    assert torch.equal(damaged[1:], together[1:]) and torch.equal(damaged[0, row.block :], together[0, row.block :])
    if row.global_scale is None and row.block_bytes is not None:
        packed, scales = row.pack(x, rule, None, False)
        values = row.unpack(packed, scales, None, torch.float32, x.shape[-1])
        assert torch.equal(values.nan_to_num(3.0), damaged.nan_to_num(3.0))
        assert packed.shape[-1] + scales.shape[-1] * scales.itemsize == row.row_bytes(x.shape[-1])


def test_config_words():
    spec = resolve(QuantSettings(format="mxfp4"))
    assert (spec.learner_weights, spec.rollout_weights("w2"), spec.rule("mxfp4")) == ("mxfp4", "mxfp4", "floor")
    assert resolve(QuantSettings(format="mxfp4", scale_rule="ceil")).rule("mxfp4") == "ceil"
    mixed = resolve(QuantSettings(format="mxfp4", learner_weights="nvfp4", scale_rule="even", global_scale="amax"))
    assert (mixed.rule("nvfp4"), mixed.rule("mxfp4")) == ("amax", "even")
    for changes, message in (
        ({"scale_rule": "half"}, "scale_rule = 'half' is none of mxfp4; use floor, even, ceil"),
        ({"global_scale": "amax"}, "which mxfp4 has not"),
    ):
        with pytest.raises(UserError, match=message):
            resolve(QuantSettings(format="mxfp4", **changes))


def test_the_banner_and_the_kernels_say_that_there_are_none():
    spec = resolve(QuantSettings(format="mxfp4", scale_rule="even"))
    lines = banner(spec).splitlines()
    assert "mxfp4: 4.25 bits a weight, blocks of 32, scale rule even." in lines and "nvfp4" not in "".join(lines)
    assert "mxfp4 has no kernel: widened to bf16 values" in banner(spec, device="cuda")
    assert "vllm engine, reference path (mxfp4 has no kernel: widened to bf16 values)" in banner(spec, "vllm")
    with pytest.raises(UserError, match='has no kernels for mxfp4; set rollout.kernel = "reference"'):
        backend.choose_kernel("triton", torch.device("cuda"), "w4a4", "mxfp4")


def test_vllm_on_a_gpu_is_refused_before_it_starts():
    """There is no kernel for it. On a CPU the reference path serves it."""
    spec = resolve(QuantSettings(format="mxfp4"))
    check_settings(spec, RolloutSettings(engine="vllm"), False, torch.device("cpu"))
    check_settings(resolve(QuantSettings()), RolloutSettings(engine="vllm"), False, torch.device("cuda"))
    with pytest.raises(UserError, match="w4a4_residual in mxfp4: .* rollout.engine = 'native'"):
        check_settings(spec, RolloutSettings(engine="vllm"), False, torch.device("cuda"))
