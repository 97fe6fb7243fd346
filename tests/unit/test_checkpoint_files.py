"""Checkpoints that cannot be written, were damaged, or want to run code: one message each, and what was there stays."""

import errno
import json
import multiprocessing
import os
import pickle
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import xxhash

from quads.errors import UserError
from quads.run import checkpoint_save
from quads.run.checkpoint import Checkpointer, latest_checkpoint, load_model_weights
from quads.run.checkpoint_files import bytes_needed
from quads.run.checkpoint_state import TrainState, checkpoint_content
from tests.helpers import assert_bitwise
from tests.unit.test_checkpoint import TinyLearner, settings


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A folder with the checkpoint step_1, and the learner that wrote it beside its loader."""
    learner = TinyLearner()
    learner.train(1)
    Checkpointer(tmp_path, settings(), "[optim]\nlr = 0.1").save(TrainState(step=1), learner)
    return tmp_path


def test_the_sums_are_those_of_the_files(saved: Path) -> None:
    step = saved / "step_1"
    files = json.loads((step / "COMPLETE").read_text())["files"]
    assert files.keys() == {path.name for path in step.iterdir()} - {"COMPLETE"}
    for name, found in files.items():
        data = (step / name).read_bytes()
        assert found == {"bytes": len(data), "xxh3_64": xxhash.xxh3_64(data).hexdigest()}, name


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "train_state.json", "config.toml"])
def test_one_flipped_bit_is_found_before_anything_is_loaded(saved: Path, name: str) -> None:
    file = saved / "step_1" / name
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.write_bytes(data)
    other = TinyLearner()
    before = [p.detach().clone() for p in other.model.parameters()]
    with pytest.raises(UserError, match=f"step_1 is damaged, use another one .{name} is not what was written"):
        load_model_weights(saved, other.model)
    with pytest.raises(UserError, match="step_1 is damaged"):
        Checkpointer(saved, settings(resume="latest")).resume(other)
    for ours, old in zip(other.model.parameters(), before, strict=True):
        assert_bitwise(ours.detach(), old)


def test_a_cut_file_is_named_with_both_sizes_and_a_broken_marker_is_no_marker(saved: Path) -> None:
    file = saved / "step_1" / "__0_0.distcp"
    size = file.stat().st_size
    os.truncate(file, size - 7)
    with pytest.raises(UserError, match=f"__0_0.distcp has {size - 7} bytes, {size} were written"):
        load_model_weights(saved, TinyLearner().model)
    for text in ("x", "[]", '{"files": []}', '{"files": {"a": 1}}'):
        (saved / "step_1" / "COMPLETE").write_text(text)
        with pytest.raises(UserError, match="step_1 is damaged"):
            load_model_weights(saved, TinyLearner().model)


def test_a_checkpoint_without_sums_loads_and_says_so(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (saved / "step_1" / "COMPLETE").write_text("")
    load_model_weights(saved, TinyLearner().model)
    assert "was written without checksums: not verified" in capsys.readouterr().out


class Shell:
    """What a stranger would put into an index: it runs a command when it is unpickled."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Callable, tuple[str]]:
        return os.system, (self.command,)


def with_true_sums(step: Path) -> None:
    """As a forger would leave it: the marker says what the files are."""
    files = {
        path.name: {"bytes": path.stat().st_size, "xxh3_64": xxhash.xxh3_64(path.read_bytes()).hexdigest()}
        for path in step.iterdir()
        if path.name != "COMPLETE"
    }
    (step / "COMPLETE").write_text(json.dumps({"files": files}))


def test_the_index_of_a_stranger_runs_nothing(saved: Path, tmp_path: Path) -> None:
    (saved / "step_1" / ".metadata").write_bytes(pickle.dumps(Shell(f"touch {tmp_path}/ran")))
    with_true_sums(saved / "step_1")
    with pytest.raises(UserError, match="its index asks for (posix|nt).system, which no checkpoint needs"):
        load_model_weights(saved, TinyLearner().model)
    assert not (tmp_path / "ran").exists()


def test_a_number_of_a_stranger_runs_nothing(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Learning rates and the like are stored pickled; one of them is code here."""
    learner = TinyLearner()
    learner.optimizer.param_groups[0]["initial_lr"] = Shell(f"touch {tmp_path}/ran")
    with monkeypatch.context() as writer:
        writer.setattr(Shell, "__deepcopy__", lambda self, memo: self, raising=False)
        Checkpointer(saved, settings()).save(TrainState(step=2), learner)
    (tmp_path / "ran").unlink(missing_ok=True)
    mine = TinyLearner()
    mine.optimizer.param_groups[0]["initial_lr"] = 0.1
    with pytest.raises(UserError, match="step_2 is damaged, use another one .UnpicklingError: Weights only"):
        Checkpointer(saved, settings(resume="latest")).resume(mine)
    assert not (tmp_path / "ran").exists()


def test_a_weight_that_is_not_finite_is_not_loaded(tmp_path: Path) -> None:
    learner = TinyLearner()
    with torch.no_grad():
        learner.model[2].weight[0, 3] = torch.nan
    Checkpointer(tmp_path, settings()).save(TrainState(step=1), learner)
    with pytest.raises(UserError, match=r"step_1: weight 2\.weight is not finite"):
        load_model_weights(tmp_path, TinyLearner().model)
    with pytest.raises(UserError, match=r"step_1: weight 2\.weight is not finite"):
        Checkpointer(tmp_path, settings(resume="latest")).resume(TinyLearner())


def _save_with_a_file_limit(folder: Path, async_save: bool, send: Any) -> None:
    learner = TinyLearner(width=4096)
    checkpointer = Checkpointer(folder, settings(async_save=async_save))
    checkpointer.save(TrainState(step=1), learner)
    checkpointer.wait()
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    try:
        with checkpointer.naming_the_last():
            checkpointer.save(TrainState(step=2), learner)
            checkpointer.wait()
    except UserError as error:
        send.send(str(error))


@pytest.mark.parametrize("async_save", [False, True])
def test_a_save_that_hits_a_limit_is_one_line_and_leaves_nothing(tmp_path: Path, async_save: bool) -> None:
    fork = multiprocessing.get_context("fork")
    receive, send = fork.Pipe(duplex=False)
    process = fork.Process(target=_save_with_a_file_limit, args=(tmp_path, async_save, send))
    process.start()
    assert receive.poll(60)
    message = receive.recv()
    process.join()
    assert message == (
        f"checkpoint {tmp_path}/step_2 could not be saved: {os.strerror(errno.EFBIG)}; free some space there, lower "
        f"checkpoint.keep, or choose another train.out; the last good checkpoint is {tmp_path}/step_1"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["step_1"]
    load_model_weights(tmp_path, TinyLearner(width=4096).model)


def test_space_is_looked_for_before_anything_is_written(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    learner = TinyLearner(width=2**16)
    needed = 3 * sum(p.nbytes for p in learner.model.parameters())  # weights and two moments
    assert needed <= bytes_needed(checkpoint_content(learner)) < needed + 20_000  # and generators
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=2**20))
    made = []
    monkeypatch.setattr(Path, "mkdir", lambda path, **kwargs: made.append(path))
    with pytest.raises(UserError, match="step_2 could not be saved: it needs 0.004.. GiB, 0.000977 GiB are free"):
        Checkpointer(saved, settings()).save(TrainState(step=2), learner)
    assert not made and latest_checkpoint(saved) == saved / "step_1"


def test_what_the_disk_changes_on_the_way_is_no_checkpoint(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compare = checkpoint_save.wrong_files

    def flipped(folder: Path, *args: Any) -> list[str]:
        with open(folder / "__0_0.distcp", "r+b") as file:  # a bit that the disk gives back otherwise
            file.seek(1000)
            byte = file.read(1)[0]
            file.seek(1000)
            file.write(bytes([byte ^ 1]))
        return compare(folder, *args)

    monkeypatch.setattr(checkpoint_save, "wrong_files", flipped)
    with pytest.raises(UserError, match="step_2 could not be saved: what the disk gives back is not what was written"):
        Checkpointer(saved, settings()).save(TrainState(step=2), TinyLearner())
    assert [path.name for path in saved.iterdir()] == ["step_1"]


@pytest.mark.parametrize(("stored", "asked"), [("8bit", "float32"), ("float32", "8bit"), ("cpu", "8bit")])
def test_moments_of_another_kind_are_named(tmp_path: Path, stored: str, asked: str) -> None:
    learner = TinyLearner()
    text = '[optim]\nmoments = "{}"'
    Checkpointer(tmp_path, settings(), text.format(stored)).save(TrainState(step=1), learner)
    again = Checkpointer(tmp_path, settings(resume="latest"), text.format(asked))
    with pytest.raises(UserError, match=f"moments = '{stored}', this run has '{asked}'.*--optim.moments {stored}"):
        again.resume(learner)


def test_float32_moments_resume_in_cpu_memory(tmp_path: Path) -> None:
    learner = TinyLearner()
    learner.train(2)
    Checkpointer(tmp_path, settings(), '[optim]\nmoments = "float32"').save(TrainState(step=1), learner)
    other = TinyLearner(moments="cpu")
    Checkpointer(tmp_path, settings(resume="latest"), '[optim]\nmoments = "cpu"').resume(other)
    moments = [s["exp_avg_sq"] for s in other.optimizer.state_dict()["state"].values()]
    expected = [s["exp_avg_sq"] for s in learner.optimizer.state_dict()["state"].values()]
    for ours, theirs in zip(moments, expected, strict=True):
        assert_bitwise(ours, theirs)


def steps(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_steps_that_are_not_healthy_are_not_saved_and_never_cost_a_good_one(tmp_path: Path) -> None:
    learner, checkpointer = TinyLearner(), Checkpointer(tmp_path, settings(every=2, keep=1))
    for step in (1, 2):
        checkpointer.offer(TrainState(step=step), learner, healthy=True)
    assert steps(tmp_path) == ["step_2"]
    checkpointer.offer(TrainState(step=3), learner, healthy=True)
    checkpointer.offer(TrainState(step=4), learner, healthy=False)  # due, and not saved
    assert steps(tmp_path) == ["step_2"]
    checkpointer.offer(TrainState(step=5), learner, healthy=True)  # so the next healthy one is
    assert steps(tmp_path) == ["step_2", "step_5"]  # nothing has drawn from step 5 yet: step 2 stays
    checkpointer.offer(TrainState(step=6), learner, healthy=False)
    assert steps(tmp_path) == ["step_2", "step_5"]
    checkpointer.offer(TrainState(step=7), learner, healthy=True)  # step 5 is proven; and step 6 was due
    assert steps(tmp_path) == ["step_5", "step_7"]
    checkpointer.offer(TrainState(step=8), learner, healthy=False)
    checkpointer.offer(TrainState(step=8), learner, healthy=False, last=True)
    assert steps(tmp_path) == ["step_5", "step_7"]


def test_what_is_saved_at_the_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    learner = TinyLearner()
    for final, healthy in ((True, True), (False, True), (True, False)):
        folder = tmp_path / f"{final}_{healthy}"
        checkpointer = Checkpointer(folder, settings(every=0, final=final))
        checkpointer.offer(TrainState(step=3), learner, healthy)
        assert not folder.exists()
        checkpointer.offer(TrainState(step=3), learner, healthy, last=True)
        assert latest_checkpoint(folder) == (folder / "step_3" if final and healthy else None)
    assert "step 3 was skipped, so it is not saved; no checkpoint was saved" in capsys.readouterr().out
