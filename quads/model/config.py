"""The shape of a model: what a Hugging Face config.json says, and the architectures that can be had by name."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quads.errors import UserError
from quads.json_file import read_object
from quads.model.config_json import checked_fields

# Without the qk-norm no published class has this layout, so such a folder carries a model type of its own.
HF_MODEL_TYPE = {True: "qwen3_moe", False: "quads_moe"}
HF_ARCHITECTURE = {True: "Qwen3MoeForCausalLM", False: "QuadsMoeForCausalLM"}


@dataclass(frozen=True)
class ParameterCounts:
    """Numbers of parameters: of one layer, of one of its experts (w13, w2), and of the embedding or the output head."""

    qkv: int
    o: int
    norms: int
    router: int
    w13: int
    w2: int
    head: int

    @property
    def attention(self) -> int:
        return self.qkv + self.o

    @property
    def expert(self) -> int:
        return self.w13 + self.w2


@dataclass(frozen=True)
class ModelConfig:
    """Qwen3-MoE compatible decoder. Every layer is attention and a mixture of experts.

    Example: `ModelConfig(vocab_size=512, hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16,
    moe_intermediate_size=32, num_experts=8, top_k=2)`
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    moe_intermediate_size: int
    num_experts: int
    top_k: int
    norm_topk_prob: bool = True  # gates of the chosen experts sum to one
    qk_norm: bool = True  # RMSNorm over each head of q and k before RoPE
    rope_theta: float = 1e6
    rms_norm_eps: float = 1e-6
    tie_embeddings: bool = False
    max_position: int = 40960  # longest sequence the model is meant for; nothing is allocated from it
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        sizes = (
            "vocab_size hidden_size num_layers num_heads num_kv_heads head_dim moe_intermediate_size num_experts top_k"
        )
        for name in sizes.split():
            if getattr(self, name) < 1:
                raise UserError(f"model config: {name} is {getattr(self, name)}; it must be at least 1")
        if self.num_heads % self.num_kv_heads:
            raise UserError(
                f"model config: {self.num_heads} heads cannot share {self.num_kv_heads} key-value heads evenly; "
                "num_attention_heads must be a multiple of num_key_value_heads"
            )
        if self.head_dim % 2:
            raise UserError(f"model config: head_dim is {self.head_dim}; rotary embeddings need an even number")
        if self.top_k > self.num_experts:
            raise UserError(
                f"model config: {self.top_k} experts per token out of {self.num_experts}; at most all of them"
            )

    @property
    def router_learns(self) -> bool:
        """False where the gates do not depend on the router: one expert a token with a gate normalized to 1."""
        return self.num_experts > 1 and not (self.top_k == 1 and self.norm_topk_prob)

    @classmethod
    def from_hf(cls, raw: dict[str, Any], where: str = "config.json") -> "ModelConfig":
        """Reads the fields of a Hugging Face config, checked as config_json.py says. `where` names the file.

        Raises:
            UserError: a field is missing, wrong, contradicted, or asks for what this decoder does not do.
        """
        fields = checked_fields(raw, where, list(HF_MODEL_TYPE.values()))
        heads, hidden = fields["num_attention_heads"], fields["hidden_size"]
        eos = fields.get("eos_token_id")
        try:
            return cls(
                vocab_size=fields["vocab_size"],
                hidden_size=hidden,
                num_layers=fields["num_hidden_layers"],
                num_heads=heads,
                num_kv_heads=fields["num_key_value_heads"],
                head_dim=hidden // heads if fields.get("head_dim") is None else fields["head_dim"],
                moe_intermediate_size=fields["moe_intermediate_size"],
                num_experts=fields["num_experts"],
                top_k=fields["num_experts_per_tok"],
                # An absent key means the default of transformers' Qwen3MoeConfig, which is not always ours.
                norm_topk_prob=fields.get("norm_topk_prob", False),
                qk_norm=fields["model_type"] == HF_MODEL_TYPE[True],
                rope_theta=float(fields.get("rope_theta", 10000.0)),
                rms_norm_eps=float(fields.get("rms_norm_eps", 1e-6)),
                tie_embeddings=fields.get("tie_word_embeddings", False),
                max_position=fields.get("max_position_embeddings", 32768),
                eos_token_ids=() if eos is None else tuple(eos) if isinstance(eos, list) else (eos,),
            )
        except UserError as error:  # how fields bind each other
            raise UserError(f"{where}: {error}") from None

    def to_hf(self) -> dict[str, Any]:
        """The config.json that transformers' Qwen3MoeForCausalLM and vLLM load (with `qk_norm`; see HF_MODEL_TYPE)."""
        return {
            "architectures": [HF_ARCHITECTURE[self.qk_norm]],
            "model_type": HF_MODEL_TYPE[self.qk_norm],
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "moe_intermediate_size": self.moe_intermediate_size,
            "num_experts": self.num_experts,
            "num_experts_per_tok": self.top_k,
            "norm_topk_prob": self.norm_topk_prob,
            "rope_theta": self.rope_theta,
            "rms_norm_eps": self.rms_norm_eps,
            "tie_word_embeddings": self.tie_embeddings,
            "max_position_embeddings": self.max_position,
            "eos_token_id": self.eos_token_ids[0] if len(self.eos_token_ids) == 1 else list(self.eos_token_ids) or None,
            # Fixed by this layout; written because readers take other values for granted.
            "intermediate_size": self.moe_intermediate_size,
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "use_sliding_window": False,
            "sliding_window": None,
            "router_aux_loss_coef": 0.0,
            "initializer_range": 0.02,
            "use_cache": True,
        }

    def parts(self) -> "ParameterCounts":
        """Parameters by what they belong to. The only place that knows the shapes of a layer by heart."""
        return ParameterCounts(
            qkv=self.hidden_size * self.head_dim * (self.num_heads + 2 * self.num_kv_heads),
            o=self.hidden_size * self.head_dim * self.num_heads,
            norms=2 * self.hidden_size + (2 * self.head_dim if self.qk_norm else 0),
            router=self.num_experts * self.hidden_size,
            w13=2 * self.hidden_size * self.moe_intermediate_size,
            w2=self.hidden_size * self.moe_intermediate_size,
            head=self.vocab_size * self.hidden_size,
        )

    def num_parameters(self) -> tuple[int, int]:
        """(all parameters, those that one token meets)."""
        p = self.parts()
        embeddings = p.head * (1 if self.tie_embeddings else 2)
        shared = embeddings + self.hidden_size + self.num_layers * (p.attention + p.norms + p.router)
        layers = self.num_layers * p.expert
        return shared + layers * self.num_experts, shared + layers * self.top_k

    def train_flops(self, lengths: Iterable[int]) -> float:
        """Model FLOPs of forward and backward over sequences of so many tokens; what is computed again is not counted.

        A token: 6 for each parameter that it meets (not the embedding, a table). A pair of tokens of which one attends
        to the other: 12 for each channel of each head of each layer; a sequence of L tokens has L * L / 2.
        """
        sizes = list(lengths)
        table = 0 if self.tie_embeddings else self.parts().head  # a tied one is the output head, too
        active = self.num_parameters()[1] - table
        attention = 12 * self.num_layers * self.num_heads * self.head_dim
        return 6.0 * active * sum(sizes) + attention * sum(size * size for size in sizes) / 2


ARCHITECTURES: dict[str, ModelConfig] = {
    # A few hundred thousand parameters: learns small tasks on one CPU core.
    "tiny": ModelConfig(
        vocab_size=512,
        hidden_size=64,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        moe_intermediate_size=64,
        num_experts=8,
        top_k=2,
        rope_theta=1e4,
        max_position=512,
    ),
    # 25.5B parameters, 2.9B active.
    "moe25b_a3b": ModelConfig(
        vocab_size=151936,
        hidden_size=2048,
        num_layers=40,
        num_heads=32,
        num_kv_heads=4,
        head_dim=128,
        moe_intermediate_size=768,
        num_experts=128,
        top_k=8,
        eos_token_ids=(151645,),
    ),
    # The published Qwen3-30B-A3B: 30.5B parameters, 3.3B active.
    "qwen3_30b_a3b": ModelConfig(
        vocab_size=151936,
        hidden_size=2048,
        num_layers=48,
        num_heads=32,
        num_kv_heads=4,
        head_dim=128,
        moe_intermediate_size=768,
        num_experts=128,
        top_k=8,
        eos_token_ids=(151645,),
    ),
}


def load_config(folder: str | Path) -> ModelConfig:
    """Reads config.json of a Hugging Face folder. Raises UserError for a missing, broken or incompatible file."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise UserError(
            f"no model at {folder}: {path} does not exist; give a folder with config.json and safetensors files (of a "
            "model on the Hugging Face hub: `hf download NAME --local-dir FOLDER` makes one)"
        )
    return ModelConfig.from_hf(read_object(path), str(path))
