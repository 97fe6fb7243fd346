"""One owner of a run's folder: two runs in one would mix their rows and delete each other's checkpoints.

The lock is of the kernel (flock on <out>/.lock), so it ends with its process, however that ends; what stands in the
file only says who it was. Forks of the owner do not inherit it.
"""

import errno
import fcntl
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from quads.errors import UserError

NAME = ".lock"
GRACE_S = 2.0


@contextmanager
def own_folder(out: Path) -> Iterator[None]:
    """Hold the lock of `out`, which is made if it does not exist and removed again if it is empty at the end.

    Raises:
        UserError: another process has it (named with its host), or the folder or the lock cannot be had.
    """
    made = [path for path in (out, *out.parents) if not path.exists()]  # innermost first
    path = out / NAME
    try:
        out.mkdir(parents=True, exist_ok=True)
        descriptor = _lock(path)
    except BlockingIOError:
        raise UserError(
            f"[train] out = '{out}' belongs to a run that is still going ({_owner(path)}); wait for it, stop it, or "
            "choose another folder"
        ) from None
    except OSError as error:
        if error.errno in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            raise UserError(
                f"[train] out = '{out}': its file system has no locks ({error.strerror}), so two runs could mix their "
                "files there; mount it with flock, or choose another folder"
            ) from None
        raise UserError(
            f"[train] out = '{out}' cannot be made a folder: {error.strerror}; choose another one"
        ) from None
    os.register_at_fork(after_in_child=lambda: _close(descriptor, path))
    try:
        yield
    finally:
        path.unlink(missing_ok=True)  # while it is still held: see _lock
        os.close(descriptor)
        with suppress(OSError):  # not empty: the run's
            for folder in made:
                folder.rmdir()


def _lock(path: Path) -> int:
    """An open, locked descriptor of the file that `path` names now. BlockingIOError where another process has it and
    keeps it: one that was killed a moment ago lets go with its last thread."""
    deadline = time.monotonic() + GRACE_S
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.exists() and os.path.samestat(os.fstat(descriptor), path.stat()):
                os.truncate(descriptor, 0)
                os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
                return descriptor
        except BlockingIOError:
            os.close(descriptor)
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
            continue
        except OSError:
            os.close(descriptor)
            raise
        os.close(descriptor)  # its owner removed it between the two calls


def _owner(path: Path) -> str:
    try:
        return path.read_text().strip() or "which does not say who it is"
    except OSError:
        return "which has just ended"


def _close(descriptor: int, path: Path) -> None:
    """In a fork: let go of the parent's lock, unless the number is that of another file by now."""
    with suppress(OSError):
        if os.path.samestat(os.fstat(descriptor), path.stat()):
            os.close(descriptor)
