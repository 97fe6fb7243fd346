"""The plain-torch NVFP4 against a scalar implementation in exact rationals, at scale values that tell chains apart."""

import pytest
import torch

from quads.quant import nvfp4
from tests.numerics import nvfp4_scalar as scalar

# Significands of amax: short ones, ones on either side of 1.3125 (where the power-of-two scale steps up), and
# arbitrary ones.
AMAX_BITS = [0x3F800000, 0x40C00000, 0x40A80000, 0x40700000, 0x407C0000, 0x409A0000, 0x3FA80000, 0x3FA80001, 0x3FA7FFFF]


def bits(x: torch.Tensor) -> list[int]:
    canonical = torch.where(x.isnan(), torch.nan, x)
    return [b & 0xFFFFFFFF for b in canonical.contiguous().view(torch.int32).flatten().tolist()]


def assert_same_as_scalar(x: torch.Tensor, mode: str) -> None:
    codes, scale_bytes, g, values = scalar.quantize(x.tolist(), mode)
    packed, sf, g_torch = nvfp4.quantize(x, mode=mode)
    assert g_torch.item() == g
    assert sf.view(torch.uint8).tolist() == scale_bytes
    assert nvfp4.unpack_codes(packed).tolist() == codes
    assert bits(nvfp4.dequantize(packed, sf, g_torch)) == scalar.bits(values)
    assert bits(nvfp4.qdq(x, mode=mode)) == scalar.bits(values)


@pytest.mark.parametrize("mode", ["pow2", "amax"])
def test_sweep_of_amax_values(mode):
    """One large random tensor hides what many small ones with different amax show: the scale chain rounds differently
    for each."""
    generator = torch.Generator().manual_seed(0)
    random_bits = torch.randint(0x3F000000, 0x41000000, (60,), generator=generator).tolist()
    for pattern in AMAX_BITS + random_bits:
        amax = torch.tensor(pattern, dtype=torch.int32).view(torch.float32)
        x = torch.randn(48, generator=generator)
        x = x / x.abs().max() * amax * (1 - 2**-20)
        x[17] = -amax
        x[:8] = amax / torch.tensor([8.0, 24, 4.8, 2.4, 1.7142857, 1.2, 16, 3])  # near ties of the own block
        assert_same_as_scalar(x, mode)


@pytest.mark.parametrize("mode", ["pow2", "amax"])
@pytest.mark.parametrize("exponent", [-149, -140, -126, -120, -115, -114, -60, 0, 60, 120, 127])
def test_sweep_of_magnitudes(mode, exponent):
    generator = torch.Generator().manual_seed(exponent + 200)
    x = torch.ldexp(torch.rand(64, generator=generator) * 2 - 1, torch.tensor(exponent)).float()
    x[:16] *= 2.0**-9  # a block with a small scale
    assert x.isfinite().all()
    assert_same_as_scalar(x, mode)


@pytest.mark.parametrize("mode", ["pow2", "amax"])
def test_wide_dynamic_range_and_non_finite_blocks(mode):
    generator = torch.Generator().manual_seed(3)
    for _ in range(20):
        x = torch.randn(96, generator=generator) * torch.exp(3 * torch.randn(96, generator=generator))
        x[torch.randint(96, (6,), generator=generator)] = 0.0
        x[3] = -0.0
        x[40] = torch.nan
        x[80] = torch.inf
        assert_same_as_scalar(x, mode)


def test_power_of_two_scale_is_the_smallest_that_reaches_amax():
    generator = torch.Generator().manual_seed(1)
    patterns = torch.randint(1, 0x7F800000, (2000,), generator=generator, dtype=torch.int32)
    edges = [k << 23 | 0x280000 | d for k in range(12, 255, 7) for d in (0, 1)] + [1, 0x7FFFFF, 0x800000, 0x7F7FFFFF]
    amax = torch.cat([patterns, torch.tensor(edges, dtype=torch.int32)]).view(torch.float32)
    g, gs = nvfp4.global_scale(amax, "pow2")
    reach = g.double() * 2688
    assert (reach >= amax.double()).all()
    assert ((reach / 2 < amax.double()) | (g == 2.0**-126)).all()
    assert (torch.frexp(g).mantissa == 0.5).all()
    assert (g * gs == 1).all()


def test_e2m1_rounding_of_every_bf16():
    """All finite bf16 numbers against the nearest code by exact distance."""
    patterns = torch.arange(0, 0x7F80, dtype=torch.int32)
    y = (patterns << 16).view(torch.float32)
    expected = [scalar.e2m1_code(v) for v in y.tolist()]
    assert nvfp4.encode_e2m1(y).tolist() == expected
    negative = nvfp4.encode_e2m1(-y).tolist()
    assert negative == [0] + [code | 8 for code in expected[1:]]


def test_dequantized_weight_is_exact_in_bf16():
    """Power-of-two g: no (e2m1 * sf) * g needs more than bf16's 8 significant bits."""
    codes = torch.arange(16, dtype=torch.uint8)
    scales = torch.arange(0, 0x7F, dtype=torch.uint8)
    packed = nvfp4.pack_codes(codes).expand(127, 8)
    for exponent in (-100, -20, 0, 13):
        g = torch.tensor(2.0**exponent)
        args = packed, scales.view(torch.float8_e4m3fn).unsqueeze(-1), g
        exact = nvfp4.dequantize(*args)
        assert torch.equal(nvfp4.dequantize(*args, dtype=torch.bfloat16).float(), exact)
        assert exact.abs().max() == 2688 * 2.0**exponent


def test_quantizing_a_dequantized_tensor_gives_the_same_codes():
    """With the same g, the second pass changes nothing but signed zeros: -0.0 encodes as +0, and the value stays 0.

    Blocks here have normal scales. With a subnormal one (block max below 6 * 2**-6 * g) the largest code may be less
    than 7, and the second scale is then finer.
    """
    generator = torch.Generator().manual_seed(5)
    for _ in range(50):
        x = torch.randn(8, 64, generator=generator) * torch.exp(2 * torch.randn(8, 1, generator=generator))
        packed, sf, g = nvfp4.quantize(x)
        once = nvfp4.dequantize(packed, sf, g)
        packed2, sf2, _ = nvfp4.quantize(once, g)
        assert torch.equal(sf.view(torch.uint8), sf2.view(torch.uint8))
        codes, codes2 = nvfp4.unpack_codes(packed), nvfp4.unpack_codes(packed2)
        assert torch.equal(torch.where(codes == 8, 0, codes), codes2)
        assert torch.equal(nvfp4.dequantize(packed2, sf2, g), once)
