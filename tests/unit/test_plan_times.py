"""The planner's times against measurements that it was not made from, its lengths, its advice, and runs beside it."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from quads.config import load_config
from quads.model.config import ARCHITECTURES
from quads.plan.__main__ import main
from quads.plan.arrangement import make_plan
from quads.plan.compare import compare, measured_medians
from quads.plan.learn_time import LearnShape, exchange_seconds, learn_seconds, sharding_seconds
from quads.plan.lengths import drawn_from, lengths_of_run, lognormal_lengths
from quads.plan.rollout_time import READ_BYTES_PER_S, kv_bytes_per_token, rollout_seconds, weights_seconds
from quads.plan.step_time import StepTime, Workload, best_changes, kv_cache_tokens, step_time

MOE25B = ARCHITECTURES["moe25b_a3b"]
CUT8, CUT12 = replace(MOE25B, num_layers=8), replace(MOE25B, num_layers=12)
ANY_CACHE = float("inf")


def rollout(lengths, kv_tokens=ANY_CACHE, model=MOE25B, max_batch=256, precision="w4a4_residual", gpus=1):
    return rollout_seconds(model, precision, lengths, 128, 16, max_batch, kv_tokens, gpus)


@pytest.mark.parametrize(("context", "measured_ms"), [(7168, 15.8), (3840, 11.9)])
def test_decode_steps_of_long_contexts(context: int, measured_ms: float) -> None:
    """64 sequences in vLLM on one H200; the table was measured at 278 tokens."""
    step = weights_seconds("w4a4_residual", 64, MOE25B) + 64 * context * kv_bytes_per_token(MOE25B) / READ_BYTES_PER_S
    assert 1e3 * step == pytest.approx(measured_ms, rel=0.05)


@pytest.mark.parametrize(
    ("model", "lengths", "checkpointing", "tokens_per_s"),
    [
        (CUT8, [4096] * 4, "none", 47_846),  # benchmarks/results/learner_h200x2_202611.md, and beside torchtitan
        (CUT8, [4096] * 8, "none", 54_043),
        (CUT12, [4096] * 4, "none", 33_085),
        (CUT12, [16_384], "none", 22_673),
    ],
)
def test_updates_measured_on_two_h200s(model, lengths, checkpointing, tokens_per_s) -> None:
    shape = LearnShape(model, checkpointing, 2, 8, model.num_parameters()[0] / 2, updates=1, shards=2)
    assert sum(lengths) / sum(learn_seconds(shape, lengths).values()) == pytest.approx(tokens_per_s, rel=0.1)


@pytest.mark.parametrize(("tokens", "rollout_s", "learn_s"), [(2048, 20.0, 16.6), (1024, None, 8.3)])
def test_whole_steps_measured_on_two_h200s(tokens: int, rollout_s: float | None, learn_s: float) -> None:
    """benchmarks/results/grpo_h200x2_202611.md. Its rollout of 1024 tokens took 13.9 s, of 2048 tokens 20: the 7.8 s
    that do not grow with the length are not in the model."""
    shape = LearnShape(CUT8, "full", 2, 8, CUT8.num_parameters()[0] / 2, updates=2, moments="cpu", shards=2)
    shape = replace(shape, microbatches=256 * tokens // 16384, gathered_bytes=0.5625)
    assert sum(learn_seconds(shape, 256 * [tokens + 16]).values()) == pytest.approx(learn_s, rel=0.2)
    if rollout_s is not None:
        assert rollout(256 * [tokens], model=CUT8).total == pytest.approx(rollout_s, rel=0.2)


def test_a_full_cache_makes_responses_wait_and_be_computed_again() -> None:
    lengths = 64 * [2000]
    roomy, tight, hopeless = rollout(lengths), rollout(lengths, 40_000), rollout(lengths, 2_050)
    assert roomy.set_back == 0 and tight.set_back > 0
    assert roomy.total < tight.total < hopeless.total
    one_by_one = sum(rollout([2000]).total for _ in range(64))
    assert 0.5 * one_by_one < hopeless.total < one_by_one  # hardly two at a time
    assert roomy.total < 0.1 * one_by_one


def test_the_slowest_response_decides() -> None:
    even, skewed = rollout(64 * [1000]), rollout(63 * [900] + [7300])  # as many tokens
    assert skewed.total > 2 * even.total and skewed.tail > 0.5 * skewed.total and even.tail == 0
    assert sum(skewed.parts.values()) == skewed.total


def test_every_token_is_drawn_once() -> None:
    """Without keys, values and a host's share a step takes as long as its weights, whatever is in the batch."""
    tiny_cache = replace(MOE25B, num_kv_heads=1, head_dim=2)
    time = rollout([10, 20, 30], model=tiny_cache, max_batch=2)
    steps = {1: weights_seconds("w4a4_residual", 1, tiny_cache), 2: weights_seconds("w4a4_residual", 2, tiny_cache)}
    assert time.parts["weights"] == pytest.approx(10 * steps[2] + 10 * steps[2] + 20 * steps[1])


def test_the_exchange_crosses_the_network_only_where_experts_do() -> None:
    shape = LearnShape(MOE25B, "full", 8, 8, 1.6e9, updates=2)
    tokens = 256 * 8192.0
    # there and back, bf16, forward, again and backward: 40 layers x 8 experts x 2048 channels
    everything = 3 * 2 * 2 * tokens * 40 * 8 * 2048
    assert exchange_seconds(shape, tokens) == pytest.approx(everything * 7 / 8 / 200e9)
    assert exchange_seconds(replace(shape, ep=16), tokens) == pytest.approx(everything * 8 / 16 / 50e9)
    assert exchange_seconds(replace(shape, ep=16, gpus_per_host=16), tokens) == pytest.approx(
        everything * 15 / 16 / 200e9
    )
    assert exchange_seconds(replace(shape, ep=1), tokens) == 0.0
    assert exchange_seconds(replace(shape, checkpointing="none"), tokens) == pytest.approx(
        exchange_seconds(shape, tokens) * 2 / 3
    )


def test_what_sharding_moves() -> None:
    """Of the experts an expert-parallel rank gathers its own share from the others that hold parts of it."""
    shape = LearnShape(MOE25B, "full", 8, 8, 1.6e9, updates=2, shards=16, microbatches=10, gathered_bytes=0.5625)
    dense, experts = 40 * (2048 * 128 * 72 + 128 * 2048 + 2 * 2048 + 2 * 128), 40 * 128 * 3 * 2048 * 768
    moved = 10 * (2 * 0.5625 + 4) * (dense * 15 / 16 + experts / 8 / 2)
    assert sharding_seconds(shape) == pytest.approx(moved / 50e9)
    one_owner = sharding_seconds(replace(shape, ep=16))
    assert one_owner == pytest.approx(10 * (2 * 0.5625 + 4) * dense * 15 / 16 / 50e9)
    assert sharding_seconds(replace(shape, gpus_per_host=16)) == pytest.approx(moved / 200e9)
    assert sharding_seconds(LearnShape(MOE25B, "none", 1, 8, 25e9, updates=1)) == 0.0


def test_what_makes_learning_longer() -> None:
    shape = LearnShape(CUT8, "none", 1, 8, 1e9, updates=1)
    plain = learn_seconds(shape, [4096])
    full = learn_seconds(replace(shape, checkpointing="full"), [4096])
    assert full["matrix products"] == pytest.approx(plain["matrix products"] * 4 / 3)
    assert full["attention"] == pytest.approx(plain["attention"] * 4 / 3)
    twice = learn_seconds(replace(shape, epochs=2), [4096])
    old = learn_seconds(replace(shape, forwards=1), [4096])
    for part in ("matrix products", "attention", "memory-bound rest"):
        assert twice[part] == pytest.approx(2 * plain[part]) and old[part] == pytest.approx(plain[part] * 4 / 3)
    assert learn_seconds(shape, [8192])["attention"] == pytest.approx(4 * plain["attention"])
    there_and_back = learn_seconds(replace(shape, moments="cpu"), [4096])["optimizer"] - plain["optimizer"]
    assert there_and_back == pytest.approx(16e9 / 50e9)


def test_lengths() -> None:
    lengths = lognormal_lengths(4000, 1000.0, 0.8, 100_000)
    assert sum(lengths) / 4000 == pytest.approx(1000, rel=0.02) and max(lengths) > 10 * min(lengths)
    assert lognormal_lengths(5, 100.0, 0.0, 1000) == 5 * [100]
    assert max(lognormal_lengths(100, 1000.0, 0.8, 1500)) == 1500
    assert lognormal_lengths(50, 100.0, 0.8, 1000) == lognormal_lengths(50, 100.0, 0.8, 1000)
    assert sorted(drawn_from([5, 1, 9], 6)) == [1, 1, 5, 5, 9, 9]


def small_run(folder: Path) -> Path:
    folder.mkdir()
    responses = [{"text": "", "reward": 0.0, "tokens": tokens, "finish": "stop"} for tokens in (100, 300)]
    (folder / "samples.jsonl").write_text(json.dumps({"step": 1, "responses": responses}) + "\n")
    rows = [{"step": step, "time/rollout_s": 90.0, "memory/learn_gib": 50.0} for step in (1, 2)]
    rows += [{"step": step, "time/rollout_s": 5.0 + step, "memory/learn_gib": 40.0} for step in (3, 4, 5)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_lengths_and_times_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = small_run(tmp_path / "run")
    assert lengths_of_run(run) == [100, 300]
    assert measured_medians(run) == {"time/rollout_s": 9.0, "memory/learn_gib": 40.0}  # without steps 1 and 2
    words = ["--config", "configs/moe25b_quads.toml", "--gpus", "16", "--lengths", str(run), "--measured", str(run)]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "responses of 200 tokens on average, the longest 300" in out
    measured = out[out.index("against") :]
    assert "9.00" in measured and "40.00" in measured and " -" in measured  # sync was not measured
    for words in (["--lengths", str(tmp_path)], ["--measured", str(tmp_path)]):
        with pytest.raises(SystemExit) as failed:
            main(["--config", "configs/moe25b_quads.toml", "--gpus", "16", *words])
        assert failed.value.code == 2 and "give the folder of a run" in capsys.readouterr().err


def test_the_ratio_is_planned_over_measured(tmp_path: Path) -> None:
    cfg = load_config(["--config", "configs/moe25b_quads.toml"])
    plan = make_plan(cfg, MOE25B, 16, [1_596_700_000], 139.8)
    times = StepTime(rollout([18], max_batch=1), {"attention": 4.0}, 1.0)
    lines = list(compare(small_run(tmp_path / "run"), times, plan.memory))
    row = next(line for line in lines if line.startswith("  rollout, s")).split()
    assert float(row[-1]) == pytest.approx(times.rollout.total / 9.0, abs=0.01) and row[-2] == "9.00"


def test_the_paper_run_waits_for_its_long_answers_and_its_exchange() -> None:
    """4096 answers of 8192 tokens on 16 H200s: a step is many minutes, and experts inside a host save most."""
    cfg = load_config(["--config", "configs/moe25b_quads.toml", "--parallel.ep", "16"])
    plan = make_plan(cfg, MOE25B, 16, [1_596_700_000], 139.8)
    work = Workload(lognormal_lengths(256, 8192, 0.8, 32768), 384, 8)
    assert kv_cache_tokens(cfg, MOE25B) == pytest.approx(629_146, rel=1e-3)
    times = step_time(cfg, MOE25B, plan, work)
    assert times.rollout.set_back > 0  # 256 sequences do not fit
    assert times.total == pytest.approx(sum(times.phases.values()))
    best = dict(best_changes(cfg, MOE25B, plan, work, 139.8))
    assert "--parallel.ep 8" in best  # experts of one host: the network carries no tokens
    for option, saved in best.items():
        assert saved > 0.01 * times.total, option
