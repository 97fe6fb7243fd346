"""FP8 with block scales: values by hand, ranges, edges, poison."""

import math

import pytest
import torch

from quads.quant import fp8


def test_scales_by_hand():
    w = torch.zeros(130, 129)
    w[0, 0], w[129, 0], w[0, 128], w[129, 128] = 448.0, 1.0, -450.0, 0.0
    codes, scales = fp8.quantize_weight(w)
    assert scales.tolist() == [[1.0, 2.0], [2.0**-8, 1.0]]  # 2**-8 * 448 = 1.75 is the smallest that reaches 1
    assert codes.shape == w.shape and codes.dtype == torch.float8_e4m3fn
    assert codes[0, 0].item() == 448.0 and codes[129, 0].item() == 256.0 and codes[0, 128].item() == -224.0
    assert torch.equal(fp8.quantize_weight(w, "amax")[1], torch.tensor([[1.0, 450 / 448], [1 / 448, 1.0]]))


@pytest.mark.parametrize("mode", ["pow2", "amax"])
@pytest.mark.parametrize("shape", [(1, 1), (127, 129), (256, 128), (3, 130, 40)])
def test_weight_error_is_half_an_e4m3_step(mode, shape):
    w = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    codes, scales = fp8.quantize_weight(w, mode)
    assert scales.shape == (*shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128))
    assert codes.float().abs().max() <= 448
    out = fp8.dequantize_weight(codes, scales)
    # 3 stored mantissa bits: half a step is 2**-4 of the value; below 2**-6 * scale the step is 2**-9 * scale.
    # "amax" adds the rounding of x / scale and code * scale.
    assert ((out - w).abs() <= w.abs() * 2**-4 * (1 + 1e-6) + 2**-10 * scales.max()).all()
    assert torch.equal(fp8.qdq_weight(w, mode), out)


@pytest.mark.parametrize("num_channels", [1, 127, 128, 200])
def test_rows_are_independent_and_grouped(num_channels):
    x = torch.randn(5, num_channels) * torch.tensor([1, 1e4, 1e-4, 0.0, 3]).view(5, 1)
    codes, scales = fp8.quantize_rows(x)
    assert scales.shape == (5, -(-num_channels // 128))
    out = fp8.dequantize_rows(codes, scales)
    for t in range(5):
        assert torch.equal(fp8.qdq_rows(x[t]), out[t])
    assert ((out - x).abs() <= x.abs() * 2**-4 + 2**-10 * scales.amax(-1, keepdim=True)).all()


def test_pow2_values_are_exact_in_bf16_and_requantize_to_themselves():
    w = torch.randn(140, 150)
    out = fp8.qdq_weight(w)
    assert torch.equal(out.bfloat16().float(), out)
    assert torch.equal(fp8.qdq_weight(out), out)


@pytest.mark.parametrize("mode", ["pow2", "amax"])
def test_zero_tiny_huge_and_poison(mode):
    assert fp8.qdq_weight(torch.zeros(4, 4), mode).count_nonzero() == 0
    for amax in (1e-45, 1e-38, 3e38):
        out = fp8.qdq_rows(torch.tensor([[amax, -amax, 0.0]]), mode)
        assert out.isfinite().all() and out[0, 2] == 0
    x = torch.tensor([[1.0, math.nan, 2.0, math.inf, -math.inf]])
    out = fp8.qdq_rows(x, mode)
    assert out[0].isnan().tolist() == [False, True, False, True, True]
    assert torch.equal(out[0, [0, 2]], fp8.qdq_rows(torch.tensor([[1.0, 2.0]]), mode)[0])


def test_unknown_mode_is_refused():
    with pytest.raises(ValueError, match="pow2"):
        fp8.quantize_rows(torch.ones(1, 4), "e8m0")
