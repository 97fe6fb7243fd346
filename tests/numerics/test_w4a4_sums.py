"""Sums of products of 4-bit operands come out the same in any order: two correct W4A4 kernels agree bit for bit.

A product of two E2M1 codes and their two E4M3 scales has at most 2 + 2 + 4 + 4 significant bits, and neighbouring
blocks have scales of similar size, so fp32 holds the partial sums exactly. With a bf16 operand it does not.
"""

import pytest
import torch

from quads.quant import nvfp4


def sums(a_MK: torch.Tensor, b_NK: torch.Tensor, reverse: bool, chunk: int = 64) -> torch.Tensor:
    """a @ b.T, added up in fp32 from one end or from the other."""
    starts = range(0, a_MK.shape[1], chunk)
    total = torch.zeros(a_MK.shape[0], b_NK.shape[0])
    for start in reversed(starts) if reverse else starts:
        columns = slice(start, start + chunk)
        total = total + a_MK[:, columns] @ b_NK[:, columns].T
    return total


@pytest.mark.parametrize("k", [576, 1536])  # hidden and expert width of SmolLM2
def test_order_of_summation(k: int):
    generator = torch.Generator().manual_seed(0)
    outliers = 1 + 9 * (torch.rand(k, generator=generator) < 0.01)
    x = (torch.randn(128, k, generator=generator) * outliers).bfloat16()
    w = (torch.randn(256, k, generator=generator) * 0.05).bfloat16()
    x4, w4 = nvfp4.qdq_rows(x), nvfp4.qdq(w)

    def equal(a: torch.Tensor, b: torch.Tensor) -> float:
        return float((sums(a, b, False) == sums(a, b, True)).float().mean())

    assert equal(x4, w4) == 1.0
    assert equal(x.float(), w4) < 0.9 and equal(x.float(), w.float()) < 0.9
