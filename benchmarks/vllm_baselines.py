"""The expert layers of vLLM 0.26 for the same table: Marlin (stock NVFP4 on Hopper, W4A16) and its FP8 kernel.

Called below vLLM's engine, with the arguments that its own quantization methods pass. Both are compared with bf16
experts before they are timed.
"""

import importlib
from types import SimpleNamespace

import torch
from torch import Tensor

from benchmarks import baselines
from quads.quant.triton import ops as kernels


def missing() -> str:
    """Why vLLM's kernels cannot be called; empty if they can."""
    try:
        importlib.import_module("vllm._custom_ops")
        importlib.import_module("vllm.model_executor.layers.fused_moe.experts.marlin_moe")
        torch.ops._moe_C.moe_sum  # noqa: B018  # raises if the compiled part is missing
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:150]}"
    return ""


class MarlinLayer:
    """Experts packed as NVFP4, one global scale an expert, in Marlin's layout."""

    def __init__(self, w13: Tensor, w2: Tensor) -> None:
        """bf16 [E, 2I, H], gate rows first, and [E, H, I]."""
        from vllm.model_executor.layers.quantization.utils.marlin_utils_fp4 import prepare_nvfp4_moe_layer_for_marlin

        layer = SimpleNamespace(
            num_experts=w13.shape[0],
            hidden_size=w13.shape[2],
            intermediate_size_per_partition=w2.shape[2],
            params_dtype=torch.bfloat16,
        )
        prepared = prepare_nvfp4_moe_layer_for_marlin(layer, *kernels.quantize(w13), *kernels.quantize(w2), True)
        self.w13, self.s13, self.g13, self.w2, self.s2, self.g2 = prepared
        self.workspace = layer.workspace

    def __call__(self, x: Tensor, ids: Tensor, gates: Tensor) -> Tensor:
        """ids int32, gates fp32 [T, A]."""
        from vllm import _custom_ops
        from vllm.model_executor.layers.fused_moe.experts.marlin_moe import fused_marlin_moe
        from vllm.scalar_type import scalar_types

        out = torch.empty_like(x)
        fused_marlin_moe(
            x,
            self.w13,
            self.w2,
            None,
            None,
            self.s13,
            self.s2,
            gates,
            ids,
            quant_type_id=scalar_types.float4_e2m1f.id,
            global_num_experts=self.w13.shape[0],
            global_scale1=self.g13,
            global_scale2=self.g2,
            workspace=self.workspace,
            output=out,
            moe_sum=lambda y, into, _ids, _map: _custom_ops.moe_sum(y, into),
        )
        return out


class Fp8Layer:
    """vLLM's Triton kernel for FP8 experts: a scale per output row and per token, tuned tiles if it has a file."""

    def __init__(self, w13: tuple[Tensor, Tensor], w2: tuple[Tensor, Tensor]) -> None:
        """Each (float8_e4m3fn [E, N, K], fp32 [E, N])."""
        from vllm.model_executor.layers.fused_moe.config import fp8_w8a8_moe_quant_config

        self.w13, self.w2 = w13[0], w2[0]
        self.config = fp8_w8a8_moe_quant_config(
            w13[1].unsqueeze(-1), w2[1].unsqueeze(-1), per_act_token_quant=True, per_out_ch_quant=True
        )

    def __call__(self, x: Tensor, ids: Tensor, gates: Tensor) -> Tensor:
        from vllm.model_executor.layers.fused_moe.fused_moe import fused_experts

        return fused_experts(x, self.w13, self.w2, gates, ids, quant_config=self.config)


def check(layer, x: Tensor, w13: Tensor, w2: Tensor, ids: Tensor, gates: Tensor) -> None:
    """Raises AssertionError unless the layer computes the experts that it was given (to the error of its precision)."""
    want = baselines.bf16_moe(x, w13, w2, ids, gates).float()
    error = float((layer(x, ids.int(), gates.float()).float() - want).norm() / want.norm())
    print(f"  {type(layer).__name__}: relative difference to bf16 {error:.3f}", flush=True)
    assert error < 0.2, error


def layers(full: list, fp8: list) -> dict[str, list]:
    """{"marlin": one a weight set, "vllm fp8": ...}; a kernel that cannot be had is named with the reason."""
    if reason := missing():
        print(f"Marlin and vLLM's FP8: not available ({reason})")
        return {}
    found = {}
    x = torch.randn(64, full[0][0].shape[2], device="cuda", dtype=torch.bfloat16)
    gates, ids = torch.randn(64, full[0][0].shape[0], device="cuda").softmax(-1).topk(8)
    for name, make in (
        ("marlin", lambda i: MarlinLayer(*full[i])),
        ("vllm fp8", lambda i: Fp8Layer(*fp8[i])),
    ):
        try:
            found[name] = [make(i) for i in range(len(full))]
            for layer, pair in zip(found[name], full, strict=True):
                check(layer, x, *pair, ids, gates.bfloat16())
        except Exception as error:
            found.pop(name, None)
            print(f"{name}: not available ({type(error).__name__}: {str(error)[:200]})", flush=True)
    return found
