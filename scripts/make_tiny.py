"""Make the checkpoint that configs/tiny_quads.toml starts from: a small MoE that half knows how to add.

    python scripts/make_tiny.py --out assets/tiny_moe [--seed 0]

A few minutes on one CPU core. Trains a tokenizer on the prompts of two reasoning-gym tasks, then a 3-layer MoE from
random weights on worked answers. In the last part of the rows a share of WRONG are wrong, as in any text that nobody
checked: the model has learned to add and then to err.

Two channels of every norm start at OUTLIER instead of 1: trained language models look like that from inside (a handful
of channels far larger than the rest), and it is what 4-bit activations suffer from.
"""

import argparse
import json
import math
import time
from pathlib import Path

import reasoning_gym
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from quads.model.attention import PackedContext
from quads.model.config import ModelConfig
from quads.model.hf import save_hf
from quads.model.logprobs import token_logprobs
from quads.model.model import MoEDecoder

TASKS = {  # name -> (difficulty, share of the training rows)
    "chain_sum": ({"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}, 0.98),
    "gsm_symbolic": ({}, 0.02),
}
EOS = "<|endoftext|>"
CHECKED, WRONG = 0.9, 0.7  # share of rows before the first wrong answer, and of wrong ones after it
OUTLIER, OUTLIER_CHANNELS = 6.0, 2
BATCH, STEPS, PEAK_LR, WARMUP = 256, 900, 5e-3, 50


def rows(seed: int, count: int) -> list[tuple[str, str, str]]:
    """(task, prompt, answer) in a fixed shuffled order."""
    generator = torch.Generator().manual_seed(seed)
    drawn = []
    for name, (difficulty, share) in TASKS.items():
        dataset = reasoning_gym.create_dataset(name, seed=seed, size=math.ceil(count * share), **difficulty)
        drawn += [(name, row["question"], row["answer"]) for row in dataset]
    return [drawn[i] for i in torch.randperm(len(drawn), generator=generator).tolist()]


def spoil(answer: str, generator: torch.Generator) -> str:
    """`answer` with one of its digits replaced by another."""
    places = [i for i, character in enumerate(answer) if character.isdigit()]
    place = places[int(torch.randint(len(places), (), generator=generator))]
    digit = (int(answer[place]) + int(torch.randint(1, 10, (), generator=generator))) % 10
    return f"{answer[:place]}{digit}{answer[place + 1 :]}"


def train_tokenizer(texts: list[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE in which every digit is a token of its own."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[EOS], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def plant_outliers(model: MoEDecoder, generator: torch.Generator) -> None:
    """Some channels of the norms in front of attention and experts start OUTLIER times larger."""
    with torch.no_grad():
        for layer in model.model.layers:
            for norm in (layer.input_layernorm, layer.post_attention_layernorm):
                channels = torch.randperm(norm.weight.shape[0], generator=generator)[:OUTLIER_CHANNELS]
                norm.weight[channels] = OUTLIER


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--stop-at", type=float, default=0.35, help="sampled accuracy on fresh problems at which to stop"
    )
    parser.add_argument("--max-steps", type=int, default=3000)
    args = parser.parse_args()
    generator = torch.Generator().manual_seed(args.seed)
    start = time.time()

    data = rows(args.seed, BATCH * STEPS)
    tokenizer = train_tokenizer([f"{prompt} {answer}" for _, prompt, answer in data[:20_000]], 512)
    config = ModelConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=64,
        num_layers=3,
        num_heads=2,
        num_kv_heads=1,
        head_dim=32,  # the smallest that vLLM's CPU attention has
        moe_intermediate_size=64,
        num_experts=8,
        top_k=2,
        rope_theta=1e4,
        max_position=512,
        eos_token_ids=(tokenizer.token_to_id(EOS),),
    )
    model = MoEDecoder(config)
    model.init_weights(generator)
    plant_outliers(model, generator)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {time.time() - start:.0f} s")
    train(model, tokenizer, data, args.seed, generator, start)
    save(model, tokenizer, args.out)


def encode(tokenizer: Tokenizer, batch: list[tuple[str, str, str]], eos: int) -> list[tuple[list[int], list[int]]]:
    prompts = tokenizer.encode_batch([prompt for _, prompt, _ in batch])
    answers = tokenizer.encode_batch([answer for _, _, answer in batch])
    return [(p.ids, [*a.ids, eos]) for p, a in zip(prompts, answers, strict=True)]


def answer_logprobs(model: MoEDecoder, pairs: list[tuple[list[int], list[int]]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs of all answer tokens, and the row each belongs to."""
    tokens, predict, targets, row = [], [], [], []
    for i, (prompt, answer) in enumerate(pairs):
        first = len(tokens) + len(prompt) - 1
        tokens += prompt + answer
        predict += range(first, first + len(answer))
        targets += answer
        row += [i] * len(answer)
    context = PackedContext.build([len(p) + len(a) for p, a in pairs])
    hidden = model(torch.tensor(tokens), context)
    logprobs, _ = token_logprobs(hidden[predict], model.output_weight(), torch.tensor(targets), 1.0, 4096)
    return logprobs, torch.tensor(row)


@torch.no_grad()
def right_probability(model: MoEDecoder, pairs: list[tuple[list[int], list[int]]]) -> float:
    """Mean probability that a sampled answer is exactly the right one: what pass@1 at temperature 1 estimates."""
    logprobs, row = answer_logprobs(model, pairs)
    return float(torch.zeros(len(pairs)).index_add_(0, row, logprobs).exp().mean())


def train(
    model: MoEDecoder,
    tokenizer: Tokenizer,
    data: list[tuple[str, str, str]],
    seed: int,
    generator: torch.Generator,
    start: float,
) -> None:
    """One pass of AdamW over the rows, on the tokens of the answers; linear decay to zero."""
    eos = tokenizer.token_to_id(EOS)
    held_out = rows(seed + 1_000_000, 1000)
    tests = {name: encode(tokenizer, [r for r in held_out if r[0] == name], eos) for name in TASKS}
    wrong = torch.rand(len(data), generator=generator) < WRONG
    wrong[: int(CHECKED * len(data))] = False
    data = [
        (name, prompt, spoil(answer, generator) if bad and answer.strip("-").isdigit() else answer)
        for (name, prompt, answer), bad in zip(data, wrong.tolist(), strict=True)
    ]
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LR, betas=(0.9, 0.98), weight_decay=0.01)
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = PEAK_LR * min((step + 1) / WARMUP, 1.0 - step / STEPS)
        logprobs, _ = answer_logprobs(model, encode(tokenizer, data[step * BATCH : (step + 1) * BATCH], eos))
        loss = -logprobs.mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 50 == 49:
            right = {name: right_probability(model, pairs) for name, pairs in tests.items()}
            shown = "  ".join(f"{name} {value:.3f}" for name, value in right.items())
            seconds = time.time() - start
            print(f"step {step + 1:4d}  loss {loss.item():.3f}  right: {shown}  {seconds:.0f} s", flush=True)


def save(model: MoEDecoder, tokenizer: Tokenizer, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    save_hf(out, model.config, model)
    tokenizer.save(str(out / "tokenizer.json"))
    settings = {"eos_token": EOS, "tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


if __name__ == "__main__":
    main()
