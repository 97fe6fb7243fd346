"""Which code multiplies in a rollout, and what to say when it cannot be had.

    reference  plain torch, anywhere (matmul.py)
    triton     kernels for a CUDA GPU: native FP4 on compute capability 10.x, elsewhere 4-bit operands are decoded to
               bf16 in registers ("emulated"). A format says which precisions they serve (formats.py)

Triton is imported when asked for, never by importing this module.
"""

import importlib.util
from types import ModuleType
from typing import Literal

import torch

from quads.errors import UserError
from quads.quant.formats import FORMATS

Kernel = Literal["reference", "triton"]


def interpreted() -> bool:
    """Triton runs kernels in its interpreter on the CPU (TRITON_INTERPRET=1)."""
    import triton

    return bool(triton.knobs.runtime.interpret)  # pyright: ignore[reportAttributeAccessIssue]


def load_kernels() -> ModuleType:
    """The Triton kernels. Raises UserError where they cannot be imported or have nothing to run on."""
    instead = "the reference backend in plain torch runs everywhere"
    try:
        from quads.quant.triton import ops as kernels
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


def kernels_of(format: str, residual_scale: float = 1.0) -> tuple[str, ...]:
    """The precisions that Triton kernels serve. None of them subtracts a share of the residual."""
    words = FORMATS[format].kernels
    return tuple(word for word in words if word != "w4a4_residual" or residual_scale == 1.0)


def choose_kernel(
    kernel: str, device: torch.device, precision: str, format: str, residual_scale: float = 1.0
) -> Kernel:
    """What serves `precision`, a word of recipes.PRECISIONS with the 4-bit `format`, on `device`, for rollout.kernel =
    "auto", "reference" or "triton".

    "auto" is triton on a CUDA GPU for the precisions that it serves, else reference; the banner prints which. Raises
    UserError where "triton" was asked for and cannot be had.
    """
    serves = kernels_of(format, residual_scale)
    if kernel == "triton":
        if precision not in serves:
            what = f"serves {', '.join(serves)}, not {precision}" if serves else f"has no kernels for {format}"
            what += f" with residual_scale = {residual_scale}" if residual_scale != 1.0 else ""
            raise UserError(f'rollout.kernel = "triton" {what}; set rollout.kernel = "reference", or leave it "auto"')
        load_kernels()
        if device.type != kernel_device().type:
            raise UserError(
                f'rollout.kernel = "triton" runs on {kernel_device().type}, the model is on {device.type}; '
                'set rollout.kernel = "reference"'
            )
        return "triton"
    if kernel not in ("auto", "reference"):
        raise UserError(f'rollout.kernel must be "auto", "reference" or "triton", not {kernel!r}')
    can = device.type == "cuda" and precision in serves and importlib.util.find_spec("triton")
    return "triton" if kernel == "auto" and can else "reference"


def operand_in_force(
    word: str, kernel: str, device: torch.device, format: str, residual_scale: float = 1.0
) -> Literal["folded", "two"]:
    """What [quant] residual_operand = `word` comes to on a device, for rollout.kernel = `kernel` ("auto" for vllm)."""
    if word == "auto":
        folds = choose_kernel(kernel, device, "w4a4_residual", format, residual_scale) == "triton" and (
            load_kernels().choose(device, "w4a4_residual")[0] == "decoded"
        )
        return "folded" if folds else "two"
    return "folded" if word == "folded" else "two"


def describe_kernel(kernel: Kernel, precision: str, format: str, device: torch.device, operand: str = "auto") -> str:
    """A few words for the banner. operand: the word of [quant] residual_operand."""
    if precision == "bf16":
        return "torch matmul"
    if kernel == "reference":
        lacking = device.type == "cuda" and precision != "fp8" and not FORMATS[format].kernels
        return f"reference ({format} has no kernel: widened to bf16 values)" if lacking else "reference (plain torch)"
    path, _ = load_kernels().choose(device, precision, "decoded" if operand == "folded" else "auto")
    if path == "native_fp4":
        return "native fp4 (triton)"
    folded = precision == "w4a4_residual" and operand != "two"
    return f"emulated (triton, 4-bit operands decoded to {'fp16, residual folded' if folded else 'bf16'})"
