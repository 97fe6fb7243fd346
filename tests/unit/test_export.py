"""Exported folders: the learner's bytes under other projects' names, and bf16 that reads back."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from quads.config import config_to_toml, load_config
from quads.config.sections import QuantSettings
from quads.errors import UserError
from quads.export import export, main
from quads.model.config import ARCHITECTURES
from quads.model.hf import load_model, save_hf
from quads.model.model import MoEDecoder
from quads.quant import nvfp4
from quads.quant.convert import convert_learner
from quads.quant.masters import quantized_weights, requantize
from quads.quant.recipes import QuantSpec, resolve
from quads.quant.tensor import QuantizedTensor
from quads.run.checkpoint import Checkpointer
from quads.run.checkpoint_state import TrainState
from tests.helpers import assert_bitwise, run_command

CONFIG = replace(ARCHITECTURES["tiny"], vocab_size=40, num_experts=4)
SPEC = QuantSpec("nvfp4", "bf16", "w4a4_residual")
STEM = "model.layers.1"


@pytest.fixture
def learner() -> MoEDecoder:
    model = MoEDecoder(CONFIG)
    model.init_weights(torch.Generator().manual_seed(1))
    with torch.no_grad():
        for layer in model.model.layers:  # ranges that differ inside a sharing group
            layer.self_attn.k_proj.weight.mul_(9.0)
            layer.mlp.experts.gate_up_proj[2, :8].mul_(33.0)
    convert_learner(model, SPEC)
    requantize(model)
    return model


@pytest.fixture
def folder(learner: MoEDecoder, tmp_path: Path) -> Path:
    """fp32 masters, so that the bf16 cast of the export shows."""
    save_hf(tmp_path / "source", CONFIG, learner, torch.float32)
    (tmp_path / "source" / "tokenizer.json").write_text("{}")
    return tmp_path / "source"


def run(kind: str, source: Path, out: Path) -> dict[str, Tensor]:
    main(["--format", kind, str(source), str(out)])
    assert (out / "tokenizer.json").read_text() == "{}"
    return load_file(out / "model.safetensors")


def by_matrix(learner: MoEDecoder) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    """(packed, block scale, global scale []) of every matrix of the learner, under its name on disk."""
    found = {}
    for name, tensor in quantized_weights(learner, SPEC):
        if not isinstance(tensor, QuantizedTensor):
            continue
        if tensor.dim() == 2:
            found[name] = tensor.packed, tensor.block_scale, tensor.global_scale
            continue
        stem, _, leaf = name.rpartition(".")
        for e in range(CONFIG.num_experts):
            parts = ["gate_proj", "up_proj"] if leaf == "gate_up_proj" else ["down_proj"]
            for part, packed, scale in zip(
                parts, tensor.packed[e].chunk(len(parts)), tensor.block_scale[e].chunk(len(parts)), strict=True
            ):
                found[f"{stem}.{e}.{part}.weight"] = packed, scale, tensor.global_scale[e].reshape(())
    return found


def test_modelopt_holds_the_learners_bytes(learner: MoEDecoder, folder: Path, tmp_path: Path) -> None:
    tensors = run("nvfp4-modelopt", folder, tmp_path / "out")
    expected = by_matrix(learner)
    assert len(expected) == 2 * (4 + 3 * 4)
    for name, (packed, scale, g) in expected.items():
        assert_bitwise(tensors.pop(name), packed)
        assert_bitwise(tensors.pop(f"{name}_scale"), scale)
        assert_bitwise(tensors.pop(f"{name}_scale_2"), g)
    plain = {n: p.detach().bfloat16() for n, p in learner.named_parameters()}
    assert sorted(tensors) == sorted(n for n in plain if "proj" not in n)
    for name, tensor in tensors.items():
        assert_bitwise(tensor, plain[name])
    settings = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert settings == {
        "quant_method": "modelopt",
        "quant_algo": "W4A16_NVFP4",
        "group_size": 16,
        "ignore": ["lm_head", "*.mlp.gate"],
    }


def test_compressed_tensors_holds_the_learners_bytes(learner: MoEDecoder, folder: Path, tmp_path: Path) -> None:
    tensors = run("nvfp4-compressed-tensors", folder, tmp_path / "out")
    for name, (packed, scale, g) in by_matrix(learner).items():
        assert_bitwise(tensors[f"{name}_packed"], packed)
        assert_bitwise(tensors[f"{name}_scale"], scale)
        assert_bitwise(1 / tensors[f"{name}_global_scale"], g.reshape(1))
        assert name not in tensors
    settings = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert settings["format"] == "nvfp4-pack-quantized"
    assert settings["ignore"] == ["lm_head", r"re:.*\.mlp\.gate$"]


def test_sharing_groups_share_one_global_scale(folder: Path, tmp_path: Path) -> None:
    tensors = run("nvfp4-modelopt", folder, tmp_path / "out")

    def scale(name: str) -> float:
        return float(tensors[f"{STEM}.{name}.weight_scale_2"])

    assert scale("self_attn.q_proj") == scale("self_attn.k_proj") == scale("self_attn.v_proj")
    assert scale("mlp.experts.2.gate_proj") == scale("mlp.experts.2.up_proj") > scale("mlp.experts.1.up_proj")
    q = load_model(folder).get_parameter(f"{STEM}.self_attn.q_proj.weight")
    assert scale("self_attn.q_proj") > float(nvfp4.global_scale(nvfp4.finite_amax(q))[0])  # k is the wider one


def test_bf16_reads_back(learner: MoEDecoder, folder: Path, tmp_path: Path) -> None:
    run("bf16", folder, tmp_path / "out")
    for name, parameter in load_model(tmp_path / "out").named_parameters():
        assert torch.equal(parameter, learner.get_parameter(name).bfloat16().float()), name


def test_untargeted_attention_stays_bf16_and_is_ignored(learner: MoEDecoder, tmp_path: Path) -> None:
    spec = QuantSpec("nvfp4", "bf16", "w4a4", targets=("experts",))
    export("nvfp4-compressed-tensors", CONFIG, spec, lambda n: learner.get_parameter(n).detach(), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert tensors[f"{STEM}.self_attn.q_proj.weight"].dtype == torch.bfloat16
    settings = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert settings["ignore"][-1] == r"re:.*\.self_attn\..*$"


@pytest.mark.parametrize("weights", ["bf16", "fp8", "mxfp4"])
@pytest.mark.parametrize("kind", ["nvfp4-modelopt", "nvfp4-compressed-tensors"])
def test_weights_that_were_not_trained_are_not_exported(
    weights: str, kind: str, learner: MoEDecoder, tmp_path: Path
) -> None:
    spec = QuantSpec(weights, "bf16", "w4a4")
    with pytest.raises(UserError, match=f"learner of this run trained {weights} weights.*use --format bf16$"):
        export(kind, CONFIG, spec, lambda name: learner.get_parameter(name).detach(), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_mistakes_have_one_line(tmp_path: Path) -> None:
    result = run_command(["-m", "quads.export", "--format", "bf16", str(tmp_path / "nowhere"), str(tmp_path / "out")])
    assert result.returncode == 2 and len(result.stderr.splitlines()) == 1
    assert result.stderr.startswith(f"error: checkpoint not found: {tmp_path / 'nowhere'}; give ")
    result = run_command(["-m", "quads.export", "--format", "gguf", "a", "b"])
    assert result.returncode == 2 and "invalid choice: 'gguf'" in result.stderr


def test_a_run_is_exported_with_its_own_quantization(learner: MoEDecoder, folder: Path, tmp_path: Path) -> None:
    """A checkpoint of a run: its own weights, the [quant] section of its config.toml."""
    trained = SimpleNamespace(
        model=learner,
        optimizer=torch.optim.AdamW(learner.parameters()),
        counters=dict,
        load_counters=lambda counters: None,
    )
    with torch.no_grad():
        for parameter in learner.parameters():
            parameter.add_(0.01)
    arguments = ["--config", "configs/tiny_quads.toml", "--model.path", str(folder), "--model.tokenizer", str(folder)]
    cfg = load_config([*arguments, "--quant.targets", "experts", "--quant.residual_sites", "w13"])
    Checkpointer(tmp_path / "run" / "checkpoints", cfg.checkpoint, config_to_toml(cfg)).save(
        TrainState(step=1), trained
    )
    tensors = run("nvfp4-modelopt", tmp_path / "run", tmp_path / "out")
    weight = learner.get_parameter(f"{STEM}.self_attn.q_proj.weight")
    assert_bitwise(tensors[f"{STEM}.self_attn.q_proj.weight"], weight.detach().bfloat16())
    packed = QuantizedTensor.from_hp(learner.get_parameter(f"{STEM}.mlp.experts.down_proj").bfloat16(), "nvfp4")
    assert_bitwise(tensors[f"{STEM}.mlp.experts.3.down_proj.weight"], packed.packed[3])


@pytest.mark.parametrize("kind", ["bf16", "nvfp4-modelopt"])
def test_a_weight_that_is_not_finite_is_not_exported(kind: str, learner: MoEDecoder, tmp_path: Path) -> None:
    name = f"{STEM}.mlp.experts.down_proj"
    with torch.no_grad():
        learner.get_parameter(name)[3, 1, 2] = torch.inf
    read = {key: value.detach() for key, value in learner.named_parameters()}.__getitem__
    with pytest.raises(UserError, match=f"tensor {name} has 1 values"):
        export(kind, learner.config, resolve(QuantSettings()), read, tmp_path / "out")
    assert not (tmp_path / "out").exists()
