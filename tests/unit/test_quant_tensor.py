"""Quantized tensors: shapes, conversions, in-place copies, files, compiled functions; and fake quantization."""

import copy
import io

import pytest
import torch

from quads.quant import fake_quant, fp8, nvfp4
from quads.quant.device import weight_amax
from quads.quant.formats import FORMATS
from quads.quant.tensor import QuantizedTensor

SHAPES = [(5, 40), (3, 4, 33), (1, 1), (2, 130, 260)]


def weight(shape, dtype=torch.bfloat16, seed=0):
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.02).to(dtype)


def assert_same(a, b):
    assert type(a) is type(b) and a.shape == b.shape and a.dtype == b.dtype and (a.format, a.rule) == (b.format, b.rule)
    for name, part in a.parts.items():
        assert part.dtype == b.parts[name].dtype
        assert torch.equal(part.reshape(-1).view(torch.uint8), b.parts[name].reshape(-1).view(torch.uint8)), name


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("mode", ["pow2", "amax"])
def test_nvfp4_tensor_holds_what_the_spec_says(shape, mode):
    w = weight(shape)
    t = QuantizedTensor.from_hp(w, "nvfp4", mode)
    assert t.shape == w.shape and t.dtype == torch.bfloat16 and t.device == w.device
    assert t.global_scale.shape == ((shape[0], 1, 1) if len(shape) == 3 else ())
    for e, w_e in enumerate(w if len(shape) == 3 else [w]):
        expected = nvfp4.qdq(w_e, mode=mode)
        got = t.dequantize(torch.float32)
        assert torch.equal(got[e] if len(shape) == 3 else got, expected)
    assert torch.equal(t.dequantize(), t.dequantize(torch.float32).bfloat16())
    if mode == "pow2":
        assert torch.equal(t.dequantize().float(), t.dequantize(torch.float32))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("format", list(FORMATS))
def test_detach_clone_to_and_copy(format, shape):
    t = QuantizedTensor.from_hp(weight(shape), format)
    assert_same(t.detach(), t)
    clone = t.clone()
    assert_same(clone, t)
    assert all(a.data_ptr() != b.data_ptr() for a, b in zip(clone.parts.values(), t.parts.values(), strict=True))
    assert_same(copy.deepcopy(t), t)
    as_float = t.to(torch.float32)
    assert as_float.dtype == torch.float32 and torch.equal(as_float.dequantize(), t.dequantize(torch.float32))
    assert t.to("cpu", torch.bfloat16) is t
    meta = t.to("meta")
    assert meta.device.type == "meta" and meta.shape == t.shape and meta.parts.keys() == t.parts.keys()

    target = QuantizedTensor.empty(shape, torch.float32, format)
    assert target.dequantize().count_nonzero() == 0
    addresses = [part.data_ptr() for part in target.parts.values()]
    assert target.copy_(t) is target
    assert [part.data_ptr() for part in target.parts.values()] == addresses
    assert torch.equal(target.dequantize(), t.dequantize(torch.float32))


def test_copy_refuses_other_shapes_and_kinds():
    t = QuantizedTensor.from_hp(weight((4, 32)), "nvfp4")
    with pytest.raises(ValueError, match="cannot copy"):
        t.copy_(QuantizedTensor.from_hp(weight((4, 31)), "nvfp4"))  # the same packed shapes, but another K
    with pytest.raises(ValueError, match="cannot copy"):
        t.copy_(weight((4, 32)))
    with pytest.raises(ValueError, match="cannot copy"):
        t.copy_(QuantizedTensor.from_hp(weight((4, 32)), "fp8"))


@pytest.mark.parametrize("format", list(FORMATS))
def test_torch_save_round_trips(format):
    rule = FORMATS[format].rules[-1]
    tensors = {str(shape): QuantizedTensor.from_hp(weight(shape), format, rule) for shape in ((5, 40), (2, 3, 33))}
    buffer = io.BytesIO()
    torch.save(tensors, buffer)
    buffer.seek(0)
    for name, t in torch.load(buffer, weights_only=True).items():
        assert_same(t, tensors[name])


@pytest.mark.parametrize("format", list(FORMATS))
def test_module_buffer_state_dict_round_trip(format):
    def module(t):
        m = torch.nn.Module()
        m.register_buffer("weight", t)
        return m

    source = module(QuantizedTensor.from_hp(weight((5, 40)), format))
    target = module(QuantizedTensor.empty((5, 40), torch.bfloat16, format))
    address = next(iter(target.weight.parts.values())).data_ptr()
    target.load_state_dict(source.state_dict())
    assert_same(target.weight, source.weight)
    assert next(iter(target.weight.parts.values())).data_ptr() == address
    assert target.float().weight.dtype == torch.float32


@pytest.mark.parametrize("format", list(FORMATS))
def test_dequantize_inside_a_compiled_function(format):
    x = weight((3, 40), seed=1)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def linear(x, w):
        return x @ w.dequantize(x.dtype).t()

    t = QuantizedTensor.from_hp(weight((5, 40)), format)
    assert torch.equal(linear(x, t), x @ t.dequantize().t())


def test_activation_quantizers_inside_a_compiled_function():
    x = torch.randn(6, 40, requires_grad=True)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def f(x):
        return fake_quant.fake_quantize_rows(x, "nvfp4", "pow2") * 2 + fake_quant.fake_quantize_rows(x, "fp8", "pow2")

    out = f(x)
    assert torch.equal(out, nvfp4.qdq_rows(x.detach()) * 2 + fp8.qdq_rows(x.detach()))
    out.sum().backward()
    assert (x.grad == 3).all()


def test_repr_explains_itself():
    text = repr(QuantizedTensor.from_hp(weight((4, 64, 32)), "nvfp4"))
    for fact in ("[4, 64, 32]", "4.5 bits per weight", "blocks of 16", "pow2", "each of 4 experts", "bfloat16"):
        assert fact in text, text
    text = repr(QuantizedTensor.from_hp(weight((256, 256)), "fp8", "amax"))
    for fact in ("[256, 256]", "8.002 bits per weight", "128 x 128", "amax"):
        assert fact in text, text


def test_shared_scale_is_used_as_given():
    q, k = weight((4, 32)), weight((4, 32), seed=1) * 8
    g, gs = nvfp4.global_scale(torch.maximum(nvfp4.finite_amax(q), nvfp4.finite_amax(k)), "amax")
    tq, tk = (QuantizedTensor.from_hp(w, "nvfp4", "amax", (g, gs)) for w in (q, k))
    assert tq.global_scale.item() == tk.global_scale.item() == g.item()
    both = nvfp4.qdq(torch.cat([q, k]), mode="amax")
    assert torch.equal(torch.cat([tq.dequantize(torch.float32), tk.dequantize(torch.float32)]), both)


@pytest.mark.parametrize("shape", [(6, 40), (3, 4, 32)])
@pytest.mark.parametrize("format", list(FORMATS))
def test_straight_through_weight(shape, format):
    w = weight(shape, torch.float32).requires_grad_()
    packed = QuantizedTensor.from_hp(w, format, cast=True)
    value = packed.dequantize()
    scales = FORMATS[format].global_scale and FORMATS[format].global_scale(weight_amax(w, cast=True), packed.rule)
    again = fake_quant.qdq(w.detach().bfloat16(), *(scales or (None, None)), format, packed.rule, torch.bfloat16)
    assert torch.equal(again, value)  # what a process that gathered the cast makes of it
    out = fake_quant.straight_through(w, value)
    assert out.dtype == torch.bfloat16 and torch.equal(out, value)
    upstream = torch.randn(shape).bfloat16()
    out.backward(upstream)
    assert w.grad is not None and w.grad.dtype == torch.float32 and torch.equal(w.grad, upstream.float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_straight_through_rows(dtype):
    x = torch.randn(4, 48, dtype=dtype, requires_grad=True)
    for format, value in (("nvfp4", nvfp4.qdq_rows(x.detach())), ("fp8", fp8.qdq_rows(x.detach()))):
        x.grad = None
        out = fake_quant.fake_quantize_rows(x, format, "pow2")
        assert out.dtype == dtype and torch.equal(out.float(), value)
        (out * 3).sum().backward()
        assert x.grad is not None and (x.grad == 3).all()


def test_gradient_through_a_linear_uses_the_quantized_operands():
    """y = fq(x) fq(W)^T: dW = g^T fq(x), dx = g fq(W), by hand."""
    x = torch.randn(3, 32, requires_grad=True)
    w = weight((5, 32), torch.float32).requires_grad_()
    xq = fake_quant.fake_quantize_rows(x, "nvfp4", "pow2")
    wq = fake_quant.straight_through(w, nvfp4.qdq(w.detach().bfloat16()))
    g = torch.randn(3, 5)
    (xq @ wq.t()).backward(g)
    assert torch.equal(w.grad, g.t() @ nvfp4.qdq_rows(x.detach()))
    assert torch.equal(x.grad, g @ nvfp4.qdq(w.detach().bfloat16()))
