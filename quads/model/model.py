"""A Qwen3-MoE compatible decoder in plain, single-device PyTorch; the same code learns and samples.

    h = embed(tokens)
    h = h + o_proj(attention(rope(norm(q_proj(n))), rope(norm(k_proj(n))), v_proj(n)))      n = rms_norm(h)
    h = h + moe(rms_norm(h))                                                                for each layer
    logits = lm_head(rms_norm(h))

Tokens come packed, [T] without a batch dimension; the context says which of them form a sequence (see attention.py).
Parameters are the fp32 master weights, under Hugging Face's names with fused experts; each module casts its own weight
to the dtype of its activations, `MoEDecoder.dtype`: bf16, fp32, or float64 where rounding must not depend on the batch.
Norms, the router and the logits compute in fp32, or in float64 if the activations are.

Shapes: T tokens, H hidden, V vocabulary, N query heads, G key-value heads, D head_dim, A experts a token, P = D / 2.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from quads.model.attention import Context
from quads.model.config import ModelConfig
from quads.model.linear import Linear
from quads.model.logprobs import output_logits
from quads.model.moe import MoE

INIT_STD = 0.02


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype for sums over a row that must not lose bits: fp32, or float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight, rounded to the activation dtype before the product, as Qwen3 does it."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size))

    def forward(self, x: Tensor) -> Tensor:
        x_wide = x.to(wide(x.dtype))
        normed = x_wide * torch.rsqrt(x_wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight.to(x.dtype) * normed.to(x.dtype)


def rope_tables(positions_T: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin [T, 1, P] of the rotary angles, rounded to `dtype`.

    The angles are always computed in fp32, as in transformers and vLLM: at position 1000 an fp32 angle is off by
    6e-5, so a side that computed them in float64 would not agree with one that did not.
    """
    exponent_P = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions_T.device) / head_dim
    angles_TP = positions_T.to(torch.float32)[:, None] * (1.0 / theta**exponent_P)
    return angles_TP.cos().to(dtype).unsqueeze(1), angles_TP.sin().to(dtype).unsqueeze(1)


def apply_rope(x_TND: Tensor, cos_T1P: Tensor, sin_T1P: Tensor) -> Tensor:
    """Rotates dimension p with dimension p + D/2 (the "half" layout of Hugging Face)."""
    first, second = x_TND.to(wide(x_TND.dtype)).chunk(2, dim=-1)
    rotated = (first * cos_T1P - second * sin_T1P, second * cos_T1P + first * sin_T1P)
    return torch.cat(rotated, dim=-1).to(x_TND.dtype)


class Attention(nn.Module):
    """Grouped-query attention. q, k and v are quantized from the same input, once each, by their own `Linear`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = Linear(config.hidden_size, q_size, "qkv")
        self.k_proj = Linear(config.hidden_size, kv_size, "qkv")
        self.v_proj = Linear(config.hidden_size, kv_size, "qkv")
        self.o_proj = Linear(q_size, config.hidden_size, "o")
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None

    @staticmethod
    def attend(ctx: Context, layer: int, q_TND: Tensor, k_TGD: Tensor, v_TGD: Tensor) -> Tensor:
        """A compiler is kept out of this: contexts differ in how many sequences they hold, and it would specialize."""
        return ctx.attend(layer, q_TND, k_TGD, v_TGD)

    def forward(self, x_TH: Tensor, rope: tuple[Tensor, Tensor], ctx: Context, layer: int) -> Tensor:
        q_TND, k_TGD, v_TGD = (
            proj(x_TH, ctx.live).unflatten(-1, (-1, self.head_dim)) for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.q_norm is not None and self.k_norm is not None:
            q_TND, k_TGD = self.q_norm(q_TND), self.k_norm(k_TGD)
        out_TND = self.attend(ctx, layer, apply_rope(q_TND, *rope), apply_rope(k_TGD, *rope), v_TGD)
        return self.o_proj(out_TND.flatten(1), ctx.live)


class DecoderLayer(nn.Module):
    """Attention and experts, each behind a norm and added to the residual stream."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MoE(
            config.hidden_size, config.moe_intermediate_size, config.num_experts, config.top_k, config.norm_topk_prob
        )

    def forward(self, h_TH: Tensor, rope: tuple[Tensor, Tensor], ctx: Context) -> Tensor:
        h_TH = h_TH + self.self_attn(self.input_layernorm(h_TH), rope, ctx, self.layer)
        replay_TA = None if ctx.routed_experts is None else ctx.routed_experts[:, self.layer]
        x_TH = self.post_attention_layernorm(h_TH)
        y_TH, ids_TA = self.mlp(x_TH, ctx.live, replay_TA)
        if ctx.record_routing:
            ctx.recorded[self.layer] = ids_TA if replay_TA is None else self.mlp.gate.own_choice(x_TH)
        return h_TH + y_TH


class Trunk(nn.Module):
    """Embedding, layers and final norm: what Hugging Face calls `model`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        # Given a weight, nn.Embedding does not spend time on random values of its own.
        embedding_VH = torch.empty(config.vocab_size, config.hidden_size)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, _weight=embedding_VH)
        self.layers = nn.ModuleList(DecoderLayer(config, layer) for layer in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class MoEDecoder(nn.Module):
    """The model. Parameters are made on the current default device (meta included), without values until `init_weights`
    or a load. `dtype` is that of the activations.

    `lm_head` is absent when embeddings are tied; `output_weight()` is the matrix [V, H] of the logits either way.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.config = config
        self.dtype = dtype
        self.model = Trunk(config)
        self.lm_head = None if config.tie_embeddings else Linear(config.hidden_size, config.vocab_size, "lm_head")

    def forward(self, tokens_T: Tensor, ctx: Context) -> Tensor:
        """Hidden states [T, H] after the final norm, in `self.dtype`."""
        h_TH = self.model.embed_tokens(tokens_T).to(self.dtype)
        rope = rope_tables(ctx.positions_T, self.config.head_dim, self.config.rope_theta, self.dtype)
        for layer in self.model.layers:
            h_TH = layer(h_TH, rope, ctx)
        return self.model.norm(h_TH)

    def output_weight(self) -> Tensor:
        """The weight [V, H] that turns hidden states into logits (a master weight, not yet cast)."""
        return self.model.embed_tokens.weight if self.lm_head is None else self.lm_head.weight

    def logits(self, hidden_TH: Tensor) -> Tensor:
        """Logits [T, V] in fp32 (float64 for float64 hidden states). For training use `logprobs.token_logprobs`."""
        return output_logits(hidden_TH, self.output_weight().to(hidden_TH.dtype))

    @torch.no_grad()
    def init_weights(
        self, generator: torch.Generator | None = None, write: Callable[[Tensor, Tensor], Any] = Tensor.copy_
    ) -> None:
        """Normal weights of std 0.02, norms at one. Draws on the generator's device, in parameter order.

        `write(parameter, values)` stores the values; a sharded model keeps its part of them.
        """
        for parameter in self.parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0)
                continue
            device = parameter.device if generator is None else generator.device
            values = torch.empty(parameter.shape, device=device).normal_(0.0, INIT_STD, generator=generator)
            write(parameter, values)
