"""Learner and rollout multiply the same numbers: weights bit for bit, sharing groups, precisions, batch invariance."""

from dataclasses import replace

import pytest
import torch

from quads.config.sections import QuantSettings
from quads.model.attention import PackedContext
from quads.model.config import ARCHITECTURES
from quads.model.linear import Linear
from quads.model.model import MoEDecoder
from quads.model.moe import Experts
from quads.quant import fp8, nvfp4, residual
from quads.quant.convert import convert_learner, convert_rollout
from quads.quant.masters import pack_group, quantized_weights, requantize, sharing_groups
from quads.quant.recipes import RECIPES, QuantSpec, resolve
from quads.quant.rollout import load_weight, named_weights
from quads.quant.sites import is_targeted, layer_of, site_of_parameter
from quads.quant.tensor import QuantizedTensor

CONFIG = ARCHITECTURES["tiny"]
ATTENTION = "model.layers.0.self_attn"
EXPERTS = "model.layers.1.mlp.experts"


def decoder(dtype=torch.float32, seed=0):
    model = MoEDecoder(CONFIG, dtype)
    model.init_weights(torch.Generator().manual_seed(seed))
    with torch.no_grad():  # different ranges in a sharing group and between experts, so that sharing shows
        attention = model.get_submodule(ATTENTION)
        attention.k_proj.weight.mul_(5)
        attention.v_proj.weight.mul_(0.3)
        model.get_submodule(EXPERTS).gate_up_proj.mul_(torch.logspace(-1, 1, CONFIG.num_experts).view(-1, 1, 1))
    return model


def spec_of(recipe, **changes):
    return replace(resolve(QuantSettings(recipe=recipe)), **changes)


def learner(recipe, dtype=torch.float32, **changes):
    model = decoder(dtype)
    convert_learner(model, spec_of(recipe, **changes))
    requantize(model)
    return model


def rollout(source, recipe, dtype=torch.float32, **changes):
    model = MoEDecoder(CONFIG, torch.float64 if dtype == torch.float32 else dtype).to(dtype)
    convert_rollout(model, spec_of(recipe, **changes))
    for name, tensor in quantized_weights(source, spec_of(recipe, **changes)):
        load_weight(model, name, tensor)
    return model


def hidden(model, lengths=(5, 3)):
    tokens = torch.arange(sum(lengths)) * 7 % CONFIG.vocab_size
    return model(tokens, PackedContext.build(list(lengths)))


@pytest.mark.parametrize("recipe", ["qat", "symmetric", "quads", "fp8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_learner_weight_is_the_rollout_weight_bit_for_bit(recipe, dtype):
    source = learner(recipe, dtype)
    engine = rollout(source, recipe, dtype)
    compared = 0
    for path, module in source.named_modules():
        if isinstance(module, Linear) and module.site in ("qkv", "o"):
            pairs = [(module.effective_weight(dtype), engine.get_submodule(path), "weight")]
        elif path.endswith("mlp.experts"):
            pairs = [
                (weight, engine.get_submodule(path), leaf)
                for weight, leaf in zip(module.effective_weights(dtype), ("gate_up_proj", "down_proj"), strict=True)
            ]
        else:
            continue
        for weight, layer, leaf in pairs:
            assert torch.equal(weight.float(), layer.stored(leaf).dequantize(torch.float32))
            assert torch.equal(weight.double(), layer.wide(leaf))
            assert not torch.equal(weight.float(), source.get_submodule(path).get_parameter(leaf))
            compared += 1
    assert compared == CONFIG.num_layers * 6


@pytest.mark.parametrize("mode", ["pow2", "amax"])
def test_sharing_groups(mode):
    source = learner("qat", global_scale=mode)
    attention = source.get_submodule(ATTENTION)
    projections = [attention.q_proj, attention.k_proj, attention.v_proj]
    masters = [p.weight.detach().bfloat16() for p in projections]
    g, _ = nvfp4.global_scale(torch.cat(masters).abs().max().float(), mode)
    assert [p.packed["weight"].tensor.global_scale.item() for p in projections] == [g.item()] * 3
    together = nvfp4.qdq(torch.cat(masters), mode=mode)
    values = torch.cat([p.packed["weight"].tensor.dequantize(torch.float32) for p in projections])
    assert torch.equal(values, together)
    alone, _ = nvfp4.global_scale(masters[2].abs().max().float(), mode)
    assert alone < g  # v alone would have had another scale

    o_proj = attention.o_proj
    assert torch.equal(
        o_proj.packed["weight"].tensor.dequantize(torch.float32),
        nvfp4.qdq(o_proj.weight.detach().bfloat16(), mode=mode),
    )

    experts = source.get_submodule(EXPERTS)
    for leaf in ("gate_up_proj", "down_proj"):
        packed, master = experts.packed[leaf].tensor, experts.get_parameter(leaf).detach().bfloat16()
        assert packed.global_scale.shape == (CONFIG.num_experts, 1, 1)
        for e in range(CONFIG.num_experts):
            assert torch.equal(packed.dequantize(torch.float32)[e], nvfp4.qdq(master[e], mode=mode))
    assert experts.packed["gate_up_proj"].tensor.global_scale.unique().numel() > 1


def test_groups_by_name():
    groups = [(group.site, list(group.members)) for group in sharing_groups(decoder(), ("experts", "attention"))]
    prefix = "model.layers.0."
    assert groups[:4] == [
        ("qkv", [f"{prefix}self_attn.{x}_proj.weight" for x in "qkv"]),
        ("o", [f"{prefix}self_attn.o_proj.weight"]),
        ("w13", [f"{prefix}mlp.experts.gate_up_proj"]),
        ("w2", [f"{prefix}mlp.experts.down_proj"]),
    ]
    assert len(groups) == 4 * CONFIG.num_layers
    assert [site for site, _ in [(g.site, g) for g in sharing_groups(decoder(), ("experts",))]] == ["w13", "w2"] * 2


def test_what_is_quantized_is_the_bf16_cast_of_the_master():
    source = learner("qat")
    weight = source.get_submodule(EXPERTS).down_proj
    assert not torch.equal(weight.bfloat16().float(), weight)  # the cast matters here
    values = source.get_submodule(EXPERTS).packed["down_proj"].tensor.dequantize(torch.float32)
    assert torch.equal(values[0], nvfp4.qdq(weight[0].detach().bfloat16()))
    assert source.get_submodule(EXPERTS).packed["down_proj"].tensor.dtype == torch.bfloat16


@pytest.mark.parametrize("recipe", list(RECIPES))
def test_what_is_shipped(recipe):
    """Kinds by name; the learner's own bytes where it has them, and the same bytes where it has not."""
    spec = spec_of(recipe)
    source = learner(recipe)
    shipped = dict(quantized_weights(source, spec))
    assert list(shipped) == [name for name, _ in decoder().named_parameters()]
    format = spec.rollout_weights("w13")
    plain = spec.unquantized_layers(source)
    for name, tensor in shipped.items():
        targeted = is_targeted(site_of_parameter(name), spec.targets) and layer_of(name) not in plain
        quantized = targeted and format != "bf16"
        assert type(tensor) is (QuantizedTensor if quantized else torch.Tensor), name
        assert not quantized or tensor.format == format
        if not targeted:
            assert tensor.dtype == torch.float32
    if spec.learner_weights != "bf16":
        experts = "model.layers.0.mlp.experts"  # 4bitter leaves the last layer alone
        packed = source.get_submodule(experts).packed["down_proj"].tensor
        assert shipped[f"{experts}.down_proj"] is packed
    if recipe == "naive":  # a bf16 learner ships what a quantized one would
        other = dict(quantized_weights(learner("qat"), spec))
        for name, tensor in shipped.items():
            if isinstance(tensor, QuantizedTensor):
                assert torch.equal(tensor.packed, other[name].packed)
                assert torch.equal(tensor.global_scale, other[name].global_scale)


def test_a_rollout_in_another_format_than_the_learner_gets_weights_packed_for_it():
    """The bytes that a learner without quantization ships, and those of the same weights in no model."""
    spec = spec_of("quads", learner_weights="fp8")
    source = learner("fp8")
    shipped = dict(quantized_weights(source, spec))
    expected = dict(quantized_weights(decoder(), spec_of("naive")))
    for group in sharing_groups(source, spec.targets):
        alone = pack_group({name: master.detach() for name, master in group.parameters().items()}, "nvfp4", "pow2")
        for name in group.members:
            for tensor in (shipped[name], alone[name]):
                assert isinstance(tensor, QuantizedTensor) and tensor.format == "nvfp4"
                assert torch.equal(tensor.packed, expected[name].packed)
                assert torch.equal(tensor.global_scale, expected[name].global_scale)


def test_layers_that_stay_unquantized():
    """On both sides, and the sync ships them plain; the other layer keeps the bits that it has without the key."""
    changes = {"bf16_layers": "1"}
    source, everything = learner("symmetric", **changes), learner("symmetric")
    engine = rollout(source, "symmetric", **changes)
    for model in (source, engine):
        kinds = [type(model.get_submodule(f"model.layers.{i}.mlp.experts")) for i in (0, 1)]
        assert kinds[1] is Experts and kinds[0] is not Experts
        assert type(model.get_submodule("model.layers.1.self_attn.q_proj")) is Linear
    shipped = dict(quantized_weights(source, spec_of("symmetric", **changes)))
    for name, tensor in quantized_weights(everything, spec_of("symmetric")):
        if name.startswith("model.layers.1."):
            assert type(shipped[name]) is torch.Tensor, name
        elif isinstance(tensor, QuantizedTensor):
            assert torch.equal(shipped[name].packed, tensor.packed), name
    assert torch.equal(hidden(source), hidden(source)) and not torch.equal(hidden(source), hidden(everything))
    torch.testing.assert_close(hidden(engine).float(), hidden(source), rtol=1e-4, atol=1e-4)  # sums in another order


def test_backward_through_operands_of_high_precision():
    """The forward is the quantized one bit for bit; gradients are those of the products of what was not quantized."""
    for precise in (False, True):
        changes = {"backward": "high_precision"} if precise else {}
        model = learner("symmetric", **changes)
        layer = model.get_submodule(f"{ATTENTION}.o_proj")
        x = torch.randn(6, layer.in_features, generator=torch.Generator().manual_seed(1), requires_grad=True)
        y = layer(x)
        upstream = torch.linspace(-1, 1, y.numel()).view_as(y)
        (y * upstream).sum().backward()
        quantized = layer.packed["weight"].tensor.dequantize(torch.float32), nvfp4.qdq_rows(x.detach())
        used = (layer.weight.detach(), x.detach()) if precise else quantized
        assert torch.equal(y, quantized[1] @ quantized[0].T)
        torch.testing.assert_close(x.grad, upstream @ used[0])
        torch.testing.assert_close(layer.weight.grad, upstream.T @ used[1])


def test_experts_backward_through_operands_of_high_precision():
    ids, gates = torch.tensor([[0, 3], [3, 5], [1, 0], [2, 7]]), torch.full((4, 2), 0.5)
    x = torch.randn(4, CONFIG.hidden_size, generator=torch.Generator().manual_seed(1))
    outputs, grads = [], []
    for recipe, changes in (("symmetric", {}), ("symmetric", {"backward": "high_precision"}), ("bf16", {})):
        experts = learner(recipe, **changes).get_submodule(EXPERTS)
        outputs.append(experts(x, ids, gates))
        outputs[-1].sum().backward()
        grads.append(experts.down_proj.grad)
    assert torch.equal(outputs[0], outputs[1]) and not torch.equal(outputs[0], outputs[2])
    # down's gradient: upstream times h. h is silu(gate) * up of quantized products, but not quantized itself.
    quantized, precise, plain = grads
    assert not torch.equal(precise, quantized) and not torch.equal(precise, plain)
    error = [float((grad - plain).norm() / plain.norm()) for grad in (precise, quantized)]
    assert error[0] < error[1]


def test_targets_and_weight_only_precisions():
    spec = QuantSpec("nvfp4", "bf16", "w4a16", targets=("attention",))
    model = decoder()
    convert_learner(model, spec)
    requantize(model)
    assert not hasattr(model.get_submodule(EXPERTS), "packed")
    shipped = dict(quantized_weights(model, spec))
    assert isinstance(shipped[f"{ATTENTION}.q_proj.weight"], QuantizedTensor)
    assert type(shipped[f"{EXPERTS}.down_proj"]) is torch.Tensor
    spec = QuantSpec("bf16", "bf16", "w16a4")
    assert all(type(tensor) is torch.Tensor for _, tensor in quantized_weights(decoder(), spec))


def test_forward_before_requantize_and_stale_weights_are_errors():
    model = decoder()
    convert_learner(model, spec_of("quads"))
    with pytest.raises(RuntimeError, match="requantize"):
        hidden(model)
    with pytest.raises(RuntimeError, match="requantize"):
        list(quantized_weights(model, spec_of("quads")))
    requantize(model)
    before = hidden(model)
    with torch.no_grad():
        model.get_submodule(EXPERTS).down_proj.mul_(1.5)
    assert torch.equal(hidden(model), before)  # the packed bytes are what runs
    with pytest.raises(RuntimeError, match="requantize"):
        list(quantized_weights(model, spec_of("quads")))
    requantize(model)
    assert not torch.equal(hidden(model), before)
    assert len(list(quantized_weights(model, spec_of("quads")))) == len(list(model.parameters()))


def test_conversion_keeps_parameters_names_and_state_dict():
    model = decoder()
    parameters = dict(model.named_parameters())
    keys = list(model.state_dict())
    convert_learner(model, spec_of("symmetric"))
    requantize(model)
    assert list(model.state_dict()) == keys
    assert all(parameters[name] is parameter for name, parameter in model.named_parameters())


def test_gradient_passes_straight_through_to_the_master():
    """d/dW of x fq(W)^T is the upstream gradient times x; in the symmetric recipe times fq(x)."""
    x = torch.randn(4, CONFIG.hidden_size)
    upstream = torch.randn(4, CONFIG.num_heads * CONFIG.head_dim)
    for recipe, operand in (("qat", x), ("symmetric", nvfp4.qdq_rows(x)), ("fp8", fp8.qdq_rows(x))):
        layer = learner(recipe).get_submodule(ATTENTION).q_proj
        layer.weight.grad = None
        out = layer(x)
        assert torch.equal(out, operand @ layer.packed["weight"].tensor.dequantize(torch.float32).t())
        out.backward(upstream)
        assert torch.equal(layer.weight.grad, upstream.t() @ operand)


@pytest.mark.parametrize("recipe", ["qat", "symmetric", "fp8"])
def test_every_parameter_gets_a_gradient(recipe):
    model = learner(recipe, torch.bfloat16)
    hidden(model).float().square().sum().backward()
    for name, parameter in model.named_parameters():
        if name != "lm_head.weight":
            assert parameter.grad is not None and parameter.grad.dtype == torch.float32, name
            assert parameter.grad.isfinite().all() and parameter.grad.abs().sum() > 0, name


def test_rollout_linear_by_hand():
    source = decoder()
    x = torch.randn(6, CONFIG.hidden_size, generator=torch.Generator().manual_seed(3))
    x[:, 9] *= 40
    master = source.get_submodule(ATTENTION).o_proj.weight.detach()
    w4, w8 = nvfp4.qdq(master.bfloat16()).double(), fp8.qdq_weight(master.bfloat16()).double()
    a4, a8 = nvfp4.qdq_rows(x).double(), fp8.qdq_rows(x).double()
    main, res = (t.double() for t in residual.compensate(x, 0.5, "token"))
    expected = {
        "fp8": a8 @ w8.t(),
        "w4a16": x.double() @ w4.t(),
        "w16a4": a4 @ master.double().t(),
        "w4a8": a8 @ w4.t(),
        "w4a4": a4 @ w4.t(),
        "w4a4_residual": main @ w4.t() - res @ w4.t(),
    }
    for precision, y in expected.items():
        spec = QuantSpec("bf16", "bf16", precision, residual_sites=("o",), selection="token")
        model = MoEDecoder(CONFIG)
        convert_rollout(model, spec)
        for name, tensor in quantized_weights(source, spec):
            load_weight(model, name, tensor)
        layer = model.get_submodule(ATTENTION).o_proj
        assert torch.equal(layer(x), y.float()), precision


@pytest.mark.parametrize("recipe", ["qat", "fp8", "symmetric"])
def test_rollout_model_against_a_learner_that_quantizes_the_same(recipe):
    """Weights and activations of symmetric and fp8 learners are those of their rollouts; what is left is fp32 rounding.

    A rounding difference can flip an activation code, so the bound is on the mean; a wrong scale would give 1e-1.
    """
    spec = spec_of(recipe, rollout={"qat": "w4a16", "fp8": "fp8", "symmetric": "w4a4"}[recipe])
    source = decoder()
    convert_learner(source, spec)
    requantize(source)
    engine = MoEDecoder(CONFIG, torch.float64).to(torch.float32)
    convert_rollout(engine, spec)
    for name, tensor in quantized_weights(source, spec):
        load_weight(engine, name, tensor)
    with torch.no_grad():
        want, got = hidden(source), hidden(engine)
    assert (want - got).abs().mean() < 1e-3 * want.abs().mean()


@pytest.mark.parametrize("precision", ["w4a16", "w4a8", "w16a4", "w4a4", "w4a4_residual", "fp8"])
def test_rows_do_not_depend_on_their_batch_mates(precision):
    """In float64 the reference path gives a row the same bits in any batch; "batch" selection is the stated
    exception."""
    spec = QuantSpec("bf16", "bf16", precision, residual_sites=("w13", "w2", "qkv", "o"), selection="token")
    engine = MoEDecoder(CONFIG, torch.float64).to(torch.float32)
    convert_rollout(engine, spec)
    for name, tensor in quantized_weights(decoder(), spec):
        load_weight(engine, name, tensor)
    tokens = torch.randint(CONFIG.vocab_size, (24,), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        together = engine(tokens, PackedContext.build([9, 4, 11]))
        alone = torch.cat([engine(part, PackedContext.build([len(part)])) for part in tokens.split([9, 4, 11])])
    assert (together - alone).abs().max() < 1e-9 * together.abs().max()  # float64 rounding; one flipped code gives 1e-3


def test_dead_rows_of_a_rollout_do_not_change_the_live_ones():
    engine = rollout(decoder(), "quads", residual_sites=("w13", "w2", "qkv", "o"))
    experts = engine.get_submodule(EXPERTS)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(5, CONFIG.hidden_size, generator=generator, dtype=torch.float64)
    ids = torch.randint(CONFIG.num_experts, (5, 2), generator=generator)
    gates = torch.rand(5, 2, generator=generator, dtype=torch.float64)
    garbage = 1e3 * torch.randn(2, CONFIG.hidden_size, generator=generator, dtype=torch.float64)
    live = torch.tensor([True] * 5 + [False] * 2)
    padded = experts(torch.cat([x, garbage]), torch.cat([ids, ids[:2]]), torch.cat([gates, gates[:2]]), live)
    assert torch.allclose(padded[:5], experts(x, ids, gates), rtol=1e-12, atol=0)
    without = experts(torch.cat([x, garbage]), torch.cat([ids, ids[:2]]), torch.cat([gates, gates[:2]]))
    assert not torch.allclose(without[:5], padded[:5], rtol=1e-3, atol=0)


@pytest.mark.parametrize("recipe", ["quads", "fp8", "bf16"])
def test_loads_are_in_place(recipe):
    source = learner(recipe)
    engine = rollout(source, recipe)

    def addresses():
        out = {}
        for name, tensor in named_weights(engine):
            for part, plain in getattr(tensor, "parts", {"": tensor}).items():
                out[name, part] = plain.data_ptr()
        for name, buffer in engine.named_buffers():
            if name.endswith("_wide"):
                out[name] = buffer.data_ptr()
        return out

    before, old = addresses(), hidden(engine)
    with torch.no_grad():
        for parameter in source.parameters():
            parameter.mul_(1.25)
    requantize(source)
    for name, tensor in quantized_weights(source, spec_of(recipe)):
        load_weight(engine, name, tensor)
    assert addresses() == before
    assert not torch.equal(hidden(engine), old)
    stored = dict(named_weights(engine))
    for name, tensor in quantized_weights(source, spec_of(recipe)):
        parts = getattr(tensor, "parts", {"": tensor})
        mine = getattr(stored[name], "parts", {"": stored[name]})
        assert all(torch.equal(parts[p].float(), mine[p].float()) for p in parts), name


def test_load_refuses_what_does_not_fit():
    engine = rollout(learner("quads"), "quads")
    with pytest.raises(KeyError, match="no weight"):
        load_weight(engine, "model.layers.9.self_attn.q_proj.weight", torch.zeros(1))
    with pytest.raises(KeyError, match="no weight"):
        load_weight(engine, "model.norm.bias", torch.zeros(1))
    with pytest.raises(ValueError, match="shape"):
        load_weight(engine, "model.norm.weight", torch.zeros(1))
    with pytest.raises(ValueError, match="cannot copy"):  # engines never quantize
        load_weight(engine, f"{EXPERTS}.down_proj", decoder().get_submodule(EXPERTS).down_proj)


def test_rollout_layers_hold_no_master():
    engine = rollout(learner("quads"), "quads", torch.bfloat16)
    assert not any("_proj" in name for name, _ in engine.named_parameters())
    stored = engine.get_submodule(EXPERTS).stored("down_proj")
    assert stored.bits_per_weight == pytest.approx(4.5, abs=0.02)  # plus one fp32 scale for each 64 x 64 expert
