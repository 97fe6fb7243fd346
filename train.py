"""GRPO with 4-bit rollouts, in one readable loop.

    torchrun train.py --config configs/tiny_quads.toml [--section.key value ...] [--dry-run] [--help]

One step: sample prompts -> roll out (policy version v), and reward each group while others are still being drawn ->
group advantages -> pack -> learn -> sync the weights (quantized once, shipped as bytes, written in place) -> version
v + 1. Every phase is one call below; what it does is one file away. A run's folder holds config.toml, metrics.jsonl,
samples.jsonl, checkpoints/, tb/ and plots/.
"""

import sys
from contextlib import nullcontext
from pathlib import Path

import torch

from quads.assemble import Parts, build_parts
from quads.config import Config, config_to_toml, load_config
from quads.distributed import Distributed, init_distributed
from quads.errors import main_guard
from quads.plot import plot_runs
from quads.rl.advantage import group_advantages
from quads.rl.grading import part_means
from quads.rl.packing import Sample
from quads.rl.scores import eval_metrics
from quads.rl.updates import merge_updates
from quads.run.checkpoint import Checkpointer, TrainState
from quads.run.folder import check_run_folder
from quads.run.lock import own_folder
from quads.run.measure import mfu
from quads.run.metrics import RunLog, import_wandb
from quads.run.signals import StopRequest


@main_guard
def main(argv: list[str]) -> None:
    cfg = load_config(argv)
    with init_distributed(cfg.parallel, cfg.train) as world:
        check_run_folder(Path(cfg.train.out))
        if cfg.log.wandb_project and world.is_main:
            import_wandb()  # a missing package stops the run now, not after the weights are loaded
        with own_folder(Path(cfg.train.out)) if world.is_main and not cfg.dry_run else nullcontext():
            parts = build_parts(cfg, world)
            if parts is None:
                world.print("dry run: config, data, tokenizer and memory are fine")
                return
            try:
                train(parts.cfg, parts, world)
            finally:
                parts.close()


def train(cfg: Config, parts: Parts, world: Distributed) -> None:
    """All steps: learn, log, evaluate, save; until train.steps, SIGTERM or Ctrl-C."""
    out = Path(cfg.train.out)
    checkpointer = Checkpointer(out / "checkpoints", cfg.checkpoint, config_to_toml(cfg))
    state = checkpointer.resume(parts.learner)
    log = RunLog(out, cfg, state.step, world.device, world.is_main, world.at)
    parts.sync(state.policy_version)
    if state.step >= cfg.train.steps:
        world.print(f"all {cfg.train.steps} steps are done already; raise train.steps to go on")
    healthy = True
    with StopRequest() as stop, checkpointer.naming_the_last():
        while state.step < cfg.train.steps and not stop.requested:
            step = state.step + 1
            metrics, state = train_step(cfg, parts, world, state, log)
            with log.timer("eval"):
                if cfg.eval.every and (step % cfg.eval.every == 0 or step == cfg.train.steps):
                    metrics |= eval_metrics(parts.evaluate(step))
            log.write(step, metrics)
            healthy = metrics["train/skipped_updates"] == 0
            checkpointer.offer(state, parts.learner, healthy)
        checkpointer.offer(state, parts.learner, healthy, last=True)
        checkpointer.wait()
    log.close()
    if world.is_main:
        draw_curves(out)
    world.print(f"ended at step {state.step} of {cfg.train.steps}; metrics, samples, checkpoints, plots are in {out}")


def draw_curves(out: Path) -> None:
    """The run is over and saved: what goes wrong with its picture is said, and changes nothing."""
    try:
        plot_runs([out], out / "plots" / "curves.png")
    except Exception as error:
        print(f"the curves were not drawn ({error}); python -m quads.plot {out} draws them", flush=True)


def train_step(
    cfg: Config, parts: Parts, world: Distributed, state: TrainState, log: RunLog
) -> tuple[dict[str, float], TrainState]:
    """One step of GRPO: returns its metrics and the state after it.

    With several processes each rolls out and rewards its share of the prompts, and trains on a balanced share of all
    responses; suffixes below count this process's prompts until the metrics, which are of all processes.
    """
    step, rl = state.step + 1, cfg.rl
    with log.timer("rollout"):
        batch = parts.task.batch(step - 1, rl.prompts_per_step)
        share = world.share(len(batch))
        examples = [batch[p] for p in share]
        seeds = parts.request_seeds(f"rollout/{step}", share, rl.group_size)
        sampling = parts.sampling(cfg.rollout.temperature, rl.score_centering)
        prompts = [e.prompt_ids for e in examples]
        grading = parts.grading(examples, truncated=False)  # a response that was cut is worth 0, or left out below
        groups = parts.engine.generate(
            prompts, rl.group_size, sampling, seeds, routed_experts=cfg.wants_routes, on_group=grading.add
        )
        parts.engine.sleep()  # its memory is the learner's until the sync
        world.barrier()

    with log.timer("reward"):  # the rest: groups were graded while others were still being drawn
        graded = grading.finish()
        rewards_PG, ungraded_PG = graded.rewards_PG, graded.ungraded_PG
        truncated_PG = torch.tensor([[c.finish_reason == "length" for c in group] for group in groups])
        counted_PG = ~(ungraded_PG | truncated_PG) if rl.truncated == "mask" else ~ungraded_PG
        advantages_PG, zero_spread_P = group_advantages(rewards_PG, rl.advantage, counted_PG)

    with log.timer("learn"):
        trained_PG = counted_PG & ~zero_spread_P[:, None]
        minibatches = []
        for first in range(0, len(batch), rl.minibatch_prompts):
            samples = [
                Sample(
                    examples[i].prompt_ids,
                    groups[i][g],
                    float(advantages_PG[i, g]),
                    trained=bool(trained_PG[i, g]),
                    counted=bool(counted_PG[i, g]),
                )
                for i, p in enumerate(share)
                if first <= p < first + rl.minibatch_prompts
                for g in range(rl.group_size)
            ]
            microbatches, denominator = parts.packer.pack(samples)
            minibatches.append((parts.learner.add_fixed_logprobs(microbatches), denominator))
        updates = [parts.learner.update(*minibatch) for _ in range(rl.epochs) for minibatch in minibatches]

    with log.timer("sync"):
        parts.sync(version=step)  # the version rises last: a completion always names the weights that drew it

    if cfg.log.samples_every and (step == 1 or step % cfg.log.samples_every == 0):
        log.samples(step, parts.tokenizer.decode, examples[: cfg.log.samples], groups, graded.shown())
    lengths_PG = torch.tensor([[float(len(c.token_ids)) for c in group] for group in groups])
    packed = rl.epochs * [length for minibatch, _ in minibatches for mb in minibatch for length in mb.lengths]
    counted = world.gather_objects((sum(packed), parts.model_config.train_flops(packed)))
    num_packed, flops = (sum(of_ranks) for of_ranks in zip(*counted, strict=True))
    utilisation = mfu(flops / world.size / log.seconds("learn"), world.device)
    by_rank = world.gather_objects((rewards_PG, ungraded_PG, lengths_PG, truncated_PG, zero_spread_P))
    rewards_PG, ungraded_PG, lengths_PG, truncated_PG, zero_spread_P = map(torch.cat, zip(*by_rank, strict=True))
    metrics = {
        "reward/mean": float(rewards_PG[~ungraded_PG].mean()),  # no verdict is not 0
        "reward/std": float(rewards_PG[~ungraded_PG].std()),
        "reward/ungraded": int(ungraded_PG.sum()),
        **part_means(world.gather_objects(graded.parts)),
        "response/length_mean": float(lengths_PG.mean()),
        "response/truncated_frac": float(truncated_PG.float().mean()),
        "group/zero_std_frac": float(zero_spread_P.float().mean()),
        **merge_updates(updates, world),
        "policy/version": step,
        "memory/estimate_gib": parts.estimate.total,
        "rollout/tokens_per_s": float(lengths_PG.sum()) / log.seconds("rollout"),
        "learn/tokens_per_s": num_packed / log.seconds("learn"),
        **({} if utilisation is None else {"learn/mfu": utilisation}),
    }
    seen = state.tokens_seen + sum(u.tokens for u in updates)
    return metrics, TrainState(step, step, state.prompts_seen + len(batch), seen)


if __name__ == "__main__":
    main(sys.argv[1:])
