"""Which code multiplies in a rollout, and what to say when it cannot be had.

    reference  plain torch, anywhere (linear.py)
    triton     kernels for a CUDA GPU: native FP4 on compute capability 10.x, elsewhere 4-bit operands are decoded to
               bf16 in registers ("emulated"). They serve w4a16, w4a4 and w4a4_residual

Triton is imported when asked for, never by importing this module.
"""

import importlib
import importlib.util
from types import ModuleType
from typing import Literal

import torch

from quads.errors import UserError

Kernel = Literal["reference", "triton"]

TRITON_PRECISIONS = ("w4a16", "w4a4", "w4a4_residual")


def interpreted() -> bool:
    """Triton runs kernels in its interpreter on the CPU (TRITON_INTERPRET=1)."""
    return bool(importlib.import_module("triton").knobs.runtime.interpret)


def load_kernels() -> ModuleType:
    """The Triton kernels. Raises UserError where they cannot be imported or have nothing to run on."""
    instead = "the reference backend in plain torch runs everywhere"
    try:
        importlib.import_module("triton")
        kernels = importlib.import_module("quads.quant.triton.ops")
    except ImportError as error:
        raise UserError(f"the triton backend cannot be imported ({error}); install triton. Else: {instead}") from None
    if not torch.cuda.is_available() and not interpreted():
        raise UserError(
            "the triton backend needs a CUDA GPU, or TRITON_INTERPRET=1 to interpret its kernels on the CPU (slow, for "
            f"tests); {instead}"
        )
    return kernels


def kernel_device() -> torch.device:
    """Where Triton kernels run: the CPU under the interpreter, else the GPU."""
    return torch.device("cpu" if interpreted() else "cuda")


def choose_kernel(kernel: str, device: torch.device, precision: str) -> Kernel:
    """What serves `precision` on `device`, for rollout.kernel = "auto", "reference" or "triton".

    "auto" is triton on a CUDA GPU for the precisions that it serves, else reference; the banner prints which. Raises
    UserError where "triton" was asked for and cannot be had.
    """
    if kernel == "triton":
        if precision not in TRITON_PRECISIONS:
            raise UserError(
                f'rollout.kernel = "triton" serves {", ".join(TRITON_PRECISIONS)}, not {precision}; '
                'set rollout.kernel = "reference", or leave it "auto"'
            )
        load_kernels()
        if device.type != kernel_device().type:
            raise UserError(
                f'rollout.kernel = "triton" runs on {kernel_device().type}, the model is on {device.type}; '
                'set rollout.kernel = "reference"'
            )
        return "triton"
    if kernel not in ("auto", "reference"):
        raise UserError(f'rollout.kernel must be "auto", "reference" or "triton", not {kernel!r}')
    can = device.type == "cuda" and precision in TRITON_PRECISIONS and importlib.util.find_spec("triton")
    return "triton" if kernel == "auto" and can else "reference"


def describe_kernel(kernel: Kernel, precision: str, device: torch.device) -> str:
    """A few words for the banner."""
    if precision == "bf16":
        return "torch matmul"
    if kernel == "reference":
        return "reference (plain torch)"
    path, _ = load_kernels().choose(device, precision)
    return "native fp4 (triton)" if path == "native_fp4" else "emulated (triton, 4-bit operands decoded to bf16)"
