"""Hugging Face folders: round trips, shards, fused names, and what each kind of damage says."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quads.errors import UserError
from quads.model.config import ARCHITECTURES, ModelConfig, load_config
from quads.model.hf import HFCheckpoint, load_hf, load_model, save_hf
from quads.model.model import MoEDecoder
from tests.helpers import assert_bitwise

CONFIG = ModelConfig(
    vocab_size=11,
    hidden_size=8,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    moe_intermediate_size=6,
    num_experts=3,
    top_k=2,
    eos_token_ids=(1, 2),
)
PREFIX = "model.layers.1.mlp.experts"


@pytest.fixture
def model() -> MoEDecoder:
    model = MoEDecoder(CONFIG)
    model.init_weights(torch.Generator().manual_seed(0))
    return model


def assert_same(a: MoEDecoder, b: MoEDecoder) -> None:
    assert [name for name, _ in a.named_parameters()] == [name for name, _ in b.named_parameters()]
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        assert_bitwise(p.detach(), q.detach())


@pytest.mark.parametrize("shard_bytes", [2**30, 1000])
def test_round_trip(model: MoEDecoder, shard_bytes: int, tmp_path: Path) -> None:
    save_hf(tmp_path, CONFIG, model, torch.float32, shard_bytes)
    files = sorted(path.name for path in tmp_path.iterdir())
    if shard_bytes == 1000:
        index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
        assert set(index["weight_map"].values()) == {name for name in files if name.endswith(".safetensors")}
        assert index["metadata"]["total_size"] == 4 * CONFIG.num_parameters()[0]
        largest_single = 11 * 8 * 4
        assert all(
            sum(t.nbytes for t in load_file(tmp_path / name).values()) <= max(1000, largest_single)
            for name in files
            if name.endswith(".safetensors")
        )
    else:
        assert files == ["config.json", "model.safetensors"]
    assert load_config(tmp_path) == CONFIG
    assert_same(load_model(tmp_path), model)


def test_saving_over_an_older_folder_leaves_nothing_of_it(model: MoEDecoder, tmp_path: Path) -> None:
    save_hf(tmp_path, CONFIG, model, torch.float32, shard_bytes=1000)
    (tmp_path / "tokenizer.json").write_text("{}")
    save_hf(tmp_path, CONFIG, model, torch.float32)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert_same(load_model(tmp_path), model)


def test_fused_names_load(model: MoEDecoder, tmp_path: Path) -> None:
    save_hf(tmp_path, CONFIG, model, torch.float32)
    save_file({name: p.detach().clone() for name, p in model.named_parameters()}, tmp_path / "model.safetensors")
    assert_same(load_model(tmp_path), model)


def test_reading_some_experts(model: MoEDecoder, tmp_path: Path) -> None:
    save_hf(tmp_path, CONFIG, model, torch.float32)
    part = HFCheckpoint(tmp_path, CONFIG).tensor(f"{PREFIX}.gate_up_proj", range(1, 3))
    assert_bitwise(part, dict(model.named_parameters())[f"{PREFIX}.gate_up_proj"].detach()[1:3])


def test_tied_embeddings_are_stored_once_and_a_copy_is_accepted(tmp_path: Path) -> None:
    config = replace(CONFIG, tie_embeddings=True)
    tied = MoEDecoder(config)
    tied.init_weights()
    save_hf(tmp_path, config, tied, torch.float32)
    tensors = load_file(tmp_path / "model.safetensors")
    assert "lm_head.weight" not in tensors
    save_file(
        {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, tmp_path / "model.safetensors"
    )
    assert_same(load_model(tmp_path), tied)


def test_a_tied_head_that_is_not_the_embedding_is_refused(tmp_path: Path) -> None:
    config = replace(CONFIG, tie_embeddings=True)
    tied = MoEDecoder(config)
    tied.init_weights()
    save_hf(tmp_path, config, tied, torch.float32)
    other = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"].clone()
    other[10, 7] += 1e-6
    edit_tensors(tmp_path, lambda t: t.update({"lm_head.weight": other}))
    with pytest.raises(UserError, match="lm_head.weight is not the embedding, but tie_word_embeddings"):
        load_model(tmp_path)
    edit_tensors(tmp_path, lambda t: t.update({"lm_head.weight": other[:5]}))
    with pytest.raises(UserError, match="lm_head.weight is not the embedding"):
        HFCheckpoint(tmp_path, config)


def test_a_stored_rotary_table_must_be_the_derived_one(model: MoEDecoder, tmp_path: Path) -> None:
    save_hf(tmp_path, CONFIG, model, torch.float32)
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    for dtype in (torch.float32, torch.bfloat16):
        edit_tensors(tmp_path, lambda t, dtype=dtype: t.update({name: torch.tensor([1.0, 1e6**-0.5]).to(dtype)}))
        assert_same(load_model(tmp_path), model)


def test_an_index_that_maps_to_no_files_is_refused(model: MoEDecoder, tmp_path: Path) -> None:
    save_hf(tmp_path, CONFIG, model, torch.float32)
    for weight_map in (None, [], "x", {"model.norm.weight": 3}):
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(UserError, match="index.json: weight_map is .* must map names of tensors to files"):
            load_model(tmp_path)


def test_no_qk_norm_is_marked_as_our_own_model_type(tmp_path: Path) -> None:
    config = replace(CONFIG, qk_norm=False)
    model = MoEDecoder(config)
    model.init_weights()
    save_hf(tmp_path, config, model, torch.float32)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "quads_moe"
    assert load_config(tmp_path) == config
    assert_same(load_model(tmp_path), model)


def edit_tensors(folder: Path, edit: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


DAMAGE = {
    "missing": (lambda t: t.pop("model.norm.weight"), "tensor model.norm.weight .* is missing"),
    "missing expert": (
        lambda t: t.pop(f"{PREFIX}.2.up_proj.weight"),
        f"tensor {PREFIX}.2.up_proj.weight .* is missing",
    ),
    "missing head": (lambda t: t.pop("lm_head.weight"), "lm_head.weight .* tie_word_embeddings"),
    "unknown": (lambda t: t.update({"model.extra": torch.zeros(1)}), "unknown tensor model.extra"),
    "extra expert": (
        lambda t: t.update({f"{PREFIX}.3.up_proj.weight": torch.zeros(6, 8)}),
        f"unknown tensor {PREFIX}.3.up_proj.weight",
    ),
    "bias": (
        lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(8)}),
        "unknown tensor model.layers.0.self_attn.q_proj.bias",
    ),
    "shape": (
        lambda t: t.update({f"{PREFIX}.0.gate_proj.weight": torch.zeros(6, 7)}),
        rf"model.safetensors: tensor {PREFIX}.0.gate_proj.weight has shape \[6, 7\], config.json asks for \[6, 8\]",
    ),
    "dtype": (
        lambda t: t.update({"model.norm.weight": torch.zeros(8, dtype=torch.int32)}),
        "model.norm.weight is stored as I32",
    ),
    **{
        f"{value} in one expert": (
            lambda t, value=value: t[f"{PREFIX}.2.down_proj.weight"][3].fill_(value),
            rf"model.safetensors: tensor {PREFIX}.2.down_proj.weight has 6 values of 48 that are not finite",
        )
        for value in (torch.nan, torch.inf, -torch.inf)
    },
    "NaN in the last tensor": (
        lambda t: t["model.norm.weight"][7:].fill_(torch.nan),
        "tensor model.norm.weight has 1 values of 8 that are not finite",
    ),
    "rotary table of another base": (
        lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.tensor([1.0, 1e-2])}),
        "rotary_emb.inv_freq is not that of rope_theta = 1e[+]06",
    ),
}


@pytest.mark.parametrize("edit,message", DAMAGE.values(), ids=DAMAGE.keys())
def test_damaged_weights_name_file_and_tensor_and_write_nothing(
    edit: Callable, message: str, model: MoEDecoder, tmp_path: Path
) -> None:
    save_hf(tmp_path, CONFIG, model, torch.float32)
    edit_tensors(tmp_path, edit)
    target = MoEDecoder(CONFIG)
    target.init_weights(torch.Generator().manual_seed(1))
    before = [parameter.detach().clone() for parameter in target.parameters()]
    with pytest.raises(UserError, match=message):
        load_hf(tmp_path, target)
    for parameter, old in zip(target.parameters(), before, strict=True):
        assert_bitwise(parameter.detach(), old)


FIELDS = {
    "attention_bias": True,
    "use_sliding_window": True,
    "mlp_only_layers": [0],
    "decoder_sparse_step": 2,
    "hidden_act": "gelu",
    "rope_scaling": {"rope_type": "yarn", "factor": 4.0},
    "model_type": "mixtral",
    "num_experts": "many",
    "num_key_value_heads": 3,
    "num_experts_per_tok": 4,
    "quantization_config": {"quant_method": "fp8"},
}


@pytest.mark.parametrize("field", FIELDS)
def test_incompatible_config_field_is_named(field: str, model: MoEDecoder, tmp_path: Path) -> None:
    save_hf(tmp_path, CONFIG, model, torch.float32)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), field: FIELDS[field]}))
    named = {"num_experts_per_tok": "experts per token"}.get(field, field)
    with pytest.raises(UserError, match=named):
        load_model(tmp_path)


def test_files_that_are_no_model(model: MoEDecoder, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        load_model(tmp_path / "nowhere")
    save_hf(tmp_path, CONFIG, model, torch.float32)
    (tmp_path / "model.safetensors").write_bytes(b"not a safetensors file")
    with pytest.raises(UserError, match="model.safetensors cannot be read"):
        load_model(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(UserError, match="0 safetensors files"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match="not valid JSON"):
        load_model(tmp_path)


def test_missing_shard_is_named(model: MoEDecoder, tmp_path: Path) -> None:
    save_hf(tmp_path, CONFIG, model, torch.float32, shard_bytes=1000)
    victim = sorted(tmp_path.glob("*.safetensors"))[1]
    victim.unlink()
    with pytest.raises(UserError, match=victim.name):
        load_model(tmp_path)


def test_weights_of_another_size_do_not_load_into_a_model(model: MoEDecoder, tmp_path: Path) -> None:
    save_hf(tmp_path, CONFIG, model, torch.float32)
    with pytest.raises(UserError, match="num_layers is 2, but the model to fill has 1"):
        load_hf(tmp_path, MoEDecoder(replace(CONFIG, num_layers=1)))


def test_saving_checks_that_every_parameter_comes_once(model: MoEDecoder, tmp_path: Path) -> None:
    named = [(name, parameter.detach()) for name, parameter in model.named_parameters()]
    with pytest.raises(ValueError, match="no value was given"):
        save_hf(tmp_path, CONFIG, named[:-1])
    with pytest.raises(ValueError, match="given twice"):
        save_hf(tmp_path, CONFIG, [*named, named[0]])


def test_sizes_of_the_named_architectures() -> None:
    """25.5B parameters, 2.9B active; the published Qwen3-30B-A3B has 30.5B and 3.3B."""
    assert ARCHITECTURES["moe25b_a3b"].num_parameters() == (25_547_157_504, 2_897_915_904)
    assert ARCHITECTURES["qwen3_30b_a3b"].num_parameters() == (30_532_122_624, 3_353_032_704)
    tiny = ARCHITECTURES["tiny"]
    assert tiny.num_parameters()[0] == sum(parameter.numel() for parameter in MoEDecoder(tiny).parameters())
