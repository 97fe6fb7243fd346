"""Check a quantizer against a file of test vectors, bit for bit.

    python -m quads.quant.conformance FILE [--backend reference|triton|all]

FILE is a JSON list of cases, of one of two kinds, told apart by their fields:

    weights   mode, x_bits, global_scale_bits, block_scale, packed, dequant_bits: one flat tensor, quantized with its
              own amax
    residual  shape [T, K], ratio, selection, x_bits, mask, main_bits, residual_bits: rows of activations (residual.py)

`format` is one of formats.py, NVFP4 where it is absent, and `mode` a scale rule of it; of NVFP4 with four-over-six the
end of the rule, mse or mae, is `select`. HiF4 has its second and third scales in `level2` and `level3`. `*_bits` are
fp32 bit patterns (of 1.0 where a format has no global scale), `block_scale` and `packed` bytes, `mask` 0 or 1 a channel
and row. `name` is optional. NaN equals NaN; everything else must match in every bit. Prints `N cases, M mismatches` for
each backend that ran, and names every mismatch and every format that is not known, whose cases did not run. Exit code
0: all ran and none differs; 1: not so; 2: the file or the backend cannot be had, or no format of the file is known.
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quads.errors import UserError, main_guard
from quads.quant import nvfp4, residual
from quads.quant.backend import kernel_device, load_kernels
from quads.quant.formats import FORMATS

Case = dict[str, Any]
Fields = dict[str, Tensor]  # int64, flat: bit patterns by field name

WEIGHT_FIELDS = ("mode", "x_bits", "global_scale_bits", "block_scale", "packed", "dequant_bits")
RESIDUAL_FIELDS = ("shape", "ratio", "selection", "x_bits", "mask", "main_bits", "residual_bits")
SELECTIONS = ("batch", "block", "token", "2:4")
FLOAT_FIELDS = ("global_scale_bits", "dequant_bits", "main_bits", "residual_bits")


def load_cases(path: str | Path) -> list[Case]:
    """Read and check a vector file. Raises UserError naming the case and field that is wrong."""
    try:
        cases = json.loads(Path(path).read_text())
    except OSError as error:
        raise UserError(f"cannot read vector file {path}: {error.strerror}; give the path of a JSON file") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not JSON ({error}); write the vectors again") from None
    if not isinstance(cases, list) or not cases:
        raise UserError(f"{path} must hold a JSON list of cases, at least one; a case has {', '.join(WEIGHT_FIELDS)}")
    for index, case in enumerate(cases):
        _join(case)
        problem = _problem(case)
        if problem:
            raise UserError(f"{path}, case {index}: {problem}")
    return cases


def _join(case: Any) -> None:
    """Fields that files of one format have apart, as all others have them: in `mode` and in `block_scale`."""
    if not isinstance(case, dict):
        return
    if "select" in case:
        case["mode"] = f"{case['mode']}+{case.pop('select')}"
    level2, level3 = case.pop("level2", None), case.pop("level3", None)
    if level2 is not None and level3 is not None:
        pairs = [level3[i : i + 2] for i in range(0, len(level3), 2)]
        blocks = zip(case["block_scale"], level2, pairs, strict=False)
        case["block_scale"] = [byte for one, two, three in blocks for byte in (one, two, *three)]


def _problem(case: Any) -> str:
    """What is wrong with a case, or an empty string."""
    if not isinstance(case, dict):
        return "not an object"
    if format_of(case) not in FORMATS:
        return ""
    row = FORMATS[format_of(case)]
    required = RESIDUAL_FIELDS if "main_bits" in case else WEIGHT_FIELDS
    missing = [name for name in required if name not in case]
    if missing:
        return f"missing {', '.join(missing)}; a case has {', '.join(required)}"
    lists = [name for name in required if name not in ("mode", "global_scale_bits", "ratio", "selection")]
    for name in lists:
        if not isinstance(case[name], list) or not all(type(value) is int for value in case[name]):
            return f"{name} must be a list of integers"
    num_elements = len(case["x_bits"])
    if not num_elements:
        return "x_bits is empty"
    num_blocks = -(-num_elements // row.block)
    if "mode" in case and case["mode"] not in row.rules:
        return f"mode of {row.name} must be {' or '.join(map(json.dumps, row.rules))}, not {case['mode']!r}"
    if required is WEIGHT_FIELDS:
        if row.block_bytes is None:
            return f"{row.name} packs no rows; there are no vectors of it"
        if type(case["global_scale_bits"]) is not int:
            return "global_scale_bits must be an integer"
        codes, scales = row.block_bytes
        lengths = {"block_scale": num_blocks * scales, "packed": num_blocks * codes, "dequant_bits": num_elements}
    else:
        if case["selection"] not in SELECTIONS:
            return f"selection must be one of {', '.join(SELECTIONS)}, not {case['selection']!r}"
        if type(case["ratio"]) not in (int, float) or not 0 <= case["ratio"] <= 1:
            return f"ratio must be a number in [0, 1], not {case['ratio']!r}"
        if case["selection"] == "2:4" and case["ratio"] != 0.5:
            return f"selection 2:4 has ratio 0.5, not {case['ratio']!r}"
        shape = case["shape"]
        if len(shape) != 2 or min(shape) < 1 or shape[0] * shape[1] != num_elements:
            return f"shape {shape} does not hold the {num_elements} elements of x_bits"
        lengths = dict.fromkeys(("mask", "main_bits", "residual_bits"), num_elements)
    for name, length in lengths.items():
        if len(case[name]) != length:
            return f"{name} has {len(case[name])} entries, x_bits asks for {length}"
    bits = [case["global_scale_bits"]] if required is WEIGHT_FIELDS else []
    bits += [value for name in lists if name.endswith("_bits") for value in case[name]]
    if not all(0 <= value < 2**32 for value in bits):
        return "fp32 bit patterns are unsigned 32-bit integers"
    return ""


def from_bits(bits: list[int]) -> Tensor:
    """fp32 tensor of unsigned 32-bit patterns."""
    return torch.tensor(bits, dtype=torch.int64).to(torch.int32).view(torch.float32)  # the cast keeps the low 32 bits


def to_bits(x: Tensor) -> Tensor:
    """int64 [numel] of the fp32 bit patterns of x, unsigned."""
    return x.detach().cpu().contiguous().view(torch.int32).flatten().long() & 0xFFFFFFFF


def run_reference(case: Case) -> Fields:
    """What the plain-torch specification makes of a case."""
    name = format_of(case)
    row, x = FORMATS[name], from_bits(case["x_bits"])
    if "main_bits" in case:
        x_TK = x.view(case["shape"])
        arguments = case["ratio"], case["selection"], None, name, case.get("mode", row.rules[0])
        main_TK, _, mask = residual.both_terms(x_TK, *arguments)
        _, residual_TK = residual.compensate(x_TK, *arguments)
        mask_bits = mask.expand_as(x_TK).flatten().long()
        return {"mask": mask_bits, "main_bits": to_bits(main_TK), "residual_bits": to_bits(residual_TK)}
    rule, num_elements = case["mode"], len(x)
    scales = row.global_scale(nvfp4.finite_amax(x), rule) if row.global_scale else None
    packed, block_scale = row.pack(x.unsqueeze(0), rule, scales, False)
    g = scales[0] if scales else None
    return {
        "global_scale_bits": to_bits(torch.ones(()) if g is None else g),
        "block_scale": block_scale.view(torch.uint8).flatten().long(),
        "packed": packed.flatten().long(),
        "dequant_bits": to_bits(row.unpack(packed, block_scale, g, torch.float32, num_elements)),
    }


def format_of(case: Case) -> str:
    """The name of a case's format."""
    return str(case.get("format", "nvfp4"))


def run_triton(case: Case) -> Fields:
    """What the Triton kernels make of a case. UserError for a format that they do not serve."""
    if not FORMATS[format_of(case)].kernels:
        raise UserError(f"there are no Triton kernels for {format_of(case)}; use --backend reference")
    quantizer, device = load_kernels(), kernel_device()
    x = from_bits(case["x_bits"]).to(device)
    if "main_bits" not in case:
        packed, block_scale, g = quantizer.quantize(x, mode=case["mode"])
        return {
            "global_scale_bits": to_bits(g),
            "block_scale": block_scale.view(torch.uint8).cpu().flatten().long(),
            "packed": packed.cpu().flatten().long(),
            "dequant_bits": to_bits(quantizer.dequantize(packed, block_scale, g, num_elements=x.shape[-1])),
        }
    x_TK = x.view(case["shape"])
    pair = quantizer.compensate_packed(x_TK, case["ratio"], case["selection"])
    mask_TK = pair.mask.expand_as(x_TK)
    main_TK, residual_TK = (quantizer.dequantize(*p, num_elements=x_TK.shape[-1]) for p in (pair.main, pair.residual))
    return {
        "mask": mask_TK.cpu().flatten().long(),
        "main_bits": to_bits(main_TK),
        "residual_bits": to_bits(torch.where(mask_TK, residual_TK, 0.0)),
    }


def mismatches(case: Case, got: Fields) -> list[str]:
    """One line for each field that differs: how many entries, and the first of them."""
    lines = []
    for name, have in got.items():
        want = torch.tensor(case[name], dtype=torch.int64).flatten()
        differs = have != want
        if name in FLOAT_FIELDS:
            differs &= ~(_is_nan(have) & _is_nan(want))
        if differs.any():
            first = int(differs.nonzero()[0])
            lines.append(
                f"{name}: {int(differs.sum())} of {len(want)} differ, first at {first}: "
                f"expected {int(want[first]):#x}, got {int(have[first]):#x}"
            )
    return lines


def _is_nan(bits: Tensor) -> Tensor:
    return (bits & 0x7FFFFFFF) > 0x7F800000


def check(cases: list[Case], run: Callable[[Case], Fields]) -> list[str]:
    """Every mismatch of a backend, each with the name of its case."""
    return [
        f"{case.get('name', f'case {index}')}{_setting(case)}: {line}"
        for index, case in enumerate(cases)
        for line in mismatches(case, run(case))
    ]


def _setting(case: Case) -> str:
    words = [str(case[name]) for name in ("format", "mode", "selection", "ratio") if name in case]
    return f" [{' '.join(words)}]"


@main_guard
def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit code (0 or 1), 2 by way of UserError."""
    parser = argparse.ArgumentParser(
        prog="python -m quads.quant.conformance", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("file", help="JSON file of vectors")
    parser.add_argument("--backend", choices=("reference", "triton", "all"), default="reference")
    args = parser.parse_args(argv)
    everything = load_cases(args.file)
    cases = [case for case in everything if format_of(case) in FORMATS]
    unknown = Counter(format_of(case) for case in everything if format_of(case) not in FORMATS)
    for name, count in unknown.items():
        print(f"did not run: {count} cases of the format {name!r}, which is not known; known: {', '.join(FORMATS)}")
    if not cases:
        raise UserError(f"{args.file} holds no case of a known format; known: {', '.join(FORMATS)}")
    runners = {"reference": run_reference, "triton": run_triton}
    if args.backend != "all":
        runners = {args.backend: runners[args.backend]}
    if "triton" in runners:
        try:
            load_kernels()
        except UserError as error:
            if args.backend != "all":
                raise
            del runners["triton"]
            print(f"triton: did not run: {error}")
    failed = bool(unknown)
    for backend, run in runners.items():
        found = check(cases, run)
        print(f"{backend}: {len(cases)} cases, {len(found)} mismatches")
        for line in found:
            print(f"  {line}")
        failed |= bool(found)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
