"""The FP8 kernels have the bits of fp8.py: on a GPU, or interpreted in a process of its own."""

import os

import pytest
import torch

from quads.quant import fp8
from tests.helpers import assert_bitwise, assert_passes_interpreted

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

if INTERPRETED or torch.cuda.is_available():
    from quads.quant.triton import fp8 as kernels_fp8

    DEVICE = "cpu" if INTERPRETED else "cuda"

    def awkward(*shape: int) -> torch.Tensor:
        """Blocks of every size of number, ties, both zeros, and some that are not finite."""
        x = torch.randn(shape) * torch.exp2(torch.randint(-40, 20, (*shape[:-1], 1)).float())
        flat = x.view(-1)
        flat[::7] = flat[::7].abs().log2().round().exp2() * 1.0625  # halfway between two codes
        flat[1::31] = -0.0
        flat[5::101] = 1e-44
        if flat.numel() > 300:
            flat[200], flat[201], flat[299] = float("nan"), float("inf"), -float("inf")
        return x

    def equal(ours: torch.Tensor, theirs: torch.Tensor) -> None:
        assert torch.equal(ours.isnan(), theirs.isnan())
        assert_bitwise(ours.nan_to_num(), theirs.nan_to_num())

    @pytest.mark.parametrize("mode", ["pow2", "amax"])
    @pytest.mark.parametrize("shape", [(1, 1), (127, 129), (2, 130, 40), (3, 0, 16)])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_weights(shape, mode, dtype) -> None:
        w = awkward(*shape).to(DEVICE, dtype)
        codes, scales = kernels_fp8.quantize_weight(w, mode)
        want_codes, want_scales = fp8.quantize_weight(w, mode)
        equal(codes.float(), want_codes.float())
        assert_bitwise(scales, want_scales)
        for out in (torch.float32, torch.bfloat16):
            equal(kernels_fp8.qdq_weight(w, mode, out), fp8.qdq_weight(w, mode, out))
            equal(
                kernels_fp8.dequantize_weight(want_codes, want_scales, out),
                fp8.dequantize_weight(want_codes, want_scales, out),
            )

    @pytest.mark.parametrize("mode", ["pow2", "amax"])
    @pytest.mark.parametrize("shape", [(1, 1), (17, 200), (2, 3, 128), (0, 8)])
    def test_rows(shape, mode) -> None:
        x = awkward(*shape).to(DEVICE)
        for out in (torch.float32, torch.bfloat16):
            equal(kernels_fp8.qdq_rows(x, mode, out), fp8.qdq_rows(x, mode, out))

    def test_zeros_and_extremes() -> None:
        for value in (0.0, 1e-45, 1e-38, 3e38):
            x = torch.full((1, 3), value, device=DEVICE)
            for mode in ("pow2", "amax"):
                equal(kernels_fp8.qdq_rows(x, mode), fp8.qdq_rows(x, mode))


@pytest.mark.skipif(INTERPRETED, reason="is the interpreter's own process")
def test_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    assert_passes_interpreted(__file__)
