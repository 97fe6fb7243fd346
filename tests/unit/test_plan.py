import time
from dataclasses import replace

import pytest
import torch

from quads.config import load_config
from quads.config.options import take_option
from quads.config.sections import ParallelSettings, QuantSettings, RLSettings, RolloutSettings
from quads.errors import UserError
from quads.memory import GIB, ProcessShape, check_memory, estimate_memory, layer_activations
from quads.model.config import ARCHITECTURES
from quads.plan.__main__ import describe, main
from quads.plan.arrangement import count_local_sizes, make_plan, ways_to_fit
from quads.plan.step_time import Workload
from quads.quant.recipes import resolve

MOE25B = ARCHITECTURES["moe25b_a3b"]


def config(*overrides):
    return load_config(["--config", "configs/moe25b_quads.toml", *overrides])


WORK = Workload(256 * [8192], 384, 8)


def plan(cfg, gpus):
    return make_plan(cfg, MOE25B, gpus, count_local_sizes(cfg, MOE25B, gpus), 139.8)


@pytest.mark.parametrize(
    ("gpus", "ep", "billions"), [(16, 16, 1.5967), (8, 8, 3.1934), (32, 16, 0.7984), (1, 1, 25.547)]
)
def test_local_parameters(gpus, ep, billions):
    """All of 25.547B divide evenly here (4096, 512 and 151936 rows, 128 experts)."""
    assert sum(count_local_sizes(config("--parallel.ep", str(ep)), MOE25B, gpus)) == pytest.approx(
        billions * 1e9, rel=1e-4
    )


def test_learner_memory_by_hand():
    parts = plan(config("--optim.moments", "float32"), 16).memory.parts
    assert parts["master weights"] == parts["gradients"] == pytest.approx(5.95, abs=0.01)
    assert parts["Adam moments"] == pytest.approx(11.90, abs=0.01)
    # 24.16B expert and 0.75B attention weights in 4.5 bits, a sixteenth of them
    assert parts["learner's quantized weights"] == pytest.approx(24.92e9 * 0.5625 / 16 / GIB, rel=0.01)
    assert parts["engine weights"] == pytest.approx((24.92e9 * 0.5625 + 0.63e9 * 2) / GIB, rel=0.01)
    # The peak is the loss: 40 layers keep [35840, 2048] in bf16, and 4096 tokens have logits and their gradients.
    assert parts["activations"] == pytest.approx(40 * 35840 * 2048 * 2 / GIB)
    assert parts["logits"] == pytest.approx(151936 * (4096 * 6 + 2048 * 4) / GIB)


def test_moments_elsewhere_take_no_memory_here():
    for moments, per_parameter in (("cpu", 0.0), ("8bit", 2.03125)):
        parts = plan(config("--optim.moments", moments), 16).memory.parts
        assert parts["Adam moments"] == pytest.approx(per_parameter * 1.5967e9 / GIB, rel=1e-3)


def test_checkpointing_saves_activations_in_order():
    sizes = [layer_activations(MOE25B, mode, False).kept for mode in ("none", "selective", "moe", "full")]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] > 10 * sizes[-1]


def test_gathering_bf16_keeps_a_quantized_copy_of_every_layer():
    spec = resolve(QuantSettings(recipe="quads"))
    experts, rest = 128 * 3 * 2048 * 768 * 2 / GIB, 2048 * 128 * 72 * 2 / GIB  # of a layer, in bf16

    def kept(ep, all_gather):
        parallel = ParallelSettings(ep=ep)  # nothing is computed again
        args = (MOE25B, spec, RolloutSettings(), RLSettings(), torch.bfloat16, parallel, 16)
        return estimate_memory(ProcessShape(*args, all_gather)).parts["weights in the compute dtype"]

    assert kept(8, "bf16") - kept(8, "packed") == pytest.approx(40 * (experts / 8 + rest), rel=0.02)
    # with one owner for each expert, that keeps its own either way
    assert kept(16, "bf16") - kept(16, "packed") == pytest.approx(40 * rest, rel=0.02)
    assert kept(16, "packed") - kept(8, "packed") == pytest.approx(40 * experts / 16, rel=0.02)


def test_what_does_not_fit_says_what_would():
    cfg = config("--parallel.activation_checkpointing", "none")
    too_large = plan(cfg, 16)
    text = describe(cfg, MOE25B, too_large, 139.8, WORK)
    assert "DOES NOT FIT" in text and "on 16 GPUs: --parallel.activation_checkpointing full" in text
    assert ways_to_fit(cfg, MOE25B, too_large, 1.0) == []
    assert "no setting that this plan knows" in describe(cfg, MOE25B, too_large, 1.0, WORK)


def test_impossible_arrangements_are_named():
    with pytest.raises(UserError, match="do not fit 4 processes"):
        count_local_sizes(config(), MOE25B, 4)
    with pytest.raises(UserError, match="cannot be split evenly over 48"):
        count_local_sizes(config("--parallel.ep", "3", "--rl.group_size", "10"), MOE25B, 48)
    with pytest.raises(UserError, match="prompts_per_step = 8 is fewer than the 16 processes"):
        count_local_sizes(config("--rl.prompts_per_step", "8", "--rl.minibatch_prompts", "8"), MOE25B, 16)
    with pytest.raises(UserError, match="ep = 48 must divide the model's 128 experts"):
        count_local_sizes(config("--parallel.ep", "48", "--rl.group_size", "12"), MOE25B, 48)


def test_page_locked_moments_are_rounded_up_to_powers_of_two():
    """On two H200s 8 layers took 57 GiB of CPU memory in both processes (benchmarks/results/grpo_h200x2_202611.md)."""
    cfg = config("--parallel.ep", "2")
    eight = replace(MOE25B, num_layers=8)
    plan = make_plan(cfg, eight, 2, count_local_sizes(cfg, eight, 2), 139.8)
    assert 2 * plan.page_locked_gib == pytest.approx(57, abs=0.5)
    assert replace(plan, local_sizes=[3 << 20, 1, 0]).page_locked_gib * GIB == 2 * ((16 << 20) + 4)


def test_command(capsys):
    start = time.monotonic()
    assert main(["--config", "configs/moe25b_quads.toml", "--gpus", "16"]) == 0
    assert time.monotonic() - start < 10
    out = capsys.readouterr().out
    assert "1.597B parameters" in out and ": fits" in out and "260 steps" in out and "what would help most" in out
    assert main(["--config", "configs/moe25b_quads.toml", "--gpus", "16", "--gpu-memory", "64"]) == 1
    with pytest.raises(SystemExit) as failed:
        main(["--config", "configs/moe25b_quads.toml", "--gpus", "many"])
    assert failed.value.code == 2 and "--gpus many must be a whole number of at least 1" in capsys.readouterr().err


def test_processes_on_one_machine_share_its_memory():
    spec = resolve(QuantSettings(recipe="bf16"))
    rollout, rl = (
        RolloutSettings(max_batch=1, max_new_tokens=64, max_prompt_tokens=8),
        RLSettings(microbatch_tokens=128),
    )
    estimate = estimate_memory(ProcessShape(ARCHITECTURES["tiny"], spec, rollout, rl, torch.float32))
    check_memory(estimate, torch.device("cpu"))
    with pytest.raises(UserError, match="use more processes"):
        check_memory(estimate, torch.device("cpu"), processes_here=1_000_000)


def test_help_names_the_options_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(["--help"])
    assert exit_info.value.code == 0
    text = capsys.readouterr().out
    for option in ("--gpus N", "--gpu-memory GiB", "--response-tokens N", "--lengths RUN", "--rl.group_size"):
        assert option in text


def test_an_option_and_its_value_may_be_one_word() -> None:
    words = ["--gpus=4", "--config", "x.toml", "--out", "y"]
    assert (take_option(words, "--gpus"), take_option(words, "--out")) == ("4", "y")
    assert words == ["--config", "x.toml"]
