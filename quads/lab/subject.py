"""What an analysis looks at: one checkpoint, and responses that were sampled from it once.

The responses are drawn by the native engine without quantization (or under the config's rollout, `sampler="config"`).
Afterwards the tokens are fixed: every precision is asked for the log-probs of the very same tokens.

Shapes: T packed tokens of all sequences, N response tokens.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from quads.assemble import build_engine, build_model, build_rewards, request_seeds
from quads.checks import DTYPES, check_context, check_vocabulary, load_model_config
from quads.config import Config, load_config
from quads.config.options import whole
from quads.data.tasks import build_task
from quads.data.tokenizer import Tokenizer
from quads.distributed import choose_device
from quads.errors import UserError
from quads.lab.results import config_argv, config_parser, progress
from quads.model.model import MoEDecoder
from quads.quant.convert import convert_learner
from quads.quant.masters import requantize
from quads.quant.recipes import QuantSpec, resolve
from quads.rollout.sync import sync
from quads.run.checkpoint import load_model_weights
from quads.types import Sampling

SEED_PURPOSE = "lab"  # the responses of an analysis differ from those of any training step


@dataclass
class Sequences:
    """Prompts with their responses, laid end to end in groups of whole sequences."""

    prompts: list[list[int]]
    responses: list[list[int]]
    sampled_logprobs: Tensor  # float64 [N], as the sampling engine reported them, decoding token by token
    temperature: float

    def chunks(self, max_tokens: int) -> Iterator[tuple[Tensor, list[int], Tensor]]:
        """(tokens int64 [T], lengths, response rows bool [T]) of at most `max_tokens` tokens, or one sequence.

        A row is a response row if the token after it is a response token. The last token of a sequence is never fed.
        """
        group: list[int] = []
        size = 0
        for i, (prompt, response) in enumerate(zip(self.prompts, self.responses, strict=True)):
            length = len(prompt) + len(response) - 1
            if group and size + length > max_tokens:
                yield self._chunk(group)
                group, size = [], 0
            group.append(i)
            size += length
        yield self._chunk(group)

    def _chunk(self, group: list[int]) -> tuple[Tensor, list[int], Tensor]:
        tokens, lengths, rows = [], [], []
        for i in group:
            prompt, response = self.prompts[i], self.responses[i]
            tokens += [*prompt, *response[:-1]]
            lengths.append(len(prompt) + len(response) - 1)
            rows += [False] * (len(prompt) - 1) + [True] * len(response)
        return torch.tensor(tokens), lengths, torch.tensor(rows)

    @property
    def targets(self) -> Tensor:
        """int64 [N]: all response tokens, in the order of `chunks`."""
        return torch.tensor([token for response in self.responses for token in response])

    @property
    def starts(self) -> list[int]:
        """Where each sequence begins among the packed tokens."""
        lengths = [len(p) + len(r) - 1 for p, r in zip(self.prompts, self.responses, strict=True)]
        return [sum(lengths[:i]) for i in range(len(lengths))]

    @property
    def num_tokens(self) -> int:
        """Tokens of a forward over everything."""
        return sum(len(p) + len(r) - 1 for p, r in zip(self.prompts, self.responses, strict=True))


@dataclass
class Subject:
    """One checkpoint with its sequences. `master` holds fp32 weights and is never converted."""

    cfg: Config
    spec: QuantSpec
    master: MoEDecoder
    tokenizer: Tokenizer
    device: torch.device
    dtype: torch.dtype  # compute dtype of the learner
    sequences: Sequences
    facts: dict[str, object]  # what a result states about the batch
    layer: int  # that a heat map shows


def subject_parser(name: str, help: str) -> argparse.ArgumentParser:
    """`config_parser` with the options that choose checkpoint and batch."""
    parser = config_parser(name, help)
    parser.add_argument("--checkpoint", default="", help="run or checkpoint folder whose weights replace the config's")
    parser.add_argument("--prompts", type=whole(1), default=32, help="held-out prompts (default: 32)")
    parser.add_argument("--samples", type=whole(1), default=4, help="responses to each (default: 4)")
    parser.add_argument(
        "--batch-tokens",
        type=whole(1),
        default=4096,
        help="tokens of one forward, which share one set of residual channels",
    )
    parser.add_argument(
        "--sampler", choices=("bf16", "config"), default="bf16", help="rollout precision that draws the responses"
    )
    return parser


@torch.no_grad()
def build_subject(args: argparse.Namespace, overrides: list[str], native: bool = True, layer: int = -1) -> Subject:
    """Load the checkpoint and draw the responses, once, with the native engine or with the config's.

    Args:
        layer: the one to show, from 0; -1: the middle one.

    Raises:
        UserError: for what does not fit, as train.py does, and for a layer that the model does not have.
    """
    cfg = load_config(config_argv(args.config, overrides))
    spec = resolve(cfg.quant)
    device, dtype = choose_device(cfg.train.device, 0), DTYPES[cfg.model.dtype]
    model_config = load_model_config(cfg)
    if layer >= model_config.num_layers:
        raise UserError(f"--layer {layer}: the model has layers 0 to {model_config.num_layers - 1}")
    tokenizer = Tokenizer(cfg.model.tokenizer)
    check_vocabulary(tokenizer, model_config)
    check_context(cfg, model_config, tokenizer)
    readers = build_rewards(cfg).rewards
    task = build_task(cfg.task, cfg.sources, readers, tokenizer, cfg.train.seed, cfg.rollout.max_prompt_tokens)
    master = build_model(cfg, model_config, device)
    if args.checkpoint:
        load_model_weights(Path(args.checkpoint), master)
    examples = task.eval_set(args.prompts)
    sampler = replace(spec, rollout="bf16") if args.sampler == "bf16" else spec
    prompts = [example.prompt_ids for example in examples]
    num_responses = len(prompts) * args.samples
    engine_name = "native" if native else cfg.rollout.engine
    rollout = replace(cfg.rollout, engine=engine_name, max_batch=min(cfg.rollout.max_batch, num_responses))
    engine = build_engine(replace(cfg, rollout=rollout), model_config, sampler, dtype, device)
    sync(as_learner(master, sampler), engine, sampler, version=0)
    seeds = request_seeds(cfg.train.seed, SEED_PURPOSE, range(len(prompts)), args.samples)
    sampling = Sampling(cfg.rollout.max_new_tokens, cfg.rollout.temperature, tokenizer.eos_ids)
    groups = engine.generate(prompts, args.samples, sampling, seeds)
    engine.close()
    completions = [completion for group in groups for completion in group]
    sequences = Sequences(
        [prompt for prompt in prompts for _ in range(args.samples)],
        [completion.token_ids for completion in completions],
        torch.tensor([value for completion in completions for value in completion.logprobs], dtype=torch.float64),
        cfg.rollout.temperature,
    )
    facts: dict[str, object] = {
        "model": cfg.model.path or cfg.model.arch,
        "checkpoint": args.checkpoint,
        "dtype": cfg.model.dtype,
        "layers": model_config.num_layers,
        "experts": model_config.num_experts,
        "prompts": len(prompts),
        "responses": num_responses,
        "response_tokens": len(sequences.targets),
        "forward_tokens": sequences.num_tokens,
        "selection_batch_tokens": min(args.batch_tokens, sequences.num_tokens),
        "sampler": sampler.rollout,
        "seed": cfg.train.seed,
    }
    progress(f"{num_responses} responses to {len(prompts)} prompts, {len(sequences.targets)} response tokens")
    shown = model_config.num_layers // 2 if layer < 0 else layer
    return Subject(cfg, spec, master, tokenizer, device, dtype, sequences, facts, shown)


def as_learner(master: MoEDecoder, spec: QuantSpec) -> MoEDecoder:
    """The model as the learner of `spec` computes it. Shares the master's parameters."""
    with torch.device("meta"):
        model = MoEDecoder(master.config, master.dtype)
    model.load_state_dict(master.state_dict(), assign=True)
    model.requires_grad_(False).eval()
    convert_learner(model, spec)
    requantize(model)
    return model
