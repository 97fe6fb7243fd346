"""Which models how many ranks can share; refused ones are told what to change."""

from dataclasses import replace

import pytest

from quads.errors import UserError
from quads.model.config import ARCHITECTURES
from quads.rollout.engine import check_tensor_parallel

LARGE = ARCHITECTURES["moe25b_a3b"]  # 32 heads, 4 KV heads, experts of 768


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_divisors_are_fine(size: int) -> None:
    check_tensor_parallel(size, LARGE, 8)  # 8 ranks: two hold the same KV head


@pytest.mark.parametrize(
    ("size", "processes", "message"),
    [
        (2, 1, "needs a multiple of 2 processes, not 1"),
        (4, 6, "needs a multiple of 4 processes, not 6"),
        (3, 3, "does not divide 32 attention heads and 4 KV heads"),
    ],
)
def test_others_are_refused(size: int, processes: int, message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_tensor_parallel(size, LARGE, processes)


def test_odd_widths_are_refused() -> None:
    with pytest.raises(UserError, match="does not divide the model's widths"):
        check_tensor_parallel(4, replace(LARGE, moe_intermediate_size=770), 4)
