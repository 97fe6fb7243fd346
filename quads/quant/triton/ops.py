"""The door to the Triton kernels: which path serves a precision on a device, and linear and expert layers that use it.

    choose(device, precision) -> (path, why)         "native_fp4" | "decoded" | UserError naming the choices
    weight = KernelWeight.from_packed(packed, block_scale, g)          then weight.load_(...) in place
    y = linear(x, weight, "w4a4_residual", ratio=0.5, selection="batch", fold=True, live_T=live)
    y = moe(x, w13, w2, topk_ids, topk_weights, "w4a4", ...)
    quantize, dequantize, qdq, compensate_packed                       the operators of nvfp4.py and residual.py

Paths: "native_fp4" multiplies 4-bit operands on Blackwell's tensor cores (gemm_fp4.py); "decoded" turns codes
into 16-bit numbers in registers, exactly, and multiplies those (gemm.py). Nothing here synchronizes with the host,
and no shape depends on data, so every call may be captured in a CUDA graph once it has run before.
"""

from typing import Literal

import torch
import triton
from torch import Tensor

from quads.quant.residual import PackedPair, Selection
from quads.quant.triton import gemm_fp4
from quads.quant.triton.activations import (
    SCORED_ROWS,
    Compensation,
    Operand,
    budget,
    quantize_activations,
    reorder_activations,
)
from quads.quant.triton.dense import expanded
from quads.quant.triton.launch import launch
from quads.quant.triton.pack import dequantize, qdq, quantize
from quads.quant.triton.paths import choose, folds
from quads.quant.triton.routing import Routing, combine, empty_map, map_arguments, route
from quads.quant.triton.tune import NARROW, Layer, ShapeClass, shape_class
from quads.quant.triton.weight import KernelWeight

__all__ = [
    "KernelWeight",
    "choose",
    "compensate_packed",
    "dequantize",
    "folds",
    "linear",
    "moe",
    "qdq",
    "quantize",
    "quantize_ahead",
]

Precision = Literal["w4a16", "w4a4", "w4a4_residual"]


def compensate_packed(x_TK: Tensor, ratio: float, selection: Selection, live_T: Tensor | None = None) -> PackedPair:
    """`quads.quant.residual.compensate_packed` on the GPU: codes, scales and mask."""
    rows, k = x_TK.shape
    operand, mask = quantize_activations(
        x_TK, k, Compensation(ratio, selection), _bytes(live_T), codes=True, whole=True
    )
    assert operand.block_scale is not None and operand.scale is not None and mask is not None
    parts = (operand.data, operand.block_scale.view(torch.float8_e4m3fn), operand.scale.unsqueeze(-1))
    main, residual = (tuple(part[half] for part in parts) for half in (slice(0, rows), slice(rows, None)))
    return PackedPair(main, residual, mask.bool())  # pyright: ignore[reportArgumentType]


def _bytes(live: Tensor | None) -> Tensor | None:
    return None if live is None else live.view(torch.uint8)


def _operand(
    x: Tensor,
    weight: KernelWeight,
    precision: Precision,
    compensation: Compensation,
    live: Tensor | None,
    *,
    stored: bool = False,
    slots: tuple[Tensor, int] | None = None,
    route: dict | None = None,
) -> Operand:
    """The activations of one GEMM at a precision."""
    if precision == "w4a16":
        return Operand(x, None, None, False) if stored else reorder_activations(x, weight.k, live, route)
    keeps_some = precision == "w4a4_residual" and budget(weight.k, compensation) > 0  # without channels no residual
    operand, _ = quantize_activations(
        x,
        weight.k,
        compensation if keeps_some else None,
        live,
        codes=weight.path == "native_fp4",
        stored=stored,
        slots=slots,
        route=route,
    )
    return operand


def _gemm(
    operand: Operand,
    weight: KernelWeight,
    out: Tensor,
    *,
    layer: Layer,
    row: ShapeClass,
    name: str,
    blocks: int,
    n_rows: int,
    routing: Routing | None = None,
    top_k: int = 1,
) -> None:
    """Launch one GEMM of either path.

    layer, row, name: what the table of tiles is asked for (tune.py). blocks: of row.bm tokens each. n_rows: tokens, or
    pairs of token and expert. routing, top_k: of routed experts; of w2 top_k is 1, as its rows are pairs already.
    """
    shape = {"blocks": blocks, "n_rows": n_rows, "routing": routing, "top_k": top_k}
    if weight.path == "native_fp4":
        mode = {"w13": "gather", "w2": "scatter"}.get(layer, "dense")
        gemm_fp4.launch(operand, weight, out, mode=mode, bm=row.bm, **shape)
    else:
        launch(operand, weight, out, layer=layer, row=row, name=name, **shape)


def linear(
    x_TK: Tensor,
    weight: KernelWeight,
    precision: Precision,
    *,
    ratio: float = 0.5,
    selection: Selection = "batch",
    fold: bool = False,
    live_T: Tensor | None = None,
) -> Tensor:
    """y = x W^T, bfloat16 [T, N]. x: bfloat16 [T, K]; live_T: bool [T], rows that take part in the channel scores.

    fold: the residual and x are one operand (residual.fold). ValueError on the path "native_fp4"."""
    tokens = x_TK.shape[0]
    compensation = _compensation(ratio, selection, fold, weight)
    name = "dense_residual" if precision == "w4a4_residual" and not fold else "dense"
    row = shape_class(x_TK.device, name, tokens, weight.path == "native_fp4")
    if row.expand:
        return expanded(x_TK, weight, precision, compensation, _bytes(live_T))
    out = torch.empty(tokens, weight.n, dtype=torch.bfloat16, device=x_TK.device)
    operand = _operand(x_TK, weight, precision, compensation, _bytes(live_T))
    layer = "narrow" if weight.n <= NARROW else "dense"
    _gemm(operand, weight, out, layer=layer, row=row, name=name, blocks=triton.cdiv(tokens, row.bm), n_rows=tokens)
    return out


def moe(
    x_TH: Tensor,
    w13: KernelWeight,
    w2: KernelWeight,
    topk_ids_TA: Tensor,
    topk_weights_TA: Tensor,
    precision: Precision,
    *,
    residual_sites: tuple[str, ...] = ("w13",),
    ratio: float = 0.5,
    selection: Selection = "batch",
    fold: bool = False,
    live_T: Tensor | None = None,
    quantized: Operand | None = None,
) -> Tensor:
    """Routed experts, bfloat16 [T, H]: sum over a token's experts of gate * w2(silu(gate rows) * up rows).

    x: bfloat16 [T, H]; topk_ids int [T, A]; topk_weights [T, A]; live_T bool [T]: dead rows cost nothing and give 0.
    With precision "w4a4_residual" the sites named in residual_sites ("w13", "w2") are compensated, the other is w4a4.
    fold: as in `linear`.
    quantized: what `quantize_ahead` made of x; the result is the same.
    """
    tokens, top_k = topk_ids_TA.shape
    compensation = _compensation(ratio, selection, fold, w13)
    at = {site: _site_precision(precision, site, residual_sites) for site in ("w13", "w2")}
    name = "moe_residual" if "w4a4_residual" in at.values() and not fold else "moe"
    row = shape_class(x_TH.device, name, tokens * top_k / w13.experts, w13.path == "native_fp4")
    live = _bytes(live_T)
    # the quantizer of x writes the routing map as well
    decode = quantized is None and w13.path == "decoded" and tokens <= SCORED_ROWS
    if decode:
        routing = empty_map(topk_ids_TA, w13.experts, row.bm, row.large)
    else:
        routing = route(topk_ids_TA, w13.experts, row.bm, live, row.large)
    job = map_arguments(routing, topk_ids_TA, w13.experts) if decode else None
    blocks, pairs = routing.expert.numel(), routing.pairs

    hidden = torch.empty(routing.rows.numel(), w13.hidden_width, dtype=torch.bfloat16, device=x_TH.device)
    operand = quantized or _operand(x_TH, w13, at["w13"], compensation, live, route=job)
    shape = {"row": row, "name": name, "blocks": blocks, "n_rows": pairs, "routing": routing}
    _gemm(operand, w13, hidden, layer="w13", top_k=top_k, **shape)

    live_slots = (routing.rows < pairs).view(torch.uint8) if at["w2"] == "w4a4_residual" else None
    stored = w2.path == "decoded"
    operand = _operand(hidden, w2, at["w2"], compensation, live_slots, stored=stored, slots=(routing.rows, pairs))
    y = torch.empty(pairs, w2.n, dtype=torch.bfloat16, device=x_TH.device)
    _gemm(operand, w2, y, layer="w2", **shape)
    return combine(y, topk_ids_TA, topk_weights_TA, w13.experts, live)


def quantize_ahead(
    x_TH: Tensor,
    w13: KernelWeight,
    precision: Precision,
    *,
    ratio: float = 0.5,
    selection: Selection = "batch",
    fold: bool = False,
    live_T: Tensor | None = None,
) -> Operand:
    """The activations of an expert layer's first GEMM, which do not depend on the routing: for `moe(quantized=...)`.

    precision: of w13.
    """
    return _operand(x_TH, w13, precision, _compensation(ratio, selection, fold, w13), _bytes(live_T))


def _compensation(ratio: float, selection: Selection, fold: bool, weight: KernelWeight) -> Compensation:
    if fold and weight.path != "decoded":
        raise ValueError(f"operands of the path {weight.path} stay in 4 bits; only decoded ones can be folded")
    return Compensation(ratio, selection, fold)


def _site_precision(precision: Precision, site: str, residual_sites: tuple[str, ...]) -> Precision:
    return "w4a4" if precision == "w4a4_residual" and site not in residual_sites else precision
