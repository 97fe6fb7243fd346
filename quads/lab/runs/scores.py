"""`python -m quads.lab scores --runs RUN...`: trained policies under other rollout precisions than their own.

A run's own evaluation judges the policy and the precision that it is rolled out with at once. Here the last checkpoint
of each run answers the same held-out prompts, with the same seeds, under each of `--rollouts`:

    own      what the run was trained with
    bf16     nothing quantized: the master weights as they are
    w4a16    4-bit weights, plain activations: what a learner with weight QDQ (qat, quads) optimizes
    ...      any other rollout precision

A policy that is good in bf16 and bad at its own precision has a bad rollout; one that is bad in both has learned
little. `start` is the model that the runs start from. Everything runs in the native engine. pass@1 is over all sources'
prompts together; errors are standard errors over prompts, those of differences over prompts compared with themselves.

RUN is a folder of train.py that holds a checkpoint (`--checkpoint.final true`); ARM_seedK, as `lab recipes` names them,
makes K a seed of ARM. The runs must be of one model and one task.
"""

import argparse
import concurrent.futures
import dataclasses
import multiprocessing
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure

from quads.assemble import build_engine, build_model, build_rewards, request_seeds
from quads.checks import DTYPES, load_model_config
from quads.run.checkpoint import find_checkpoint, load_model_weights
from quads.config import Config, load_config
from quads.distributed import choose_device
from quads.errors import UserError
from quads.lab import style
from quads.lab.results import config_argv, markdown, progress, provenance, write_result
from quads.lab.subject import as_learner
from quads.config.options import whole
from quads.quant.recipes import PRECISIONS, QuantSpec, resolve
from quads.rl.scores import evaluate, standard_error
from quads.rl.grading import Grading
from quads.data.tasks import build_task
from quads.data.tokenizer import Tokenizer
from quads.rollout.sync import sync
from quads.types import Sampling

HELP = "trained policies under other rollout precisions: is the policy good and the rollout bad, or both?"

START = "start"
SEED_PURPOSE = "scores"

Cells = Sequence[tuple["Policy", str]]  # a policy and the rollout precision that judges it


@dataclass(frozen=True, eq=False)
class Policy:
    """The weights of a run's last checkpoint, or those that runs start from (folder None)."""

    arm: str
    seed: int
    folder: Path | None
    cfg: Config

    @classmethod
    def of_run(cls, folder: Path, overrides: Sequence[str]) -> "Policy":
        """Raises UserError for a folder without config or checkpoint."""
        if not (folder / "config.toml").is_file():
            raise UserError(f"{folder} has no config.toml; name folders of train.py")
        find_checkpoint(folder)
        cfg = load_config(config_argv(str(folder / "config.toml"), overrides))
        named = re.fullmatch(r"(.+)_seed(\d+)", folder.name)
        return cls(named[1], int(named[2]), folder, cfg) if named else cls(folder.name, cfg.train.seed, folder, cfg)

    def spec(self, rollout: str) -> QuantSpec:
        """The settings of the engine that judges the policy; where nothing is compensated, the keys of the residual say nothing."""
        own = resolve(self.cfg.quant)
        precision = own.rollout if rollout == "own" else rollout
        spec = replace(own, learner_weights="bf16", learner_activations="bf16", rollout=precision)
        plain = QuantSpec("bf16", "bf16", "bf16")
        if precision != "w4a4_residual":
            spec = replace(spec, residual_sites=plain.residual_sites, ratio=plain.ratio, selection=plain.selection)
        return spec


@dataclass(frozen=True)
class Judged:
    """One policy under one precision. Example: `Judged([0.5, 1.0], 0.25)`"""

    scores: list[float]  # pass@1 of each prompt, all sources in order
    truncated: float  # share of responses that did not end


def check_alike(policies: Sequence[Policy]) -> None:
    """UserError unless model, task and rollout lengths of all are those of the first."""
    first = policies[0].cfg
    for policy in policies[1:]:
        for name in ("model", "task", "sources", "reward", "rollout"):
            if getattr(policy.cfg, name) != getattr(first, name):
                raise UserError(
                    f"{policy.folder}: [{name}] differs from that of {policies[0].folder}; compare runs of one config"
                )


@torch.no_grad()
def judge(spec: QuantSpec, policies: Sequence[Policy], prompts: int, samples: int) -> list[Judged]:
    """The policies under one engine."""
    cfg = policies[0].cfg
    device, dtype = choose_device(cfg.train.device, 0), DTYPES[cfg.model.dtype]
    model_config, tokenizer = load_model_config(cfg), Tokenizer(cfg.model.tokenizer)
    rewards = build_rewards(cfg)
    rewards.check()
    task = build_task(
        cfg.task, cfg.sources, rewards.rewards, tokenizer, cfg.train.seed, cfg.rollout.max_prompt_tokens
    )
    examples = task.eval_set(prompts)
    seeds = request_seeds(cfg.train.seed, SEED_PURPOSE, range(len(examples)), samples)
    sampling = Sampling(cfg.rollout.max_new_tokens, cfg.eval.temperature, tokenizer.eos_ids)
    native = replace(cfg, rollout=replace(cfg.rollout, engine="native"))
    engine = build_engine(native, model_config, spec, dtype, device)
    judged: list[Judged] = []
    try:
        for policy in policies:
            master = build_model(cfg, model_config, device)
            if policy.folder is not None:
                load_model_weights(policy.folder, master)
            sync(as_learner(master, spec), engine, spec, version=len(judged))
            engine.wake()
            grading = Grading(rewards.submit, tokenizer.decode_batch, tokenizer.eos_ids, examples, truncated=True)
            results = evaluate(engine.generate, grading, samples, sampling, seeds)
            scores = [value for result in results for value in result.pass_at_1_prompts]
            judged.append(Judged(scores, sum(r.truncated_frac * r.prompts for r in results) / len(scores)))
            progress(f"{policy.arm} seed {policy.seed}, {spec.rollout}: {statistics.fmean(scores):.3f}")
    finally:
        rewards.close()
        engine.close()
    return judged


def judge_all(cells: Cells, prompts: int, samples: int, jobs: int) -> list[Judged]:
    """One a cell. Cells of one engine are judged one after the other by one process, or by
    several where that keeps `jobs` of them busy."""
    by_spec: dict[QuantSpec, list[Policy]] = {}
    for policy, rollout in cells:
        of_spec = by_spec.setdefault(policy.spec(rollout), [])
        if policy not in of_spec:  # "own" may be another of the precisions
            of_spec.append(policy)
    share = -(-sum(map(len, by_spec.values())) // jobs)
    work = [(s, p[i : i + share]) for s, p in by_spec.items() for i in range(0, len(p), share)]
    if jobs == 1:
        parts = [judge(spec, of_spec, prompts, samples) for spec, of_spec in work]
    else:
        context = multiprocessing.get_context("spawn")  # a forked process cannot use a GPU that its parent has used
        with concurrent.futures.ProcessPoolExecutor(jobs, context) as pool:
            futures = [pool.submit(judge, spec, of_spec, prompts, samples) for spec, of_spec in work]
            parts = [future.result() for future in futures]
    judged = {
        (spec, policy): result
        for (spec, of_spec), part in zip(work, parts, strict=True)
        for policy, result in zip(of_spec, part, strict=True)
    }
    return [judged[policy.spec(rollout), policy] for policy, rollout in cells]


def rows_of(cells: Cells, judged: Sequence[Judged]) -> list[dict[str, Any]]:
    """One row a cell. `over_own`: pass@1 less that at the run's own precision, and its error."""
    own_scores = {p: result.scores for (p, rollout), result in zip(cells, judged, strict=True) if rollout == "own"}
    rows = []
    for (policy, rollout), result in zip(cells, judged, strict=True):
        scores = result.scores
        row: dict[str, Any] = {"arm": policy.arm, "seed": policy.seed, "rollout": rollout}
        row |= {
            "precision": policy.spec(rollout).rollout,
            "pass@1": statistics.fmean(scores),
            "error": standard_error(scores),
        }
        row["truncated"] = result.truncated
        own = own_scores.get(policy)
        if own is not None and rollout != "own":
            differences = [a - b for a, b in zip(scores, own, strict=True)]
            row |= {"over_own": statistics.fmean(differences), "over_own_error": standard_error(differences)}
        rows.append(row)
    return rows


def means(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, list[float]]]:
    """arm -> rollout -> pass@1 of each seed."""
    result: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        result.setdefault(row["arm"], {}).setdefault(row["rollout"], []).append(row["pass@1"])
    return result


def tables(data: dict[str, Any]) -> str:
    """Markdown: pass@1, means over seeds, behind them the seeds."""
    lines = []
    for arm, of_arm in means(data["rows"]).items():
        own = next(row["precision"] for row in data["rows"] if row["arm"] == arm)
        cells = []
        for rollout in data["rollouts"]:
            values = of_arm.get(rollout, [])
            each = f" ({', '.join(f'{v:.3f}' for v in values)})" if len(values) > 1 else ""
            cells.append(f"{statistics.fmean(values):.3f}{each}" if values else "-")
        lines.append([arm, own if arm != START and "own" in data["rollouts"] else "-", *cells])
    return markdown(["policy", "own precision", *data["rollouts"]], lines)


def figure(data: dict[str, Any]) -> Figure:
    """Bars: a group for each policy, a colour for each precision."""
    fig, axes = style.new_figure(width=9.6)
    of_arms = means(data["rows"])
    series = {r: [statistics.fmean(of_arm.get(r, [0.0])) for of_arm in of_arms.values()] for r in data["rollouts"]}
    style.grouped_bars(axes[0], list(of_arms), series, style.SEQUENCE)
    style.finish(axes[0], "Trained policies under other rollout precisions", "", "pass@1, held out")
    style.legend_below(fig, axes[0], len(data["rollouts"]))
    return fig


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m quads.lab scores",
        description=HELP,
        epilog="--section.key value overrides the runs' config, as in train.py.",
        allow_abbrev=False,
    )
    parser.add_argument("--runs", nargs="+", type=Path, required=True, help="folders of train.py with a checkpoint")
    parser.add_argument("--rollouts", default="own,bf16,w4a16", help="comma-separated (default: own,bf16,w4a16)")
    parser.add_argument("--prompts", type=whole(1), default=512, help="held-out prompts, all sources (default: 512)")
    parser.add_argument("--samples", type=whole(1), default=2, help="responses to each (default: 2)")
    parser.add_argument("--jobs", type=whole(1), default=1, help="processes that judge at the same time (default: 1)")
    parser.add_argument("--out", type=Path, default=Path("lab"), help="folder for JSON, table and PNG (default: lab)")
    parser.add_argument("--name", default="scores", help="of these files (default: scores)")
    args, overrides = parser.parse_known_args(argv)
    rollouts = list(dict.fromkeys(name for name in args.rollouts.split(",") if name))
    unknown = [name for name in rollouts if name != "own" and name not in PRECISIONS]
    if unknown or not rollouts:
        raise UserError(f"--rollouts {args.rollouts}: name own or {', '.join(PRECISIONS)}")
    runs = [Policy.of_run(folder, overrides) for folder in args.runs]
    check_alike(runs)
    start = Policy(START, runs[0].seed, None, runs[0].cfg)
    cells = [(start, rollout) for rollout in rollouts if rollout != "own"]
    cells += [(run, rollout) for run in runs for rollout in rollouts]
    judged = judge_all(cells, args.prompts, args.samples, args.jobs)
    rows = rows_of(cells, judged)
    data = {"prompts": len(judged[0].scores), "samples": args.samples, "rollouts": rollouts, "rows": rows}
    data["policies"] = {f"{p.arm}_seed{p.seed}": dataclasses.asdict(p.cfg.quant) for p in runs}
    text = tables(data)
    about = provenance("scores", argv, runs[0].cfg, sorted({policy.seed for policy in runs}))
    path = write_result(args.out, args.name, about, data)
    path.with_suffix(".md").write_text(text + "\n", encoding="utf-8")
    style.save(figure(data), path.with_suffix(".png"))
    print(f"{text}\n\nwrote {path}, .md and .png")
