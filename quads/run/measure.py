"""Time and memory of the phases of a step, and model FLOPs utilisation."""

import resource
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

# Dense bf16 tensor-core peak, FLOP/s, from NVIDIA's data sheets (without sparsity).
PEAK_BF16_FLOPS = {"H100": 989e12, "H200": 989e12, "B200": 2250e12, "GB200": 2500e12, "B300": 2250e12, "A100": 312e12}


SAMPLED_EVERY_S = 0.05


class Timers:
    """Seconds spent in the named phases of one step, and the most memory that was in use during each.

    On a GPU a phase ends when its kernels have, and memory is what the device has in use, whoever holds it: torch's
    allocator, vLLM's, NCCL, the CUDA context, other processes. On a CPU it is what this process has resident. A thread
    looks every 50 ms and once more at the end.

    Example: `with timers.phase("rollout"): ...` and then `timers.seconds("rollout")`
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.reset()

    def reset(self) -> None:
        """Begin a step; its clock starts with its first phase."""
        self._seconds: dict[str, float] = {}
        self._peak_gib: dict[str, float] = {}
        self._start: float | None = None

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time within to phase `name`; may run several times in a step."""
        start = time.perf_counter()
        self._start = start if self._start is None else self._start
        ended = threading.Event()
        watcher = threading.Thread(target=self._watch, args=(name, ended), daemon=True)
        watcher.start()
        try:
            yield
        finally:
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - start
            ended.set()
            watcher.join()

    def _watch(self, name: str, ended: threading.Event) -> None:
        last = False
        while not last:
            last = ended.wait(SAMPLED_EVERY_S)
            self._peak_gib[name] = max(self._peak_gib.get(name, 0.0), used_memory_gib(self._device))

    def seconds(self, name: str) -> float:
        """Seconds that a phase of this step has taken so far; 0 for one that has not run."""
        return self._seconds.get(name, 0.0)

    def metrics(self) -> dict[str, float]:
        """`time/<phase>_s` and `memory/<phase>_gib` of every phase, and `time/step_s` since the first began."""
        total = 0.0 if self._start is None else time.perf_counter() - self._start
        memory = {f"memory/{name}_gib": gib for name, gib in self._peak_gib.items()}
        return {f"time/{name}_s": seconds for name, seconds in self._seconds.items()} | {"time/step_s": total} | memory


def used_memory_gib(device: torch.device) -> float:
    """GiB in use now: of the whole GPU, or resident in this process (its peak, where Linux's /proc is missing)."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return (total - free) / 2**30
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * resource.getpagesize() / 2**30
    except FileNotFoundError:
        return peak_resident_gib()


def peak_resident_gib() -> float:
    """The most CPU memory that this process has had resident, in GiB."""
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss is in bytes on macOS, in KiB on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


def mfu(flops_per_s: float, device: torch.device) -> float | None:
    """Model FLOPs utilisation: the share of a GPU's dense bf16 peak; None where the peak is not known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    known = [model for model in PEAK_BF16_FLOPS if model in name]
    return flops_per_s / PEAK_BF16_FLOPS[max(known, key=len)] if known else None
