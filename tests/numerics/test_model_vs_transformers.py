"""Our decoder against transformers' Qwen3MoeForCausalLM on random weights, in fp32, and folders in both directions.

Tolerance: the project asks for logits equal to 1e-4. Weights are drawn so that logits are of order one to ten and the
router is far from uniform; the differences are summation order, 1e-6 of that.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from quads.model.attention import PackedContext
from quads.model.config import ModelConfig, load_config
from quads.model.hf import load_model, save_hf
from quads.model.model import MoEDecoder
from tests.helpers import assert_bitwise, assert_close

transformers = pytest.importorskip("transformers")

BASE = ModelConfig(
    vocab_size=83,
    hidden_size=40,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    moe_intermediate_size=24,
    num_experts=6,
    top_k=2,
    rope_theta=1e4,
    max_position=128,
    eos_token_ids=(1,),
)
CONFIGS = {
    "base": BASE,
    "gates not renormalised": replace(BASE, norm_topk_prob=False),
    "tied": replace(BASE, tie_embeddings=True),
    # 13 and 27 are no multiple of 4: grouped_mm does not serve them
    "odd sizes": replace(
        BASE, vocab_size=61, hidden_size=27, moe_intermediate_size=13, num_experts=5, top_k=3, head_dim=6
    ),
    "one kv head, every expert": replace(BASE, num_kv_heads=1, top_k=6, rope_theta=1e6, rms_norm_eps=1e-5),
    "no grouping, one expert": replace(BASE, num_kv_heads=4, num_experts=1, top_k=1, num_layers=1),
}
LENGTHS = [7, 1, 23, 12, 12, 3]


def random_model(config: ModelConfig) -> MoEDecoder:
    model = MoEDecoder(config)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(0.0, 0.4, generator=generator)
            if parameter.dim() == 1:
                parameter.add_(1.0)
            if name.endswith("embed_tokens.weight"):
                parameter.mul_(2.5)
    return model


def their_model(folder: Path):
    theirs = transformers.Qwen3MoeForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    if hasattr(theirs, "set_experts_implementation"):  # transformers 5: its default does not take odd sizes
        theirs.set_experts_implementation("eager")
    return theirs


def their_logits(folder: Path, tokens: Tensor, lengths: list[int]) -> Tensor:
    theirs = their_model(folder)
    with torch.no_grad():
        return torch.cat([theirs(part[None]).logits[0] for part in tokens.split(lengths)])


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_of_packed_sequences_equal_transformers(name: str, tmp_path: Path) -> None:
    config = CONFIGS[name]
    model = random_model(config)
    save_hf(tmp_path, config, model, torch.float32)
    tokens = torch.randint(config.vocab_size, (sum(LENGTHS),))
    with torch.no_grad():
        ours = model.logits(model(tokens, PackedContext.build(LENGTHS)))
    theirs = their_logits(tmp_path, tokens, LENGTHS)
    assert theirs.std() > 1.0
    assert_close(ours, theirs, atol=1e-4)


@pytest.mark.parametrize("tied", [False, True])
def test_folder_written_by_transformers_loads(tied: bool, tmp_path: Path) -> None:
    wanted = replace(BASE, tie_embeddings=tied, norm_topk_prob=False)
    hf_config = transformers.Qwen3MoeConfig(**{k: v for k, v in wanted.to_hf().items() if k != "architectures"})
    theirs = transformers.Qwen3MoeForCausalLM(hf_config).eval()
    theirs.save_pretrained(tmp_path)
    config = load_config(tmp_path)
    assert config == wanted
    tokens = torch.randint(config.vocab_size, (20,))
    with torch.no_grad():
        model = load_model(tmp_path)
        ours = model.logits(model(tokens, PackedContext.build([20])))
        assert_close(ours, theirs(tokens[None]).logits[0], atol=1e-4)


def test_gradients_equal_transformers(tmp_path: Path) -> None:
    model = random_model(BASE)
    save_hf(tmp_path, BASE, model, torch.float32)
    theirs = their_model(tmp_path)
    tokens = torch.randint(BASE.vocab_size, (30,))
    model.logits(model(tokens, PackedContext.build([30]))).logsumexp(-1).sum().backward()
    theirs(tokens[None]).logits[0].logsumexp(-1).sum().backward()
    reference = dict(theirs.named_parameters())
    for name, parameter in model.named_parameters():
        expected = reference[name].grad
        # relative to the tensor's largest gradient: fp32 sums in another order through two layers
        assert_close(parameter.grad, expected, atol=2e-5 * float(expected.abs().max()))


def test_saving_in_bf16_rounds_once(tmp_path: Path) -> None:
    model = random_model(BASE)
    save_hf(tmp_path, BASE, model)
    loaded = dict(load_model(tmp_path).named_parameters())
    for name, parameter in model.named_parameters():
        assert_bitwise(loaded[name].detach(), parameter.detach().bfloat16().float())
