"""Checkpoints for other engines: a Hugging Face folder with bf16 weights, or with the packed bytes that the learner
makes.

    python -m quads.export --format bf16|nvfp4-modelopt|nvfp4-compressed-tensors SOURCE OUT

SOURCE is a Hugging Face folder, a run's folder or one of its checkpoints. What is packed is bf16(master), in the
sharing groups of the learner, so q, k, v and gate, up carry one global scale each. Both NVFP4 formats are the
weight-only kind (16-bit activations): they have no word for scales that are chosen for each token, let alone for a
residual pass; served with `--quantization quads` the bf16 format runs those. Names and scales of the two, for a
matrix M [N, K]:

                          codes uint8 [N, K/2]   E4M3 scales [N, K/16]   global scale fp32
    modelopt              M.weight               M.weight_scale          M.weight_scale_2 [] = g
    compressed-tensors    M.weight_packed        M.weight_scale          M.weight_global_scale [1] = 1 / g
"""

import argparse
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quads.checks import load_model_config
from quads.config import load_config as load_run_config
from quads.config.sections import QuantSettings
from quads.errors import UserError, main_guard
from quads.finite import require_finite
from quads.model.config import ModelConfig, load_config
from quads.model.hf import HFCheckpoint, expert_names, parameter_shapes, save_hf, write_folder
from quads.model.model import MoEDecoder
from quads.quant.formats import FORMATS
from quads.quant.masters import pack_group, sharing_groups
from quads.quant.recipes import QuantSpec, resolve
from quads.quant.sites import bf16_layers
from quads.quant.tensor import QuantizedTensor
from quads.run.checkpoint import find_checkpoint, load_model_weights

EXPORTS = {"bf16": "bf16", "nvfp4-modelopt": "nvfp4", "nvfp4-compressed-tensors": "nvfp4"}  # with their formats
BESIDES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja")

Read = Callable[[str], Tensor]


@main_guard
def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m quads.export", description="Write a checkpoint for other engines.")
    parser.add_argument("--format", required=True, choices=list(EXPORTS))
    parser.add_argument("source", type=Path, help="Hugging Face folder, run folder or checkpoint")
    parser.add_argument("out", type=Path, help="folder to write")
    arguments = parser.parse_args(argv)
    config, spec, read, files = open_source(arguments.source)
    export(arguments.format, config, spec, read, arguments.out)
    for name in BESIDES:
        if (files / name).is_file():
            shutil.copyfile(files / name, arguments.out / name)
    print(f"{arguments.format}: {arguments.out}")


def open_source(source: Path) -> tuple[ModelConfig, QuantSpec, Read, Path]:
    """(model config, quantization, reader of parameters by name, folder of the tokenizer).

    A run brings its own [quant] section; a Hugging Face folder gets the defaults.
    """
    if (source / "config.json").is_file():
        config = load_config(source)
        return config, resolve(QuantSettings()), HFCheckpoint(source, config).tensor, source
    checkpoint = find_checkpoint(source)
    cfg = load_run_config(["--config", str(checkpoint / "config.toml")])
    config = load_model_config(cfg)
    model = MoEDecoder(config)
    load_model_weights(checkpoint, model)
    parameters = dict(model.named_parameters())
    return config, resolve(cfg.quant), lambda name: parameters[name].detach(), Path(cfg.model.tokenizer)


@torch.no_grad()
def export(kind: str, config: ModelConfig, spec: QuantSpec, read: Read, out: Path) -> None:
    """Write the folder; one parameter at a time is in memory (of q, k, v: three).

    Raises:
        UserError: a parameter is not finite, or the format cannot hold this model. Nothing is written then.
    """
    for name in parameter_shapes(config):
        require_finite(name, read(name).bfloat16(), f"export to {out}")
    if kind == "bf16":
        save_hf(out, config, ((name, read(name)) for name in parameter_shapes(config)))
        return
    check_trained(kind, spec)
    ignored = ["lm_head", "*.mlp.gate", *([] if "attention" in spec.targets else ["*.self_attn.*"])]
    ignored += [f"*.layers.{layer}.*" for layer in sorted(bf16_layers(spec.bf16_layers, config.num_layers))]
    if "experts" not in spec.targets:
        raise UserError("the NVFP4 formats need quantized experts; add 'experts' to quant.targets or use --format bf16")
    if not config.qk_norm:
        raise UserError("no other engine has a class for a model without qk_norm; only --format bf16 writes one")
    named, settings = (modelopt, modelopt_config) if kind == "nvfp4-modelopt" else (compressed, compressed_config)
    tensors = (
        pair
        for name, tensor in packed_parameters(config, spec, read)
        for matrix, values in matrices(config, name, tensor)
        for pair in (named(matrix, values) if isinstance(values, QuantizedTensor) else [(matrix, values)])
    )
    write_folder(out, tensors, {**config.to_hf(), "torch_dtype": "bfloat16", "quantization_config": settings(ignored)})


def check_trained(kind: str, spec: QuantSpec) -> None:
    """UserError unless the learner trained weights in the format of an export: no other 4-bit policy was trained."""
    trained = spec.learner_weights
    if trained == EXPORTS[kind]:
        return
    can = [name for name, format in EXPORTS.items() if format in ("bf16", trained)]
    raise UserError(
        f"--format {kind} writes {EXPORTS[kind]} weights, but the learner of this run trained {trained} weights, so "
        f"that policy was never trained; use --format {' or '.join(can)}"
    )


def packed_parameters(config: ModelConfig, spec: QuantSpec, read: Read) -> Iterator[tuple[str, Tensor]]:
    """(parameter name, packed or bf16 tensor) in model order: the bytes of the learner's `quantized_weights`."""
    with torch.device("meta"):
        model = MoEDecoder(config)
    plain = spec.unquantized_layers(model)
    members = {
        name: list(group.members) for group in sharing_groups(model, spec.targets, plain) for name in group.members
    }
    ready: dict[str, QuantizedTensor] = {}
    for name, _ in model.named_parameters():
        if name not in members:
            yield name, read(name).bfloat16()
            continue
        if name not in ready:
            group = {member: read(member) for member in members[name]}
            ready |= pack_group(group, spec.learner_weights, spec.rule(spec.learner_weights))
        yield name, ready.pop(name)


def matrices(config: ModelConfig, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Fused experts to one matrix each, under their names on disk."""
    if not expert_names(name, 0):
        yield name, tensor
        return
    for expert in range(config.num_experts):
        parts = expert_names(name, expert)
        if not isinstance(tensor, QuantizedTensor):
            yield from zip(parts, tensor[expert].chunk(len(parts)), strict=True)
            continue
        scale = tensor.block_scale.view(torch.uint8)
        g = tensor.global_scale[expert].reshape(()) if tensor.global_scale is not None else None
        halves = zip(*(t[expert].chunk(len(parts)) for t in (tensor.packed, scale)), strict=True)
        for part, (packed, scale) in zip(parts, halves, strict=True):
            yield part, tensor.with_parts(packed, scale.view(tensor.block_scale.dtype), g)


def modelopt(name: str, weight: QuantizedTensor) -> list[tuple[str, Tensor]]:
    """The tensors of one matrix in NVIDIA ModelOpt's format."""
    assert weight.global_scale is not None
    return [(name, weight.packed), (f"{name}_scale", weight.block_scale), (f"{name}_scale_2", weight.global_scale)]


def compressed(name: str, weight: QuantizedTensor) -> list[tuple[str, Tensor]]:
    """The tensors of one matrix in compressed-tensors' format, whose global scale is the encoding one."""
    assert weight.global_scale is not None
    encode = weight.global_scale.reciprocal().reshape(1)
    if not torch.equal(encode.reciprocal(), weight.global_scale.reshape(1)):
        raise UserError("compressed-tensors stores 1 / g, which is exact for quant.global_scale = 'pow2' alone")
    return [
        (f"{name}_packed", weight.packed),
        (f"{name}_scale", weight.block_scale),
        (f"{name}_global_scale", encode),
    ]


def modelopt_config(ignored: list[str]) -> dict[str, Any]:
    return {
        "quant_method": "modelopt",
        "quant_algo": "W4A16_NVFP4",
        "group_size": FORMATS["nvfp4"].block,
        "ignore": ignored,
    }


def compressed_config(ignored: list[str]) -> dict[str, Any]:
    weights = {
        "num_bits": 4,
        "type": "float",
        "strategy": "tensor_group",
        "group_size": FORMATS["nvfp4"].block,
        "symmetric": True,
        "dynamic": False,
    }
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    patterns = [f"re:{re.escape(name).replace(re.escape('*'), '.*')}$" if "*" in name else name for name in ignored]
    return {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": patterns,
    }


if __name__ == "__main__":
    main(sys.argv[1:])
