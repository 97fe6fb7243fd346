"""`python -m quads.lab warmup --config CONFIG --model.path START --out FOLDER`: supervised training before RL.

GRPO learns from groups of which some responses are right and some wrong. A small pretrained model answers most tasks
never, and in no form that a scorer reads; after some hundred steps on worked answers it is right sometimes. The prompts
are worded as in the run (template, chat template); the loss is the mean over the tokens of each answer and the EOS
behind it, then over answers.

Rows come from the training stream of the config, a million steps behind those that RL will see; held-out prompts are
left out by the task. `right` is the mean probability of the reference answer of held-out prompts, which is pass@1 at
temperature 1 where one answer alone is right. Training stops at `--stop-at`, or after `--steps`.

Shapes: N answer tokens of a micro-batch, S its rows.
"""

import argparse
import shutil
import time
from pathlib import Path

import torch
from torch import Tensor

from quads.assemble import build_model, build_rewards
from quads.checks import DTYPES, check_vocabulary, load_model_config
from quads.config import load_config
from quads.config.options import real, whole
from quads.data.tasks import Task, build_task
from quads.data.tokenizer import Tokenizer
from quads.distributed import choose_device
from quads.errors import UserError
from quads.lab.results import config_argv, config_parser, markdown, number, progress, provenance, write_result
from quads.lab.smollm2.dense import TOKENIZER_FILES
from quads.model.attention import PackedContext
from quads.model.hf import save_hf
from quads.model.logprobs import token_logprobs
from quads.model.model import MoEDecoder
from quads.rl.optimizer import build_adamw, clip_gradients, learning_rate, set_learning_rate
from quads.rl.packing import Microbatch, Sample, pack
from quads.types import Completion, Example

HELP = "supervised training on a task's reference answers, so that RL starts where some responses are right"

FIRST_BATCH = 1_000_000  # of the training stream: far behind the prompts of RL
BETAS, EPS, WEIGHT_DECAY, MAX_GRAD_NORM = (0.9, 0.98), 1e-8, 0.01, 1.0
CHUNK = 2048  # tokens whose logits exist at once


def answer_text(example: Example) -> str:
    """The reference answer. Raises UserError for a source whose rows hold tests in its place."""
    answer = example.answer["answer"] if isinstance(example.answer, dict) else example.answer
    if not isinstance(answer, str | int | float):
        raise UserError(f"[sources.{example.source}] has no answers to train on")
    return str(answer)


def as_sample(example: Example, tokenizer: Tokenizer) -> Sample:
    """The prompt with its answer and EOS, as packing takes it."""
    ids = [*tokenizer.encode(answer_text(example)), tokenizer.eos_ids[0]]
    return Sample(example.prompt_ids, Completion(ids, [0.0] * len(ids), "stop", 0), advantage=1.0)


def answer_logprobs(model: MoEDecoder, batch: Microbatch) -> Tensor:
    """Log-probs of the answer tokens, fp32 [N]."""
    hidden_TH = model(batch.tokens_T, PackedContext.build(list(batch.lengths), batch.tokens_T.device))
    logprobs_N, _ = token_logprobs(hidden_TH[batch.predict_N], model.output_weight(), batch.targets_N, 1.0, CHUNK)
    return logprobs_N


@torch.no_grad()
def right_probability(model: MoEDecoder, samples: list[Sample], microbatch_tokens: int, device: torch.device) -> float:
    """Mean probability of the whole reference answer."""
    total = 0.0
    for batch in (mb.to(device) for mb in pack(samples, microbatch_tokens, "token")[0]):
        logprobs_N = answer_logprobs(model, batch).double()
        sums_S = torch.zeros(len(batch.lengths), dtype=torch.float64, device=device)
        total += float(sums_S.index_add_(0, batch.sequence_N, logprobs_N).exp().sum())
    return total / len(samples)


def train(
    model: MoEDecoder, task: Task, tokenizer: Tokenizer, args: argparse.Namespace, microbatch_tokens: int
) -> list[dict[str, float]]:
    """AdamW with a linear warm-up over a tenth of the steps and a linear decay; returns a row for each check."""
    device = next(model.parameters()).device
    held_out: dict[str, list[Sample]] = {}
    for example in task.eval_set(args.prompts):
        held_out.setdefault(example.source, []).append(as_sample(example, tokenizer))
    optimizer = build_adamw(model, args.lr, BETAS, EPS, WEIGHT_DECAY)
    rows: list[dict[str, float]] = []
    started, loss = time.monotonic(), float("nan")
    for step in range(args.steps + 1):
        if step % args.check_every == 0 or step == args.steps:
            right = {name: right_probability(model, s, microbatch_tokens, device) for name, s in held_out.items()}
            mean = sum(right.values()) / len(right)
            rows.append({"step": step, "loss": loss, "right": mean, **{f"right/{k}": v for k, v in right.items()}})
            shown = ", ".join(f"{name} {value:.3f}" for name, value in right.items())
            progress(f"step {step:4d}  loss {loss:.3f}  right: {shown}  {time.monotonic() - started:.0f} s")
            if mean >= args.stop_at:
                break
        if step == args.steps:
            break
        samples = [as_sample(example, tokenizer) for example in task.batch(FIRST_BATCH + step, args.rows)]
        microbatches, denominator = pack(samples, microbatch_tokens, "sample")
        optimizer.zero_grad(set_to_none=True)
        loss_sum = torch.zeros((), device=device)
        for batch in (mb.to(device) for mb in microbatches):
            part = -(answer_logprobs(model, batch) * batch.weights_N).sum() / denominator
            part.backward()
            loss_sum += part.detach()
        clip_gradients(model.parameters(), MAX_GRAD_NORM)
        set_learning_rate(optimizer, learning_rate(step, args.lr, max(1, args.steps // 10), args.steps, "linear"))
        optimizer.step()
        loss = float(loss_sum)
    return rows


def main(argv: list[str]) -> None:
    parser = config_parser("warmup", HELP)
    parser.set_defaults(out=None)
    parser.add_argument("--steps", type=whole(1), default=300, help="at most (default: 300)")
    parser.add_argument("--rows", type=whole(1), default=128, help="prompts in one step (default: 128)")
    parser.add_argument("--lr", type=real(above=0.0), default=1e-4, help="peak learning rate (default: 1e-4)")
    parser.add_argument(
        "--stop-at", type=real(above=0.0), default=1.0, help="`right`, averaged over sources (default: 1, never)"
    )
    parser.add_argument(
        "--check-every", type=whole(1), default=25, help="steps from one check to the next (default: 25)"
    )
    parser.add_argument("--prompts", type=whole(1), default=256, help="held-out prompts of each source (default: 256)")
    args, overrides = parser.parse_known_args(argv)
    if args.out is None:
        raise UserError("give --out FOLDER, for the weights")
    cfg = load_config(config_argv(args.config, overrides))
    device = choose_device(cfg.train.device, 0)
    model_config, tokenizer = load_model_config(cfg), Tokenizer(cfg.model.tokenizer)
    check_vocabulary(tokenizer, model_config)
    readers = build_rewards(cfg).rewards
    task = build_task(cfg.task, cfg.sources, readers, tokenizer, cfg.train.seed, cfg.rollout.max_prompt_tokens)
    model = build_model(cfg, model_config, device)
    rows = train(model, task, tokenizer, args, cfg.rl.microbatch_tokens)

    args.out.mkdir(parents=True, exist_ok=True)
    for name in TOKENIZER_FILES:
        source = Path(cfg.model.tokenizer) / name
        if source.is_file() and source.resolve() != (args.out / name).resolve():
            shutil.copyfile(source, args.out / name)
    save_hf(args.out, model_config, model, DTYPES[cfg.model.dtype])
    settings = {name: value for name, value in vars(args).items() if name != "out"}
    data = {"settings": settings, "start": cfg.model.path or cfg.model.arch, "checks": rows}
    path = write_result(args.out, "warmup", provenance("warmup", argv, cfg, [cfg.train.seed]), data)
    names = [key for key in rows[-1] if key.startswith("right/")]
    lines = [[str(int(row["step"])), number(row["loss"]), *(f"{row[name]:.3f}" for name in names)] for row in rows]
    print(markdown(["step", "loss", *(name.removeprefix("right/") for name in names)], lines))
    print(f"\nwrote {args.out} and {path.name}")
