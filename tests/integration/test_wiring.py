"""Every key of [optim], [rl], [rollout], [eval], [quant] and [checkpoint] reaches the place where it acts.

One short run under values unlike every default, with a spy at each place; what a spy saw is compared with the config.
Keys whose effect is a matter of numbers have a test of their own elsewhere, which ELSEWHERE names.
"""

import ast
import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import quads.assemble
import quads.rl.learner
import train
from quads.config import SECTIONS, Config, load_config
from quads.data.tasks import Task
from quads.distributed import derive_seed
from quads.rl.grading import Grading
from quads.rl.learner import Learner
from quads.rollout.native.engine import NativeEngine
from quads.run.checkpoint import Checkpointer
from quads.run.folder import read_rows
from tests.helpers import REPOSITORY
from tests.tiny_run import make_world, options

VALUES: dict[str, Any] = {
    "train__steps": 5,
    "train__seed": 11,
    "rl__prompts_per_step": 6,
    "rl__group_size": 4,
    "rl__minibatch_prompts": 3,
    "rl__epochs": 2,
    "rl__microbatch_tokens": 51,
    "rl__advantage": "group_mean",
    "rl__clip_low": 0.11,
    "rl__clip_high": 0.33,
    "rl__cumulative_ratio_clip": 7.0,
    "rl__loss_average": "token",
    "rl__old_logprobs": "learner",
    "rl__correction": "mis",
    "rl__correction_level": "geometric",
    "rl__correction_cap": 1.25,
    "rl__dual_clip": 3.5,
    "rl__kl_coef": 0.015,
    "rl__truncated": "mask",
    "rl__routing_replay": "true",
    "optim__lr": 2e-3,
    "optim__betas": "0.7,0.8",
    "optim__eps": 1e-4,
    "optim__weight_decay": 0.05,
    "optim__warmup_steps": 2,
    "optim__schedule": "cosine",
    "optim__max_grad_norm": 0.6,
    "rollout__max_batch": 11,
    "rollout__max_prompt_tokens": 7,
    "rollout__max_new_tokens": 5,
    "rollout__temperature": 0.75,
    "rollout__kernel": "reference",
    "rollout__verify_sync": "true",
    "rollout__cuda_graphs": "false",
    "eval__every": 3,
    "eval__prompts": 5,
    "eval__samples": 3,
    "eval__temperature": 1.35,
    "quant__recipe": "quads",
    "quant__targets": "experts",
    "quant__bf16_layers": "1",
    "quant__backward": "high_precision",
    "quant__norm_noise": 0.02,
    "quant__norm_noise_end": 0.003,
    "quant__norm_noise_stages": 4,
    "quant__residual_sites": "w2",
    "quant__residual_ratio": 0.25,
    "quant__residual_scale": 0.75,
    "quant__residual_selection": "token",
    "quant__residual_operand": "folded",
    "quant__global_scale": "amax",
    "checkpoint__every": 2,
    "checkpoint__keep": 1,
    "checkpoint__final": "false",
    "log__samples_every": 1,
    "log__samples": 100,
}

# Keys that this run cannot show, with the test that does.
ELSEWHERE = {
    "rl.score_centering": "tests/integration/test_train_corrections.py::test_the_rollout_is_asked_for_the_candidates",
    "rl.surrogate": "tests/integration/test_train_corrections.py::test_no_two_of_them_train_alike",
    "optim.moments": "tests/unit/test_optimizer.py::test_8bit_moments_stay_near_float32",
    "rollout.engine": "tests/integration/test_vllm_processes.py::test_the_loop_follows_a_moving_policy",
    "rollout.tensor_parallel": "tests/unit/test_rollout_tensor_parallel.py",
    "rollout.gpu_memory_gib": "tests/unit/test_memory.py",
    "quant.learner_weights": "tests/unit/test_quant_recipes.py",
    "quant.learner_activations": "tests/unit/test_quant_recipes.py",
    "quant.rollout": "tests/unit/test_quant_recipes.py",
    "quant.format": "tests/integration/parallel_learner_checks.py",
    "quant.scale_rule": "tests/unit/test_quant_mxfp4.py::test_config_words",
    "quant.four_over_six": "tests/unit/test_quant_four_over_six.py::test_one_key_sets_the_format_and_its_rule",
    "quant.all_gather": "tests/integration/test_parallel.py",
    "checkpoint.resume": "tests/integration/test_train_resume.py::test_a_resumed_run_equals_the_straight_one",
    "checkpoint.async_save": "tests/integration/test_train_recipes.py::test_options_of_the_loop",
}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_world(tmp_path_factory.mktemp("wiring") / "world")


@pytest.fixture(scope="module")
def run(config: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    """A finished run with what its parts were asked for."""
    names = ("generated", "engines", "learners", "losses", "advantages", "saved", "verified", "updates", "gradings")
    names += ("slept", "tasks", "gradients", "noise")
    seen = SimpleNamespace(**{name: [] for name in names})
    with pytest.MonkeyPatch.context() as patch:

        def spy(owner: Any, name: str, note: Callable[..., None]) -> None:
            real = getattr(owner, name)

            def watched(*args: Any, **kwargs: Any) -> Any:
                note(*args, **kwargs)
                return real(*args, **kwargs)

            patch.setattr(owner, name, watched)

        def note_request(self: NativeEngine, prompts: Any, n: int, sampling: Any, seeds: Any, **_: Any) -> None:
            slots = self.decoder.cache.k.shape[1]
            seen.generated.append(SimpleNamespace(prompts=prompts, n=n, sampling=sampling, slots=slots, seeds=seeds))

        def note_update(self: Learner, microbatches: Any, denominator: float) -> None:
            seen.updates.append(
                SimpleNamespace(
                    tokens=[sum(mb.lengths) for mb in microbatches],
                    weights=sum(float(mb.weights_N.sum()) for mb in microbatches),
                    routed=[mb.routed_experts_TLA is not None for mb in microbatches],
                    denominator=denominator,
                )
            )

        def note_loss(logprobs_N: Any, batch: Any, config: Any, denominator: float, *_: Any) -> None:
            seen.losses.append(SimpleNamespace(config=config, old=batch.old_logprobs_N, ref=batch.ref_logprobs_N))

        spy(NativeEngine, "generate", note_request)
        spy(NativeEngine, "__init__", lambda self, *a, **k: seen.engines.append(self))
        spy(Learner, "__init__", lambda self, *a, **k: seen.learners.append(self))
        spy(Learner, "update", note_update)
        spy(quads.rl.learner, "grpo_loss", note_loss)
        spy(train, "group_advantages", lambda rewards, kind, counted: seen.advantages.append((kind, rewards.shape)))

        def note_sync(model: torch.nn.Module, *_: Any, verify: bool, sigma: float, seed: int) -> None:
            seen.verified.append(verify)
            seen.noise.append((sigma, seed))
            seen.gradients.append(any(parameter.grad is not None for parameter in model.parameters()))

        def note_grading(
            self: Grading, submit: Any, decode: Any, stop_ids: Any, examples: Any, truncated: bool
        ) -> None:
            seen.gradings.append((len(examples), truncated))

        spy(quads.assemble, "sync", note_sync)
        spy(quads.assemble, "build_task", lambda *a: seen.tasks.append(a))
        spy(Grading, "__init__", note_grading)
        spy(NativeEngine, "sleep", lambda self: seen.slept.append(len(seen.updates)))
        spy(Checkpointer, "save", lambda self, state, learner: seen.saved.append(state.step))
        out = tmp_path_factory.mktemp("wired")
        words = ["--config", str(config), "--train.out", str(out), *options(**VALUES)]
        train.main(words)
        seen.out, seen.rows, seen.cfg = out, read_rows(out / "metrics.jsonl"), load_config(words)
        yield seen


def trainings(run: SimpleNamespace) -> list[Any]:
    return [call for call in run.generated if call.n == run.cfg.rl.group_size]


def evaluations(run: SimpleNamespace) -> list[Any]:
    return [call for call in run.generated if call.n == run.cfg.eval.samples]


def cosine_rates(steps: int, updates_per_step: int, peak: float, warmup_steps: int) -> list[float]:
    """The rate of the last update of each step."""
    warmup, total = warmup_steps * updates_per_step, steps * updates_per_step
    rates = []
    for update in range(updates_per_step - 1, total, updates_per_step):
        if update < warmup:
            rates.append(peak * (update + 1) / warmup)
        else:
            share = torch.tensor((update - warmup) / (total - warmup), dtype=torch.float64)
            rates.append(float(peak * 0.5 * (1 + torch.cos(torch.pi * share))))
    return rates


# key -> (what was seen, what the config asks for), by a run
PLACES: dict[str, Callable[[SimpleNamespace], tuple[Any, Any]]] = {
    "optim.lr": lambda r: ([row["train/lr"] for row in r.rows], pytest.approx(cosine_rates(5, 4, 2e-3, 2))),
    "optim.warmup_steps": lambda r: (r.rows[0]["train/lr"], pytest.approx(2e-3 * 4 / 8)),
    "optim.schedule": lambda r: (r.rows[-1]["train/lr"], pytest.approx(cosine_rates(5, 4, 2e-3, 2)[-1])),
    "optim.betas": lambda r: ({group["betas"] for group in r.learners[0].optimizer.param_groups}, {(0.7, 0.8)}),
    "optim.eps": lambda r: ({group["eps"] for group in r.learners[0].optimizer.param_groups}, {1e-4}),
    "optim.weight_decay": lambda r: ([g["weight_decay"] for g in r.learners[0].optimizer.param_groups], [0.05, 0.0]),
    "optim.max_grad_norm": lambda r: (r.learners[0].optim.max_grad_norm, 0.6),
    "rl.prompts_per_step": lambda r: ([len(call.prompts) for call in trainings(r)], [6] * 5),
    "rl.group_size": lambda r: ({tuple(shape) for _, shape in r.advantages}, {(6, 4)}),
    "rl.minibatch_prompts": lambda r: (len(r.updates), 5 * 2 * 2),
    "rl.epochs": lambda r: (r.rows[-1]["train/lr"] > 0 and len(r.updates) / 5, 4),
    "rl.microbatch_tokens": lambda r: (40 < max(max(call.tokens) for call in r.updates) <= 51, True),
    "rl.advantage": lambda r: ({kind for kind, _ in r.advantages}, {"group_mean"}),
    "rl.clip_low": lambda r: ({loss.config.clip_low for loss in r.losses}, {0.11}),
    "rl.clip_high": lambda r: ({loss.config.clip_high for loss in r.losses}, {0.33}),
    "rl.cumulative_ratio_clip": lambda r: ({loss.config.cumulative_ratio_clip for loss in r.losses}, {7.0}),
    "rl.loss_average": lambda r: ([c.denominator for c in r.updates], [c.weights for c in r.updates]),
    "rl.old_logprobs": lambda r: (all(loss.old is not None for loss in r.losses), True),
    "rl.correction": lambda r: ({loss.config.correction for loss in r.losses}, {"mis"}),
    "rl.correction_level": lambda r: ({loss.config.correction_level for loss in r.losses}, {"geometric"}),
    "rl.correction_cap": lambda r: ({loss.config.correction_cap for loss in r.losses}, {1.25}),
    "rl.dual_clip": lambda r: ({loss.config.dual_clip for loss in r.losses}, {3.5}),
    "rl.kl_coef": lambda r: ({(loss.config.kl_coef, loss.ref is None) for loss in r.losses}, {(0.015, False)}),
    "rl.truncated": lambda r: (r.updates[0].denominator, trained_tokens(r)),
    "rl.routing_replay": lambda r: (all(all(call.routed) for call in r.updates), True),
    "rollout.max_batch": lambda r: ({call.slots for call in r.generated}, {11}),
    "rollout.max_prompt_tokens": lambda r: (r.engines[0]._max_len, 7 + 5),
    "rollout.max_new_tokens": lambda r: ({call.sampling.max_new_tokens for call in r.generated}, {5}),
    "rollout.temperature": lambda r: (
        ({call.sampling.temperature for call in trainings(r)}, r.learners[0].temperature), ({0.75}, 0.75)),
    "rollout.kernel": lambda r: (r.engines[0]._rollout.kernel, "reference"),
    "rollout.verify_sync": lambda r: (set(r.verified), {True}),
    "rollout.cuda_graphs": lambda r: (r.engines[0]._rollout.cuda_graphs, False),
    "eval.every": lambda r: (["eval/pass@1" in row for row in r.rows], [False, False, True, False, True]),
    "eval.prompts": lambda r: ({len(call.prompts) for call in evaluations(r)}, {5}),
    "eval.samples": lambda r: ([call.n for call in r.generated if call.n != 4], [3, 3]),
    "eval.temperature": lambda r: ({call.sampling.temperature for call in evaluations(r)}, {1.35}),
    "quant.recipe": lambda r: (type(layer(r).mlp.experts).__name__, "RolloutExperts"),
    "quant.targets": lambda r: (type(layer(r).self_attn.q_proj).__name__, "Linear"),
    "quant.bf16_layers": lambda r: (
        [type(layer.mlp.experts).__name__ for layer in r.engines[0].model.model.layers[:2]],
        ["RolloutExperts", "Experts"]),
    "quant.backward": lambda r: (r.learners[0].model.model.layers[0].mlp.experts.high_precision, True),
    # Five steps in four stages, the first silent; each evaluation syncs silently and back again.
    "quant.norm_noise": lambda r: ([sigma for sigma, _ in r.noise[:4]], [0.0, 0.0, 0.0, 0.02]),
    "quant.norm_noise_end": lambda r: (r.noise[-1], (pytest.approx(0.003), r.cfg.train.seed)),
    "quant.norm_noise_stages": lambda r: (
        [sigma for sigma, _ in r.noise[4:]],
        pytest.approx([0.02 * 0.15**0.5, 0.0, 0.02 * 0.15**0.5, 0.003, 0.003, 0.0, 0.003])),
    "quant.residual_sites": lambda r: (
        [getattr(layer(r).mlp.experts, f"{site}_spec").precision for site in ("w13", "w2")], ["w4a4", "w4a4_residual"]),
    "quant.residual_ratio": lambda r: (layer(r).mlp.experts.w2_spec.ratio, 0.25),
    "quant.residual_selection": lambda r: (layer(r).mlp.experts.w2_spec.selection, "token"),
    "quant.residual_scale": lambda r: (layer(r).mlp.experts.w2_spec.residual_scale, 0.75),
    "quant.residual_operand": lambda r: (layer(r).mlp.experts.w2_spec.operand, "folded"),
    "quant.global_scale": lambda r: (all_powers_of_two(layer(r).mlp.experts.stored("down_proj").global_scale), False),
    "checkpoint.every": lambda r: (r.saved, [2, 4]),
    "checkpoint.keep": lambda r: ([p.name for p in (r.out / "checkpoints").glob("step_*")], ["step_4"]),
    "checkpoint.final": lambda r: (r.saved[-1], 4),
}  # fmt: skip


def layer(run: SimpleNamespace) -> Any:
    return run.engines[0].model.model.layers[0]


def all_powers_of_two(g: torch.Tensor) -> bool:
    return bool((torch.frexp(g).mantissa == 0.5).all())


def trained_tokens(run: SimpleNamespace) -> float:
    """Response tokens of the first mini-batch that count: of responses that ended, in groups whose rewards differ."""
    total = 0
    for row in [json.loads(line) for line in (run.out / "samples.jsonl").read_text().splitlines()][:3]:
        ended = [response for response in row["responses"] if response["finish"] == "stop"]
        if len({response["reward"] for response in ended}) > 1:
            total += sum(response["tokens"] for response in ended)
    return total


def test_no_two_requests_of_a_run_share_a_seed(run: SimpleNamespace) -> None:
    seeds = [seed for call in run.generated for seed in call.seeds]
    assert len(seeds) == len(set(seeds)) == 5 * 6 * 4 + 2 * 5 * 3
    assert run.generated[0].seeds == [derive_seed(11, "rollout/1", i) for i in range(6 * 4)]


def test_data_are_drawn_by_the_seed_and_prompts_are_held_to_their_length(run: SimpleNamespace) -> None:
    ((_, _, _, _, seed, max_prompt_tokens),) = run.tasks
    assert (seed, max_prompt_tokens) == (11, 7)


def test_a_response_that_was_cut_is_graded_in_evaluation_alone(run: SimpleNamespace) -> None:
    assert run.gradings == [(6, False)] * 3 + [(5, True)] + [(6, False)] * 2 + [(5, True)]


def test_the_memory_of_the_cache_and_of_gradients_changes_hands(run: SimpleNamespace) -> None:
    """The engine sleeps before the four updates of each step, and at the end; a sync finds no gradients."""
    assert run.slept == [0, 4, 8, 12, 16, 20]
    assert (
        run.gradients == [False] * 11
    )  # at the start twice, after each step, twice for each evaluation (noise away, back)


@pytest.mark.parametrize("key", PLACES)
def test_a_key_reaches_its_place(run: SimpleNamespace, key: str) -> None:
    seen, expected = PLACES[key](run)
    assert seen == expected


def test_values_are_unlike_the_defaults(run: SimpleNamespace) -> None:
    for name in VALUES:
        section, key = name.split("__")
        default = getattr(SECTIONS[section](), key)
        assert (name == "quant__recipe") or getattr(getattr(run.cfg, section), key) != default, name


def test_every_key_is_seen_here_or_elsewhere() -> None:
    sections = ("optim", "rl", "rollout", "eval", "quant", "checkpoint")
    keys = {f"{name}.{field.name}" for name in sections for field in dataclasses.fields(SECTIONS[name])}
    assert keys == {*PLACES, *ELSEWHERE}
    for where in ELSEWHERE.values():
        file, _, test = where.partition("::")
        names = {node.name for node in ast.walk(ast.parse((REPOSITORY / file).read_text())) if hasattr(node, "name")}
        assert not test or test in names, where


def test_each_step_has_its_own_prompts_and_a_resumed_run_goes_on_with_the_next(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What samples.jsonl says was asked, against the task's own answer for each step."""
    tasks: list[Task] = []
    real = quads.assemble.build_task
    monkeypatch.setattr(quads.assemble, "build_task", lambda *a: tasks.append(real(*a)) or tasks[-1])
    values = {"log__samples_every": 1, "log__samples": 100, "eval__every": 0}
    words = ["--config", str(config), "--train.out", str(tmp_path / "run"), *options(**values)]
    train.main([*words, "--train.steps", "3"])
    train.main([*words, "--train.steps", "5", "--checkpoint.resume"])
    rows = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    asked = {step: [row["prompt"] for row in rows if row["step"] == step] for step in range(1, 6)}
    expected = {step: [example.prompt for example in tasks[0].batch(step - 1, 8)] for step in range(1, 6)}
    assert asked == expected
    assert all(row["policy_version"] == row["step"] - 1 for row in rows)
    state = json.loads((tmp_path / "run" / "checkpoints" / "step_5" / "train_state.json").read_text())
    tokens = sum(response["tokens"] for row in rows for response in row["responses"])
    assert state["prompts_seen"] == 5 * 8 and 0 < state["tokens_seen"] <= tokens
    before = json.loads((tmp_path / "run" / "checkpoints" / "step_4" / "train_state.json").read_text())
    assert before["tokens_seen"] < state["tokens_seen"]
    assert len({tuple(prompts) for prompts in expected.values()}) == 5


@pytest.fixture
def every_fourth_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the engine, whatever it drew."""
    real = NativeEngine.generate

    def cut(self: NativeEngine, prompts: Any, n: int, sampling: Any, seeds: Any, **kwargs: Any) -> Any:
        told = kwargs.pop("on_group")
        groups = real(self, prompts, n, sampling, seeds, **kwargs)
        for p, group in enumerate(groups):
            groups[p] = [
                dataclasses.replace(c, finish_reason="stop" if i % 4 else "length") for i, c in enumerate(group)
            ]
            told(p, groups[p])
        return groups

    monkeypatch.setattr(NativeEngine, "generate", cut)


@pytest.mark.usefixtures("every_fourth_is_cut")
def test_masked_responses_are_not_in_the_denominator_of_a_mean_over_samples(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, real = [], Learner.update
    monkeypatch.setattr(Learner, "update", lambda *arguments: seen.append(arguments[2]) or real(*arguments))
    for word in ("mask", "wrong"):
        values = {"rl__truncated": word, "eval__every": 0, "train__steps": 1}
        train.main(["--config", str(config), "--train.out", str(tmp_path / word), *options(**values)])
    assert seen == [8 * 6, 8 * 8]


@pytest.mark.usefixtures("every_fourth_is_cut")
def test_truncation_of_a_fake_engine_is_counted_and_worth_nothing(config: Path, tmp_path: Path) -> None:
    """A share of one quarter, and no cut response earns a reward."""
    values = {"log__samples_every": 1, "log__samples": 100, "eval__every": 0, "train__steps": 1}
    words = ["--config", str(config), "--train.out", str(tmp_path / "run"), *options(**values)]
    train.main(words)
    (row,) = read_rows(tmp_path / "run" / "metrics.jsonl")
    assert row["response/truncated_frac"] == 0.25
    assert row["policy/version"] == 1 and row["reward/ungraded"] == 0
    samples = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    responses = [response for sample in samples for response in sample["responses"]]
    assert all(r["reward"] == 0.0 for r in responses if r["finish"] == "length")
    rewards_PG = torch.tensor([[r["reward"] for r in sample["responses"]] for sample in samples])
    assert row["reward/mean"] == pytest.approx(float(rewards_PG.mean()))
    assert row["reward/std"] == pytest.approx(float(rewards_PG.std()))
    alike_P = (rewards_PG == rewards_PG[:, :1]).all(dim=1)
    assert row["group/zero_std_frac"] == pytest.approx(float(alike_P.float().mean())) and not alike_P.all()
    tokens = sum(r["tokens"] for r in responses)
    assert row["response/length_mean"] == pytest.approx(tokens / len(responses))
    assert row["rollout/tokens_per_s"] == pytest.approx(tokens / row["time/rollout_s"])


def test_how_many_samples_are_written_and_when(config: Path, tmp_path: Path) -> None:
    values = {"log__samples_every": 2, "log__samples": 3, "eval__every": 0, "train__steps": 5}
    train.main(["--config", str(config), "--train.out", str(tmp_path / "run"), *options(**values)])
    rows = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1] * 3 + [2] * 3 + [4] * 3


def test_a_source_that_is_tested_on_alone_has_a_reward(config: Path, tmp_path: Path) -> None:
    other = {"kind": "jsonl", "path": str(config.parent / "test.jsonl"), "reward": "exact", "eval_rows": 4}
    values = {f"sources__other__{key}": value for key, value in other.items()}
    train.main(["--config", str(config), "--train.out", str(tmp_path / "run"), "--train.steps", "1", "--task.eval",
                "other", *options(**values, eval__every=1)])  # fmt: skip
    (row,) = read_rows(tmp_path / "run" / "metrics.jsonl")
    assert 0.0 <= row["eval/pass@1"] <= 1.0


def test_the_config_of_the_run_is_what_was_asked(run: SimpleNamespace) -> None:
    assert isinstance(run.cfg, Config) and run.cfg.optim.betas == (0.7, 0.8)
