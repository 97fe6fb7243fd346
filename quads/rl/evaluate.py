"""Evaluation: pass@1 averaged over several samples a prompt, with its standard error, per source; and pass@k.

    python -m quads.rl.evaluate --config configs/tiny_quads.toml --checkpoint runs/tiny_quads [--out eval.json]

judges a checkpoint with the engine and the precision of the config, so that one policy can be judged under several
(`--quant.recipe bf16`, `--quant.rollout w4a4_residual`) side by side.
"""

import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from quads.config import load_config
from quads.distributed import init_distributed
from quads.errors import UserError, main_guard
from quads.types import Completion, Example, Sampling

Generate = Callable[[list[list[int]], int, Sampling, list[int]], list[list[Completion]]]
Score = Callable[[list[tuple[Example, str]]], list[float]]


@dataclass(frozen=True)
class JudgedPrompt:
    """One prompt's responses, reduced to what the results need.

    Example: `JudgedPrompt("chain_sum", [1.0, 0.0], [4, 8], [False, True])`
    """

    source: str
    scores: list[float]
    lengths: list[int]  # tokens
    truncated: list[bool]


@dataclass(frozen=True)
class EvalResult:
    """One source's scores. Rates are fractions, lengths are tokens."""

    source: str
    prompts: int
    samples: int
    pass_at_1: float  # share of right responses (score 1), averaged over samples and prompts
    standard_error: float  # of pass_at_1, over prompts (samples of one prompt are not independent)
    score_mean: float  # with the partial credit that some scorers give
    pass_at_k: dict[int, float]  # k -> probability that one of k samples is right, unbiased
    truncated_frac: float
    length_mean: float


def pass_at_k(num_samples: int, num_right: int, k: int) -> float:
    """Probability that k of `num_samples` draws, without replacement, hold a right one: 1 - C(n-c, k) / C(n, k)."""
    if num_samples - num_right < k:
        return 1.0
    return 1.0 - math.comb(num_samples - num_right, k) / math.comb(num_samples, k)


def evaluate(
    generate: Generate,
    score: Score,
    decode: Callable[[Sequence[int]], str],
    examples: Sequence[Example],
    samples: int,
    sampling: Sampling,
    seeds: list[int],
    gather: Callable[[list[JudgedPrompt]], list[JudgedPrompt]] = list,
) -> list[EvalResult]:
    """Draw `samples` responses to every example, score them, and sum up per source.

    Args:
        generate: an engine's `generate`.
        seeds: one a response, prompt by prompt (len(examples) * samples).
        gather: makes the judged prompts of all processes from those of this one, where each has its own examples.
    """
    completions = generate([e.prompt_ids for e in examples], samples, sampling, seeds)
    graded = [
        (example, decode(strip_stop(c, sampling.stop_token_ids)))
        for example, group in zip(examples, completions, strict=True)
        for c in group
    ]
    scores_PS = torch.tensor(score(graded)).reshape(len(examples), samples).tolist()
    judged = gather(
        [
            JudgedPrompt(
                e.source, scores, [len(c.token_ids) for c in group], [c.finish_reason == "length" for c in group]
            )
            for e, scores, group in zip(examples, scores_PS, completions, strict=True)
        ]
    )
    sources = dict.fromkeys(prompt.source for prompt in judged)
    return [_summarize(source, [prompt for prompt in judged if prompt.source == source]) for source in sources]


def strip_stop(completion: Completion, stop_token_ids: Sequence[int]) -> list[int]:
    """The response's tokens without the stop token that ended it: what is decoded and scored."""
    ids = completion.token_ids
    return ids[:-1] if ids and completion.finish_reason == "stop" and ids[-1] in stop_token_ids else ids


def _summarize(source: str, judged: list[JudgedPrompt]) -> EvalResult:
    scores_PS = torch.tensor([prompt.scores for prompt in judged])
    num_prompts, num_samples = scores_PS.shape
    right_PS = scores_PS >= 1.0
    per_prompt_P = right_PS.double().mean(dim=1)
    error = float(per_prompt_P.std() / math.sqrt(num_prompts)) if num_prompts > 1 else float("nan")
    right_P = right_PS.sum(dim=1).tolist()
    ks = [k for k in (1, 2, 4, 8, 16, 32, 64) if k <= num_samples]
    return EvalResult(
        source=source,
        prompts=num_prompts,
        samples=num_samples,
        pass_at_1=float(per_prompt_P.mean()),
        standard_error=error,
        score_mean=float(scores_PS.mean()),
        pass_at_k={k: sum(pass_at_k(num_samples, c, k) for c in right_P) / num_prompts for k in ks},
        truncated_frac=sum(sum(prompt.truncated) for prompt in judged) / scores_PS.numel(),
        length_mean=sum(sum(prompt.lengths) for prompt in judged) / scores_PS.numel(),
    )


def eval_metrics(results: Sequence[EvalResult]) -> dict[str, float]:
    """Metrics of a training step: `eval/pass@1` over all prompts, and each source's when there are several."""
    prompts = sum(r.prompts for r in results)
    metrics = {
        "eval/pass@1": sum(r.pass_at_1 * r.prompts for r in results) / prompts,
        "eval/truncated_frac": sum(r.truncated_frac * r.prompts for r in results) / prompts,
        "eval/length_mean": sum(r.length_mean * r.prompts for r in results) / prompts,
    }
    if len(results) > 1:
        metrics |= {f"eval/{r.source}/pass@1": r.pass_at_1 for r in results}
    return metrics


def format_table(results: Sequence[EvalResult]) -> str:
    """The results as a text table, one source a line."""
    lines = [f"{'source':<24} {'prompts':>7} {'samples':>7} {'pass@1':>16} {'truncated':>9} {'length':>8}  pass@k"]
    for r in results:
        ks = "  ".join(f"@{k} {value:.3f}" for k, value in r.pass_at_k.items() if k > 1)
        score = f"{r.pass_at_1:.4f} ± {r.standard_error:.4f}"
        counts = f"{r.source:<24} {r.prompts:>7} {r.samples:>7}"
        lines.append(f"{counts} {score:>16} {r.truncated_frac:>9.3f} {r.length_mean:>8.1f}  {ks}")
    return "\n".join(lines)


def take_option(argv: list[str], name: str) -> str:
    """Remove `name VALUE` from a command line and return VALUE, "" when absent."""
    if name not in argv:
        return ""
    at = argv.index(name)
    if at + 1 >= len(argv):
        raise UserError(f"{name} needs a value")
    value = argv[at + 1]
    del argv[at : at + 2]
    return value


@main_guard
def main(argv: list[str]) -> None:
    """Evaluate one checkpoint; see the module's docstring."""
    from quads.assemble import build_parts  # joins rl and rollout: only a command may

    checkpoint, out = take_option(argv, "--checkpoint"), take_option(argv, "--out")
    cfg = load_config(argv)
    with init_distributed(cfg.parallel, cfg.train) as world:
        parts = build_parts(cfg, world, checkpoint=checkpoint)
        if parts is None:  # --dry-run
            return
        try:
            results = parts.evaluate(step=0)
        finally:
            parts.close()
        world.print(format_table(results))
        if out and world.is_main:
            report = {"config": cfg.path, "checkpoint": checkpoint, "results": [asdict(r) for r in results]}
            Path(out).write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
