"""NVFP4 in plain torch: rounding ties, padding, scales, and inputs that break quantizers."""

import math

import pytest
import torch

from quads.quant import nvfp4


def codes_of(x: torch.Tensor, **kwargs) -> list[int]:
    return nvfp4.unpack_codes(nvfp4.quantize(x, **kwargs)[0]).tolist()


def test_seven_ties_go_to_the_even_code():
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    even = [0, 2, 2, 4, 4, 6, 6]
    assert nvfp4.encode_e2m1(ties).tolist() == even
    assert nvfp4.encode_e2m1(-ties).tolist() == [code | 8 for code in even]
    below = torch.nextafter(ties, torch.zeros(7))
    above = torch.nextafter(ties, torch.full((7,), 9.0))
    assert nvfp4.encode_e2m1(below).tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert nvfp4.encode_e2m1(above).tolist() == [1, 2, 3, 4, 5, 6, 7]


def test_encode_saturates_and_decodes_back():
    assert nvfp4.encode_e2m1(torch.tensor([5.1, 7.0, 1e30, math.inf, -math.inf])).tolist() == [7, 7, 7, 7, 15]
    all_codes = torch.arange(16, dtype=torch.uint8)
    values = nvfp4.decode_e2m1(all_codes)
    assert values.tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]
    assert values[8].signbit()
    recoded = all_codes.clone()
    recoded[8] = 0  # -0.0 encodes as +0
    assert torch.equal(nvfp4.encode_e2m1(values), recoded)


def test_low_nibble_is_the_even_element():
    codes = torch.arange(16, dtype=torch.uint8)
    packed = nvfp4.pack_codes(codes)
    assert packed.tolist() == [0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]
    assert torch.equal(nvfp4.unpack_codes(packed), codes)


def test_zero_tensor_has_scale_one():
    packed, sf, g = nvfp4.quantize(torch.zeros(3, 32))
    assert g.item() == 1.0
    assert packed.count_nonzero() == 0 and sf.view(torch.uint8).count_nonzero() == 0
    assert torch.equal(nvfp4.dequantize(packed, sf, g), torch.zeros(3, 32))


def test_zero_block_beside_a_live_one():
    x = torch.zeros(32)
    x[20] = 3.0
    packed, sf, g = nvfp4.quantize(x)
    assert sf[0].item() == 0.0 and sf[1].item() > 0
    assert packed[:8].count_nonzero() == 0
    assert nvfp4.dequantize(packed, sf, g)[:16].count_nonzero() == 0


@pytest.mark.parametrize("poison", [math.nan, -math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("mode", ["pow2", "amax"])
def test_non_finite_poisons_its_block_only(poison, mode):
    x = torch.linspace(-1, 1, 48)
    clean = x.clone()
    clean[16:32] = 0
    x[19] = poison
    packed, sf, g = nvfp4.quantize(x, mode=mode)
    assert sf.view(torch.uint8)[1].item() == 0x7F
    assert packed[8:16].count_nonzero() == 0
    out = nvfp4.dequantize(packed, sf, g)
    assert out[16:32].isnan().all()
    # amax is over finite elements, and those of the poisoned block still count, here without being the largest
    assert torch.equal(out[:16], nvfp4.qdq(clean, mode=mode)[:16])
    assert torch.equal(out[32:], nvfp4.qdq(clean, mode=mode)[32:])
    assert torch.equal(nvfp4.qdq(x, mode=mode).isnan(), out.isnan())


def test_finite_elements_of_a_poisoned_block_count_in_amax():
    x = torch.ones(32)
    x[:2] = torch.tensor([100.0, math.inf])
    assert nvfp4.finite_amax(x).item() == 100.0
    assert nvfp4.finite_amax(torch.full((4,), math.nan)).item() == 0.0
    assert nvfp4.finite_amax(torch.zeros(0)).item() == 0.0


def test_subnormal_block_scales_are_kept():
    x = torch.zeros(32)
    x[16] = 2688.0  # g == 1
    x[0] = 6 * 2**-9  # exactly the smallest E4M3 scale
    packed, sf, g = nvfp4.quantize(x)
    assert g.item() == 1.0
    assert sf.view(torch.uint8)[0].item() == 1
    assert nvfp4.dequantize(packed, sf, g)[0].item() == 6 * 2**-9
    x[0] = 3 * 2**-9  # half of it: ties to zero, and then every code of the block is +0
    x[1] = -1e-9
    packed, sf, _ = nvfp4.quantize(x)
    assert sf.view(torch.uint8)[0].item() == 0
    assert packed[:8].count_nonzero() == 0


def test_signs_of_zeros():
    """-0.0 encodes as +0; what rounds to zero keeps its sign, even where x * inv underflows."""
    x = torch.zeros(16)
    x[:4] = torch.tensor([6.0, -0.0, -1e-4, -1e-45])
    assert codes_of(x)[:4] == [7, 0, 8, 8]
    x[0] = 6e5  # inv < 1/2: -1e-45 * inv is -0.0 in fp32
    assert codes_of(x)[:4] == [7, 0, 8, 8]


@pytest.mark.parametrize("amax", [1e-45, 1e-42, 1e-37, 1e-30, 1e30, 2e38])
@pytest.mark.parametrize("mode", ["pow2", "amax"])
def test_huge_and_tiny_amax(amax, mode):
    # Near FLT_MAX itself the rounded block scale may carry the largest value past it, to Inf: fp32 has no more room.
    x = torch.zeros(32)
    x[:3] = torch.tensor([amax, -amax / 2, amax / 3])
    packed, sf, g = nvfp4.quantize(x, mode=mode)
    out = nvfp4.dequantize(packed, sf, g)
    assert g.isfinite() and g > 0 and out.isfinite().all()
    if amax >= 1e-37:  # below, the smallest scale product 2**-9 * 2**-126 is coarser than x
        # half a code step (1/12 of the block's max) plus half an E4M3 step of its scale (1/16)
        assert (out - x).abs().max() <= amax * (1 / 12 + 1 / 16)


def test_given_scale_saturates():
    x = torch.tensor([1.0, 4.0, -8.0] + [0.0] * 13)
    out = nvfp4.qdq(x, torch.tensor(1 / 2688))  # made for amax 1
    assert out[2].item() == -1.0 and out[1].item() == pytest.approx(1.0, rel=1e-6)


@pytest.mark.parametrize("shape", [(1,), (15,), (17,), (3, 1), (5, 48), (2, 3, 40), (2, 1, 3, 16), (0, 32)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_shape_with_padding(shape, dtype):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(7)).to(dtype)
    num_elements = shape[-1]
    num_blocks = -(-num_elements // 16)
    packed, sf, g = nvfp4.quantize(x)
    assert packed.shape == (*shape[:-1], num_blocks * 8) and packed.dtype == torch.uint8
    assert sf.shape == (*shape[:-1], num_blocks) and sf.dtype == torch.float8_e4m3fn
    assert g.shape == () and g.dtype == torch.float32
    out = nvfp4.dequantize(packed, sf, g, num_elements=num_elements)
    padded = torch.zeros(*shape[:-1], num_blocks * 16)
    padded[..., :num_elements] = x.float()
    assert torch.equal(out, nvfp4.qdq(padded)[..., :num_elements])
    assert torch.equal(out, nvfp4.qdq(x)) and torch.equal(nvfp4.qdq(x, dtype=torch.bfloat16).float(), out)


def test_one_scale_for_each_expert():
    x = torch.randn(3, 4, 32, generator=torch.Generator().manual_seed(2)) * torch.tensor([1e-3, 1.0, 50.0]).view(
        3, 1, 1
    )
    for mode in ("pow2", "amax"):
        g, gs = nvfp4.global_scale(nvfp4.finite_amax(x, dim=(-2, -1)), mode)
        assert g.shape == (3, 1, 1)
        packed, sf, _ = nvfp4.quantize(x, g, mode, gs=gs)
        for e in range(3):
            alone = nvfp4.quantize(x[e], mode=mode)
            assert torch.equal(packed[e], alone[0]) and g[e].item() == alone[2].item()
            assert torch.equal(sf[e].view(torch.uint8), alone[1].view(torch.uint8))


def test_rows_do_not_depend_on_their_batch_mates():
    x = torch.randn(5, 40, generator=torch.Generator().manual_seed(4)) * torch.tensor([1, 1e3, 1e-3, 0, 7.0]).view(5, 1)
    packed, sf, g = nvfp4.quantize_rows(x)
    assert g.shape == (5, 1)
    out = nvfp4.dequantize(packed, sf, g, num_elements=40)
    assert torch.equal(out, nvfp4.qdq_rows(x))
    for t in range(5):
        assert torch.equal(nvfp4.qdq(x[t]), out[t])


def test_unknown_mode_is_refused():
    with pytest.raises(ValueError, match="pow2"):
        nvfp4.quantize(torch.ones(16), mode="max")
