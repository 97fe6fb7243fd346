"""The weight quantizer of a CUDA device against plain torch on the CPU, bit for bit."""

import pytest
import torch

from quads.quant import fake_quant, nvfp4
from quads.quant.device import weight_amax
from quads.quant.tensor import QuantizedTensor
from tests.helpers import assert_bitwise

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("shape", [(48, 64), (5, 40), (4, 32, 128), (1, 1, 16), (128, 96, 2048)])
@pytest.mark.parametrize("mode", ["pow2", "amax"])
def test_cuda_has_the_bits_of_the_cpu(shape: tuple[int, ...], mode: str) -> None:
    w = torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16()
    w.view(-1)[::31] *= 100
    cpu = QuantizedTensor.from_hp(w, "nvfp4", mode)
    gpu = QuantizedTensor.from_hp(w.cuda(), "nvfp4", mode)
    assert_bitwise(weight_amax(w.cuda()), weight_amax(w))
    for name, part in cpu.parts.items():
        assert_bitwise(gpu.parts[name], part)
    for dtype in (torch.bfloat16, torch.float32):
        assert_bitwise(gpu.dequantize(dtype), cpu.dequantize(dtype))
        g, gs = nvfp4.global_scale(weight_amax(w), mode)
        assert_bitwise(
            fake_quant.qdq(w.cuda(), g.cuda(), gs.cuda(), "nvfp4", mode, dtype),
            fake_quant.qdq(w, g, gs, "nvfp4", mode, dtype),
        )
