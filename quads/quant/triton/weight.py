"""A weight in the form that the GEMM kernels read: preallocated, written in place, convertible back without loss.

The weight sync's last step on a GPU is one pass: checkpoint bytes -> tiles of layout.py, or bf16 values -> tiles when
nobody has quantized them yet. Both give the bits of `layout.tile`, of `nvfp4.quantize`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quads.quant import nvfp4
from quads.quant.triton.codes import encode_words, whole_blocks, word_block_max
from quads.quant.triton.layout import TILE, padded, row_order, untile
from quads.quant.triton.math import block_factors, compiled
from quads.quant.triton.pack import quantize, weight_amax


@triton.jit
def spread(codes):
    """int32, code j in bits 4j..4j+3 -> the same codes in the places of kernels_layout.CODE_BITS."""
    word = ((codes & 0x8) << 12) | ((codes & 0x7) << 6)
    word |= ((codes & 0x80) << 5) | ((codes & 0x70) >> 1)
    word |= ((codes & 0x800) << 3) | ((codes & 0x700) >> 8)
    return word | ((codes & 0x8000) >> 2) | ((codes & 0x7000) >> 3)


@triton.jit
def repack_kernel(packed_ptr, byte_ptr, order_ptr, words_ptr, scales_ptr, N, K, NB, KB):
    """One [128 rows, 128 columns] tile of one expert. packed_ptr: int16 [E, N, K/4], four codes a word; byte_ptr: E4M3
    bytes [E, N, K/16]; order_ptr: int32 [NB * 128], checkpoint row of each stored row (N or more: padding)."""
    tile = tl.program_id(0)
    kb = tile % KB
    expert = (tile // KB // NB).to(tl.int64)
    stored = tl.arange(0, 128)
    row = tl.load(order_ptr + (tile // KB % NB) * 128 + stored)
    inside = row < N
    row = expert * N + row

    word = tl.arange(0, 32)
    source = kb * 32 + (word % 8) * 4 + word // 8  # stored word 8 i + g is checkpoint word 4 g + i
    mask = inside[:, None] & (source < K // 4)[None, :]
    codes = tl.load(packed_ptr + row[:, None] * (K // 4) + source[None, :], mask=mask, other=0).to(tl.int32)
    at = tile.to(tl.int64) * 4096 + stored[:, None] * 32 + word[None, :]
    tl.store(words_ptr + at, spread(codes).to(tl.int16))

    group = tl.arange(0, 8)
    source = kb * 8 + group
    mask = inside[:, None] & (source < K // 16)[None, :]
    byte = tl.load(byte_ptr + row[:, None] * (K // 16) + source[None, :], mask=mask, other=0)
    at = tile.to(tl.int64) * 1024 + stored[:, None] * 8 + group[None, :]
    tl.store(scales_ptr + at, tl.where(byte == 0x7F, 0xFF, byte).to(tl.uint8))


def repack(packed: Tensor, block_scale: Tensor, order: Tensor, words: Tensor, scales: Tensor) -> None:
    """`layout.tile` into existing tensors.

    packed: uint8 [E, N, K/2]; block_scale: uint8 [E, N, K/16]; order: int32 `row_order`. Written: words int16
    [E, NB, KB, 128, 32], scales uint8 [E, NB, KB, 128, 8].
    """
    experts, n, half_k = packed.shape
    nb, kb = order.numel() // TILE, padded(2 * half_k) // TILE
    repack_kernel[(experts * nb * kb,)](
        packed.contiguous().view(torch.int16),
        block_scale.contiguous(),
        order,
        words,
        scales,
        n,
        2 * half_k,
        nb,
        kb,
        num_warps=4,
    )


@triton.jit
def _words(codes, B: tl.constexpr):
    """uint8 [B, 4], two codes a byte in order -> int16 [B, 2] stored words of four codes each."""
    low, high = tl.split(tl.reshape(codes.to(tl.int32), (B, 2, 2)))
    return spread(low | (high << 8)).to(tl.int16)


@triton.jit
def quantize_repack_kernel(
    x_ptr,
    g_ptr,
    gs_ptr,
    order_ptr,
    words_ptr,
    scales_ptr,
    N,
    K,
    NB,
    KB,
    stride_e,
    stride_n,
    ROWS: tl.constexpr,
    ASM: tl.constexpr,
):
    """ROWS rows of one [128, 128] tile of one expert, bfloat16 -> stored words and scale bytes, a block a thread.

    x_ptr: int32 words of two values, strides in blocks. order_ptr: as in `repack_kernel`. g, gs: fp32 [E], global scale
    and its encode scale.
    """
    B: tl.constexpr = ROWS * 8
    part = tl.program_id(0) % (128 // ROWS)
    tile = tl.program_id(0) // (128 // ROWS)
    kb = tile % KB
    expert = (tile // KB // NB).to(tl.int64)
    block = tl.arange(0, B)
    stored = part * ROWS + block // 8
    group = block % 8
    row = tl.load(order_ptr + (tile // KB % NB) * 128 + stored)
    inside = ((row < N) & (kb * 128 + group * 16 < K))[:, None]
    source = expert * stride_e + row.to(tl.int64) * stride_n + kb * 8 + group
    at = source[:, None] * 8 + tl.arange(0, 4)[None, :]
    first = tl.load(x_ptr + at, mask=inside, other=0)
    second = tl.load(x_ptr + at + 4, mask=inside, other=0)
    byte, _, inv = block_factors(word_block_max(first, second, ASM), tl.load(g_ptr + expert), tl.load(gs_ptr + expert))
    dead = (byte == 0) | (byte == 0x7F)
    # Stored word 8 i + g holds the columns 16 g + 4 i ... + 3; `first` gives i = 0, 1 and `second` i = 2, 3.
    at = (tile.to(tl.int64) * 4096 + stored * 32 + group)[:, None] + tl.arange(0, 2)[None, :] * 8
    tl.store(words_ptr + at, _words(encode_words(first, inv, dead, ASM), B))
    tl.store(words_ptr + at + 16, _words(encode_words(second, inv, dead, ASM), B))
    at = tile.to(tl.int64) * 1024 + stored * 8 + group
    tl.store(scales_ptr + at, tl.where(byte == 0x7F, 0xFF, byte).to(tl.uint8))


def quantize_repack(values: Tensor, g: Tensor, gs: Tensor, order: Tensor, words: Tensor, scales: Tensor) -> None:
    """`layout.tile(nvfp4.quantize(values, g))` into existing tensors, in one pass.

    values: bf16 [E, N, K] with `codes.whole_blocks`; g and gs: fp32 [E]; the rest as in `repack`.
    """
    experts, n, k = values.shape
    nb, kb = order.numel() // TILE, padded(k) // TILE
    rows = 32
    quantize_repack_kernel[(experts * nb * kb * (TILE // rows),)](
        values.view(torch.int32),
        g,
        gs,
        order,
        words,
        scales,
        n,
        k,
        nb,
        kb,
        values.stride(0) // 16,
        values.stride(1) // 16,
        ROWS=rows,
        ASM=compiled(),
        num_warps=4,
        enable_fp_fusion=False,
    )


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
