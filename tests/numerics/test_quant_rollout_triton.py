"""Rollout layers on the Triton kernels against the reference layers, on the CPU in Triton's interpreter.

Runs in a process of its own: the interpreter is chosen when triton is first imported.
"""

import os

import pytest
import torch
from torch import nn

from quads.errors import UserError
from quads.model.linear import Linear
from quads.model.moe import Experts
from quads.quant.convert import convert_rollout
from quads.quant.masters import quantized_weights
from quads.quant.recipes import QuantSpec
from quads.quant.rollout import load_weight, named_weights
from tests.helpers import assert_passes_interpreted

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def layers(seed: int = 0) -> nn.Module:
    model = nn.Module()
    model.o_proj = Linear(48, 32, "o")
    model.experts = Experts(32, 16, 4)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2, generator=torch.Generator().manual_seed(seed))
    return model.to(torch.bfloat16)


def rollout(source: nn.Module, spec: QuantSpec, kernel: str) -> nn.Module:
    model = layers(seed=1)
    convert_rollout(model, spec, kernel)
    for name, tensor in quantized_weights(source, spec):
        load_weight(model, name, tensor)
    return model


if INTERPRETED:
    from quads.quant.triton import ops

    @pytest.mark.parametrize(
        ("precision", "operand"),
        [("w4a16", "auto"), ("w4a4", "auto"), ("w4a4_residual", "two"), ("w4a4_residual", "folded")],
    )
    def test_layers_agree_with_the_reference(precision, operand):
        spec = QuantSpec("bf16", "bf16", precision, residual_sites=("w13", "o"), operand=operand)
        source = layers()
        reference, triton = rollout(source, spec, "reference"), rollout(source, spec, "triton")
        generator = torch.Generator().manual_seed(2)
        x = torch.randn(5, 48, generator=generator).bfloat16()
        tokens = torch.randn(5, 32, generator=generator).bfloat16()
        ids = torch.randint(4, (5, 2), generator=generator)
        gates = torch.rand(5, 2, generator=generator).bfloat16()
        live = torch.tensor([True, True, True, True, False])
        # bf16 outputs of the same operands: half a bf16 step for each side, and its growth through the second matmul
        for got, want in (
            (triton.o_proj(x, live), reference.o_proj(x, live)),
            (triton.experts(tokens, ids, gates, live), reference.experts(tokens, ids, gates, live)),
        ):
            error = (got[:4].float() - want[:4].float()).abs().max()
            assert error <= 2**-7 * want[:4].float().abs().max()

    @pytest.mark.parametrize(("operand", "dtype"), [("auto", "fp16"), ("folded", "fp16"), ("two", "bf16")])
    def test_the_word_of_the_operand_reaches_the_kernels(operand, dtype, monkeypatch):
        """auto is folded here: the interpreter takes the path that decodes."""
        spec = QuantSpec("bf16", "bf16", "w4a4_residual", residual_sites=("w13", "w2", "o"), operand=operand)
        model, seen = rollout(layers(), spec, "triton"), []
        real = ops._gemm
        monkeypatch.setattr(ops, "_gemm", lambda x, *rest, **more: (seen.append(x), real(x, *rest, **more))[1])
        model.o_proj(torch.randn(3, 48).bfloat16())
        model.experts(torch.randn(3, 32).bfloat16(), torch.tensor([[0], [1], [2]]), torch.ones(3, 1).bfloat16())
        want = torch.float16 if dtype == "fp16" else torch.bfloat16
        assert [(x.data.dtype, x.residual) for x in seen] == [(want, dtype == "bf16")] * 3

    def test_what_was_loaded_comes_back_and_stays_where_it_is():
        spec = QuantSpec("bf16", "bf16", "w4a4_residual")
        source = layers()
        model = rollout(source, spec, "triton")
        weights = {**model.o_proj.kernel_weights, **model.experts.kernel_weights}
        addresses = [w.words.data_ptr() for w in weights.values()]
        for seed in (0, 5):
            shipped = dict(quantized_weights(layers(seed), spec))
            for name, tensor in shipped.items():
                load_weight(model, name, tensor)
            stored = dict(named_weights(model))
            assert stored.keys() == shipped.keys()
            for name, tensor in shipped.items():
                for part, plain in tensor.parts.items():
                    got = stored[name].parts[part]
                    assert got.shape == plain.shape and torch.equal(got.float(), plain.float()), (name, part)
        assert [w.words.data_ptr() for w in weights.values()] == addresses

    def test_what_does_not_fit_is_refused():
        spec = QuantSpec("bf16", "bf16", "w4a4")
        with pytest.raises(UserError, match="bfloat16"):
            convert_rollout(layers().float(), spec, "triton")
        model = rollout(layers(), spec, "triton")
        with pytest.raises(ValueError, match="NVFP4 of shape"):
            load_weight(model, "o_proj.weight", torch.zeros(32, 48))

else:

    def test_in_the_interpreter():
        assert "9 passed" in assert_passes_interpreted(__file__)
