"""Launching the GEMM of gemm.py: one kernel, or two for a routing map with blocks of two sizes."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quads.quant.triton.activations import Operand
from quads.quant.triton.dense import sum_parts
from quads.quant.triton.gemm import w4_gemm_kernel
from quads.quant.triton.layout import TILE
from quads.quant.triton.math import compiled
from quads.quant.triton.routing import Routing
from quads.quant.triton.tune import Layer, ShapeClass, Tile, tile

if TYPE_CHECKING:
    from quads.quant.triton.weight import KernelWeight


def launch(
    operand: Operand,
    weight: "KernelWeight",
    out: Tensor,
    *,
    layer: Layer,
    row: ShapeClass,
    name: str,
    blocks: int,
    n_rows: int,
    routing: Routing | None,
    top_k: int,
) -> None:
    """One GEMM; arguments as in ops.py. Of a map with large blocks two launches: those with the large ones begin, as
    their programs take longest."""
    if routing is None or not routing.large:
        _launch(operand, weight, out, layer, row, name, blocks, n_rows, routing, top_k, False)
        return
    assert not operand.residual, "the halves of two operands lie apart by the rows of one map"
    slots, small = routing.num_small * routing.bm, routing.num_small
    large = Routing(routing.rows[slots:], routing.expert[small:], routing.pairs, routing.large)
    wide = row._replace(bm=routing.large)
    if layer == "w13":
        rest, out_rest = operand, out[slots:]
    else:
        scale = None if operand.scale is None else operand.scale[slots:]
        rest, out_rest = operand._replace(data=operand.data[slots:], scale=scale), out
    tiles: Layer = "w13_large" if layer == "w13" else "w2_large"
    _launch(rest, weight, out_rest, tiles, wide, name, large.expert.numel(), n_rows, large, top_k, False)
    _launch(operand, weight, out, layer, row, name, small, n_rows, routing, top_k, True)


def _launch(
    operand: Operand,
    weight: "KernelWeight",
    out: Tensor,
    layer: Layer,
    row: ShapeClass,
    name: str,
    blocks: int,
    n_rows: int,
    routing: Routing | None,
    top_k: int,
    late: bool,
) -> None:
    mode = {"w13": "gather", "w2": "scatter"}.get(layer.removesuffix("_large"), "dense")
    nb, kb = weight.words.shape[1:3]
    unused = weight.g

    def run(choice: Tile) -> None:
        split = choice.split if kb % choice.split == 0 else 1
        kstep = choice.kstep if kb // split % choice.kstep == 0 else 1
        target = out if split == 1 else torch.empty(split, *out.shape, dtype=torch.float32, device=out.device)
        w4_gemm_kernel[(blocks * nb * (TILE // choice.bn) * split,)](
            operand.data,
            unused if operand.scale is None else operand.scale,
            weight.words,
            weight.scales.view(torch.int16),
            weight.g,
            unused if routing is None else routing.rows,
            unused if routing is None else routing.expert,
            target,
            n_rows,
            weight.n,
            nb,
            kb,
            operand.data.stride(0),
            out.stride(0),
            TOP_K=top_k,
            BM=row.bm,
            BN=choice.bn,
            KSTEP=kstep,
            MODE=mode,
            SCALED=operand.scale is not None,
            RESIDUAL=operand.residual,
            SPLIT=split,
            LATE=late,
            ASM=compiled(),
            num_warps=choice.warps,
            num_stages=choice.stages,
            launch_pdl=compiled() and _overlaps(mode, n_rows, weight.experts),
        )
        if split > 1:
            sum_parts(target, out)

    run(tile(row, layer, name, weight.n, weight.k, run))


def _overlaps(mode: str, n_rows: int, experts: int) -> bool:
    """Whether a GEMM is launched while the kernel before it runs. A grid that does not fill the GPU then lands unevenly
    on it: measured slower."""
    return n_rows <= 16 if mode == "dense" else n_rows >= experts
