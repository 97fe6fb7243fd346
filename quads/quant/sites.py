"""The matrix inputs that can be quantized, each with all its names. Everything else of a model never is.

A site is one input of a matmul, quantized once for all the weights that it multiplies. Those weights share one global
scale where their format has any: {q, k, v} of a layer; {gate, up} of one expert; o, and each expert's down, alone.

    site  parameters of the model    matrices on disk         linear layer in vLLM  its members
    qkv   q_proj, k_proj, v_proj     the same                 qkv_proj              q, k, v
    o     o_proj                     the same                 o_proj
    w13   gate_up_proj, all experts  gate_proj, up_proj each  gate_up_proj          w1, w3 of an expert
    w2    down_proj, all experts     down_proj each           down_proj             w2 of an expert
"""

import math
import re
from dataclasses import dataclass

from quads.errors import UserError


@dataclass(frozen=True)
class Site:
    """One row of the table."""

    title: str  # in the banner
    target: str  # the word of [quant] targets that it belongs to
    leaves: tuple[str, ...]  # parameters of the model: the last part of their names, without ".weight"
    matrices: tuple[str, ...]  # names of the same rows in a Hugging Face folder, in row order
    vllm_layer: str  # the last part of the name of the linear layer that vLLM makes of them; w13, w2: in a dense MLP
    vllm_members: tuple[str, ...]  # what vLLM's loaders call its matrices, in row order


SITES = {
    "w13": Site(
        "experts w13 (gate, up)", "experts", ("gate_up_proj",), ("gate_proj", "up_proj"), "gate_up_proj", ("w1", "w3")
    ),
    "w2": Site("experts w2 (down)", "experts", ("down_proj",), ("down_proj",), "down_proj", ("w2",)),
    "qkv": Site(
        "attention q, k, v",
        "attention",
        ("q_proj", "k_proj", "v_proj"),
        ("q_proj", "k_proj", "v_proj"),
        "qkv_proj",
        ("q", "k", "v"),
    ),
    "o": Site("attention o", "attention", ("o_proj",), ("o_proj",), "o_proj", ()),
}
TARGETS = ("experts", "attention")
EXPERT_SITES = {site.leaves[0]: name for name, site in SITES.items() if site.target == "experts"}  # by parameter
SITE_OF_LEAF = {leaf: name for name, site in SITES.items() for leaf in site.leaves}
NEVER = ("router", "embeddings", "norms", "lm_head")


def is_targeted(site: str, targets: tuple[str, ...]) -> bool:
    """Whether a matrix input is quantized, given [quant] targets. False for names that are no site."""
    return site in SITES and SITES[site].target in targets


def site_of_parameter(name: str) -> str:
    """The site of a parameter of the model by its full name, or "" for one that is never quantized."""
    return SITE_OF_LEAF.get(name.removesuffix(".weight").rpartition(".")[2], "")


def read_bf16_layers(word: str) -> tuple[str, float | tuple[int, ...]]:
    """[quant] bf16_layers as ("first" or "last", a share), ("first" or "last", a count) or ("listed", numbers).

    Raises:
        UserError: it says nothing of the kind.
    """
    if word == "none":
        return "listed", ()
    ends = re.fullmatch(r"(first|last) (\d{1,6}|\d{1,2}(?:\.\d{1,3})?%|100%)", word)
    if ends:
        end, amount = ends.groups()
        return end, float(amount[:-1]) / 100 if amount.endswith("%") else (int(amount),)
    if re.fullmatch(r"\d{1,6}( ?, ?\d{1,6})*", word):
        return "listed", tuple(sorted({int(number) for number in word.split(",")}))
    raise UserError(
        f'[quant] bf16_layers = {word!r} names no layers; write "last 15%", "first 2", numbers as in "0, 1, 39", '
        'or "none"'
    )


def bf16_layers(word: str, num_layers: int) -> frozenset[int]:
    """The numbers of the decoder layers that stay unquantized. A share of the layers is rounded up.

    Raises:
        UserError: there is no such layer, or nothing would be quantized.
    """
    where, amount = read_bf16_layers(word)
    if where == "listed":
        assert isinstance(amount, tuple)
        numbers = frozenset(amount)
    else:
        count = amount[0] if isinstance(amount, tuple) else math.ceil(round(amount * num_layers, 6))
        numbers = frozenset(range(count) if where == "first" else range(num_layers - count, num_layers))
    if numbers and (min(numbers) < 0 or max(numbers) >= num_layers):
        raise UserError(f"[quant] bf16_layers = {word!r}: the model has {num_layers} layers, 0 to {num_layers - 1}")
    if len(numbers) == num_layers:
        raise UserError(f'[quant] bf16_layers = {word!r} are all {num_layers} layers; set recipe = "bf16"')
    return numbers


def layer_of(name: str) -> int | None:
    """The number of the decoder layer that a module or parameter belongs to; None outside them.

    >>> layer_of("model.layers.12.mlp.experts"), layer_of("lm_head.weight")
    (12, None)
    """
    found = re.search(r"(?:^|\.)layers\.(\d+)(?:\.|$)", name)
    return int(found.group(1)) if found else None
