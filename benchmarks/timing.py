"""Timing on a GPU: CUDA graphs of rotating inputs, medians; and the memory bandwidth that times are held against."""

from collections.abc import Callable, Sequence

import torch
import triton
import triton.language as tl


def graph_us(calls: Sequence[Callable[[], object]], replays: int = 9) -> float:
    """Median microseconds of one call. All calls are captured in one graph, in order, so that consecutive ones can use
    different inputs (together larger than the L2 cache) and launch gaps are those of a captured decode step."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    times = []
    for _ in range(replays):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / len(calls))
    return sorted(times)[len(times) // 2]


@triton.jit
def _copy(x_ptr, y_ptr, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + i, tl.load(x_ptr + i))


@triton.jit
def _read(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    total = tl.zeros((BLOCK,), dtype=tl.int32)
    for i in range(tl.program_id(0), n, tl.num_programs(0)):
        total ^= tl.load(x_ptr + i.to(tl.int64) * BLOCK + tl.arange(0, BLOCK))
    tl.store(y_ptr + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), total)


def copy_gbps(elements: int = 2**29) -> float:
    """GB/s read plus written of an elementwise copy kernel (a memcpy node of a graph is slower)."""
    x = torch.randint(-9, 9, (elements,), dtype=torch.int32, device="cuda")
    y = torch.empty_like(x)
    us = graph_us([lambda: _copy[(elements // 4096,)](x, y, BLOCK=4096, num_warps=4)] * 2)
    return 2 * 4 * elements / us / 1000


def read_gbps(elements: int = 2**29) -> float:
    """GB/s of a kernel that only reads."""
    x = torch.randint(-9, 9, (elements,), dtype=torch.int32, device="cuda")
    programs = 132 * 8
    y = torch.empty(programs * 4096, dtype=torch.int32, device="cuda")
    us = graph_us([lambda: _read[(programs,)](x, y, elements // 4096, BLOCK=4096, num_warps=4)] * 2)
    return 4 * elements / us / 1000
