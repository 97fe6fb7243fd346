"""One checkpoint on its way to the disk: room for it, small files, hashes read back, the name that says it is whole.

    writing = Writing(final)
    writing.prepare(num_bytes, texts)       step_N.partial, if there is room
    save(..., storage_writer=writing.writer)
    writing.complete(group)                 read back, COMPLETE, renamed to step_N

Every process calls every method; where one fails, all raise the same error.
"""

import errno
import json
import os
import shutil
from pathlib import Path

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from quads.distributed import current_rank, gather_from_all
from quads.errors import UserError
from quads.run.checkpoint_files import MARKER, FileSums, HashingWriter, free_bytes, text_sum, wrong_files


class Writing:
    """Args: final: the folder step_N, which does not exist yet."""

    def __init__(self, final: Path) -> None:
        self.final, self.partial = final, final.with_suffix(".partial")
        self.writer = HashingWriter(self.partial)
        self._texts: FileSums = {}

    def prepare(self, num_bytes: int, texts: dict[str, str]) -> None:
        """Make the folder with `texts` by file name. OSError, the same on all processes, if that or `num_bytes` more do
        not fit there."""
        problem = None
        if current_rank() == 0:
            try:
                self._prepare(num_bytes, texts)
            except OSError as error:
                problem = error
        problem = next(filter(None, gather_from_all(problem)), None)
        if problem is not None:
            raise problem

    def complete(self, group: dist.ProcessGroup | None) -> None:
        """All files of all processes are written: see that the disk has what was meant, and give it its name.

        group: a process group for this, where training goes on beside it.

        Raises:
            OSError: a file is not what was written; the same on all processes.
        """
        mine = self.writer.sums
        parts = gather_from_all((mine, wrong_files(self.partial, mine, list(mine))), group)
        wrong = [line for _, lines in parts for line in lines]
        if wrong:
            raise OSError(errno.EIO, f"what the disk gives back is not what was written ({wrong[0]})")
        if current_rank() != 0:
            return
        sums = self._texts | {name: file_sum for part, _ in parts for name, file_sum in part.items()}
        _write(self.partial / MARKER, json.dumps({"files": sums}, indent=1) + "\n")
        self.partial.rename(self.final)
        _sync_folder(self.final.parent)

    def failed(self, error: BaseException) -> UserError:
        """The error to raise; what was written of this checkpoint goes."""
        if isinstance(error, CheckpointException):  # its own text is the traceback of every rank
            error = self.writer.failure or next(iter(error.failures.values()))[0]
        if current_rank() == 0:
            shutil.rmtree(self.partial, ignore_errors=True)
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error).splitlines()[0]
        return UserError(
            f"checkpoint {self.final} could not be saved: {reason}; free some space there, lower checkpoint.keep, or "
            "choose another train.out"
        )

    def _prepare(self, num_bytes: int, texts: dict[str, str]) -> None:
        free = free_bytes(self.partial)
        if num_bytes > free:
            sizes = f"it needs {num_bytes / 2**30:.3g} GiB, {free / 2**30:.3g} GiB are free"
            raise OSError(errno.ENOSPC, sizes)
        self.partial.mkdir(parents=True)
        for name, text in texts.items():
            _write(self.partial / name, text)
            self._texts[name] = text_sum(text)


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
