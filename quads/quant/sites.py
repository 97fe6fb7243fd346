"""The matrix inputs that can be quantized, each with all its names. Everything else of a model never is.

A site is one input of a matmul, quantized once for all the weights that it multiplies. Those weights share one global
scale where their format has any: {q, k, v} of a layer; {gate, up} of one expert; o, and each expert's down, alone.

    site  parameters of the model    matrices on disk         linear layer in vLLM  its members
    qkv   q_proj, k_proj, v_proj     the same                 qkv_proj              q, k, v
    o     o_proj                     the same                 o_proj
    w13   gate_up_proj, all experts  gate_proj, up_proj each  gate_up_proj          w1, w3 of an expert
    w2    down_proj, all experts     down_proj each           down_proj             w2 of an expert
"""

from dataclasses import dataclass


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
