"""A quantized weight as a tensor: what the learner packs, what the sync ships, what the rollout stores.

`QuantizedTensor` is a torchao tensor subclass that looks like the weight it stands for: its shape [..., N, K], and as
`dtype` the one that `dequantize()` returns by default. Such tensors move between devices, clone, copy in place, pickle
and enter compiled functions, but take part in no arithmetic: multiply `w.dequantize(dtype)`. `copy_` writes into the
existing storage, so addresses stay valid.
"""

import logging
from typing import Any, Self

import torch
from torch import Tensor

from quads.quant import fake_quant
from quads.quant.device import weight_amax
from quads.quant.formats import FORMATS, Scales

# At import torchao warns about CUDA extensions that do not load on this machine and that nothing here uses. A user can
# do nothing about it, so warnings are held back for as long as the import takes.
_level = logging.root.manager.disable
logging.disable(logging.WARNING)
try:
    from torchao.utils import TorchAOBaseTensor
finally:
    logging.disable(_level)


class QuantizedTensor(TorchAOBaseTensor):
    """A weight [..., N, K] in one of `FORMATS`.

    Example: a [4, 40] weight in NVFP4 has packed [4, 24], block_scale [4, 3] (K padded to 48) and global_scale [].

    Args:
        packed: the codes; shapes and dtypes of this and the next as in `Format.storage`.
        block_scale: the scales of the blocks.
        format: name of the format.
        rule: how its scales were chosen.
        num_columns: K.
        orig_dtype: the dtype to dequantize to by default.
        global_scale: fp32 [] for 2-D, [E, 1, 1] for 3-D; None in a format that has none.
    """

    tensor_data_names = ["packed", "block_scale"]
    optional_tensor_data_names = ["global_scale"]
    tensor_attribute_names = ["format", "rule", "num_columns", "orig_dtype"]

    packed: Tensor
    block_scale: Tensor
    global_scale: Tensor | None
    format: str
    rule: str
    num_columns: int
    orig_dtype: torch.dtype

    def __new__(
        cls,
        packed: Tensor,
        block_scale: Tensor,
        format: str,
        rule: str,
        num_columns: int,
        orig_dtype: torch.dtype,
        global_scale: Tensor | None,
    ) -> Self:
        shape = (*packed.shape[:-1], num_columns)
        self = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=orig_dtype, device=packed.device)
        self.packed, self.block_scale, self.global_scale = packed, block_scale, global_scale
        self.format, self.rule, self.num_columns, self.orig_dtype = format, rule, num_columns, orig_dtype
        return self

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    @classmethod
    def from_hp(cls, w: Tensor, format: str, rule: str = "", scales: Scales | None = None, cast: bool = False) -> Self:
        """Quantize w [N, K] or [E, N, K] (fp32 or bf16).

        rule: "" for the format's default. scales: those of its sharing group (masters.py); by default from the amax of
        w itself, of each expert alone. cast: quantize bf16(w); False takes w as it is.
        """
        row = FORMATS[format]
        rule = rule or row.rules[0]
        w = w.detach()
        if scales is None and row.global_scale is not None:
            scales = row.global_scale(weight_amax(w, cast), rule)
        packed, block_scale = row.pack(w, rule, scales, cast)
        dtype = torch.bfloat16 if cast else w.dtype
        return cls(packed, block_scale, format, rule, w.shape[-1], dtype, scales[0] if scales else None)

    @classmethod
    def empty(
        cls,
        shape: tuple[int, ...] | torch.Size,
        dtype: torch.dtype,
        format: str,
        rule: str = "",
        device: torch.device | str = "cpu",
    ) -> Self:
        """Storage for a weight of this shape, holding zeros: something to `copy_` into."""
        row = FORMATS[format]
        packed, block_scale = (torch.zeros(size, dtype=kind, device=device) for size, kind in row.storage(tuple(shape)))
        shared = (shape[0], 1, 1) if len(shape) == 3 else ()
        g = None if row.global_scale is None else torch.ones(shared, device=device)
        return cls(packed, block_scale, format, rule or row.rules[0], shape[-1], dtype, g)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The weight in `dtype` (default: `self.dtype`); exact in bf16 and wider where `formats.is_exact(rule)`."""
        return fake_quant.unpack(
            self.packed, self.block_scale, self.global_scale, self.format, dtype or self.orig_dtype, self.num_columns
        )

    @property
    def parts(self) -> dict[str, Tensor]:
        """The plain tensors it consists of, by name, sharing storage."""
        named = {"packed": self.packed, "block_scale": self.block_scale}
        return named if self.global_scale is None else {**named, "global_scale": self.global_scale}

    def with_parts(
        self, packed: Tensor, block_scale: Tensor, global_scale: Tensor | None, num_columns: int = 0
    ) -> Self:
        """A weight of the same format, rule and dtype with other bytes: rows or an expert of it, or more of it."""
        columns = num_columns or self.num_columns
        return type(self)(packed, block_scale, self.format, self.rule, columns, self.orig_dtype, global_scale)

    @property
    def bits_per_weight(self) -> float:
        """Storage of all parts over the elements of the weight, padding and scales included."""
        return sum(part.nbytes for part in self.parts.values()) * 8 / max(1, self.numel())

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        dtype, row = str(self.orig_dtype).removeprefix("torch."), FORMATS[self.format]
        shared = ""
        if self.global_scale is not None:
            owner = f"one for each of {self.shape[0]} experts" if self.global_scale.numel() > 1 else "one"
            shared = f", global scale: {owner}"
        block = row.block if row.block_bytes else f"{row.block} x {row.block}"
        return (
            f"{type(self).__name__}({self.format}, shape={list(self.shape)}, {row.bits_per_weight:.4g} bits per "
            f"weight, blocks of {block}, {self.rule} scales{shared}, dequantizes to {dtype}, device={self.device})"
        )


aten = torch.ops.aten


@QuantizedTensor.implements([aten._to_copy.default])  # pyright: ignore[reportAttributeAccessIssue]
def _(func: Any, types: Any, args: Any, kwargs: Any) -> Tensor:
    """`.to(device, dtype)`: moves the parts, which keep their own dtypes; dtype is what it dequantizes to."""
    self, dtype = args[0], kwargs.get("dtype")
    device, non_blocking = kwargs.get("device"), kwargs.get("non_blocking", False)
    parts = {name: part.to(device, non_blocking=non_blocking, copy=True) for name, part in self.parts.items()}
    moved = self.with_parts(parts["packed"], parts["block_scale"], parts.get("global_scale"))
    if dtype is None:
        return moved
    attributes = (moved.format, moved.rule, moved.num_columns, dtype)
    return QuantizedTensor(moved.packed, moved.block_scale, *attributes, moved.global_scale)


@QuantizedTensor.implements([aten.copy_.default])  # pyright: ignore[reportAttributeAccessIssue]
def _(func: Any, types: Any, args: Any, kwargs: Any) -> Tensor:
    """In place, part by part. The dtypes that the two dequantize to may differ: they are no part of the value."""
    self, source = args[0], args[1]
    same = isinstance(self, QuantizedTensor) and isinstance(source, QuantizedTensor)
    if not same or (self.format, self.shape) != (source.format, source.shape):
        raise ValueError(f"cannot copy {source!r} into {self!r}")
    self.rule = source.rule
    for mine, theirs in zip(self.parts.values(), source.parts.values(), strict=True):
        mine.copy_(theirs)
    return self


@QuantizedTensor.implements([aten.empty_like.default])  # pyright: ignore[reportAttributeAccessIssue]
def _(func: Any, types: Any, args: Any, kwargs: Any) -> Tensor:
    self = args[0]
    dtype, device = kwargs.get("dtype") or self.orig_dtype, kwargs.get("device") or self.device
    return QuantizedTensor.empty(self.shape, dtype, self.format, self.rule, device)


# torch.load(weights_only=True) builds no classes but those declared safe.
torch.serialization.add_safe_globals([QuantizedTensor])
