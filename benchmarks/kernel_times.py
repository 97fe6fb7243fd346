"""Where a profiled piece of GPU work spent its time: sums by kind of kernel, exposed communication, idle gaps."""

import re

from torch.autograd import DeviceType
from torch.autograd.profiler_util import EventList

# The first pattern that is found in a kernel's name gives its kind.
KINDS = {
    "all-to-all": r"SendRecv|AllToAll",
    "all-gather, reduce-scatter": r"AllGather|ReduceScatter",
    "all-reduce and other NCCL": r"nccl",
    "attention": r"flash|fmha|attention|attn",
    "quantize and decode": r"^weight_kernel|^amax_kernel|^dequantize_kernel|^rows_kernel|^qdq_|fp8_",
    "loss": r"^stats_kernel|^gradient_kernel",
    "matmul": r"gemm|cutlass|cublas|nvjet|xmma|grouped",
    "optimizer, norm, clip": r"multi_tensor|Adam|lpnorm",
    "sort, gather, scatter": r"sort|radix|index|scatter|gather|topk|embedding|scan",
    "FSDP copies": r"split_with_sizes|chunk_cat|foreach_copy",
    "copies": r"emcpy|emset|copy|FillFunctor",
    "elementwise and norms (compiled)": r"^triton_",
}
REST = "elementwise (eager)"
COMMUNICATION = ("all-to-all", "all-gather, reduce-scatter", "all-reduce and other NCCL")
ANNOTATIONS = ("nccl:", "FSDP::", "## ", "ProfilerStep", "Optimizer.", "c10d::")

Interval = tuple[float, float]


def kind_of(name: str) -> str:
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, name)), REST)


def union(intervals: list[Interval]) -> float:
    """Length covered by intervals that may overlap."""
    covered, end = 0.0, float("-inf")
    for start, stop in sorted(intervals):
        covered += max(stop - max(start, end), 0.0)
        end = max(end, stop)
    return covered


def gaps(named: list[tuple[float, float, str]]) -> list[tuple[float, str, str]]:
    """(idle ms, kernel before, kernel after), longest first."""
    found, end, last = [], float("inf"), ""
    for start, stop, name in sorted(named):
        if start > end:
            found.append((start - end, last, name))
        if stop > end or not last:
            end, last = stop, name
    return sorted(found, reverse=True)


def summarize(events: EventList, largest: int = 48) -> str:
    """In milliseconds: busy, exposed and idle time, sums by kind, the largest kernels and the longest gaps."""
    by_kind: dict[str, float] = {}
    by_name: dict[str, tuple[float, int]] = {}
    every: list[Interval] = []
    named: list[tuple[float, float, str]] = []
    computing: list[Interval] = []
    for event in events:
        if event.device_type != DeviceType.CUDA or event.name.startswith(ANNOTATIONS):
            continue
        interval = (event.time_range.start / 1000, event.time_range.end / 1000)
        kind, length = kind_of(event.name), interval[1] - interval[0]
        by_kind[kind] = by_kind.get(kind, 0.0) + length
        total, count = by_name.get(event.name, (0.0, 0))
        by_name[event.name] = (total + length, count + 1)
        every.append(interval)
        named.append((*interval, event.name))
        if kind not in COMMUNICATION:
            computing.append(interval)
    if not every:
        return "no kernels were recorded"
    span = max(stop for _, stop in every) - min(start for start, _ in every)
    busy, compute = union(every), union(computing)
    lines = [f"{span:8.1f} ms from the first kernel to the last", f"{compute:8.1f} ms with a kernel that computes"]
    lines += [f"{busy - compute:8.1f} ms of communication alone", f"{span - busy:8.1f} ms idle", "by kind"]
    lines += [f"{ms:8.1f} ms {kind}" for kind, ms in sorted(by_kind.items(), key=lambda item: -item[1])]
    lines.append("largest kernels")
    ranked = sorted(by_name.items(), key=lambda item: -item[1][0])[:largest]
    lines += [f"{ms:8.1f} ms {count:5d} x {name[:110]}" for name, (ms, count) in ranked]
    idle = gaps(named)
    lines.append(f"longest of {len(idle)} gaps")
    lines += [f"{ms:8.2f} ms between {before[:50]} and {after[:50]}" for ms, before, after in idle[:8]]
    return "\n".join(lines)
