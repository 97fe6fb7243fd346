"""The model on a GPU: varlen attention, grouped expert matmuls, repeatable gradients."""

from dataclasses import replace

import pytest
import torch

from quads.model.attention import PackedContext, PaddedLayout, attention_path
from quads.model.config import ARCHITECTURES
from quads.model.logprobs import token_logprobs
from quads.model.model import MoEDecoder
from quads.model.moe import expert_matmul
from tests.helpers import assert_bitwise, assert_close

pytestmark = pytest.mark.gpu
CONFIG = replace(
    ARCHITECTURES["tiny"], hidden_size=256, num_heads=8, num_kv_heads=2, head_dim=64, moe_intermediate_size=128
)
LENGTHS = [100, 1, 37, 256, 64]


def make_model(device: str, dtype: torch.dtype) -> MoEDecoder:
    model = MoEDecoder(CONFIG, dtype)
    model.init_weights(torch.Generator().manual_seed(0))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(2.0)
    return model.to(device)


def test_varlen_equals_padded_attention() -> None:
    total = sum(LENGTHS)
    inputs = [torch.randn(total, heads, 64, device="cuda", dtype=torch.bfloat16) for heads in (8, 2, 2)]
    upstream = torch.randn(total, 8, 64, device="cuda", dtype=torch.bfloat16)
    context, layout = PackedContext.build(LENGTHS, "cuda"), PaddedLayout.build(LENGTHS, torch.device("cuda"))
    assert attention_path(inputs[0].device, torch.bfloat16) == "varlen"
    results = []
    for attend in (lambda *qkv: context.attend(0, *qkv), layout.attend):
        leaves = [x.clone().requires_grad_() for x in inputs]
        out = attend(*leaves)
        results.append((out, *torch.autograd.grad((out * upstream).sum(), leaves)))
    for varlen, padded in zip(*results, strict=True):
        # two flash kernels in bf16: a few ulp of values up to about 4 (ulp 2**-6)
        assert_close(varlen, padded, atol=0.06, rtol=0.02)


def test_grouped_and_loop_agree() -> None:
    counts = torch.tensor([30, 0, 170, 1, 0, 55, 0, 0], device="cuda", dtype=torch.int32)
    x = torch.randn(256, 128, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(8, 64, 128, device="cuda", dtype=torch.bfloat16)
    offsets = counts.cumsum(0, dtype=torch.int32)
    assert_close(expert_matmul(x, w, offsets, "grouped"), expert_matmul(x, w, offsets, "loop"), atol=0.25, rtol=2**-8)


@pytest.mark.parametrize("dtype,atol", [(torch.bfloat16, 0.25), (torch.float32, 1e-4)])
def test_gpu_equals_cpu(dtype: torch.dtype, atol: float) -> None:
    # bf16: rounding of activations in another order through two layers and sharp routing; the mean shows no bias
    tokens = torch.randint(CONFIG.vocab_size, (sum(LENGTHS),))
    results = []
    for device in ("cpu", "cuda"):
        model = make_model(device, dtype)
        hidden = model(tokens.to(device), PackedContext.build(LENGTHS, device))
        logprobs, _ = token_logprobs(hidden, model.output_weight(), tokens.roll(-1).to(device), chunk=128)
        results.append(logprobs.cpu())
    difference = (results[0] - results[1]).abs()
    assert difference.max() < atol and difference.mean() < atol / 20


def test_gradients_repeat_bit_for_bit() -> None:
    """Experts, attention projections and norms: no atomic addition in between. (The embedding's scatter is torch's.)"""
    tokens = torch.randint(CONFIG.vocab_size, (sum(LENGTHS),), device="cuda")
    runs = []
    for _ in range(2):
        model = make_model("cuda", torch.bfloat16)
        hidden = model(tokens, PackedContext.build(LENGTHS, "cuda"))
        token_logprobs(hidden, model.output_weight(), tokens.roll(-1), chunk=128)[0].sum().backward()
        runs.append({name: p.grad for name, p in model.model.layers[-1].named_parameters() if "mlp" in name})
    for name, gradient in runs[0].items():
        assert gradient is not None and gradient.abs().max() > 0
        assert_bitwise(gradient, runs[1][name])
