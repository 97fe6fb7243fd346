"""The table of sites against the model and against the names that a Hugging Face folder and vLLM use."""

from quads.model.config import ARCHITECTURES
from quads.model.hf import expert_names, parameter_shapes
from quads.quant.sites import SITE_OF_LEAF, SITES, TARGETS, is_targeted, site_of_parameter


def test_every_projection_of_the_model_has_its_site_and_nothing_else_has_one() -> None:
    found = {name: site_of_parameter(name) for name in parameter_shapes(ARCHITECTURES["tiny"])}
    assert {name.rpartition("layers.1.")[2] for name, site in found.items() if site and "layers.1." in name} == {
        *(f"self_attn.{letter}_proj.weight" for letter in "qkvo"),
        "mlp.experts.gate_up_proj",
        "mlp.experts.down_proj",
    }
    assert not any(site for name, site in found.items() if "proj" not in name)
    assert {site.target for site in SITES.values()} == set(TARGETS)


def test_names_on_disk_are_those_of_the_checkpoint_reader() -> None:
    for site in ("w13", "w2"):
        names = expert_names(f"model.layers.0.mlp.experts.{SITES[site].leaves[0]}", 3)
        assert names == [f"model.layers.0.mlp.experts.3.{matrix}.weight" for matrix in SITES[site].matrices]
    assert [SITE_OF_LEAF[leaf] for leaf in ("q_proj", "v_proj", "o_proj", "down_proj")] == ["qkv", "qkv", "o", "w2"]


def test_targets() -> None:
    assert is_targeted("w13", ("experts",)) and not is_targeted("qkv", ("experts",))
    assert not is_targeted("lm_head", TARGETS) and not is_targeted("", TARGETS)
