"""Save and resume with torch.distributed.checkpoint: any number of processes writes, any other number reads.

    <out>/checkpoints/step_20/           the name appears by one atomic rename, after all below was written
        __0_0.distcp ... .metadata       master weights, optimizer state, generators of every rank
        train_state.json                 TrainState and the learner's counters
        config.toml                      the config it was written under
        COMPLETE                         written last: sizes and checksums of all the others
    <out>/checkpoints/step_30.partial/   being written, or left by a killed process: the next start removes it

A folder is never written twice, so a killed save cannot damage an earlier checkpoint. Resuming from step 20 renames
later checkpoints of the same run to step_30.superseded: they belong to a history that the run has left.

Every file is hashed while it is written, read back before the checkpoint counts as complete, and read once more before
it is loaded. A save that fails leaves nothing behind.
"""

import shutil
import tomllib
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import async_save, save

from quads.config import config_changes
from quads.config.sections import CheckpointSettings
from quads.distributed import current_rank, gather_from_all, has_peers, in_process_group
from quads.errors import UserError
from quads.run.checkpoint_files import (
    MARKER,
    bytes_needed,
    read_sums,
    wrong_files,
)
from quads.run.checkpoint_save import Writing
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
        self._due = False
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
        self._check_moments(path)
        verify(path)
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

    def _check_moments(self, path: Path) -> None:
        """UserError where one side has Adam's moments in 8 bits and the other does not: they cannot be converted."""
        texts = (path / "config.toml").read_text(encoding="utf-8"), self.config_text
        stored, asked = (tomllib.loads(text).get("optim", {}).get("moments", "") for text in texts)
        if stored and asked and (stored == "8bit") != (asked == "8bit"):
            raise UserError(
                f"checkpoint {path} was written with [optim] moments = {stored!r}, this run has {asked!r}; 8-bit and "
                f"32-bit moments are not converted into each other: go on with --optim.moments {stored}, or start a "
                "new run from the weights (python -m quads.export --format bf16, then [model] path)"
            )

    def offer(self, state: TrainState, learner: Trainable, healthy: bool, last: bool = False) -> None:
        """Save, if a save is due and the step was healthy: every `every` steps, or at the next healthy one after that,
        and at the last one of a run with `final`.

        A checkpoint is proven by the next healthy step, whose responses its weights have drawn. Until then the one
        before it is kept too, where `keep` is 1.
        """
        every = self.settings.every
        self._due = (
            self._due or bool(last and self.settings.final) or (not last and every > 0 and state.step % every == 0)
        )
        if healthy and not last and self._pending is None and current_rank() == 0:
            self._delete_all_but(self.settings.keep)
        if self._due and healthy:
            self._due = False
            self.save(state, learner)
        elif self._due and last:
            _print(f"step {state.step} was skipped, so it is not saved; {self._last()}")

    def save(self, state: TrainState, learner: Trainable) -> None:
        """Write step_N for N = state.step, then delete what exceeds `keep`; with async_save in the background.

        Raises:
            UserError: it could not be written. Nothing of it is left, and earlier checkpoints are as they were.
        """
        self.wait()
        final = self.folder / f"step_{state.step}"
        if final.exists():
            return  # the same step of the same run: a stop right after a periodic save
        content, writing = checkpoint_content(learner), Writing(final)
        texts = {"train_state.json": train_state_text(state, learner), "config.toml": self.config_text}
        try:
            writing.prepare(bytes_needed(content), texts)
            with single_process_is_fine():
                if self._finisher is None:
                    save(content, storage_writer=writing.writer)
                else:
                    written = async_save(content, storage_writer=writing.writer, process_group=self._group)
                    self._pending = self._finisher.submit(self._finish_after, cast(Future, written), writing)
                    return
            self._finish(writing, None)
        except (OSError, CheckpointException) as error:
            raise writing.failed(error) from None
        _barrier()

    def wait(self) -> None:
        """Return when the last save is complete; raises what it raised in the background."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending.result()
            _barrier()

    @contextmanager
    def naming_the_last(self) -> Iterator[None]:
        """Within it, what ends a run with a UserError says which checkpoint is left to go on from."""
        try:
            yield
        except UserError as error:
            if self._pending is not None and not has_peers():
                wait([self._pending])
            error.args = (f"{error}; {self._last()}",)
            raise

    def _last(self) -> str:
        last = latest_checkpoint(self.folder)
        return "no checkpoint was saved" if last is None else f"the last good checkpoint is {last}"

    def _finish_after(self, written: Future, writing: Writing) -> None:
        try:
            written.result()
            self._finish(writing, self._group)
        except (OSError, CheckpointException) as error:
            raise writing.failed(error) from None

    def _finish(self, writing: Writing, group: dist.ProcessGroup | None) -> None:
        """All ranks' files are on disk: complete the checkpoint, and only then delete older ones."""
        writing.complete(group)
        if current_rank() == 0:
            self._delete_all_but(max(self.settings.keep, 2) if self.settings.keep else 0)  # see `offer`

    def _delete_all_but(self, keep: int) -> None:
        for _, old in _complete(self.folder)[:-keep] if keep else ():
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
    found = find_checkpoint(path)
    verify(found)
    return load_weights(found, model)


def verify(path: Path) -> None:
    """Read every file of a complete checkpoint, each process its share, and compare it with the sums of the save.

    Raises:
        UserError: a file is gone, cut or changed; it is named.
    """
    try:
        sums = read_sums(path)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise damaged(path, error) from None
    if sums is None:
        _print(f"{path} was written without checksums: not verified")
        return
    rank, size = current_rank(), dist.get_world_size() if has_peers() else 1
    found = gather_from_all(wrong_files(path, sums, sorted(sums)[rank::size]))
    wrong = [line for lines in found for line in lines]
    if wrong:
        raise UserError(f"checkpoint {path} is damaged, use another one ({wrong[0]})")


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


def _own_group() -> dist.ProcessGroup | None:
    return cast(dist.ProcessGroup, dist.new_group(backend="gloo")) if in_process_group() else None


def _print(text: str) -> None:
    if current_rank() == 0:
        print(text, flush=True)


def _barrier() -> None:
    if has_peers():
        dist.barrier()
