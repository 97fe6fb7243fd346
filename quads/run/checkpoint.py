"""Save and resume with torch.distributed.checkpoint: any number of processes writes, any other number reads.

    <out>/checkpoints/step_20/           the name appears by one atomic rename, after all below was written
        __0_0.distcp ... .metadata       master weights, optimizer state, generators of every rank
        train_state.json                 TrainState and the learner's counters
        config.toml                      the config it was written under
        COMPLETE                         written last
    <out>/checkpoints/step_30.partial/   being written, or left by a killed process: the next start removes it

A folder is never written twice, so a killed save cannot damage an earlier checkpoint. Resuming from step 20 renames
later checkpoints of the same run to step_30.superseded: they belong to a history that the run has left.
"""

import os
import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import cast

import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import async_save, save

from quads.config import config_changes
from quads.config.sections import CheckpointSettings
from quads.distributed import current_rank, has_peers, in_process_group
from quads.errors import UserError
from quads.run.checkpoint_state import (
    Trainable,
    TrainState,
    checkpoint_content,
    damaged,
    ignore_single_process,
    load_checkpoint,
    load_weights,
    single_process_is_fine,
    train_state_text,
)

MARKER = "COMPLETE"


class Checkpointer:
    """Writes the checkpoints of one run and finds the one to resume from. Every process calls every method.

    Args:
        folder: <out>/checkpoints, created at the first save.
        config_text: kept inside each checkpoint.
    """

    def __init__(self, folder: Path, settings: CheckpointSettings, config_text: str = "") -> None:
        self.folder, self.settings, self.config_text = folder, settings, config_text
        self._finisher = ThreadPoolExecutor(1) if settings.async_save else None
        if settings.async_save:  # its thread is not within the `with` of the call that started it
            ignore_single_process()
        # The background save runs collectives beside those of training: they need a group of their own.
        self._group = _own_group() if settings.async_save else None
        self._pending: Future[None] | None = None
        if current_rank() == 0:
            purge_incomplete(folder)
        _barrier()

    def resume(self, learner: Trainable) -> TrainState:
        """Load what `checkpoint.resume` names into `learner`; TrainState() for a fresh start.

        `latest` without any complete checkpoint is a fresh start too: the run was stopped before its first save.

        Raises:
            UserError: no such checkpoint, a damaged one, or one of another model.
        """
        if not self.settings.resume:
            return TrainState()
        if self.settings.resume == "latest":
            path = latest_checkpoint(self.folder)
            if path is None:
                _print(f"no complete checkpoint in {self.folder} yet: starting from the beginning")
                return TrainState()
        else:
            path = find_checkpoint(Path(self.settings.resume))
        try:
            changes = config_changes((path / "config.toml").read_text(encoding="utf-8"), self.config_text)
        except (OSError, ValueError) as error:
            raise damaged(path, error) from None
        state = load_checkpoint(path, learner)
        _print(f"resuming from {path}")
        for change in changes:
            if not change.startswith(("train.out:", "checkpoint.", "log.")):  # where to write, not what to compute
                _print(f"  under a changed config: {change}")
        if current_rank() == 0 and path.parent.resolve() == self.folder.resolve():
            for step, later in _complete(self.folder):
                if step > state.step:
                    later.rename(_free_name(later.with_suffix(".superseded")))
        _barrier()
        return state

    def save(self, state: TrainState, learner: Trainable) -> None:
        """Write step_N for N = state.step, then delete what exceeds `keep`; with async_save in the background."""
        self.wait()
        final = self.folder / f"step_{state.step}"
        if final.exists():
            return  # the same step of the same run: a stop right after a periodic save
        partial = final.with_suffix(".partial")
        if current_rank() == 0:
            partial.mkdir(parents=True)
            _write(partial / "train_state.json", train_state_text(state, learner))
            _write(partial / "config.toml", self.config_text)
        _barrier()
        content, writer = checkpoint_content(learner), FileSystemWriter(partial)
        with single_process_is_fine():
            if self._finisher is None:
                save(content, storage_writer=writer)
            else:
                written = cast(Future, async_save(content, storage_writer=writer, process_group=self._group))
                self._pending = self._finisher.submit(self._finish_after, written, partial, final)
                return
        self._finish(partial, final)
        _barrier()

    def wait(self) -> None:
        """Return when the last save is complete; raises what it raised in the background."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending.result()
            _barrier()

    def _finish_after(self, written: Future, partial: Path, final: Path) -> None:
        written.result()
        self._finish(partial, final)

    def _finish(self, partial: Path, final: Path) -> None:
        """All ranks' files are on disk: mark, rename, and only then delete older checkpoints."""
        if current_rank() != 0:
            return
        _write(partial / MARKER, "")
        partial.rename(final)
        _sync_folder(final.parent)
        if self.settings.keep:
            for _, old in _complete(self.folder)[: -self.settings.keep]:
                doomed = old.with_suffix(".partial")  # a kill while deleting leaves what the next start removes
                old.rename(doomed)
                shutil.rmtree(doomed)


def latest_checkpoint(folder: Path) -> Path | None:
    """The complete checkpoint with the highest step in <out>/checkpoints."""
    complete = _complete(folder)
    return complete[-1][1] if complete else None


def find_checkpoint(path: Path) -> Path:
    """A step folder, a checkpoints folder or a run folder -> the complete checkpoint it means."""
    if (path / MARKER).exists():
        return path
    for folder in (path, path / "checkpoints"):
        found = latest_checkpoint(folder)
        if found is not None:
            return found
    if not path.exists():
        raise UserError(f"checkpoint not found: {path}; give the folder of a run or of a step_N in its checkpoints")
    if path.suffix == ".partial" or (path / "train_state.json").exists():
        raise UserError(
            f"checkpoint {path} is incomplete (its save was cut off); resume from an earlier one or from latest"
        )
    raise UserError(f"{path} holds no complete checkpoint (a folder step_N with the file {MARKER})")


def load_model_weights(path: Path, model: nn.Module) -> TrainState:
    """Only the weights, in place, for evaluation and analysis. `path` as for `find_checkpoint`."""
    return load_weights(find_checkpoint(path), model)


def purge_incomplete(folder: Path) -> None:
    """Remove what a killed save left behind."""
    for path in folder.glob("step_*.partial"):
        shutil.rmtree(path)


def _complete(folder: Path) -> list[tuple[int, Path]]:
    """(step, folder) of every complete checkpoint, oldest first."""
    named = [(path.name.removeprefix("step_"), path) for path in folder.glob("step_*")]
    return sorted((int(step), path) for step, path in named if step.isdigit() and (path / MARKER).exists())


def _free_name(path: Path) -> Path:
    """`path`, or with the first number appended that is not taken."""
    candidates = [path, *(path.with_name(f"{path.name}_{i}") for i in range(2, 10_000))]
    return next(candidate for candidate in candidates if not candidate.exists())


def _write(path: Path, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    """Make renames in `folder` survive a power loss."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _own_group() -> dist.ProcessGroup | None:
    return cast(dist.ProcessGroup, dist.new_group(backend="gloo")) if in_process_group() else None


def _print(text: str) -> None:
    if current_rank() == 0:
        print(text, flush=True)


def _barrier() -> None:
    if has_peers():
        dist.barrier()
