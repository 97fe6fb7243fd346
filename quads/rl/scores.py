"""What an evaluation finds: pass@1 averaged over several samples a prompt, with its standard error, per source; pass@k.

`evaluate` asks an engine and grades; everything else here is arithmetic on its results, and text of them.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from quads.rl.grading import Grading
from quads.types import Completion, Sampling

Generate = Callable[..., list[list[Completion]]]  # an engine's `generate`


@dataclass(frozen=True)
class JudgedPrompt:
    """One prompt's responses, reduced to what the results need.

    Example: `JudgedPrompt("chain_sum", [1.0, 0.0], [True, False], [4, 8], [False, True], [False, False])`
    """

    source: str
    scores: list[float]
    right: list[bool]  # score 1 or more; of several weighted rewards the first one's
    lengths: list[int]  # tokens
    truncated: list[bool]
    ungraded: list[bool]  # the grader hung or died: no verdict, which is not a wrong one


@dataclass(frozen=True)
class EvalResult:
    """One source's scores. Rates are fractions, lengths are tokens. Responses without a verdict are left out of scores,
    and a prompt that has no other is left out of their means."""

    source: str
    prompts: int
    samples: int
    pass_at_1: float  # share of right responses (score 1), averaged over samples and prompts
    standard_error: float  # of pass_at_1, over prompts (samples of one prompt are not independent)
    score_mean: float  # with the partial credit that some scorers give
    pass_at_k: dict[int, float]  # k -> probability that one of k samples is right, unbiased
    truncated_frac: float
    length_mean: float
    ungraded: int  # responses whose grader hung or died
    pass_at_1_prompts: list[float]  # of each prompt, in the order of the test set; NaN for one without any verdict


def pass_at_k(num_samples: int, num_right: int, k: int) -> float:
    """Probability that k of `num_samples` draws, without replacement, hold a right one: 1 - C(n-c, k) / C(n, k)."""
    if num_samples - num_right < k:
        return 1.0
    return 1.0 - math.comb(num_samples - num_right, k) / math.comb(num_samples, k)


def evaluate(
    generate: Generate,
    grading: Grading,
    samples: int,
    sampling: Sampling,
    seeds: list[int],
    gather: Callable[[list[JudgedPrompt]], list[JudgedPrompt]] = list,
) -> list[EvalResult]:
    """Draw `samples` responses to every example of `grading`, grade them, and sum up per source.

    Args:
        grading: fresh; a response that was cut is graded too, as it may hold the answer already.
        seeds: one a response, prompt by prompt (len(examples) * samples).
        gather: makes the judged prompts of all processes from those of this one, where each has its own examples.
    """
    prompts = [example.prompt_ids for example in grading.examples]
    completions = generate(prompts, samples, sampling, seeds, on_group=grading.add)
    graded = grading.finish()
    judged = gather(
        [
            JudgedPrompt(
                example.source,
                rewards,
                [reward >= 1.0 for reward in correctness],
                [len(c.token_ids) for c in group],
                [c.finish_reason == "length" for c in group],
                ungraded,
            )
            for example, group, rewards, correctness, ungraded in zip(
                grading.examples,
                completions,
                graded.rewards_PG.tolist(),
                graded.correctness_PG.tolist(),
                graded.ungraded_PG.tolist(),
                strict=True,
            )
        ]
    )
    sources = dict.fromkeys(prompt.source for prompt in judged)
    return [_summarize(source, [prompt for prompt in judged if prompt.source == source]) for source in sources]


def _summarize(source: str, judged: list[JudgedPrompt]) -> EvalResult:
    scores_PS = torch.tensor([prompt.scores for prompt in judged])
    num_prompts, num_samples = scores_PS.shape
    graded_PS = ~torch.tensor([prompt.ungraded for prompt in judged])
    right_PS = torch.tensor([prompt.right for prompt in judged]) & graded_PS
    num_graded_P, num_right_P = graded_PS.sum(dim=1), right_PS.sum(dim=1)
    per_prompt_P = num_right_P.double() / num_graded_P  # 0 / 0 is NaN
    counts = list(zip(num_graded_P.tolist(), num_right_P.tolist(), strict=True))
    at_k = {
        k: [pass_at_k(graded, right, k) for graded, right in counts if graded >= k]
        for k in (1, 2, 4, 8, 16, 32, 64)
        if k <= num_samples
    }
    return EvalResult(
        source=source,
        prompts=num_prompts,
        samples=num_samples,
        pass_at_1=float(per_prompt_P[num_graded_P > 0].mean()),
        standard_error=standard_error(per_prompt_P.tolist()),
        score_mean=float(scores_PS[graded_PS].mean()),
        pass_at_k={k: sum(values) / len(values) for k, values in at_k.items() if values},
        truncated_frac=sum(sum(prompt.truncated) for prompt in judged) / scores_PS.numel(),
        length_mean=sum(sum(prompt.lengths) for prompt in judged) / scores_PS.numel(),
        ungraded=int((~graded_PS).sum()),
        pass_at_1_prompts=per_prompt_P.tolist(),
    )


def standard_error(values: Sequence[float]) -> float:
    """The standard error of the mean of independent values, such as one a prompt. NaN values are left out; NaN for a
    single value."""
    known = [value for value in values if not math.isnan(value)]
    return statistics.stdev(known) / math.sqrt(len(known)) if len(known) > 1 else math.nan


def eval_metrics(results: Sequence[EvalResult]) -> dict[str, float]:
    """Metrics of a training step: `eval/pass@1` over all prompts, and each source's when there are several."""
    prompts = sum(r.prompts for r in results)
    graded = {r.source: sum(not math.isnan(value) for value in r.pass_at_1_prompts) for r in results}
    right = sum(r.pass_at_1 * graded[r.source] for r in results if graded[r.source])
    metrics = {
        "eval/pass@1": right / sum(graded.values()) if any(graded.values()) else math.nan,
        "eval/truncated_frac": sum(r.truncated_frac * r.prompts for r in results) / prompts,
        "eval/length_mean": sum(r.length_mean * r.prompts for r in results) / prompts,
        "eval/ungraded": sum(r.ungraded for r in results),
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
        if r.ungraded:
            lines.append(f"  {r.ungraded} responses got no verdict (their grader hung or died) and are left out")
    return "\n".join(lines)


def format_side_by_side(results: dict[str, list[EvalResult]]) -> str:
    """pass@1 of each source under each rollout precision, and the difference of each later one to the first.

    The error of a difference is over prompts, each compared with itself.
    """
    first, *others = results
    head = [f"{rollout:>18}" for rollout in results] + [f"{f'{rollout} - {first}':>24}" for rollout in others]
    title = "pass@1 side by side; a difference compares each prompt with itself"
    lines = [title, " ".join([f"{'source':<24} {'prompts':>7} {'samples':>7}", *head])]
    for rows in zip(*results.values(), strict=True):
        errors = [standard_error(r.pass_at_1_prompts) for r in rows]
        cells = [f"{f'{r.pass_at_1:.4f} ± {error:.4f}':>18}" for r, error in zip(rows, errors, strict=True)]
        base_P = torch.tensor(rows[0].pass_at_1_prompts)
        for r in rows[1:]:
            difference_P = torch.tensor(r.pass_at_1_prompts) - base_P
            cells.append(f"{f'{float(difference_P.nanmean()):+.4f} ± {standard_error(difference_P.tolist()):.4f}':>24}")
        lines.append(" ".join([f"{rows[0].source:<24} {rows[0].prompts:>7} {rows[0].samples:>7}", *cells]))
    return "\n".join(lines)
