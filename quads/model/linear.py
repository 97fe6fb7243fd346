"""A bias-free linear layer with two seams, through which low precision enters without a second model definition.

    y = quantize_input(x) @ effective_weight().T

`effective_weight` is what the matmul multiplies: by default the fp32 master weight cast to the activation dtype (an
explicit cast, no autocast), in the quantized learner the value of its 4-bit codes. `quantize_input` is the identity by
default.

Shapes: T tokens, N output features, K input features (the summed dimension, along which blocks are quantized).
"""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Site = Literal["qkv", "o", "router", "lm_head"]


class Linear(nn.Module):
    """`weight` is [N, K], as Hugging Face stores it. `site` names the layer's place, for quantization and its
    banner."""

    def __init__(self, in_features: int, out_features: int, site: Site) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.site: Site = site
        self.weight = nn.Parameter(torch.empty(out_features, in_features))

    def effective_weight(self, dtype: torch.dtype) -> Tensor:
        """The weight [N, K] that the matmul multiplies, in the activation dtype."""
        return self.weight.to(dtype)

    def quantize_input(self, x_TK: Tensor, live_T: Tensor | None = None) -> Tensor:
        """The activation that the matmul multiplies, same shape. `live_T` (bool) is False for rows that are padding."""
        return x_TK

    def forward(self, x_TK: Tensor, live_T: Tensor | None = None) -> Tensor:
        x_TK = self.quantize_input(x_TK, live_T)
        return F.linear(x_TK, self.effective_weight(x_TK.dtype))

    def extra_repr(self) -> str:
        return f"{self.in_features} -> {self.out_features}, site={self.site}"
