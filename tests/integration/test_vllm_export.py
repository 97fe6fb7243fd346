"""Exported NVFP4 folders through the eyes of others: compressed-tensors decodes our values, vLLM's ModelOpt config
knows which layers are packed."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from quads.export import export
from quads.quant.masters import quantized_weights
from quads.quant.tensor import QuantizedTensor
from tests.vllm_models import CONFIG, make_learner, spec_of

pytestmark = pytest.mark.vllm

SPEC = replace(spec_of("w4a4"), learner_weights="nvfp4")


def exported(kind: str, folder: Path) -> tuple[dict, dict]:
    learner = make_learner()
    export(kind, CONFIG, SPEC, lambda name: learner.get_parameter(name).detach(), folder)
    return load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())


def test_compressed_tensors_decodes_our_values(tmp_path: Path) -> None:
    from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
    from compressed_tensors.quantization import QuantizationConfig

    tensors, config = exported("nvfp4-compressed-tensors", tmp_path)
    scheme = QuantizationConfig.model_validate(config["quantization_config"]).config_groups["group_0"]
    weights = {name: t for name, t in quantized_weights(make_learner(), SPEC) if isinstance(t, QuantizedTensor)}
    for name in ("self_attn.k_proj.weight", "self_attn.o_proj.weight"):
        name = f"model.layers.1.{name}"
        stem = name.removesuffix(".weight")
        parts = {key.removeprefix(f"{stem}."): t for key, t in tensors.items() if key.startswith(f"{stem}.")}
        theirs = NVFP4PackedCompressor.decompress(parts, scheme)["weight"]
        assert torch.equal(theirs.float(), weights[name].dequantize(torch.float32))
    stem = "model.layers.0.mlp.experts.5.up_proj"
    parts = {key.removeprefix(f"{stem}."): t for key, t in tensors.items() if key.startswith(f"{stem}.")}
    theirs = NVFP4PackedCompressor.decompress(parts, scheme)["weight"]
    ours = weights["model.layers.0.mlp.experts.gate_up_proj"].dequantize(torch.float32)[5].chunk(2)[1]
    assert torch.equal(theirs.float(), ours)


def test_vllm_knows_which_layers_are_packed(tmp_path: Path) -> None:
    from vllm.model_executor.layers.quantization.modelopt import ModelOptNvFp4Config

    _, config = exported("nvfp4-modelopt", tmp_path)
    settings = config["quantization_config"]
    assert ModelOptNvFp4Config.override_quantization_method(settings, None) == "modelopt_fp4"
    theirs = ModelOptNvFp4Config.from_config(settings)
    packed = ["self_attn.qkv_proj", "self_attn.o_proj", "mlp.experts"]
    excluded = {name: theirs.is_layer_excluded(f"model.layers.0.{name}") for name in [*packed, "mlp.gate"]}
    assert excluded == {**dict.fromkeys(packed, False), "mlp.gate": True}
    assert theirs.is_layer_excluded("lm_head")
