"""Checkpoints: what is restored, what is refused, and that no kill at any moment hides the previous one."""

import multiprocessing
import os
import random
import signal
import time
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import nn

from quads.config.sections import CheckpointSettings
from quads.errors import UserError
from quads.rl import streamed_adamw
from quads.rl.optimizer import build_adamw
from quads.run.checkpoint import Checkpointer, find_checkpoint, latest_checkpoint, load_model_weights
from quads.run.checkpoint_state import TrainState
from tests.helpers import assert_bitwise


class TinyLearner:
    """A regression whose data comes from torch's global generator: equal weights mean an equal generator too."""

    def __init__(self, width: int = 8, moments: Literal["float32", "cpu"] = "float32") -> None:
        self.model = nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 1))
        self.optimizer = build_adamw(self.model, 0.05, (0.9, 0.999), 1e-8, 0.01, moments)
        self.updates = 0

    def counters(self) -> dict[str, int]:
        return {"updates": self.updates}

    def load_counters(self, counters: dict[str, int]) -> None:
        self.updates = counters["updates"]

    def train(self, steps: int) -> None:
        for _ in range(steps):
            x = torch.rand(16, 4) + random.random()
            self.optimizer.zero_grad()
            (self.model(x) - x.sum(1, keepdim=True)).pow(2).mean().backward()
            self.optimizer.step()
            self.updates += 1


def settings(**changes: object) -> CheckpointSettings:
    return CheckpointSettings(**{"every": 1, "keep": 2, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(("async_save", "moments"), [(False, "float32"), (True, "float32"), (True, "cpu")])
def test_resumed_run_equals_the_straight_one_bit_for_bit(
    tmp_path: Path, async_save: bool, moments: Literal["float32", "cpu"], monkeypatch: pytest.MonkeyPatch
) -> None:
    straight = TinyLearner(moments=moments)
    straight.train(3)
    checkpointer = Checkpointer(tmp_path, settings(async_save=async_save), 'train.out = "x"')
    checkpointer.save(TrainState(step=3, policy_version=3, prompts_seen=48, tokens_seen=100), straight)
    straight.train(4)  # with async_save this changes the weights while the file is being written
    checkpointer.wait()

    torch.manual_seed(123)
    random.seed(123)
    resumed = TinyLearner(moments=moments)
    made = []
    monkeypatch.setattr(streamed_adamw, "_cpu_zeros_like", lambda p: made.append(p) or torch.zeros_like(p))
    state = Checkpointer(tmp_path, settings(resume="latest"), 'train.out = "x"').resume(resumed)
    assert len(made) == (2 * len(list(resumed.model.parameters())) if moments == "cpu" else 0)  # none twice
    assert state == TrainState(step=3, policy_version=3, prompts_seen=48, tokens_seen=100)
    assert resumed.updates == 3
    resumed.train(4)
    for ours, theirs in zip(resumed.model.parameters(), straight.model.parameters(), strict=True):
        assert_bitwise(ours, theirs)
    moments, expected = resumed.optimizer.state_dict()["state"], straight.optimizer.state_dict()["state"]
    assert_bitwise(moments[0]["exp_avg_sq"], expected[0]["exp_avg_sq"])
    assert float(moments[0]["step"]) == 7


def test_load_is_in_place_and_weights_alone_leave_the_rest(tmp_path: Path) -> None:
    learner = TinyLearner()
    learner.train(1)
    Checkpointer(tmp_path / "checkpoints", settings()).save(TrainState(step=1), learner)
    other = TinyLearner()
    address = other.model[0].weight.data_ptr()
    assert load_model_weights(tmp_path, other.model) == TrainState(step=1)  # a run folder means its latest checkpoint
    assert other.model[0].weight.data_ptr() == address
    assert_bitwise(other.model[0].weight, learner.model[0].weight)
    assert not other.optimizer.state


def test_only_the_newest_are_kept_and_a_step_is_written_once(tmp_path: Path) -> None:
    learner, checkpointer = TinyLearner(), Checkpointer(tmp_path, settings(keep=2))
    for step in (2, 9, 10, 11):
        learner.train(1)
        checkpointer.save(TrainState(step=step), learner)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_10", "step_11"]
    before = (tmp_path / "step_11" / "train_state.json").stat().st_mtime_ns
    checkpointer.save(TrainState(step=11), learner)
    assert (tmp_path / "step_11" / "train_state.json").stat().st_mtime_ns == before
    everything = Checkpointer(tmp_path, settings(keep=0))
    everything.save(TrainState(step=12), learner)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_10", "step_11", "step_12"]


def test_an_incomplete_checkpoint_is_passed_over_and_removed(tmp_path: Path) -> None:
    learner = TinyLearner()
    Checkpointer(tmp_path, settings()).save(TrainState(step=1), learner)
    (tmp_path / "step_2.partial").mkdir()
    (tmp_path / "step_2.partial" / "__0_0.distcp").write_bytes(b"cut")
    assert latest_checkpoint(tmp_path) == tmp_path / "step_1"
    with pytest.raises(UserError, match="incomplete"):
        find_checkpoint(tmp_path / "step_2.partial")
    Checkpointer(tmp_path, settings())
    assert [path.name for path in tmp_path.iterdir()] == ["step_1"]


def test_resuming_from_an_earlier_step_sets_later_ones_aside(tmp_path: Path) -> None:
    learner, checkpointer = TinyLearner(), Checkpointer(tmp_path, settings(keep=0))
    for step in (1, 2, 3):
        checkpointer.save(TrainState(step=step), learner)
    again = Checkpointer(tmp_path, settings(resume=str(tmp_path / "step_1"), keep=0))
    assert again.resume(learner).step == 1
    assert latest_checkpoint(tmp_path) == tmp_path / "step_1"
    assert (tmp_path / "step_3.superseded" / "COMPLETE").exists()
    again.save(TrainState(step=2), learner)
    assert latest_checkpoint(tmp_path) == tmp_path / "step_2"
    Checkpointer(tmp_path, settings(resume=str(tmp_path / "step_1"), keep=0)).resume(learner)
    assert (tmp_path / "step_2.superseded_2" / "COMPLETE").exists()


def test_a_checkpoint_of_another_model_is_refused_by_tensor_name(tmp_path: Path) -> None:
    Checkpointer(tmp_path, settings()).save(TrainState(step=1), TinyLearner(width=8))
    wider = TinyLearner(width=12)
    before = wider.model[0].weight.clone()
    resume = Checkpointer(tmp_path, settings(resume="latest"))
    with pytest.raises(UserError, match=r"0\.weight of shape \[8, 4\], the model has \[12, 4\]"):
        resume.resume(wider)
    assert_bitwise(wider.model[0].weight, before)

    deeper = TinyLearner()
    deeper.model.append(nn.Linear(1, 1))
    with pytest.raises(UserError, match=r"has no tensor 3\.weight"):
        load_model_weights(tmp_path, deeper.model)
    with pytest.raises(UserError, match=r"holds 2\.(weight|bias), which the model lacks"):
        load_model_weights(tmp_path, TinyLearner().model[:2])


def test_what_cannot_be_resumed_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match="checkpoint not found: .*nowhere"):
        Checkpointer(tmp_path, settings(resume=str(tmp_path / "nowhere"))).resume(TinyLearner())
    with pytest.raises(UserError, match="holds no complete checkpoint"):
        Checkpointer(tmp_path, settings(resume=str(tmp_path))).resume(TinyLearner())
    # stopped before the first save: the same command must still start
    assert Checkpointer(tmp_path, settings(resume="latest")).resume(TinyLearner()) == TrainState()
    assert "no complete checkpoint" in capsys.readouterr().out

    Checkpointer(tmp_path, settings()).save(TrainState(step=1), TinyLearner())
    (tmp_path / "step_1" / "__0_0.distcp").unlink()
    with pytest.raises(UserError, match="step_1 is damaged"):
        load_model_weights(tmp_path, TinyLearner().model)
    (tmp_path / "step_1" / ".metadata").unlink()
    with pytest.raises(UserError, match="step_1 is damaged"):
        load_model_weights(tmp_path, TinyLearner().model)


def test_a_changed_config_is_named_on_resume(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    learner = TinyLearner()
    Checkpointer(tmp_path, settings(), "[optim]\nlr = 0.1\neps = 1.0").save(TrainState(step=1), learner)
    Checkpointer(tmp_path, settings(resume="latest"), "[optim]\nlr = 0.2\neps = 1.0").resume(learner)
    out = capsys.readouterr().out
    assert "optim.lr: 0.1 -> 0.2" in out and "eps" not in out


def test_names_do_not_depend_on_wrappers(tmp_path: Path) -> None:
    compiled = TinyLearner()
    compiled.model = nn.Sequential(*(torch.compile(part) for part in compiled.model))  # type: ignore[arg-type]
    assert "0._orig_mod.weight" in dict(compiled.model.named_parameters())
    Checkpointer(tmp_path, settings()).save(TrainState(step=1), compiled)
    plain = TinyLearner()
    Checkpointer(tmp_path, settings(resume="latest")).resume(plain)
    assert_bitwise(plain.model[2].weight, compiled.model[2].weight)


def latest_step(folder: Path) -> int:
    latest = latest_checkpoint(folder)
    return int(latest.name.removeprefix("step_")) if latest else 0


def _save_forever(folder: Path, async_save: bool) -> None:
    """Resume, then save step after step with every weight equal to the step."""
    learner = TinyLearner(width=256)
    checkpointer = Checkpointer(folder, settings(resume="latest", async_save=async_save))
    step = checkpointer.resume(learner).step
    while True:
        step += 1
        with torch.no_grad():
            for parameter in learner.model.parameters():
                parameter.fill_(float(step))
        checkpointer.save(TrainState(step=step), learner)


@pytest.mark.parametrize("async_save", [False, True])
def test_a_kill_at_any_moment_leaves_a_checkpoint_to_resume_from(tmp_path: Path, async_save: bool) -> None:
    fork, delays, reached = multiprocessing.get_context("fork"), random.Random(7), 0
    for _ in range(8):
        process = fork.Process(target=_save_forever, args=(tmp_path, async_save))
        process.start()
        deadline = time.monotonic() + 60
        while latest_step(tmp_path) <= reached and time.monotonic() < deadline:
            time.sleep(0.002)  # resuming and starting to save takes a moment, more on a busy machine
        time.sleep(0.1 * delays.random())
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        latest = latest_checkpoint(tmp_path)
        assert latest is not None
        learner = TinyLearner(width=256)
        step = load_model_weights(latest, learner.model).step
        assert step > reached
        reached = step
        for parameter in learner.model.parameters():
            assert_bitwise(parameter, torch.full_like(parameter, float(step)))
    assert reached >= 8  # each process had saved, and was saving when it was killed
