"""A weight in the form that the GEMM kernels read: preallocated, written in place, convertible back without loss."""

import torch
from torch import Tensor

from quads.quant import nvfp4
from quads.quant.triton.codes import whole_blocks
from quads.quant.triton.layout import TILE, padded, row_order, untile
from quads.quant.triton.pack import quantize, weight_amax
from quads.quant.triton.repack import quantize_repack, repack


class KernelWeight:
    """NVFP4 weight of a linear layer ([N, K]) or of E experts ([E, N, K]).

    Path "decoded" stores the tiles of layout.py, "native_fp4" the checkpoint's own byte order. With `swiglu`
    the rows are a gate and an up half (gate first, as in gate_up_proj), stored in pairs; `n` still counts both.
    Buffers never move, so CUDA graphs stay valid across `load_`.
    """

    def __init__(
        self,
        shape: torch.Size | tuple[int, ...],
        *,
        path: str = "decoded",
        swiglu: bool = False,
        device: torch.device | str = "cpu",
    ) -> None:
        self.shape = torch.Size(shape)
        self.n, self.k = self.shape[-2:]
        self.experts = self.shape[0] if len(self.shape) == 3 else 1
        self.path = path
        self.swiglu = swiglu
        if self.k % 16 or (swiglu and self.n % 32):
            raise ValueError(f"shape {tuple(shape)}: K must be a multiple of 16, gate and up halves too")
        if path == "native_fp4":
            words = (self.experts, self.n, self.k // 2)
            scales = (self.experts, self.n, self.k // 16)
        else:
            self.order = row_order(self.n, swiglu, device).to(torch.int32)
            rows = self.order.numel()
            words = (self.experts, rows // TILE, padded(self.k) // TILE, TILE, 32)
            scales = (*words[:3], TILE, 8)
        dtype = torch.uint8 if path == "native_fp4" else torch.int16
        self.words = torch.zeros(words, dtype=dtype, device=device)
        self.scales = torch.zeros(scales, dtype=torch.uint8, device=device)
        self.g = torch.ones(self.experts, dtype=torch.float32, device=device)

    @property
    def hidden_width(self) -> int:
        """Columns of the SwiGLU output that the w13 GEMM writes for the next one."""
        return self.n // 2 if self.path == "native_fp4" else padded(self.n // 2)

    @classmethod
    def from_packed(
        cls, packed: Tensor, block_scale: Tensor, g: Tensor, *, path: str = "decoded", swiglu: bool = False
    ) -> "KernelWeight":
        """packed uint8 [(E,) N, K/2], block_scale float8_e4m3fn [(E,) N, K/16], g fp32 with one or E elements."""
        shape = (*packed.shape[:-1], packed.shape[-1] * 2)
        return cls(shape, path=path, swiglu=swiglu, device=packed.device).load_(packed, block_scale, g)

    def _pairs(self) -> Tensor:
        """Native SwiGLU row order: 8 gate rows, then their up rows."""
        half = torch.arange(self.n // 2, device=self.words.device)
        return torch.stack((half.view(-1, 8), half.view(-1, 8) + self.n // 2), dim=1).flatten()

    def load_(self, packed: Tensor, block_scale: Tensor, g: Tensor) -> "KernelWeight":
        """Overwrite in place with new checkpoint bytes of the same shape."""
        want = (*self.shape[:-1], self.k // 2)
        if tuple(packed.shape) != want:
            raise ValueError(f"packed has shape {tuple(packed.shape)}, this weight takes {want}")
        packed = packed.view(self.experts, self.n, self.k // 2)
        block_scale = block_scale.view(torch.uint8).reshape(self.experts, self.n, self.k // 16)
        if self.path == "native_fp4":
            rows = self._pairs() if self.swiglu else slice(None)
            self.words.copy_(packed[:, rows])
            self.scales.copy_(block_scale[:, rows])
        else:
            repack(packed, block_scale, self.order, self.words, self.scales)
        self.g.copy_(g.reshape(-1).expand(self.experts))
        return self

    def quantize_(
        self,
        values: Tensor,
        g: Tensor | None = None,
        mode: nvfp4.GlobalScaleMode = "pow2",
        *,
        gs: Tensor | None = None,
        expert: int = 0,
        row: int = 0,
    ) -> "KernelWeight":
        """Quantize values and write them in place: the fast way into a weight for a sync that ships bf16. For bf16 one
        kernel a tensor (two if g is not given: the amax comes first), and codes never lie anywhere else.

        values: bf16 or fp32 [n, K] or [e, n, K]; what is quantized is what is given (cast masters to bf16 first). By
        default the whole weight; otherwise experts `expert` and following, or, of a matrix, rows `row` (a multiple of
        128) and following: q, k and v of a fused projection, with the g of their group. g, gs: fp32, one or one an
        expert, as in `nvfp4.quantize`; of a part it must be given, because g belongs to the whole sharing group.

        Example: `weight.quantize_(q, g, row=0).quantize_(k, g, row=4096).quantize_(v, g, row=4608)`
        """
        values = values.view(-1, *values.shape[-2:])
        count, n, k = values.shape
        whole = (count, n) == (self.experts, self.n)
        fits = k == self.k and row + n <= self.n and expert + count <= self.experts and row % TILE == 0
        if not fits or (n != self.n and (self.swiglu or self.experts > 1)) or (g is None and not whole):
            raise ValueError(f"values {list(values.shape)} at expert {expert}, row {row} of {list(self.shape)}")
        if g is None:
            g, gs = nvfp4.global_scale(weight_amax(values), mode)
        gs = g.reciprocal() if gs is None else gs
        g, gs = (each.reshape(-1).expand(count).contiguous() for each in (g, gs))
        if self.path == "native_fp4":
            packed, block_scale, _ = quantize(values, g, mode, gs=gs)
            rows = self._pairs() if self.swiglu else slice(None)
            self.words[expert : expert + count, row : row + n].copy_(packed[:, rows])
            self.scales[expert : expert + count, row : row + n].copy_(block_scale.view(torch.uint8)[:, rows])
        else:
            order = self.order if n == self.n else self.order[: padded(n)]
            tiles = slice(row // TILE, row // TILE + order.numel() // TILE)
            words, scales = (each[expert : expert + count, tiles] for each in (self.words, self.scales))
            if whole_blocks(values, k):
                quantize_repack(values, g, gs, order, words, scales)
            else:
                packed, block_scale, _ = quantize(values, g, mode, gs=gs)
                repack(packed, block_scale.view(torch.uint8), order, words, scales)
        self.g[expert : expert + count].copy_(g)
        return self

    def to_packed(self) -> tuple[Tensor, Tensor, Tensor]:
        """(packed, block_scale, g) as they were loaded, bit for bit; g is fp32 [E] ([] for a matrix)."""
        if self.path == "native_fp4":
            packed, block_scale = self.words, self.scales
            if self.swiglu:
                back = self._pairs().argsort()
                packed, block_scale = packed[:, back], block_scale[:, back]
            block_scale = block_scale.view(torch.float8_e4m3fn)
        else:
            packed, block_scale = untile(self.words, self.scales, self.n, self.k, self.swiglu)
        lead = self.shape[:-1]
        g = self.g.clone() if len(self.shape) == 3 else self.g[0].clone()
        return packed.reshape(*lead, self.k // 2), block_scale.reshape(*lead, self.k // 16), g
