"""Launch configurations of the 16-bit-operand GEMM: stored ones for known GPUs, found by a short search on others.

A shape class is (layer, tokens per expert up to a bound, residual as a second operand or not). Layers: "w13" and "w2"
(routed experts; both use the bm of their class, because they share one routing map), "dense", and "narrow": a linear
layer of so few outputs that its tiles do not fill a GPU. A class of routed experts may have tiles for experts with more
rows than its bm as well ("w13_large", "w2_large"). Files: tuned/<gpu>.json, written by benchmarks/tune_kernels.py.
"""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple

import torch

Layer = Literal["w13", "w2", "dense", "narrow", "w13_large", "w2_large"]
LAYERS: tuple[Layer, ...] = ("w13", "w2", "dense", "narrow", "w13_large", "w2_large")
NARROW = 2560
"""A linear layer of up to so many outputs is "narrow"."""


class Tile(NamedTuple):
    """bn weight rows, kstep * 128 columns a step, pipeline stages, warps, programs that share K (linear layers)."""

    bn: int
    kstep: int
    stages: int
    warps: int
    split: int = 1


class ShapeClass(NamedTuple):
    """One row of a tuning file."""

    up_to: float  # tokens per expert (routed) or tokens (dense), inclusive
    bm: int
    tiles: dict[str, Tile]  # by layer
    expand: bool = False  # linear layers: turn the whole weight into bfloat16 first and multiply with torch
    large: int = 0  # routed: tokens of a tile for experts with more than bm rows; its tiles are "w13_large", "w2_large"


DEFAULT_TILES: tuple[Tile, ...] = (Tile(64, 1, 3, 2), Tile(64, 2, 3, 2), Tile(128, 1, 3, 4), Tile(128, 2, 3, 4))
"""What a GPU without a file tries, for each class, on first use."""

DEFAULT_BM: tuple[tuple[float, int], ...] = ((6, 8), (12, 16), (24, 32), (96, 64), (float("inf"), 128))
"""Tokens per expert -> bm of a GPU without a file."""


@functools.cache
def stored(device_name: str) -> dict[str, tuple[ShapeClass, ...]] | None:
    """The tuning file of a GPU by its name ("NVIDIA H200"), or None. Keys "moe", "moe_residual", "dense", ..."""
    for path in sorted((Path(__file__).parent / "tuned").glob("*.json")):
        if json.loads(path.read_text())["device"] == device_name:
            return load(path)
    return None


def load(path: Path) -> dict[str, tuple[ShapeClass, ...]]:
    """The classes of a tuning file."""
    classes = json.loads(path.read_text())["classes"]
    return {name: tuple(_parse(row) for row in rows) for name, rows in classes.items()}


def _parse(row: dict) -> ShapeClass:
    tiles = {layer: Tile(*row[layer]) for layer in LAYERS if layer in row}
    up_to = float("inf") if row["up_to"] is None else row["up_to"]
    return ShapeClass(up_to, row["bm"], tiles, row.get("expand", False), row.get("large", 0))


def shape_class(device: torch.device, name: str, tokens: float, native: bool = False) -> ShapeClass:
    """The class that serves `tokens` per expert; for a GPU without a file its tiles are empty (see `tile`).

    The native path has fixed tiles and takes only bm from here.
    """
    if native:
        return ShapeClass(float("inf"), 16 if device.type != "cuda" else 32 if tokens <= 64 else 128, {})
    classes = stored(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    if classes is not None:
        return next(row for row in classes[name] if tokens <= row.up_to)
    if device.type != "cuda":
        return ShapeClass(float("inf"), 16, dict.fromkeys(LAYERS, Tile(32, 1, 1, 4)))
    up_to, bm = next(pair for pair in DEFAULT_BM if tokens <= pair[0])
    return ShapeClass(up_to, bm, {}, expand=name.startswith("dense") and tokens > 256)


_FOUND: dict[tuple, Tile] = {}


def tile(row: ShapeClass, layer: Layer, name: str, n: int, k: int, run: Callable[[Tile], None]) -> Tile:
    """The tile of a layer: the stored one, or on an unknown GPU the fastest of DEFAULT_TILES, timed once and printed.

    run(tile) launches the GEMM. Raises RuntimeError inside a CUDA graph capture: warm up every shape class first.
    """
    if layer in row.tiles:
        return row.tiles[layer]
    if layer == "narrow" and "dense" in row.tiles:
        return row.tiles["dense"]
    key = (name, layer, row.up_to, n, k)
    if key not in _FOUND:
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(f"no tuned tile for {key}: run the layer once before capturing a CUDA graph")
        from triton.testing import do_bench

        times = {candidate: do_bench(functools.partial(run, candidate)) for candidate in DEFAULT_TILES}
        _FOUND[key] = min(times, key=lambda candidate: times[candidate])
        print(f"kernels: no tuning file for this GPU; {layer} {n}x{k}, up to {row.up_to}: {_FOUND[key]}", flush=True)
    return _FOUND[key]
