"""One process's rows of an NVFP4 weight, packed: what FSDP gathers in place of the master weight.

Shapes: N, K rows and columns of a weight, B = ceil(K / 16) blocks, L experts of one ep rank.
"""

from typing import Any

import torch
from torch import Tensor, nn

from quads.model.moe import local_experts
from quads.model.parallelize import is_gathered, local_tensor, own_rows
from quads.quant.nvfp4 import BLOCK, GlobalScaleMode
from quads.quant.tensor import NVFP4Tensor
from quads.quant.weights import dequantize_rows_into, quantize_rows_into, split_rows


class PackedShard:
    """This process's rows of one NVFP4 weight, as bytes, and the global scales of the weight that FSDP gathers.

    `bytes`: uint8 [..., N, 9 B]: the 8 B code bytes of each row, then its B scale bytes. It is allocated once. The two
    methods are FSDP's extension points for a parameter: what is sent, and how the weight is made from what arrived.
    """

    def __init__(self, parameter: Tensor, mode: GlobalScaleMode) -> None:
        local = local_tensor(parameter)
        self.mode: GlobalScaleMode = mode
        self.num_columns = local.shape[-1]
        self.rows = own_rows(parameter)  # found once: it takes as long as the kernels of a small weight
        self.bytes = local.new_empty(*local.shape[:-1], 9 * -(-self.num_columns // BLOCK), dtype=torch.uint8)
        self.g, self.gs = Tensor(), Tensor()  # fp32 [] or [L, 1, 1]; by `pack`
        self.owned = not is_gathered(parameter)  # these bytes are all that is multiplied here
        self.gathered = False  # whether FSDP gathers these bytes; by `attach`
        self.version = -1  # version counter of the master that they were made from

    def pack(self, parameter: Tensor, g: Tensor, gs: Tensor) -> None:
        """Quantize the local rows of bf16(master) with the scales of the gathered weight."""
        self.g, self.gs, self.version = g, gs, local_tensor(parameter)._version
        own_g, own_gs = (g[self.rows], gs[self.rows]) if g.dim() else (g, gs)
        quantize_rows_into(self.bytes, local_tensor(parameter), own_g, self.mode, own_gs)

    def tensor(self, rows: Tensor, g: Tensor, dtype: torch.dtype) -> NVFP4Tensor:
        """The weight that gathered `rows` (uint8 [..., N, 9 B]) and scales stand for."""
        return NVFP4Tensor(*split_rows(rows), g, self.num_columns, dtype, self.mode)

    def decode(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """The values of gathered or owned `rows`, [..., N, K]."""
        weight = rows.new_empty(*rows.shape[:-1], self.num_columns, dtype=dtype)
        dequantize_rows_into(weight, rows, self.g)
        return weight

    def pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: nn.Module, mp_policy: Any
    ) -> tuple[tuple[Tensor], None]:
        """What FSDP gathers in place of the master's cast. One tensor: with a mesh of one process FSDP drops others."""
        return (self.bytes,), None

    @torch.no_grad()
    def post_all_gather(
        self, outputs: tuple[Tensor, ...], metadata: None, param_dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """The decoded weight, written into `out` from the second time on."""
        rows = outputs[0]
        if out is None:
            weight = self.decode(rows, param_dtype)
            return weight, (weight,)  # FSDP frees and reallocates it with every gather
        out = local_experts(out)
        with torch.autograd._unsafe_preserve_version_counter(out):  # pyright: ignore[reportPrivateImportUsage]
            dequantize_rows_into(out, rows, self.g)
        return None
