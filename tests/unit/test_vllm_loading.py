"""What brings tensors into vLLM layers and counts them; none of it needs vLLM itself."""

import json
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from quads.errors import UserError
from quads.quant import nvfp4
from quads.quant.matmul import SiteSpec
from quads.quant.recipes import QuantSpec
from quads.quant.tensor import QuantizedTensor
from quads.rollout.vllm.loading import LoadLedger, Part, PlainLoader
from quads.rollout.vllm.options import KEYS, in_layer, read_options, site_spec, write_options
from quads.rollout.vllm.site import ReferenceSite
from tests.helpers import assert_bitwise

SPEC = SiteSpec("w4a4", 0.5, "batch", "pow2")
Q, K, V = 32, 16, 16
COLUMNS = 64


def qkv() -> dict[str, Tensor]:
    """Ranges that differ: alone each would have another global scale."""
    return {m: torch.randn(n, COLUMNS) * s for m, n, s in (("q", Q, 1.0), ("k", K, 40.0), ("v", V, 0.1))}


def whole() -> dict[str | int, Part]:
    return {m: Part(0, 0, n, COLUMNS) for m, n in (("q", Q), ("k", K), ("v", V))}


def site(parts: dict, shape: tuple[int, ...]) -> ReferenceSite:
    return ReferenceSite("layer.weight", SPEC, shape, parts, torch.float32)


@pytest.mark.parametrize("order", ["qkv", "vkq", "kqv"])
def test_a_sharing_group_has_one_scale_whatever_the_order(order: str) -> None:
    weights, layer = qkv(), site(whole(), (Q + K + V, COLUMNS))
    for member in order:
        layer.loader.add(member, weights[member])
    stacked = torch.cat([weights[m] for m in "qkv"]).bfloat16()
    expected = QuantizedTensor.from_hp(stacked, "nvfp4")
    for part, tensor in expected.parts.items():
        assert_bitwise(layer.checkpoint().parts[part], tensor)  # type: ignore[attr-defined]


@pytest.mark.parametrize("packed", [False, True])
def test_tensor_parallel_ranks_hold_slices_of_the_whole(packed: bool) -> None:
    """Rows of q, k, v on two ranks; the global scale is that of the whole group."""
    weights = qkv()
    amax = nvfp4.finite_amax(torch.cat(list(weights.values())).bfloat16())
    g, gs = nvfp4.global_scale(amax)
    whole_group = {m: QuantizedTensor.from_hp(w.bfloat16(), "nvfp4", "pow2", (g, gs)) for m, w in weights.items()}
    for rank in range(2):
        parts = {m: Part(rank * len(w) // 2, 0, len(w) // 2, COLUMNS) for m, w in weights.items()}
        layer = site(parts, ((Q + K + V) // 2, COLUMNS))
        for member, weight in weights.items():
            layer.loader.add(member, whole_group[member] if packed else weight)
        stored = layer.checkpoint()
        assert isinstance(stored, QuantizedTensor)
        rows = [t.packed[rank * len(t) // 2 : (rank + 1) * len(t) // 2] for t in whole_group.values()]
        assert_bitwise(stored.packed, torch.cat(rows))
        assert float(stored.global_scale) == float(g)


def test_row_parallel_ranks_cut_columns_in_whole_blocks() -> None:
    weight = torch.randn(24, COLUMNS)
    expected = QuantizedTensor.from_hp(weight.bfloat16(), "nvfp4")
    for rank in range(2):
        layer = site({"whole": Part(0, 32 * rank, 24, 32)}, (24, 32))
        layer.loader.add("whole", weight)
        stored = layer.checkpoint()
        assert isinstance(stored, QuantizedTensor)
        assert_bitwise(stored.packed, expected.packed[:, 16 * rank : 16 * rank + 16])
        assert_bitwise(stored.block_scale, expected.block_scale[:, 2 * rank : 2 * rank + 2])
    with pytest.raises(UserError, match="24 columns on this rank"):
        site({"whole": Part(0, 0, 24, 24)}, (24, 24))


def test_fused_experts_on_two_ranks() -> None:
    """gate_up_proj [E, 2I, H]: a rank stores its gate rows, then its up rows, in one tensor or expert by expert."""
    experts, width = 3, 32
    fused = torch.randn(experts, 2 * width, COLUMNS)
    for rank in range(2):
        gate = Part(16 * rank, 0, 16, COLUMNS)
        once, apart = (site({"w1": gate, "w3": gate}, (experts, 32, COLUMNS)) for _ in range(2))
        once.loader.add_fused(fused, [gate, Part(width + 16 * rank, 0, 16, COLUMNS)])
        for e in (1, 2, 0):
            apart.loader.add("w3", fused[e, width:], e)
            apart.loader.add("w1", fused[e, :width], e)
        expected = QuantizedTensor.from_hp(fused.bfloat16(), "nvfp4")
        rows = [expected.packed[:, start : start + 16] for start in (16 * rank, width + 16 * rank)]
        for layer in (once, apart):
            stored = layer.checkpoint()
            assert isinstance(stored, QuantizedTensor)
            assert_bitwise(stored.packed, torch.cat(rows, dim=1))
            assert_bitwise(stored.global_scale, expected.global_scale)


def test_plain_weights_go_to_their_rows() -> None:
    target = torch.zeros(2, 6, 4)
    loader = PlainLoader({"a": Part(0, 0, 4, 4), "b": Part(1, 0, 2, 4)}, lambda e, r, t: target[e, r].copy_(t))
    a, b = torch.randn(4, 4), torch.randn(3, 4)
    loader.add("b", b, 1)
    loader.add("a", a, 1)
    assert torch.equal(target[1], torch.cat([a, b[1:]]))
    assert not target[0].any()


def test_a_group_must_be_of_one_kind_and_one_scale() -> None:
    layer = site(whole(), (Q + K + V, COLUMNS))
    weights = qkv()
    layer.loader.add("q", weights["q"])
    layer.loader.add("k", QuantizedTensor.from_hp(weights["k"].bfloat16(), "nvfp4"))
    with pytest.raises(UserError, match="some matrices of one sharing group are packed"):
        layer.loader.add("v", weights["v"])
    for member in "qk":
        layer.loader.add(member, QuantizedTensor.from_hp(weights[member].bfloat16(), "nvfp4"))
    with pytest.raises(UserError, match="different global scales"):
        layer.loader.add("v", QuantizedTensor.from_hp(weights["v"].bfloat16(), "nvfp4"))
    with pytest.raises(UserError, match="torch.uint8 tensor of shape .32, 32. is neither full precision nor packed"):
        layer.loader.add("q", torch.zeros(32, 32, dtype=torch.uint8))


def test_members_that_wait_can_be_forgotten() -> None:
    """After a refit that was given up, its q must not meet the next one's k and v."""
    layer, old, new = site(whole(), (Q + K + V, COLUMNS)), qkv(), qkv()
    layer.loader.add("q", old["q"])
    layer.forget()
    for member in "kv":
        layer.loader.add(member, new[member])
    assert not layer.checkpoint().packed.any()  # type: ignore[attr-defined]  # still waiting for q
    layer.loader.add("q", new["q"])
    expected = QuantizedTensor.from_hp(torch.cat([new[m] for m in "qkv"]).bfloat16(), "nvfp4")
    assert_bitwise(layer.checkpoint().packed, expected.packed)  # type: ignore[attr-defined]


def test_writes_keep_addresses_and_renew_the_decoded_values() -> None:
    layer = site({"whole": Part(0, 0, 16, COLUMNS)}, (16, COLUMNS))
    addresses = [p.data_ptr() for p in layer.parameters().values()]
    x, live = torch.randn(3, COLUMNS), torch.ones(3, dtype=torch.bool)
    results = []
    for _ in range(2):
        weight = torch.randn(16, COLUMNS)
        layer.loader.add("whole", weight)
        results.append(layer.linear(x, live))
        expected = nvfp4.qdq_rows(x).double() @ nvfp4.qdq(weight.bfloat16()).double().t()
        assert torch.equal(results[-1], expected.float())
    assert not torch.equal(*results)
    assert [p.data_ptr() for p in layer.parameters().values()] == addresses


def loaded(ledger: LoadLedger, pairs: list[tuple[str, str, tuple]]) -> None:
    """One refit of (checkpoint name, parameter, pieces); a parameter "" is a tensor that vLLM drops."""
    ledger.begin()
    tensors = ledger.watch([(name, torch.zeros(1)) for name, _, _ in pairs])
    for (_, tensor), (_, parameter, pieces) in zip(tensors, pairs, strict=True):
        if parameter:
            ledger.record(parameter, pieces, tensor)


def test_the_ledger_wants_every_piece_exactly_once() -> None:
    ledger = LoadLedger()
    ledger.expect("qkv", ("q", "k", "v"))
    ledger.expect("norm")
    q, k, v = (("layer." + m, "qkv", (m,)) for m in "qkv")
    norm = ("layer.norm", "norm", (None,))
    loaded(ledger, [norm, k, q, v])
    ledger.finish()
    loaded(ledger, [norm, k, q])
    assert ledger.missing() == ["qkv (v)"]
    assert ledger.missing("no") == []
    with pytest.raises(UserError, match=r"did not bring qkv \(v\)"):
        ledger.finish()
    with pytest.raises(UserError, match=r"qkv \(k\) was loaded twice"):
        loaded(ledger, [norm, k, q, v, k])
    loaded(ledger, [norm, k, q, v, ("layer.bias", "", ())])
    ledger.finish(skipped=["layer.bias"])
    with pytest.raises(UserError, match="no place for layer.bias"):
        ledger.finish()


def test_the_ledger_names_a_few_of_many() -> None:
    ledger = LoadLedger()
    ledger.expect("w", range(20))
    loaded(ledger, [])
    with pytest.raises(UserError, match=r"w \(7\) and 12 more;"):
        ledger.finish()


def test_options_say_what_the_recipe_says() -> None:
    spec = QuantSpec("bf16", "bf16", "w4a4_residual", targets=("experts",), residual_sites=("w13",), ratio=0.25)
    for site_name, target in (("w13", "experts"), ("w2", "experts"), ("qkv", "attention"), ("o", "attention")):
        assert site_spec(spec, target, site_name) == SiteSpec.of(spec, site_name)
    assert site_spec(spec, "", "") == SiteSpec("bf16", 0.25, "batch", "pow2")
    assert read_options(json.loads(json.dumps(write_options(spec)))) == spec


def test_every_option_reaches_the_sites() -> None:
    """The defaults compensate every channel of every site; each key changes what it names, dense feed-forward layers
    included."""
    default = read_options({"quant_method": "quads"})
    usual = SiteSpec("w4a4_residual", 1.0, "all", "pow2")
    for target, site in (
        ("experts", "w13"),
        ("experts", "w2"),
        ("attention", "qkv"),
        ("attention", "o"),
        ("mlp", "w2"),
    ):
        assert site_spec(default, target, site) == usual
    changes = [
        ("precision", "w4a16", "mlp", "w13", replace(usual, precision="w4a16")),
        ("targets", ["attention"], "mlp", "w2", replace(usual, precision="bf16")),
        ("targets", ["attention"], "attention", "o", usual),
        ("targets", ["mlp"], "mlp", "w13", usual),
        ("targets", ["mlp"], "experts", "w13", replace(usual, precision="bf16")),
        ("residual_sites", ["qkv"], "attention", "qkv", usual),
        ("residual_sites", ["qkv"], "experts", "w13", replace(usual, precision="w4a4")),
        ("residual_ratio", 0.25, "experts", "w13", replace(usual, ratio=0.25, selection="token")),
        ("residual_selection", "token", "experts", "w13", replace(usual, ratio=0.5, selection="token")),
        ("residual_operand", "folded", "experts", "w13", replace(usual, operand="folded")),
        ("bf16_layers", "0, 1", "experts", "w13", replace(usual, precision="bf16")),
        ("bf16_layers", "last 50%", "experts", "w13", usual),
        ("residual_scale", 0.5, "experts", "w13", replace(usual, residual_scale=0.5)),
        ("global_scale", "amax", "experts", "w13", replace(usual, global_scale="amax")),
        ("format", "mxfp4", "mlp", "w13", replace(usual, format="mxfp4")),
        ("scale_rule", "ceil", "mlp", "w13", replace(usual, format="mxfp4", scale_rule="ceil")),
    ]
    assert {key for key, *_ in changes} == set(KEYS)
    for key, value, target, site_name, expected in changes:
        more = {"scale_rule": {"format": "mxfp4"}, "residual_ratio": {"residual_selection": "token"}}.get(key, {})
        here = in_layer(read_options({key: value, **more}), "model.layers.1.mlp.experts", 4)
        assert site_spec(here, target, site_name) == expected, key


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precision": "w3a3"}, "quantization_config: precision = 'w3a3': must be one of .*w4a4_residual"),
        ({"precison": "w4a4"}, "unknown precison; known: bf16_layers, format, global_scale, precision"),
        ({"precision": "fp8"}, "vLLM has its own"),
        ({"residual_ratio": 0.25}, "all of them are the default; give residual_selection as well"),
        ({"residual_ratio": 1.5, "residual_selection": "token"}, "quantization_config: residual_ratio = 1.5"),
        ({"residual_ratio": "0.5", "residual_selection": "token"}, "residual_ratio = '0.5': must be a number"),
        ({"targets": "experts"}, "targets = 'experts': must be a list"),
        ({"targets": ["lm_head"]}, r"targets = \['lm_head'\]"),
        ({"targets": []}, "targets is empty"),
        ({"residual_sites": []}, "residual_sites is empty"),
        ({"bf16_layers": "some"}, "quantization_config: bf16_layers = 'some' names no layers"),
        ({"residual_sites": ["w1"]}, r"residual_sites = \['w1'\]"),
        ({"targets": ["attention"], "residual_sites": ["w2"]}, "residual_sites has w2, which targets"),
    ],
)
def test_options_are_checked(options: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_options({"quant_method": "quads", **options})
