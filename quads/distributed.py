"""Processes, devices, meshes and seeds: what `torchrun` starts, and a plain `python` with one process.

    with init_distributed(cfg.parallel, cfg.train) as world:
        ...                                  # world.device, world.rank, world.size, world.print(...)

One process has no process group at all; the collectives below are then the identity. With more, an exception on any
rank ends the job: the first rank to fail reports, the others (whose collectives break when their peer is gone) stay
quiet, and torchrun ends whoever is left.

Meshes (all sizes are numbers of processes, replicate * fsdp = world, efsdp = fsdp / ep):

    world   (replicate, efsdp, ep)   every process once
    dense   (replicate, fsdp)        shards attention, embeddings, router: FSDP over efsdp x ep
    expert  (replicate, efsdp)       shards the experts that one ep rank owns
    ep      (ep,)                    exchanges tokens between the owners of experts
"""

import hashlib
import os
import pickle
import random
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, TypeVar

import numpy
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from quads.config.sections import ParallelSettings, TrainSettings
from quads.errors import UserError
from quads.watch import Watch, die_with_parent

T = TypeVar("T")

COLLECTIVE_TIMEOUT = timedelta(minutes=30)  # a rank may wait this long for another that still generates
REPORT_GRACE_S = 5.0  # a rank that failed after another leaves later, so that torchrun names the right one


@dataclass(frozen=True)
class Meshes:
    """See the table at the top of this file."""

    world: DeviceMesh
    dense: DeviceMesh
    expert: DeviceMesh
    ep: DeviceMesh


@dataclass(frozen=True)
class Distributed:
    """This process among all. `meshes` is None with one process: the model then is not wrapped at all."""

    rank: int
    size: int
    device: torch.device
    seed: int
    meshes: Meshes | None = None
    watch: Watch | None = None

    @property
    def is_main(self) -> bool:
        """Rank 0 alone writes files and prints."""
        return self.rank == 0

    def print(self, *words: object) -> None:
        """`print` in the first process, at once; nothing in the others."""
        if self.is_main:
            print(*words, flush=True)

    def at(self, phase: str) -> None:
        """This process enters a phase of the step; who stays behind is named (see watch.py)."""
        if self.watch is not None:
            self.watch.at(phase)

    def barrier(self) -> None:
        """Wait until every process is here."""
        self.at("a barrier")
        if self.size > 1:
            dist.barrier()

    def all_reduce(self, tensor: Tensor, op: Literal["sum", "max"] = "sum") -> Tensor:
        """Reduce `tensor` in place over all processes, and return it."""
        if self.size > 1:
            dist.all_reduce(tensor, dist.ReduceOp.SUM if op == "sum" else dist.ReduceOp.MAX)
        return tensor

    def share(self, count: int) -> range:
        """Which of `count` things are this process's: every size-th one, so that neighbours go to different ranks."""
        return range(self.rank, count, self.size)

    def gather_objects(self, value: T) -> list[T]:
        """`value` of every process, by rank, on every process. For small plain data: it travels pickled."""
        values: list[Any] = [value]
        if self.size > 1:
            values *= self.size
            dist.all_gather_object(values, value)
        return values

    def exchange_objects(self, outgoing: list[T]) -> list[T]:
        """`outgoing[r]` goes to rank r; returns what each rank sent here, by rank. Travels pickled, once."""
        if self.size == 1:
            return outgoing
        pickled = [torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8) for value in outgoing]
        sent = [len(data) for data in pickled]
        received = [sizes[self.rank] for sizes in self.gather_objects(sent)]
        arrived = torch.empty(sum(received), dtype=torch.uint8)
        dist.all_to_all_single(arrived, torch.cat(pickled), received, sent)
        return [pickle.loads(data.numpy().tobytes()) for data in arrived.split(received)]

    def generator(self, *names: object, shared: bool = False) -> torch.Generator:
        """A fresh generator on this device for the part `names`, such as ("eval", step).

        Its seed is a pure function of (train.seed, names) and, unless `shared`, the rank: nothing to save for a resume.
        """
        seed = derive_seed(self.seed, *names, *(() if shared else ("rank", self.rank)))
        return torch.Generator(self.device).manual_seed(seed)


@contextmanager
def init_distributed(parallel: ParallelSettings, train: TrainSettings) -> Iterator[Distributed]:
    """Join the processes that torchrun started (or be alone), seed every library, and leave cleanly.

    Raises:
        UserError: no such device, or [parallel] does not multiply to the number of processes.
    """
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = choose_device(train.device, local_rank)
    seed_libraries(train.seed, rank)
    if train.threads:
        torch.set_num_threads(train.threads)
    fsdp = _fsdp_size(parallel, size)
    if size == 1:
        yield Distributed(rank, size, device, train.seed)
        return
    store, _, _ = next(iter(rendezvous("env://", timeout=COLLECTIVE_TIMEOUT)))
    backend = "cuda:nccl,cpu:gloo" if device.type == "cuda" else "gloo"
    dist.init_process_group(
        backend,
        store=PrefixStore("quads", store),
        rank=rank,
        world_size=size,
        timeout=COLLECTIVE_TIMEOUT,
        device_id=device if device.type == "cuda" else None,
    )
    die_with_parent()
    own_connection = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))  # pyright: ignore[reportPrivateImportUsage]
    watch = Watch(own_connection, rank, size)
    try:
        meshes = build_meshes(device.type, parallel.replicate, fsdp, parallel.ep)
        yield Distributed(rank, size, device, train.seed, meshes, watch)
        watch.close()
        dist.barrier()  # a rank that leaves first would break its peers' last collectives
        dist.destroy_process_group()
    except Exception as error:
        _leave_after(error, rank, size, store)


def agree(flag: bool) -> bool:
    """Whether `flag` is true on any process. All processes must call it, at the same point."""
    if not has_peers():
        return flag
    value = torch.tensor(float(flag))  # on the CPU, where every job has gloo: no kernel to wait for
    dist.all_reduce(value, dist.ReduceOp.MAX)
    return bool(value)


def lowest(number: int) -> int:
    """The smallest `number` of all processes. All must call it, at the same point."""
    if not has_peers():
        return number
    value = torch.tensor(number)
    dist.all_reduce(value, dist.ReduceOp.MIN)
    return int(value)


def gather_from_all(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """`value` of every process, by rank, on every process: `Distributed.gather_objects` for who has no `Distributed`.
    group: of all processes, for a thread beside the one that trains."""
    values: list[Any] = [value]
    if has_peers():
        values *= dist.get_world_size()
        dist.all_gather_object(values, value, group)
    return values


@contextmanager
def imagined_processes(parallel: ParallelSettings, size: int) -> Iterator[Distributed]:
    """The first of `size` processes that do not exist: meshes as they would be, collectives that do nothing. For
    planning, on the meta device.

    Raises:
        UserError: [parallel] does not multiply to the number of processes.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend "fake"

    fsdp = _fsdp_size(parallel, size)
    if size == 1:
        yield Distributed(0, 1, torch.device("meta"), 0)
        return
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        meshes = build_meshes("cpu", parallel.replicate, fsdp, parallel.ep)
        yield Distributed(0, size, torch.device("meta"), 0, meshes)
    finally:
        dist.destroy_process_group()


def build_meshes(device_type: str, replicate: int, fsdp: int, ep: int) -> Meshes:
    """Device meshes over all replicate * fsdp processes; each ep group is `ep` neighbouring ranks."""
    world = init_device_mesh(device_type, (replicate, fsdp // ep, ep), mesh_dim_names=("replicate", "efsdp", "ep"))
    if replicate == 1:  # FSDP reads a second dimension as HSDP and would all-reduce over it
        return Meshes(
            world, init_device_mesh(device_type, (fsdp,), mesh_dim_names=("fsdp",)), world["efsdp"], world["ep"]
        )
    dense = init_device_mesh(device_type, (replicate, fsdp), mesh_dim_names=("replicate", "fsdp"))
    return Meshes(world, dense, world["replicate", "efsdp"], world["ep"])


def choose_device(name: str, local_rank: int) -> torch.device:
    """[train] device and the rank on this machine -> the device, which becomes CUDA's current one."""
    num_gpus = torch.cuda.device_count()
    if name == "cpu" or (name == "auto" and num_gpus == 0):
        return torch.device("cpu")
    if num_gpus == 0:
        raise UserError("[train] device = 'cuda' but torch sees no GPU; use cpu, or install a CUDA build of torch")
    if local_rank >= num_gpus:
        raise UserError(f"more processes than GPUs here; start torchrun with --nproc_per_node={num_gpus} or fewer")
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def derive_seed(*names: object) -> int:
    """A 63-bit seed for ("part", 3, ...): the same on every machine, unrelated for different names."""
    digest = hashlib.blake2b("/".join(map(str, names)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def seed_libraries(seed: int, rank: int) -> None:
    """Global generators of Python, NumPy and torch (all devices), different on every rank."""
    derived = derive_seed(seed, "libraries", rank)
    random.seed(derived)
    numpy.random.seed(derived % 2**32)
    torch.manual_seed(derived)


def _fsdp_size(parallel: ParallelSettings, size: int) -> int:
    fsdp = parallel.fsdp or size // parallel.replicate
    if parallel.replicate * fsdp != size or fsdp % parallel.ep:
        raise UserError(
            f"[parallel] replicate = {parallel.replicate}, fsdp = {parallel.fsdp}, ep = {parallel.ep} do not fit "
            f"{size} processes; replicate * fsdp must equal their number, and ep must divide fsdp: change these, or "
            "start as many processes as they need with torchrun --nproc_per_node=N"
        )
    return fsdp


def _leave_after(error: Exception, rank: int, size: int, store: Store) -> None:
    """End this process after `error`, with a report only if no other rank failed before."""
    try:
        first = store.add("quads/failed", 1) == 1
    except RuntimeError:  # rank 0 held the store and is gone
        first = False
    if first and isinstance(error, UserError):
        print(f"error: {error} (rank {rank} of {size})", file=sys.stderr, flush=True)
    elif first:
        traceback.print_exception(error)
        print(f"error: rank {rank} of {size} failed; the job ends", file=sys.stderr, flush=True)
    if not first:
        time.sleep(REPORT_GRACE_S)
    # No cleanup: peers may be stuck in collectives, and destroying the group would wait for them.
    os._exit(2 if isinstance(error, UserError) else 1)


def in_process_group() -> bool:
    """Whether this process is one of a group: False for a plain `python` with one process."""
    return dist.is_available() and dist.is_initialized()


def current_rank() -> int:
    """This process's rank in its group; 0 alone."""
    return dist.get_rank() if in_process_group() else 0


def has_peers() -> bool:
    """Whether there are other processes to talk to. A group alone does not say so: vLLM makes one of a single process,
    and on a GPU it takes no tensors of the CPU.
    """
    return in_process_group() and dist.get_world_size() > 1
