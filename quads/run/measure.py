"""Time, memory and model FLOPs utilisation of a step."""

import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

# Dense bf16 tensor-core peak, FLOP/s, from NVIDIA's data sheets (without sparsity).
PEAK_BF16_FLOPS = {"H100": 989e12, "H200": 989e12, "B200": 2250e12, "GB200": 2500e12, "B300": 2250e12, "A100": 312e12}


class Timers:
    """Seconds spent in the named phases of one step. On a GPU a phase ends when its kernels have.

    Example: `with timers.phase("rollout"): ...` and then `timers.seconds("rollout")`
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.reset()

    def reset(self) -> None:
        """Begin a step; its clock starts with its first phase."""
        self._seconds: dict[str, float] = {}
        self._start: float | None = None

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time within to phase `name`; may run several times in a step."""
        start = time.perf_counter()
        self._start = start if self._start is None else self._start
        try:
            yield
        finally:
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - start

    def seconds(self, name: str) -> float:
        """Seconds that a phase of this step has taken so far; 0 for one that has not run."""
        return self._seconds.get(name, 0.0)

    def metrics(self) -> dict[str, float]:
        """`time/<phase>_s` of every phase, and `time/step_s` since the first began."""
        total = 0.0 if self._start is None else time.perf_counter() - self._start
        return {f"time/{name}_s": seconds for name, seconds in self._seconds.items()} | {"time/step_s": total}


def peak_memory_gib(device: torch.device) -> float:
    """Peak memory in GiB: allocated on the GPU since the last call, or resident in this process since its start."""
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        return peak / 2**30
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss is in bytes on macOS, in KiB on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


def mfu(flops_per_s: float, device: torch.device) -> float | None:
    """Model FLOPs utilisation: the share of a GPU's dense bf16 peak; None where the peak is not known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    known = [model for model in PEAK_BF16_FLOPS if model in name]
    return flops_per_s / PEAK_BF16_FLOPS[max(known, key=len)] if known else None
