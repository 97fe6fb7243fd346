"""Where the time of a 4-bit expert layer goes: the layer with one stage left out or changed, microseconds.

    python -m benchmarks.ablate_kernels [TOKENS ...]

Leaving a stage out gives wrong numbers at the right speed: a kernel's results of an earlier call stand in for it. The
quantizer of x writes the routing map too, so without quantizing the map of an earlier call serves.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.timing import graph_us
from benchmarks.tune_kernels import EXPERTS, HIDDEN, TOP_K, WIDTH, weight
from quads.quant.triton import activations
from quads.quant.triton import ops as kernels

# precision, selection, folded
VARIANTS = {
    "w4a4": ("w4a4", "batch", False),
    "batch": ("w4a4_residual", "batch", True),
    "all": ("w4a4_residual", "all", True),
    "two": ("w4a4_residual", "all", False),
}


@contextmanager
def remembered(module: Any, name: str) -> Iterator[None]:
    """A function that runs once for each shape of its tensors and then returns what it returned."""
    real, seen = getattr(module, name), {}

    def cached(*args, **kwargs):
        key = tuple(a.shape if isinstance(a, torch.Tensor) else str(type(a)) for a in args)
        if key not in seen:
            seen[key] = real(*args, **kwargs)
        return seen[key]

    with patch.object(module, name, cached):
        yield


@contextmanager
def without_quantizing() -> Iterator[None]:
    with remembered(kernels, "empty_map"), remembered(kernels, "_operand"):
        yield


@contextmanager
def without_gemm(name: str) -> Iterator[None]:
    real = kernels._gemm

    def skip(operand, weight, out, *, layer, **settings):
        if layer != name:
            real(operand, weight, out, layer=layer, **settings)

    with patch.object(kernels, "_gemm", skip):
        yield


@contextmanager
def as_it_is() -> Iterator[None]:
    yield


STAGES = {
    "whole": as_it_is,
    "no combine": lambda: remembered(kernels, "combine"),
    "no select": lambda: remembered(activations, "fold_selected"),
    "no quantize": without_quantizing,
    "no w13": lambda: without_gemm("w13"),
    "no w2": lambda: without_gemm("w2"),
}


def layer_us(tokens: int, w4: list, precision: str, selection: str, fold: bool) -> float:
    span = range(8)
    x = [torch.randn(tokens, HIDDEN, device="cuda", dtype=torch.bfloat16) for _ in span]
    ids = [torch.rand(tokens, EXPERTS, device="cuda").topk(TOP_K).indices for _ in span]
    gates = [torch.rand(tokens, TOP_K, device="cuda").bfloat16() for _ in span]

    def call(i: int) -> None:
        kernels.moe(x[i], *w4[i % 2], ids[i], gates[i], precision, selection=selection, fold=fold)

    return graph_us([lambda i=i: call(i) for i in span])


def main() -> None:
    sizes = [int(each) for each in sys.argv[1:]] or [16, 64, 256]
    w4 = [(weight((EXPERTS, 2 * WIDTH, HIDDEN), True), weight((EXPERTS, HIDDEN, WIDTH))) for _ in range(2)]
    print(torch.cuda.get_device_name(), "us; tokens, variant, " + ", ".join(STAGES), flush=True)
    for tokens in sizes:
        for name, variant in VARIANTS.items():
            row = []
            for stage, change in STAGES.items():
                torch.manual_seed(tokens)  # the same routings in every row
                with change():
                    skip = stage == "no select" and name != "batch"
                    row.append(float("nan") if skip else layer_us(tokens, w4, *variant))
            print(f"{tokens:5d} {name:6s} " + " ".join(f"{us:7.1f}" for us in row), flush=True)


if __name__ == "__main__":
    main()
