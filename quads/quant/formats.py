"""The formats that numbers can be stored in, one row each. Everything that depends on a format asks its row.

A format cuts a row into blocks of `block` channels. A block has codes and one scale (a few bytes); some formats have an
fp32 scale `g` besides, shared by all weights of a site. The functions take and give

    w, x        [..., N, K] or [..., K], fp32 or bf16
    codes       uint8 (E4M3 for fp8), scales of the blocks in `scale_dtype`
    scales      (g, gs), fp32 [] or [E, 1, 1], as `global_scale` makes them of an amax; None where nothing is shared
    rule        how scales are chosen: a word of `rules`, the default first. Two formats with a shared scale name its
                choice there, "pow2" or "amax" ([quant] global_scale); a rule beside that is joined by a plus

A new format is a module with `pack`, `unpack` and `qdq_rows`, and a row here: quads/quant/README.md shows one.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from quads.errors import UserError
from quads.quant import device, four_over_six, fp8, hif4, mxfp4, nvfp4

Scales = tuple[Tensor, Tensor]
Pack = Callable[[Tensor, str, Scales | None, bool], tuple[Tensor, Tensor]]
Unpack = Callable[[Tensor, Tensor, Tensor | None, torch.dtype, int], Tensor]
Storage = tuple[tuple[int, ...], torch.dtype]


@dataclass(frozen=True)
class Format:
    """One format.

    Example: `FORMATS["nvfp4"].row_bytes(64)` is 36: four blocks of 8 bytes of codes and one of scale.
    """

    name: str
    bits: int  # of an element
    block: int  # channels that share a scale; what columns are cut in, and the unit of the "block" selection
    block_bytes: tuple[int, int] | None  # (codes, scale) of a block of a row; None: a block spans rows
    scale_dtype: torch.dtype
    rules: tuple[str, ...]
    pack: Pack  # (w, rule, scales, cast) -> (codes, block scales); cast: of bf16(w)
    unpack: Unpack  # (codes, block scales, g, dtype, K) -> values
    qdq_rows: Callable[[Tensor, str, torch.dtype], Tensor]  # (x, rule, dtype) -> the values of x as activations
    global_scale: Callable[[Tensor, str], Scales] | None = None  # (amax, rule); None: nothing is shared
    qdq: Callable[[Tensor, str, Scales | None, torch.dtype], Tensor] | None = (
        None  # (w, rule, scales, dtype), in one go
    )
    pack_rows: Callable[[Tensor, Tensor, str, Scales], bool] | None = None  # see `pack_rows_into`; False: not here
    unpack_rows: Callable[[Tensor, Tensor, Tensor], bool] | None = None  # see `unpack_rows_into`
    row_scale: Callable[[Tensor], Tensor] | None = None  # fp32 x -> power-of-two g [..., 1] of its rows as activations
    note: str = ""  # for the banner: what scales activations have besides those of their blocks
    kernels: tuple[str, ...] = ()  # rollout precisions that the Triton kernels serve; others widen to bf16 values

    @property
    def bits_per_weight(self) -> float:
        """Storage of a weight, its share of the block's scale included."""
        if self.block_bytes is None:
            return self.bits + 8 * self.scale_dtype.itemsize / self.block**2
        return 8 * sum(self.block_bytes) / self.block

    @property
    def choices(self) -> tuple[str, ...]:
        """The words that [quant] scale_rule may take beside "", the default."""
        if not self.has_global_choice:
            return self.rules
        return tuple(dict.fromkeys(rule.partition("+")[2] for rule in self.rules if "+" in rule))

    @property
    def has_global_choice(self) -> bool:
        """Whether [quant] global_scale is about this format: its rules begin with "pow2" or "amax"."""
        return any(rule.startswith("pow2") for rule in self.rules)

    def row_bytes(self, num_columns: int) -> int:
        """Bytes of a packed row of K columns: the codes of all blocks, then their scales."""
        assert self.block_bytes is not None, f"{self.name} packs no rows"
        return -(-num_columns // self.block) * sum(self.block_bytes)

    def storage(self, shape: tuple[int, ...]) -> tuple[Storage, Storage]:
        """(shape, dtype) of the codes and of the block scales of a weight [..., N, K]."""
        *leading, num_rows, num_columns = shape
        blocks = -(-num_columns // self.block)
        if self.block_bytes is None:
            scales = (*leading, -(-num_rows // self.block), blocks)
            return (shape, torch.float8_e4m3fn), (scales, self.scale_dtype)
        codes, scale = (each * blocks for each in self.block_bytes)
        scales = (*leading, num_rows, scale // self.scale_dtype.itemsize)
        return ((*leading, num_rows, codes), torch.uint8), (scales, self.scale_dtype)


FORMATS = {
    format.name: format
    for format in (
        Format(
            "fp8", 8, fp8.BLOCK, None, torch.float32, ("pow2", "amax"),
            device.pack_fp8, device.unpack_fp8, device.qdq_rows_fp8, qdq=device.qdq_fp8,
            note="; activations have one scale for a token and 128 channels",
        ),
        Format(
            "nvfp4", 4, nvfp4.BLOCK, (8, 1), torch.float8_e4m3fn, ("pow2", "amax"),
            device.pack_nvfp4, device.unpack_nvfp4, device.qdq_rows_nvfp4, device.global_scale_nvfp4, device.qdq_nvfp4,
            device.pack_rows_nvfp4, device.unpack_rows_nvfp4, nvfp4.row_scale,
            "; activations have one power-of-two scale a token", ("w4a16", "w4a4", "w4a4_residual"),
        ),
        Format(
            "mxfp4", 4, mxfp4.BLOCK, (16, 1), torch.uint8, ("floor", "even", "ceil"),
            device.pack_mxfp4, device.unpack_mxfp4, device.qdq_rows_mxfp4,
        ),
        Format(
            "hif4", 4, hif4.BLOCK, (32, 4), torch.uint8, ("half_away",),
            device.pack_hif4, device.unpack_hif4, device.qdq_rows_hif4,
        ),
        Format(
            "nvfp4_46", 4, nvfp4.BLOCK, (8, 1), torch.float8_e4m3fn,
            ("pow2+mse", "pow2+mae", "amax+mse", "amax+mae"),
            device.pack_four_over_six, device.unpack_four_over_six, device.qdq_rows_four_over_six,
            four_over_six.global_scale,
            row_scale=four_over_six.row_scale,
            note="; activations have one power-of-two scale a token",
        ),
    )
}  # fmt: skip
FOUR_BITS = tuple(name for name, format in FORMATS.items() if format.bits == 4)  # the words of [quant] format


def find_format(name: str) -> Format:
    """The row of a format. UserError for a name that is none."""
    if name not in FORMATS:
        raise UserError(f"there is no format {name!r}; known: {', '.join(FORMATS)}")
    return FORMATS[name]


def find_rule(name: str, global_scale: str, scale_rule: str = "") -> str:
    """The scale rule of a format from the keys [quant] global_scale and scale_rule. UserError for one that it lacks."""
    format = find_format(name)
    if scale_rule and scale_rule not in format.choices:
        instead = f"use {', '.join(format.choices)}" if format.choices else 'leave it ""'
        hint = "; the choice of its global scale is [quant] global_scale" if format.has_global_choice else ""
        raise UserError(f"[quant] scale_rule = {scale_rule!r} is none of {name}; {instead}{hint}")
    if not format.has_global_choice:
        return scale_rule or format.rules[0]
    scale_rule = scale_rule or next(iter(format.choices), "")
    return f"{global_scale}+{scale_rule}" if scale_rule else global_scale


def is_exact(rule: str) -> bool:
    """Whether bf16 holds every value that a format gives under a rule: all scales are sums of a few powers of two."""
    return not rule.startswith("amax")


def qdq(format: Format, w: Tensor, rule: str, scales: Scales | None, dtype: torch.dtype) -> Tensor:
    """The values of w [..., N, K] in `dtype`: packed and unpacked, by one kernel where the format has one."""
    if format.qdq is not None:
        return format.qdq(w, rule, scales, dtype)
    return format.unpack(*format.pack(w, rule, scales, False), scales[0] if scales else None, dtype, w.shape[-1])


def pack_rows_into(rows: Tensor, format: Format, w: Tensor, rule: str, scales: Scales | None) -> None:
    """Pack bf16(w) [..., N, K] into rows, uint8 [..., N, row_bytes(K)]: the codes of each row, then its scales."""
    if format.pack_rows is not None and scales is not None and format.pack_rows(rows, w, rule, scales):
        return
    packed, block_scale = format.pack(w, rule, scales, True)
    torch.cat([packed, block_scale.view(torch.uint8)], dim=-1, out=rows)


def split_rows(format: Format, rows: Tensor) -> tuple[Tensor, Tensor]:
    """(codes, block scales) of such rows, contiguous copies."""
    assert format.block_bytes is not None
    num_code_bytes = rows.shape[-1] // sum(format.block_bytes) * format.block_bytes[0]
    packed, block_scale = rows[..., :num_code_bytes], rows[..., num_code_bytes:]
    return packed.contiguous(), block_scale.contiguous().view(format.scale_dtype)


def unpack_rows_into(out: Tensor, format: Format, rows: Tensor, g: Tensor | None) -> None:
    """The values [..., N, K] of such rows into `out` (contiguous)."""
    if format.unpack_rows is not None and g is not None and format.unpack_rows(out, rows, g):
        return
    out.copy_(format.unpack(*split_rows(format, rows), g, out.dtype, out.shape[-1]))
