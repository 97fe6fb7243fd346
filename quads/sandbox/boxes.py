"""Folders of programs on disk, where there is no memory file system for them: made, measured, removed.

The trainer makes one folder for all its servers and holds a lock on it as long as it lives. A folder of that name with
a lock that can be had belongs to nobody any more, and goes when the next trainer starts.
"""

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from pathlib import Path

PREFIX = "quads-box-"


def make_locked() -> tuple[str, int]:
    """A new folder -> (its path, a descriptor that holds its lock until it is closed or its process ends)."""
    while True:
        folder = tempfile.mkdtemp(prefix=PREFIX)
        lock = _lock(folder)
        if lock is not None:
            return folder, lock  # else another start took it for a stale one, before the lock


def remove_stale() -> None:
    """Remove the folders of this user's trainers that have ended without doing so."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        lock = _lock(str(folder))
        if lock is not None:
            remove(str(folder))
            os.close(lock)


def _lock(folder: str) -> int | None:
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:  # gone, no folder, or that of another user
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        found = os.fstat(fd)
        if found.st_uid == os.getuid() and os.path.samestat(found, os.lstat(folder)):
            return fd
    except OSError:
        pass  # another trainer's
    os.close(fd)
    return None


def remove(folder: str) -> None:
    """Remove a folder and everything in it, whatever its modes; nothing happens where there is none."""
    shutil.rmtree(folder, ignore_errors=True)
    if os.path.lexists(folder):  # a mode in the way, or a path that is too long
        with contextlib.suppress(OSError):
            _empty(folder)
            os.rmdir(folder)


def _empty(folder: str) -> None:
    """Remove everything in a folder, however deep; walks by name so that no path gets too long."""
    here = os.getcwd()
    os.chmod(folder, 0o700)
    os.chdir(folder)
    above: list[str] = []
    try:
        while True:
            below = ""
            with os.scandir(".") as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        below = entry.name
                    else:
                        os.unlink(entry.name)
            if below:
                os.chmod(below, 0o700)
                os.chdir(below)
                above.append(below)
            elif above:
                os.chdir("..")
                os.rmdir(above.pop())
            else:
                break
    finally:
        os.chdir(here)


def disk_use(folder: str, pid: int) -> int:
    """Bytes on disk of the files in a folder, at least a page each, and of those that a process has open but removed.

    There are no folders in it (seccomp.py).
    """
    sizes: dict[int, int] = {}
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):  # it may have been removed by now
                _count(sizes, entry.stat(follow_symlinks=False))
    with contextlib.suppress(OSError):  # the process may have ended
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                found = os.stat(f"/proc/{pid}/fd/{name}")
                if found.st_nlink == 0 and stat.S_ISREG(found.st_mode):
                    _count(sizes, found)
    return sum(sizes.values())


def _count(sizes: dict[int, int], found: os.stat_result) -> None:
    sizes[found.st_ino] = max(4096, found.st_size, 512 * found.st_blocks)
