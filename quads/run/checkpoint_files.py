"""The files of a checkpoint: hashed while they are written, read back at once, verified before anything is loaded.

COMPLETE is written last and holds {"files": {name: {"bytes": size, "xxh3_64": hash}}}. XXH3 finds damage, not forgery.
Against who wants to deceive stands that loading runs no code: the index is unpickled with an allow list, tensors and
numbers are read by torch.load(weights_only=True).
"""

import json
import os
import pickle
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem

MARKER = "COMPLETE"
READ_AT_ONCE = 2**24
READERS = 8  # threads; hashing releases the GIL

FileSums = dict[str, dict[str, Any]]  # file name -> {"bytes": size, "xxh3_64": hash}

# What the index of a checkpoint is made of. Anything else in it would be code that a stranger wants to have run.
INDEX_CLASSES = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size", *(name for name, value in vars(torch).items() if isinstance(value, torch.dtype))},
    "pathlib": {"PosixPath", "WindowsPath", "PurePosixPath"},
    "collections": {"OrderedDict"},
}


class HashingWriter(FileSystemWriter):
    """Writes a process's part of a checkpoint; `sums` then has its files, `failure` the first error of the disk."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.fs: HashedFiles = HashedFiles()

    @property
    def sums(self) -> FileSums:
        """Of every file that was written, by its final name."""
        return self.fs.sums

    @property
    def failure(self) -> OSError | None:
        """What the system said when a write failed; torch reports what follows from it."""
        return self.fs.failure


class HashedFiles(FileSystem):
    """The file system of torch's checkpoints, with a hash of what goes through it."""

    def __init__(self) -> None:
        super().__init__()
        self.sums: FileSums = {}
        self.failure: OSError | None = None

    @contextmanager
    def create_stream(self, path: str | os.PathLike, mode: str) -> Iterator[Any]:
        """`mode` is "wb" or "rb"; what is read is not hashed."""
        try:
            with super().create_stream(path, mode) as stream:
                hashed = _HashedStream(stream) if mode == "wb" else None
                yield hashed or stream
        except OSError as error:
            self.failure = self.failure or error
            raise
        except Exception:
            self.failure = self.failure or (hashed.failure if hashed else None)
            raise
        if hashed:
            self.sums[Path(path).name] = hashed.sum()

    def rename(self, path: str | os.PathLike, new_path: str | os.PathLike) -> None:
        super().rename(path, new_path)
        self.sums[Path(new_path).name] = self.sums.pop(Path(path).name)


class _HashedStream:
    def __init__(self, stream: Any) -> None:
        self._stream, self._hash, self._bytes = stream, xxhash.xxh3_64(), 0
        self.failure: OSError | None = None
        self.tell, self.fileno, self.close, self.flush = stream.tell, stream.fileno, stream.close, stream.flush

    def write(self, data: Any) -> int:
        try:
            written = self._stream.write(data)
        except OSError as error:
            self.failure = error
            raise
        self._hash.update(data)
        self._bytes += written
        return written

    def sum(self) -> dict[str, Any]:
        return {"bytes": self._bytes, "xxh3_64": self._hash.hexdigest()}


class CheckpointReader(FileSystemReader):
    """Reads the index without running what a pickle may ask for. pickle.UnpicklingError names what it asked for."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with self.fs.create_stream(self.fs.concat_path(self.path, ".metadata"), "rb") as file:
            metadata = _IndexUnpickler(file).load()
        if not isinstance(metadata, Metadata):
            raise pickle.UnpicklingError(f"its index is a {type(metadata).__name__}")
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str) -> Any:
        if global_name not in INDEX_CLASSES.get(module_name, ()):  # nothing inside a class either
            raise pickle.UnpicklingError(f"its index asks for {module_name}.{global_name}, which no checkpoint needs")
        return super().find_class(module_name, global_name)


class SafeLoadPlanner(DefaultLoadPlanner):
    """Numbers and texts of a checkpoint (learning rates, say) as plain data; torch's own planner would unpickle."""

    def load_bytes(self, read_item: ReadItem, value: BytesIO) -> None:
        plain = BytesIO()
        torch.save(torch.load(value, weights_only=True), plain)
        plain.seek(0)
        super().load_bytes(read_item, plain)


def text_sum(text: str) -> dict[str, Any]:
    """The sum of a file that holds `text` in UTF-8."""
    data = text.encode()
    return {"bytes": len(data), "xxh3_64": xxhash.xxh3_64(data).hexdigest()}


def wrong_files(folder: Path, sums: FileSums, names: Sequence[str]) -> list[str]:
    """Of the files `names`, a line for each that is not what `sums` says, read from the disk, several at once."""
    with ThreadPoolExecutor(READERS) as readers:
        return [line for line in readers.map(lambda name: _compare(folder / name, sums[name]), names) if line]


def read_sums(folder: Path) -> FileSums | None:
    """What COMPLETE says. None for a checkpoint of an older version, which has no sums. ValueError if it is damaged."""
    text = (folder / MARKER).read_text(encoding="utf-8")
    if not text:
        return None
    files = json.loads(text)["files"]
    if not all({"bytes", "xxh3_64"} == sums.keys() for sums in files.values()):
        raise ValueError(f"{MARKER} is not what a save writes")
    return files


def bytes_needed(content: Any) -> int:
    """Of the tensors in nested dictionaries, all shards of them."""
    if isinstance(content, dict):
        return sum(map(bytes_needed, content.values()))
    return _tensor_bytes(content) if isinstance(content, torch.Tensor) else 0


def free_bytes(folder: Path) -> int:
    """Of the file system that `folder` is on, or will be."""
    nearest = next(path for path in (folder, *folder.resolve().parents) if path.exists())
    return shutil.disk_usage(nearest).free


def _tensor_bytes(tensor: Any) -> int:
    local = getattr(tensor, "_local_tensor", tensor)
    if local is not tensor:  # sharded: as many as here in each equal part
        return _tensor_bytes(local) * tensor.numel() // max(local.numel(), 1)
    if hasattr(tensor, "__tensor_flatten__"):  # quantized: its parts
        return sum(_tensor_bytes(getattr(tensor, name)) for name in tensor.__tensor_flatten__()[0])
    return tensor.nbytes


def _compare(path: Path, expected: dict[str, Any]) -> str:
    try:
        found = _file_sum(path)
    except OSError as error:
        return f"{type(error).__name__}: {path.name}: {error.strerror}"
    if found["bytes"] != expected["bytes"]:
        return f"{path.name} has {found['bytes']} bytes, {expected['bytes']} were written"
    return "" if found == expected else f"{path.name} is not what was written: its checksum differs"


def _file_sum(path: Path) -> dict[str, Any]:
    """Of what is on the disk: pages that the system still holds from writing them are dropped first, where it can."""
    hashed, size = xxhash.xxh3_64(), 0
    buffer = memoryview(bytearray(min(READ_AT_ONCE, max(path.stat().st_size, 1))))
    with open(path, "rb", buffering=0) as file:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        while count := file.readinto(buffer):
            hashed.update(buffer[:count])
            size += count
    return {"bytes": size, "xxh3_64": hashed.hexdigest()}
