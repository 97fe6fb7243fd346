"""Quantized weights as tensors: what the learner packs, what the sync ships, what the rollout stores.

    NVFP4Tensor         packed E2M1 codes, E4M3 block scales, fp32 global scale: 4.5 bits a weight
    Float8BlockTensor   E4M3 codes, one fp32 scale for 128 x 128: 8.002 bits a weight

Both are torchao tensor subclasses that look like the weight they stand for: its shape [..., N, K], and as `dtype` the
one that `dequantize()` returns by default. They move between devices, clone, copy in place, pickle and enter compiled
functions, but take part in no arithmetic: multiply `w.dequantize(dtype)`. `copy_` writes into the existing storage,
so addresses stay valid. `to_plain` and `from_plain` turn one into named plain tensors for safetensors and back.
"""

from typing import Any, Self

import torch
from torch import Tensor

from quads.quant import fp8, nvfp4, weights
from quads.quant.nvfp4 import GlobalScaleMode
from quads.quant.torchao_base import TorchAOBaseTensor


class QuantizedTensor(TorchAOBaseTensor):
    """What both kinds share: converting, copying in place, plain tensors, printing."""

    orig_dtype: torch.dtype
    mode: GlobalScaleMode
    tensor_data_names: list[str]
    tensor_attribute_names: list[str]

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The weight in `dtype` (default: `self.dtype`)."""
        raise TypeError(f"{type(self).__name__} does not say how to dequantize")

    @property
    def parts(self) -> dict[str, Tensor]:
        """The plain tensors it consists of, by name, sharing storage."""
        return {name: getattr(self, name) for name in self.tensor_data_names}

    @property
    def bits_per_weight(self) -> float:
        """Storage of all parts over the elements of the weight, padding and scales included."""
        return sum(part.nbytes for part in self.parts.values()) * 8 / max(1, self.numel())

    def to_plain(self, name: str) -> dict[str, Tensor]:
        """{"NAME.PART": tensor}, enough for `from_plain` but for dtype, sharing storage."""
        return {f"{name}.{part}": tensor for part, tensor in self.parts.items()}

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        dtype = str(self.orig_dtype).removeprefix("torch.")
        return (
            f"{type(self).__name__}(shape={list(self.shape)}, {self.bits_per_weight:.3g} bits per weight, "
            f"{self._scales_text()}, dequantizes to {dtype}, device={self.device})"
        )

    def _scales_text(self) -> str:
        return f"{self.mode} scales"


class NVFP4Tensor(QuantizedTensor):
    """A weight [..., N, K] in NVFP4 (see nvfp4.py for the meaning of the parts).

    Example: a [4, 40] weight has packed [4, 24], block_scale [4, 3] (K padded to 48) and global_scale [].

    Args:
        packed: uint8 [..., N, 8 * ceil(K / 16)].
        block_scale: float8_e4m3fn [..., N, ceil(K / 16)].
        global_scale: fp32 [] for 2-D, [E, 1, 1] for 3-D.
        num_columns: K.
        orig_dtype: the dtype to dequantize to by default.
        mode: how the global scale was chosen; with "pow2" bf16 holds every value exactly.
    """

    tensor_data_names = ["packed", "block_scale", "global_scale"]
    tensor_attribute_names = ["num_columns", "orig_dtype", "mode"]

    packed: Tensor
    block_scale: Tensor
    global_scale: Tensor
    num_columns: int

    def __new__(
        cls,
        packed: Tensor,
        block_scale: Tensor,
        global_scale: Tensor,
        num_columns: int,
        orig_dtype: torch.dtype,
        mode: GlobalScaleMode = "pow2",
    ) -> Self:
        shape = (*packed.shape[:-1], num_columns)
        self = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=orig_dtype, device=packed.device)
        self.packed, self.block_scale, self.global_scale = packed, block_scale, global_scale
        self.num_columns, self.orig_dtype, self.mode = num_columns, orig_dtype, mode
        return self

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    @classmethod
    def from_hp(
        cls, w: Tensor, g: Tensor | None = None, mode: GlobalScaleMode = "pow2", *, gs: Tensor | None = None
    ) -> Self:
        """Quantize w [N, K] or [E, N, K] (fp32 or bf16, taken as it is).

        g, gs: the scales of its sharing group, [] or [E, 1, 1]; by default from the amax of w itself, of each expert
        alone. See `nvfp4.quantize`.
        """
        if g is None:
            g, gs = nvfp4.global_scale(weights.weight_amax(w), mode)
        packed, block_scale, g = weights.quantize(w.detach(), g, mode, gs)
        return cls(packed, block_scale, g, w.shape[-1], w.dtype, mode)

    @classmethod
    def empty(
        cls,
        shape: tuple[int, ...] | torch.Size,
        dtype: torch.dtype,
        mode: GlobalScaleMode = "pow2",
        device: torch.device | str = "cpu",
    ) -> Self:
        """Storage for a weight of this shape, holding zeros: something to `copy_` into."""
        *leading, num_columns = shape
        num_blocks = -(-num_columns // nvfp4.BLOCK)
        packed = torch.zeros(*leading, 8 * num_blocks, dtype=torch.uint8, device=device)
        block_scale = torch.zeros(*leading, num_blocks, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
        g = torch.ones((shape[0], 1, 1) if len(shape) == 3 else (), device=device)
        return cls(packed, block_scale, g, num_columns, dtype, mode)

    @classmethod
    def from_plain(cls, tensors: dict[str, Tensor], name: str, dtype: torch.dtype) -> Self:
        """The inverse of `to_plain`. KeyError if a part is missing."""
        packed, block_scale, g = (tensors[f"{name}.{part}"] for part in cls.tensor_data_names)
        powers = bool((torch.frexp(g).mantissa == 0.5).all())
        num_columns = int(tensors[f"{name}.num_columns"])
        return cls(packed, block_scale, g, num_columns, dtype, "pow2" if powers else "amax")

    def to_plain(self, name: str) -> dict[str, Tensor]:
        """{"NAME.packed", ".block_scale", ".global_scale", ".num_columns"}: all that `from_plain` needs but the
        dtype."""
        return super().to_plain(name) | {f"{name}.num_columns": torch.tensor(self.num_columns)}

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The weight in `dtype` (default: `self.dtype`); exact in bf16 and wider for "pow2" scales."""
        return weights.dequantize(
            self.packed, self.block_scale, self.global_scale, dtype or self.orig_dtype, self.num_columns
        )

    def _scales_text(self) -> str:
        owner = f"one for each of {self.shape[0]} experts" if self.global_scale.numel() > 1 else "one"
        return f"E2M1 in blocks of {nvfp4.BLOCK}, global scale {self.mode} ({owner})"


class Float8BlockTensor(QuantizedTensor):
    """A weight [..., N, K] in E4M3 with 128 x 128 block scales (see fp8.py).

    Args:
        codes: float8_e4m3fn [..., N, K].
        scales: fp32 [..., ceil(N / 128), ceil(K / 128)].
        orig_dtype: the dtype to dequantize to by default.
        mode: how the scales were chosen.
    """

    tensor_data_names = ["codes", "scales"]
    tensor_attribute_names = ["orig_dtype", "mode"]

    codes: Tensor
    scales: Tensor

    def __new__(cls, codes: Tensor, scales: Tensor, orig_dtype: torch.dtype, mode: GlobalScaleMode = "pow2") -> Self:
        self = torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=orig_dtype, device=codes.device)
        self.codes, self.scales, self.orig_dtype, self.mode = codes, scales, orig_dtype, mode
        return self

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    @classmethod
    def from_hp(cls, w: Tensor, mode: GlobalScaleMode = "pow2") -> Self:
        """Quantize w [..., N, K] (fp32 or bf16, taken as it is)."""
        return cls(*weights.quantize_fp8(w.detach(), mode), w.dtype, mode)

    @classmethod
    def empty(
        cls,
        shape: tuple[int, ...] | torch.Size,
        dtype: torch.dtype,
        mode: GlobalScaleMode = "pow2",
        device: torch.device | str = "cpu",
    ) -> Self:
        """Storage for a weight of this shape, holding zeros: something to `copy_` into."""
        *leading, num_rows, num_columns = shape
        codes = torch.zeros(*shape, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
        scales = torch.ones(*leading, -(-num_rows // fp8.BLOCK), -(-num_columns // fp8.BLOCK), device=device)
        return cls(codes, scales, dtype, mode)

    @classmethod
    def from_plain(cls, tensors: dict[str, Tensor], name: str, dtype: torch.dtype) -> Self:
        """The inverse of `to_plain`. KeyError if a part is missing."""
        codes, scales = (tensors[f"{name}.{part}"] for part in cls.tensor_data_names)
        powers = bool((torch.frexp(scales).mantissa == 0.5).all())
        return cls(codes, scales, dtype, "pow2" if powers else "amax")

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The weight in `dtype` (default: `self.dtype`); exact in bf16 and wider for "pow2" scales."""
        return weights.dequantize_fp8(self.codes, self.scales, dtype or self.orig_dtype)

    def _scales_text(self) -> str:
        return f"E4M3 in blocks of {fp8.BLOCK} x {fp8.BLOCK}, scales {self.mode}"


def _register(cls: type[QuantizedTensor]) -> None:
    aten = torch.ops.aten

    @cls.implements([aten._to_copy.default])  # pyright: ignore[reportAttributeAccessIssue]
    def _(func: Any, types: Any, args: Any, kwargs: Any) -> Tensor:
        """`.to(device, dtype)`: moves the parts, which keep their own dtypes; dtype is what it dequantizes to."""
        self, dtype = args[0], kwargs.get("dtype")
        device, non_blocking = kwargs.get("device"), kwargs.get("non_blocking", False)
        parts = [part.to(device, non_blocking=non_blocking, copy=True) for part in self.parts.values()]
        attributes = {name: getattr(self, name) for name in cls.tensor_attribute_names}
        if dtype is not None:
            attributes["orig_dtype"] = dtype
        return cls(*parts, **attributes)

    @cls.implements([aten.copy_.default])  # pyright: ignore[reportAttributeAccessIssue]
    def _(func: Any, types: Any, args: Any, kwargs: Any) -> Tensor:
        """In place, part by part. The dtypes that the two dequantize to may differ: they are no part of the value."""
        self, source = args[0], args[1]
        if type(self) is not type(source) or self.shape != source.shape:
            raise ValueError(f"cannot copy {source!r} into {self!r}")
        self.mode = source.mode
        for mine, theirs in zip(self.parts.values(), source.parts.values(), strict=True):
            mine.copy_(theirs)
        return self

    @cls.implements([aten.empty_like.default])  # pyright: ignore[reportAttributeAccessIssue]
    def _(func: Any, types: Any, args: Any, kwargs: Any) -> Tensor:
        self = args[0]
        dtype, device = kwargs.get("dtype") or self.orig_dtype, kwargs.get("device") or self.device
        return cls.empty(self.shape, dtype, self.mode, device)  # pyright: ignore[reportAttributeAccessIssue]


# torch.load(weights_only=True) builds no classes but those declared safe.
for _cls in (NVFP4Tensor, Float8BlockTensor):
    _register(_cls)
torch.serialization.add_safe_globals([NVFP4Tensor, Float8BlockTensor])
