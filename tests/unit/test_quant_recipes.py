"""Recipes, overrides, contradictions, the banner, and which kernel serves what."""

from typing import get_args, get_type_hints

import pytest
import torch

from quads.config.sections import QuantSettings
from quads.errors import UserError
from quads.quant import backend
from quads.quant.banner import banner
from quads.quant.formats import FORMATS, FOUR_BITS
from quads.quant.matmul import SiteSpec, product_dtype
from quads.quant.recipes import PRECISIONS, RECIPES, QuantSpec, resolve
from quads.quant.sites import bf16_layers


def test_the_six_recipes():
    expected = {
        "bf16": ("bf16", "bf16", "bf16"),
        "fp8": ("fp8", "fp8", "fp8"),
        "naive": ("bf16", "bf16", "w4a4"),
        "qat": ("nvfp4", "bf16", "w4a4"),
        "symmetric": ("nvfp4", "nvfp4", "w4a4"),
        "quads": ("nvfp4", "bf16", "w4a4_residual"),
    }
    for recipe, both in expected.items():
        assert resolve(QuantSettings(recipe=recipe)) == QuantSpec(*both)
    spec = resolve(QuantSettings())
    assert (spec.targets, spec.residual_sites) == (("experts", "attention"), ("w13",))
    assert (spec.ratio, spec.selection, spec.global_scale) == (0.5, "batch", "pow2")
    assert resolve(QuantSettings()) == QuantSpec(*expected["quads"])


def test_recipes_that_set_more_than_formats():
    resq = resolve(QuantSettings(recipe="resq"))
    assert resq == QuantSpec(
        "nvfp4", "nvfp4", "w4a4_residual", residual_sites=("w13", "w2", "qkv", "o"), selection="2:4"
    )
    bitter = resolve(QuantSettings(recipe="4bitter"))
    assert bitter == QuantSpec(
        "nvfp4_46",
        "nvfp4_46",
        "w4a4",
        targets=("experts",),
        format="nvfp4_46",
        scale_rule="mse",
        bf16_layers="last 15%",
    )
    assert resolve(QuantSettings(recipe="qarl")) == QuantSpec("nvfp4", "bf16", "w4a16")
    for format in ("mxfp4", "hif4"):  # four over six is NVFP4's
        spec = resolve(QuantSettings(recipe="4bitter", format=format))
        assert (spec.format, spec.learner_weights, spec.scale_rule) == (format, format, "")
    plain = resolve(
        QuantSettings(
            recipe="4bitter",
            four_over_six="none",
            bf16_layers="none",
            targets=("experts", "attention"),
            rollout="w4a16",
        )
    )
    assert plain == QuantSpec("nvfp4", "nvfp4", "w4a16")
    chosen = resolve(QuantSettings(recipe="resq", residual_selection="batch", residual_sites=("w2",)))
    assert (chosen.selection, chosen.residual_sites) == ("batch", ("w2",))


@pytest.mark.parametrize(
    ("word", "num_layers", "numbers"),
    [
        ("none", 3, set()),
        ("last 15%", 30, {25, 26, 27, 28, 29}),  # 4.5 layers, rounded up
        ("last 15%", 40, {34, 35, 36, 37, 38, 39}),
        ("last 15%", 3, {2}),
        ("first 20%", 10, {0, 1}),
        ("first 2", 4, {0, 1}),
        ("last 1", 4, {3}),
        ("last 0", 4, set()),
        ("0, 1,39", 40, {0, 1, 39}),
    ],
)
def test_bf16_layers(word, num_layers, numbers):
    assert bf16_layers(word, num_layers) == numbers


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("40", "has 4 layers, 0 to 3"),
        ("first 4", "are all 4 layers"),
        ("0,1,2,3", "are all"),
        ("last 9", "has 4 layers"),
    ],
)
def test_bf16_layers_that_a_model_does_not_have(word, message):
    with pytest.raises(UserError, match=message):
        bf16_layers(word, 4)


def test_explicit_keys_override_the_recipe():
    spec = resolve(QuantSettings(recipe="quads", rollout="w4a16", learner_activations="fp8", residual_ratio=0.25))
    assert spec == QuantSpec("nvfp4", "fp8", "w4a16", ratio=0.25)


def test_precision_of_each_site():
    spec = resolve(QuantSettings(residual_sites=("w2", "w13")))
    assert [spec.rollout_precision(s) for s in ("w13", "w2", "qkv", "o", "router", "lm_head")] == [
        "w4a4_residual",
        "w4a4_residual",
        "w4a4",
        "w4a4",
        "bf16",
        "bf16",
    ]
    spec = resolve(QuantSettings(recipe="fp8", targets=("attention",)))
    assert [spec.rollout_weights(s) for s in ("w13", "qkv", "o")] == ["bf16", "fp8", "fp8"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"recipe": "int4"}, "bf16, fp8, naive, qat, symmetric, quads"),
        ({"rollout": "w8a8"}, "w4a4_residual"),
        ({"learner_weights": "fp4"}, "nvfp4"),
        ({"learner_activations": "int8"}, "nvfp4"),
        ({"targets": ("router",)}, "experts, attention"),
        ({"bf16_layers": "15%"}, 'write "last 15%", "first 2", numbers as in "0, 1, 39", or "none"'),
        ({"bf16_layers": "last 101%"}, "names no layers"),
        ({"recipe": "bf16", "backward": "high_precision"}, "this learner quantizes nothing"),
        ({"recipe": "4bitter", "residual_sites": ("qkv",), "rollout": "w4a4_residual"}, "residual_sites has qkv"),
        ({"recipe": "4bitter", "format": "hif4", "four_over_six": "mse"}, "four_over_six = 'mse' is a rule of nvfp4"),
        ({"residual_sites": ("w1",)}, "w13, w2, qkv, o"),
        ({"targets": ("attention",)}, "residual_sites has w13"),
        ({"residual_ratio": 1.5}, "outside [0, 1]"),
        ({"residual_scale": 0.0}, "outside (0, 1]"),
        ({"residual_selection": "row"}, "batch, block, token"),
        ({"residual_operand": "one"}, "use auto, folded, two"),
        ({"residual_operand": "folded", "format": "mxfp4"}, "needs a scale of each row, which mxfp4 has not"),
        ({"global_scale": "e8m0"}, "pow2, amax"),
        ({"format": "nf4"}, "[quant] format = 'nf4' does not exist; use nvfp4, mxfp4"),
        ({"scale_rule": "floor"}, "[quant] scale_rule = 'floor' is none of nvfp4; leave it \"\"; the choice of its"),
    ],
)
def test_bad_settings_say_what_can_be_had(changes, message):
    with pytest.raises(UserError, match=r"\[quant\]") as error:
        resolve(QuantSettings(**changes))
    assert message in str(error.value)


def test_sites_of_an_unused_residual_are_not_an_error():
    assert resolve(QuantSettings(recipe="qat", targets=("attention",))).rollout == "w4a4"
    assert resolve(QuantSettings(recipe="bf16", targets=())).rollout == "bf16"


def test_banner_names_every_group_and_its_kernel():
    lines = banner(resolve(QuantSettings()), "native", "auto", "cpu", torch.float32).splitlines()
    table = {line[:22].strip(): line for line in lines}
    assert "W nvfp4 A fp32" in table["experts w13 (gate, up)"]
    assert "W nvfp4 A nvfp4 + residual of 0.5 of the channels (batch, two operands)" in table["experts w13 (gate, up)"]
    for group in ("experts w2 (down)", "attention q, k, v", "attention o"):
        assert "W nvfp4 A nvfp4  " in table[group] and "residual" not in table[group]
        assert table[group].endswith("reference (plain torch)")
    plain = table["router, embeddings, no"]
    assert "norms, lm_head" in plain and plain.count("W fp32 A fp32") == 2 and "nvfp4" not in plain
    bf16 = banner(resolve(QuantSettings(recipe="bf16")))
    assert bf16.count("W bf16 A bf16") == 10 and "W nvfp4" not in bf16
    assert "nvfp4" not in bf16 and "bits a weight" not in bf16
    fp8 = banner(resolve(QuantSettings(recipe="fp8")))
    assert "fp8: 8.002 bits a weight, blocks of 128 x 128" in fp8 and "nvfp4" not in fp8
    assert "nvfp4: 4.5 bits a weight, blocks of 16; activations have one power-of-two scale a token." in lines
    assert "vllm engine" in banner(resolve(QuantSettings()), "vllm")
    assert "not exact in bf16" in banner(resolve(QuantSettings(global_scale="amax")))
    assert "of the channels (batch, folded)" in banner(resolve(QuantSettings(residual_operand="folded")))


def test_the_residual_operand_in_force():
    """Plain torch folds when asked; kernels that decode 4-bit numbers fold unless asked not to."""
    cpu = torch.device("cpu")
    words = [backend.operand_in_force(word, "auto", cpu, "nvfp4") for word in ("auto", "folded", "two")]
    assert words == ["two", "folded", "two"]


def test_kernel_choice():
    cpu = torch.device("cpu")
    assert backend.choose_kernel("auto", cpu, "w4a4", "nvfp4") == "reference"
    assert backend.choose_kernel("reference", cpu, "w4a4", "nvfp4") == "reference"
    assert backend.choose_kernel("auto", torch.device("cuda"), "fp8", "nvfp4") == "reference"
    with pytest.raises(UserError, match='"auto", "reference" or "triton"'):
        backend.choose_kernel("cutlass", cpu, "w4a4", "nvfp4")
    with pytest.raises(UserError, match="not fp8"):
        backend.choose_kernel("triton", cpu, "fp8", "nvfp4")


def test_a_share_of_the_residual_has_no_kernel():
    assert "w4a4_residual" in backend.kernels_of("nvfp4") and "w4a4" in backend.kernels_of("nvfp4", 0.5)
    assert "w4a4_residual" not in backend.kernels_of("nvfp4", 0.5)
    with pytest.raises(UserError, match=r"not w4a4_residual with residual_scale = 0\.5"):
        backend.choose_kernel("triton", torch.device("cuda"), "w4a4_residual", "nvfp4", 0.5)
    assert backend.choose_kernel("auto", torch.device("cuda"), "w4a4_residual", "nvfp4", 0.5) == "reference"
    text = banner(resolve(QuantSettings(residual_scale=0.5)))
    assert "+ 0.5 x residual of 0.5 of the channels" in text
    cuda = torch.device("cuda")
    dtypes = [product_dtype(SiteSpec("w4a4_residual", 1.0, "all", "pow2", residual_scale=a), torch.bfloat16, cuda)
              for a in (1.0, 0.5, 0.75)]  # fmt: skip
    assert dtypes == [torch.bfloat16, torch.bfloat16, torch.float32]  # three quarters of a code need more bits


def test_triton_without_a_gpu_is_an_error(monkeypatch):
    monkeypatch.setattr(backend, "interpreted", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="reference backend"):
        backend.choose_kernel("triton", torch.device("cpu"), "w4a4", "nvfp4")
    with pytest.raises(UserError, match="reference backend"):
        banner(resolve(QuantSettings()), kernel="triton")


def test_the_config_knows_every_format():
    """quads.config imports no torch, so it lists the words itself."""
    hints = get_type_hints(QuantSettings)
    assert set(get_args(hints["format"])) == set(FOUR_BITS)
    for key in ("learner_weights", "learner_activations"):
        assert set(get_args(hints[key])) == {"", "bf16", *FORMATS}
    assert set(get_args(hints["rollout"])) == {"", *PRECISIONS} and set(get_args(hints["recipe"])) == set(RECIPES)
