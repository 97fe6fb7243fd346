"""The kernels of MXFP4, HiF4 and four-over-six have the bits of the reference: on a GPU, or interpreted in a process of
its own."""

import os

import pytest
import torch

from quads.quant import four_over_six, hif4, mxfp4
from tests.helpers import assert_bitwise, assert_passes_interpreted

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

if INTERPRETED or torch.cuda.is_available():
    from quads.quant.triton import blocks

    DEVICE = "cpu" if INTERPRETED else "cuda"
    PAIRS = {"hif4": (blocks.hif4_rows, lambda x, dtype: hif4.qdq_rows(x, "half_away", dtype))}
    for rule in ("floor", "even", "ceil"):
        PAIRS[f"mxfp4 {rule}"] = (
            lambda x, dtype, rule=rule: blocks.mxfp4_rows(x, rule, dtype),
            lambda x, dtype, rule=rule: mxfp4.qdq_rows(x, rule, dtype),
        )
    for choose in ("mse", "mae"):
        PAIRS[f"nvfp4_46 {choose}"] = (
            lambda x, dtype, choose=choose: blocks.four_over_six_rows(x, choose, dtype),
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

    def same(ours: torch.Tensor, theirs: torch.Tensor) -> None:
        assert ours.dtype == theirs.dtype and torch.equal(ours.isnan(), theirs.isnan())
        assert_bitwise(ours.nan_to_num(1.0), theirs.nan_to_num(1.0))

    @pytest.mark.parametrize("name", PAIRS)
    @pytest.mark.parametrize("shape", [(1, 1), (9, 192), (4, 200), (0, 64)])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_rows(name, shape, dtype) -> None:
        kernel, reference = PAIRS[name]
        wide = awkward(*shape)
        narrow = wide.bfloat16()
        if INTERPRETED:  # it reads subnormal bfloat16 numbers as half of what they are
            narrow = torch.where(narrow.abs() < 2.0**-126, 0.0, narrow)
        for x in (wide, narrow):
            same(kernel(x, dtype), reference(x, dtype))

    def test_leading_dimensions_and_strides() -> None:
        x = awkward(10, 256).view(2, 5, 256)[..., 32:224]
        for kernel, reference in PAIRS.values():
            same(kernel(x, torch.float32), reference(x, torch.float32))


@pytest.mark.skipif(INTERPRETED, reason="is the interpreter's own process")
def test_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    assert_passes_interpreted(__file__)
