"""The plain-torch quantizers give the same bits on a GPU as on a CPU, and so does `dequantize` when compiled."""

import pytest
import torch

from quads.quant import conformance, fake_quant, fp8, nvfp4, residual
from quads.quant.formats import FORMATS
from quads.quant.tensor import QuantizedTensor
from tests.helpers import REPOSITORY

pytestmark = pytest.mark.gpu


def samples() -> list[torch.Tensor]:
    """Many small tensors of different amax; poisoned, zero and tiny ones among them."""
    generator = torch.Generator().manual_seed(0)
    sizes = 10 ** (8 * torch.rand(200, generator=generator) - 4)
    out = [torch.randn(4, 48, generator=generator) * size for size in sizes]
    out += [torch.zeros(2, 16), torch.randn(3, 40, generator=generator) * 1e-38, torch.full((1, 16), 2e38)]
    poisoned = torch.randn(4, 64, generator=generator)
    poisoned[0, 3], poisoned[1, 20], poisoned[2, 5] = torch.nan, torch.inf, -0.0
    return [*out, poisoned]


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    a, b = a.cpu().float(), b.cpu().float()
    equal = (a == b) & (a.signbit() == b.signbit()) | a.isnan() & b.isnan()
    return a.shape == b.shape and bool(equal.all())


@pytest.mark.parametrize("mode", ["pow2", "amax"])
def test_quantizers_match_the_cpu(mode):
    for x in samples():
        for on_cpu, on_gpu in (
            (nvfp4.quantize(x, mode=mode), nvfp4.quantize(x.cuda(), mode=mode)),
            (nvfp4.quantize_rows(x), nvfp4.quantize_rows(x.cuda())),
            (fp8.quantize_weight(x, mode), fp8.quantize_weight(x.cuda(), mode)),
            (fp8.quantize_rows(x, mode), fp8.quantize_rows(x.cuda(), mode)),
            ((nvfp4.qdq(x, mode=mode),), (nvfp4.qdq(x.cuda(), mode=mode),)),
        ):
            assert all(same(a, b) for a, b in zip(on_cpu, on_gpu, strict=True))


@pytest.mark.parametrize("selection", ["batch", "block", "token"])
def test_residual_matches_the_cpu(selection):
    for x in samples()[:50]:
        for a, b in zip(
            residual.compensate(x, 0.5, selection), residual.compensate(x.cuda(), 0.5, selection), strict=True
        ):
            assert same(a, b)


@pytest.mark.parametrize("name", ["nvfp4_vectors.json", "residual_vectors.json"])
@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_conformance(name, backend):
    assert conformance.main([str(REPOSITORY / "tests" / "golden" / name), "--backend", backend]) == 0


@pytest.mark.parametrize("format", list(FORMATS))
def test_compiled_dequantize(format):
    packed = QuantizedTensor.from_hp((torch.randn(3, 64, 96) * 0.02).bfloat16().cuda(), format)
    compiled = torch.compile(lambda t: t.dequantize(torch.bfloat16), fullgraph=True)
    assert torch.equal(compiled(packed), packed.dequantize(torch.bfloat16))


def test_compiled_activation_quantizer():
    x = torch.randn(7, 96, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    compiled = torch.compile(lambda x: fake_quant.fake_quantize_rows(x * 1.5, "nvfp4", "pow2"), fullgraph=True)
    out = compiled(x)
    assert torch.equal(out, nvfp4.qdq_rows(x.detach() * 1.5, torch.bfloat16))
    out.sum().backward()
    assert (x.grad == 1.5).all()
