"""The error split: exact sums, and values that can be checked by hand."""

import torch

from quads.lab.error_parts import COMPARED, ideal_qdq, split_error, summarize
from quads.quant.formats import FORMATS
from tests.helpers import assert_close


def values(x: torch.Tensor, name: str) -> torch.Tensor:
    format, rule = COMPARED[name]
    return FORMATS[format].qdq_rows(x, rule, torch.float32)


def test_parts_add_up_element_by_element_for_every_format():
    x = torch.randn(7, 50) * torch.logspace(-3, 2, 7).unsqueeze(1)  # 50: blocks need padding
    x[0, :16] = 0.0
    for name in COMPARED:
        quantized = values(x, name).double()
        parts = split_error(x, quantized, FORMATS[COMPARED[name][0]].block)
        assert_close(parts.scale_bias + parts.dead_zone + parts.grid_noise, quantized - x.double(), atol=1e-13)
        assert_close(parts.total, quantized - x.double(), atol=0.0)


def test_energies_add_up_with_the_cross_term():
    x = torch.randn(33, 96) ** 3
    for name in COMPARED:
        share = summarize(x, name)
        total = share["scale_bias"] + share["dead_zone"] + share["grid_noise"] + share["cross"]
        assert abs(total - share["total"]) < 1e-14


def test_by_hand_in_mxfp4():
    """vmax = 7: OCP's scale is 1, so 7 saturates to 6 and 0.2 becomes 0. The ideal scale is 7/6."""
    x = torch.zeros(32)
    x[:3] = torch.tensor([7.0, 0.2, 2.0])
    assert values(x, "mxfp4")[:3].tolist() == [6.0, 0.0, 2.0]
    assert values(x, "mxfp4_ceil")[:3].tolist() == [8.0, 0.0, 2.0]  # scale 2: 3.5 is a tie and goes to 4
    parts = split_error(x, values(x, "mxfp4"), 32)
    # 2 / (7/6) = 1.714 rounds to 1.5, so Q* = 1.75
    assert_close(parts.scale_bias[:3], torch.tensor([-1.0, 0.0, 0.25]), atol=1e-12)
    assert_close(parts.dead_zone[:3], torch.tensor([0.0, -0.2, 0.0]), atol=1e-7)
    assert_close(parts.grid_noise[:3], torch.tensor([0.0, 0.0, -0.25]), atol=1e-12)


def test_no_scale_bias_where_the_scale_is_exact():
    """vmax = 6 * 2**e: every format stores the ideal scale, all error is grid noise or dead zone."""
    x = torch.randn(4, 64).clamp(-2.9, 2.9)
    x[:, ::16] = 3.0
    for name in COMPARED:
        share = summarize(x, name)
        assert share["scale_bias"] == 0.0 and share["grid_noise"] > 0.0 and share["dead_zone"] > 0.0
    assert_close(ideal_qdq(x, 16), values(x, "nvfp4").double(), atol=0.0)


def test_outliers_widen_the_dead_zone():
    x = torch.randn(64, 256)
    x_outlier = x.clone()
    x_outlier[:, ::16] *= 30
    plain, outlier = (summarize(each, "nvfp4")["dead_fraction"] for each in (x, x_outlier))
    assert plain < 0.2 and outlier > 0.5
