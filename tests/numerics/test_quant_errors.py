"""Quantization errors that docs/numerics.md states: of scales, of FP8, of residual compensation."""

import re

import pytest
import torch

from quads.quant import fp8, nvfp4, residual
from tests.helpers import REPOSITORY

PAGE = (REPOSITORY / "docs" / "numerics.md").read_text(encoding="utf-8")


def relative(a, b):
    return float((a - b).norm() / b.norm())


def weight_error(qdq):
    """Mean over 16 Gaussian bf16 matrices of different amax: a power-of-two scale is sometimes tight, sometimes not."""
    generator = torch.Generator().manual_seed(1)
    errors = []
    for _ in range(16):
        w = torch.randn(256, 512, generator=generator) * torch.rand(1, generator=generator).add(1)
        w = w.bfloat16().float()
        errors.append(relative(qdq(w), w))
    return sum(errors) / len(errors)


def test_power_of_two_scales_cost_next_to_nothing():
    pow2, amax = weight_error(nvfp4.qdq), weight_error(lambda w: nvfp4.qdq(w, mode="amax"))
    assert f"{pow2:.4f} against {amax:.4f} with amax / 2688" in PAGE
    pow2, amax = weight_error(fp8.qdq_weight), weight_error(lambda w: fp8.qdq_weight(w, "amax"))
    assert f"{pow2:.4f} against {amax:.4f} with amax / 448" in PAGE


def activations():
    generator = torch.Generator().manual_seed(0)
    gaussian = torch.randn(256, 512, generator=generator)
    outliers = torch.randn(256, 512, generator=generator)
    outliers[:, torch.randperm(512, generator=generator)[:16]] *= 20
    return {"Gaussian": gaussian, "outliers": outliers}


@pytest.mark.parametrize("kind", ["Gaussian", "outliers"])
def test_residual_table(kind):
    x = activations()[kind]
    table = re.search(rf"^\| {kind}, without: ([\d.]+) \|(.*\n)((?:\| \|.*\n)*)", PAGE, re.MULTILINE)
    assert table is not None and float(table[1]) == pytest.approx(relative(nvfp4.qdq_rows(x), x), abs=1e-4)
    rows = re.findall(r"([\d.]+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|", table[2] + table[3])
    assert [row[0] for row in rows] == ["0.25", "0.5", "1"]
    for ratio, *errors in rows:
        for selection, stated in zip(("batch", "block", "token"), errors, strict=True):
            main, res = residual.compensate(x, float(ratio), selection)
            assert relative(main - res, x) == pytest.approx(float(stated), abs=1e-4)


@pytest.mark.parametrize("kind", ["Gaussian", "outliers"])
def test_how_far_a_folded_operand_is_from_two(kind):
    x = activations()[kind]
    cells = re.findall(r"([\d.]+), ([\d.e-]+), ([\d.e-]+)", re.findall(rf"^\| {kind} \|.*$", PAGE, re.MULTILINE)[0])
    assert len(cells) == 3
    for selection, (share, largest, norm) in zip(("batch", "token", "all"), cells, strict=True):
        main, res = residual.compensate(x, 0.5, selection)
        two = main.double() - res.double()
        operand, scale = residual.compensate_folded(x, 0.5, selection)
        folded = operand.double() * scale.double()
        differ = folded != two
        assert 1 - float(differ.double().mean()) == pytest.approx(float(share), abs=6e-5)
        assert f"{float(torch.where(differ, (folded - two).abs() / two.abs(), 0).max()):.1e}" == f"{float(largest):.1e}"
        assert f"{relative(folded, two):.1e}" == f"{float(norm):.1e}"
        assert bool(((folded - two).abs() <= 2.0**-11 * two.abs()).all())


def test_the_two_operands_do_not_fit_one_bf16():
    main, res = residual.compensate(activations()["Gaussian"], 1.0, "token")
    merged = main - res
    exact = float((merged.bfloat16().float() == merged).float().mean())
    assert 0.79 < exact < 0.82 and "only 80 % of the elements" in PAGE
    for operand in (main, res):
        assert torch.equal(operand.bfloat16().float(), operand)
