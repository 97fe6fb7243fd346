"""`python -m quads.lab upcycle smollm2 OUT`: a dense Llama-like model becomes a mixture of experts that quads trains.

Each MLP turns into slices x replicas experts, and a token goes to slices x active of them:

    replicas R   whole copies of the MLP (slices = 1). The gates of the chosen experts sum to one, so any choice of
                 copies gives the dense output.
    slices S     an expert holds 1/S of the MLP's width, its down projection scaled by S. The S slices of a copy
                 share their router row, so they tie and are chosen together; gates of p/S each sum to the dense output.

Before noise the mixture computes what the dense model does, for any router; the command checks that and prints the
largest difference. Then `--noise` breaks the symmetry between copies: Gaussian, that fraction of each matrix's standard
deviation. Routers start Gaussian with std 0.02. Slices stay tied until training moves the router: prefer replicas where
the mixture is trained, slices where many thin experts are wanted for an analysis.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from quads.config.options import real, whole
from quads.data.tokenizer import Tokenizer
from quads.errors import UserError
from quads.lab.smollm2.dense import read_dense
from quads.lab.smollm2.dense_gguf import DenseModel
from quads.model.attention import PackedContext
from quads.model.config import ModelConfig
from quads.model.hf import save_hf
from quads.model.model import INIT_STD, MoEDecoder

HELP = "turn a dense Llama-like model into a mixture of experts (SmolLM2 from PyPI, a GGUF file, or a folder)"

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
CHECK_TEXT = "The quick brown fox jumps over the lazy dog. 12 + 35 = 47, and def f(x): return x * 2"


def mixture_config(dense: ModelConfig, slices: int, replicas: int, active: int) -> ModelConfig:
    """The config of the mixture. Raises UserError for sizes that do not fit."""
    if dense.moe_intermediate_size % slices:
        raise UserError(f"--slices {slices} does not divide the MLP's width {dense.moe_intermediate_size}")
    if not 1 <= active <= replicas:
        raise UserError(f"--active {active} must be between 1 and --replicas {replicas}")
    return replace(
        dense,
        moe_intermediate_size=dense.moe_intermediate_size // slices,
        num_experts=slices * replicas,
        top_k=slices * active,
        norm_topk_prob=True,
    )


def mixture_tensors(
    dense: DenseModel, config: ModelConfig, noise: float, generator: torch.Generator
) -> Iterator[tuple[str, Tensor]]:
    """(parameter name, fp32 value) of the mixture, in no particular order. Experts are replica-major, then slice."""
    slices = dense.shape.moe_intermediate_size // config.moe_intermediate_size
    replicas = config.num_experts // slices
    for name, value in dense.tensors.items():
        if ".mlp." not in name and not (name == "lm_head.weight" and config.tie_embeddings):
            yield name, value
    for layer in range(config.num_layers):
        mlp = f"model.layers.{layer}.mlp"
        gate_IH, up_IH, down_HI = (dense.tensors[f"{mlp}.{part}_proj.weight"] for part in ("gate", "up", "down"))
        gate_SIH, up_SIH = (matrix.unflatten(0, (slices, -1)) for matrix in (gate_IH, up_IH))
        w13 = torch.cat([gate_SIH, up_SIH], dim=1).repeat(replicas, 1, 1)
        w2 = down_HI.unflatten(1, (slices, -1)).transpose(0, 1).mul(slices).repeat(replicas, 1, 1)
        yield f"{mlp}.experts.gate_up_proj", _disturbed(w13, noise, generator)
        yield f"{mlp}.experts.down_proj", _disturbed(w2, noise, generator)
        router_RH = torch.randn(replicas, config.hidden_size, generator=generator) * INIT_STD
        yield f"{mlp}.gate.weight", router_RH.repeat_interleave(slices, dim=0)


def _disturbed(weight: Tensor, noise: float, generator: torch.Generator) -> Tensor:
    return weight + noise * weight.std() * torch.randn(weight.shape, generator=generator) if noise else weight


def build(config: ModelConfig, tensors: Iterator[tuple[str, Tensor]]) -> MoEDecoder:
    """A model holding these tensors, fp32."""
    model = MoEDecoder(config)
    model.load_state_dict(dict(tensors), strict=True, assign=True)
    return model


@torch.no_grad()
def logits_of(model: MoEDecoder, ids: list[int]) -> Tensor:
    """fp32 [T, V] for one sequence."""
    return model.logits(model(torch.tensor(ids), PackedContext.build([len(ids)])))


def upcycle(dense: DenseModel, out: Path, args: argparse.Namespace) -> dict[str, float]:
    """Writes the folder; returns the largest logit differences to the dense model before and after the noise."""
    config = mixture_config(dense.shape, args.slices, args.replicas, args.active)
    out.mkdir(parents=True, exist_ok=True)
    for name, text in dense.tokenizer_files.items():
        (out / name).write_text(text, encoding="utf-8")
    ids = Tokenizer(out).encode(CHECK_TEXT)
    one_expert = mixture_config(dense.shape, 1, 1, 1)
    reference = logits_of(build(one_expert, mixture_tensors(dense, one_expert, 0.0, _seeded(args.seed))), ids)

    def difference(noise: float) -> tuple[float, MoEDecoder]:
        model = build(config, mixture_tensors(dense, config, noise, _seeded(args.seed)))
        return float((logits_of(model, ids) - reference).abs().max()), model

    before, model = difference(0.0)
    after = before
    if args.noise:
        after, model = difference(args.noise)
    save_hf(out, config, model, DTYPES[args.dtype])
    facts = {
        "source": dense.source,
        "slices": args.slices,
        "replicas": args.replicas,
        "active": args.active,
        "noise": args.noise,
        "seed": args.seed,
        "dtype": args.dtype,
        "logit_difference_before_noise": before,
        "logit_difference_after_noise": after,
        "logit_abs_max": float(reference.abs().max()),
    }
    (out / "upcycle.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    return {"before": before, "after": after, "scale": facts["logit_abs_max"]}


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m quads.lab upcycle", description=HELP)
    parser.add_argument("source", help="smollm2, a .gguf file, or a Hugging Face folder of a dense model")
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument("--slices", type=whole(1), default=1, help="cut each copy of the MLP into this many experts")
    parser.add_argument("--replicas", type=whole(1), default=4, help="copies of the MLP")
    parser.add_argument("--active", type=whole(1), default=2, help="copies a token goes to")
    parser.add_argument(
        "--noise", type=real(low=0.0), default=0.02, help="noise on expert weights, as a fraction of their std"
    )
    parser.add_argument("--seed", type=whole(0), default=0, help="of noise and routers")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="bfloat16", help="stored precision")
    args = parser.parse_args(argv)
    dense = read_dense(args.source)
    config = mixture_config(dense.shape, args.slices, args.replicas, args.active)
    total, met = config.num_parameters()
    result = upcycle(dense, args.out, args)
    print(
        f"{dense.source}: {config.num_layers} layers, {config.num_experts} experts of {config.moe_intermediate_size}, "
        f"top-{config.top_k}; {total / 1e6:.1f}M parameters, {met / 1e6:.1f}M a token\n"
        f"largest logit difference to the dense model: {result['before']:.2e} before noise, {result['after']:.2e} "
        f"after (logits reach {result['scale']:.1f})\nwritten: {args.out}"
    )
