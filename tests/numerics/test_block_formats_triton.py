"""The kernels of MXFP4, HiF4 and four-over-six have the bits of the reference: on a GPU, or interpreted in a process of
its own."""

import os

import pytest
import torch

from quads.quant import four_over_six, hif4, mxfp4, nvfp4
from tests.helpers import assert_bitwise, assert_passes_interpreted

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

if INTERPRETED or torch.cuda.is_available():
    from quads.quant.triton import four_over_six as kernels_46
    from quads.quant.triton import hif4 as kernels_hif4
    from quads.quant.triton import mxfp4 as kernels_mxfp4
    from quads.quant.triton import pack

    DEVICE = "cpu" if INTERPRETED else "cuda"
    PAIRS = {"hif4": (kernels_hif4.qdq_rows, lambda x, dtype: hif4.qdq_rows(x, "half_away", dtype))}
    for rule in ("floor", "even", "ceil"):
        PAIRS[f"mxfp4 {rule}"] = (
            lambda x, dtype, rule=rule: kernels_mxfp4.qdq_rows(x, rule, dtype),
            lambda x, dtype, rule=rule: mxfp4.qdq_rows(x, rule, dtype),
        )
    for choose in ("mse", "mae"):
        PAIRS[f"nvfp4_46 {choose}"] = (
            lambda x, dtype, choose=choose: kernels_46.qdq_rows(x, choose, dtype),
            lambda x, dtype, choose=choose: four_over_six.qdq_rows(x, f"pow2+{choose}", dtype),
        )

    def awkward(rows: int, columns: int) -> torch.Tensor:
        """Rows of every size of number, ties of the grids, both zeros, and some that are not finite."""
        generator = torch.Generator().manual_seed(rows * 1000 + columns)
        x = torch.randn(rows, columns, generator=generator)
        x = x * torch.exp2(torch.randint(-40, 20, (rows, 1), generator=generator).float())
        x[:, ::9] = (x[:, ::9] * 4).round() / 4
        x[:, 5::31] = -0.0
        x[::5, 3::17] *= 64  # outliers
        if rows > 8:
            x[1, 0], x[2, -1], x[3, columns // 2] = float("nan"), float("inf"), -float("inf")
            x[4], x[5], x[6], x[7] = 0.0, 1e-44, 3e38, 7e-39
        return x.to(DEVICE)

    def readable(x: torch.Tensor) -> torch.Tensor:
        """The interpreter reads subnormal bfloat16 numbers as half of what they are: zeros there."""
        return torch.where(x.abs() < 2.0**-126, 0.0, x) if INTERPRETED else x

    def same(ours: torch.Tensor, theirs: torch.Tensor) -> None:
        assert ours.dtype == theirs.dtype and torch.equal(ours.isnan(), theirs.isnan())
        assert_bitwise(ours.nan_to_num(1.0), theirs.nan_to_num(1.0))

    @pytest.mark.parametrize("name", PAIRS)
    @pytest.mark.parametrize("shape", [(1, 1), (9, 192), (4, 200), (0, 64)])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_rows(name, shape, dtype) -> None:
        kernel, reference = PAIRS[name]
        wide = awkward(*shape)
        for x in (wide, readable(wide.bfloat16())):
            same(kernel(x, dtype), reference(x, dtype))

    @pytest.mark.parametrize("name", ["mxfp4 floor", "mxfp4 even", "mxfp4 ceil", "hif4 half_away"])
    @pytest.mark.parametrize("shape", [(3, 40), (2, 5, 128)])
    @pytest.mark.parametrize("cast", [False, True])
    def test_weights_of_blocks_that_stand_alone(name, shape, cast) -> None:
        format, rule = name.split()
        reference = {"mxfp4": mxfp4, "hif4": hif4}[format]
        rows = awkward(10, shape[-1])
        w = readable((rows if len(shape) == 3 else rows[:3]).reshape(shape))
        got = kernels_mxfp4.pack(w, rule, cast) if format == "mxfp4" else kernels_hif4.pack(w, cast)
        want = reference.pack(w, rule, None, cast)
        assert_bitwise(got[0], want[0])
        assert_bitwise(got[1], want[1])
        back = {"mxfp4": kernels_mxfp4.unpack, "hif4": kernels_hif4.unpack}[format]
        for dtype in (torch.float32, torch.bfloat16):
            same(back(*want, dtype, shape[-1]), reference.unpack(*want, None, dtype, shape[-1]))

    @pytest.mark.parametrize("rule", ["pow2+mse", "amax+mae"])
    @pytest.mark.parametrize("shape", [(3, 40), (2, 5, 96)])
    @pytest.mark.parametrize("cast", [False, True])
    def test_weights_of_four_over_six(rule, shape, cast) -> None:
        rows = awkward(10, shape[-1])
        w = readable((rows if len(shape) == 3 else rows[:3]).reshape(shape))
        scales = four_over_six.global_scale(
            nvfp4.finite_amax(w.bfloat16(), dim=(-2, -1) if w.dim() == 3 else None), rule
        )
        got = kernels_46.pack(w, rule.partition("+")[2], *scales, cast)
        want = four_over_six.pack(w, rule, scales, cast)
        assert_bitwise(got[0], want[0])
        assert_bitwise(got[1].view(torch.uint8), want[1].view(torch.uint8))
        for dtype in (torch.float32, torch.bfloat16):
            back = pack.dequantize(*want, scales[0], dtype, shape[-1]) + 0.0
            same(back, four_over_six.unpack(*want, scales[0], dtype, shape[-1]))

    def test_leading_dimensions_and_strides() -> None:
        x = awkward(10, 256).view(2, 5, 256)[..., 32:224]
        for kernel, reference in PAIRS.values():
            same(kernel(x, torch.float32), reference(x, torch.float32))


@pytest.mark.skipif(INTERPRETED, reason="is the interpreter's own process")
def test_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    assert_passes_interpreted(__file__)
