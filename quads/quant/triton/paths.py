"""Which path of the kernels serves a precision on a device.

"native_fp4" multiplies 4-bit operands on Blackwell's tensor cores (gemm_fp4.py); "decoded" turns codes into 16-bit
numbers in registers, exactly, and multiplies those (gemm.py).
"""

from typing import Literal

import torch

from quads.errors import UserError
from quads.quant.triton.math import compiled

Path = Literal["native_fp4", "decoded"]


def choose(device: torch.device | str, precision: str, path: str = "auto") -> tuple[Path, str]:
    """(path, why) for 4-bit weights at a precision. Raises UserError if it, or the path asked for, cannot be had."""
    if precision not in ("w4a16", "w4a4", "w4a4_residual"):
        raise UserError(f"no Triton kernel for precision {precision!r}; choose w4a16, w4a4 or w4a4_residual")
    if path not in ("auto", "native_fp4", "decoded"):
        raise UserError(f"no kernel path {path!r}; choose auto, native_fp4 or decoded")
    device = torch.device(device)
    if device.type != "cuda":
        if compiled():
            raise UserError(
                f'Triton kernels need a CUDA GPU, not {device.type}; use kernel = "reference" (or TRITON_INTERPRET=1)'
            )
        return ("native_fp4" if path == "native_fp4" else "decoded"), "Triton interpreter"
    major, minor = torch.cuda.get_device_capability(device)
    name = torch.cuda.get_device_name(device)
    if major < 9:
        raise UserError(f'{name} (sm_{major}{minor}) is older than Hopper; use kernel = "reference"')
    native = major == 10 and precision != "w4a16"
    if path == "native_fp4" and not native:
        raise UserError(
            f"{name} (sm_{major}{minor}) has no native FP4 path for {precision}; choose decoded or reference"
        )
    if native and path != "decoded":
        return "native_fp4", f"{name} has FP4 tensor cores (tcgen05)"
    why = "16-bit activations" if precision == "w4a16" else "no tcgen05 FP4" if major != 10 else "asked for"
    return "decoded", f"{name}: {why}; codes are decoded to bfloat16 in registers"


def folds(operand: str, path: str) -> bool:
    """Whether the residual is folded on a path where [quant] residual_operand = `operand`."""
    return path == "decoded" and operand != "two"
