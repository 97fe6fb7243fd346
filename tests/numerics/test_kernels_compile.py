"""Compile the kernels for GPUs that are not here and look at the instructions: no GPU is needed for that."""

import os
import re
from pathlib import Path

import pytest

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("nothing is compiled in the interpreter", allow_module_level=True)
triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from quads.model.logprobs_triton import gradient_kernel, stats_kernel  # noqa: E402
from quads.quant.triton import tune as kernels_tune  # noqa: E402
from quads.quant.triton.activation_rows import row_codes_kernel, rows_kernel  # noqa: E402
from quads.quant.triton.codes import launch_shape  # noqa: E402
from quads.quant.triton.dense import expand_kernel  # noqa: E402
from quads.quant.triton.four_over_six import four_over_six_kernel  # noqa: E402
from quads.quant.triton.fp8 import fp8_quantize_kernel  # noqa: E402
from quads.quant.triton.gemm import w4_gemm_kernel  # noqa: E402
from quads.quant.triton.gemm_fp4 import native_gemm_kernel  # noqa: E402
from quads.quant.triton.hif4 import hif4_kernel, hif4_values_kernel  # noqa: E402
from quads.quant.triton.mxfp4 import mxfp4_kernel, mxfp4_values_kernel  # noqa: E402
from quads.quant.triton.pack import pack_kernel, weight_kernel  # noqa: E402
from quads.quant.triton.routing import route_kernel  # noqa: E402
from quads.quant.triton.selected import fold_kernel  # noqa: E402
from quads.quant.triton.tune import load  # noqa: E402
from quads.quant.triton.weight import quantize_repack_kernel  # noqa: E402
from quads.rollout.vllm.sampler import chunk_kernel, draw_kernel, rank_kernel  # noqa: E402

ALIGNED = {"N", "K", "width", "stride_x", "stride_out"}


WORDS = {"x_ptr": "*i32", "mask_ptr": "*i16", "packed_ptr": "*u8", "byte_ptr": "*u8", "scale_ptr": "*fp32"}
WORDS |= {"g_ptr": "*fp32", "gs_ptr": "*fp32", "live_ptr": "*u8", "slots_ptr": "*i32", "partial_ptr": "*fp64"}
WORDS |= {"order_ptr": "*i32", "words_ptr": "*i16", "scales_ptr": "*u8"}


def compile_kernel(kernel, pointers, constants, capability, multiples, **options):
    """A kernel compiled; arguments that are neither pointers nor constants are int32. multiples: those that are known
    to be multiples of 16."""
    names = kernel.arg_names
    signature = {name: pointers.get(name, "constexpr" if name in constants else "i32") for name in names}
    aligned = {(names.index(name),): [["tt.divisibility", 16]] for name in names if name in multiples}
    values = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, signature, values, aligned)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def ptx(kernel, pointers, constants, capability, **options) -> str:
    return compile_kernel(kernel, pointers, constants, capability, {*pointers, *ALIGNED}, **options).asm["ptx"]


def compile_gemm(mode, bm, bn, kstep, warps, residual=False, operand="bf16", capability=90, late=False):
    pointers = {"x_ptr": f"*{operand}", "x_scale_ptr": "*fp32", "w_ptr": "*i16", "s_ptr": "*i16", "g_ptr": "*fp32"}
    pointers |= {"rows_ptr": "*i32", "expert_ptr": "*i32", "out_ptr": "*bf16"}
    constants = {"TOP_K": 8, "BM": bm, "BN": bn, "KSTEP": kstep, "MODE": mode, "SCALED": True, "RESIDUAL": residual}
    constants |= {"SPLIT": 1, "LATE": late, "ASM": True}
    known = {*pointers, *ALIGNED}
    return compile_kernel(w4_gemm_kernel, pointers, constants, capability, known, num_warps=warps, num_stages=3).asm


def gemm_ptx(*shape, **options) -> str:
    return compile_gemm(*shape, **options)["ptx"]


def stored_shapes() -> list[tuple]:
    """(bm, bn, kstep, warps, residual) of all stored tiles."""
    classes = load(Path(kernels_tune.__file__).parent / "tuned" / "h200.json")
    rows = [(name.endswith("residual"), row) for name, rows in classes.items() for row in rows if not row.expand]
    plain = ("w2",)
    return sorted(
        {
            (row.bm, tile.bn, kstep, tile.warps, residual and layer not in plain)
            for residual, row in rows
            for layer, tile in row.tiles.items()
            for kstep in {1, tile.kstep}
        }
    )


def scale_layouts(ttgir: str) -> list[str]:
    """Register part of the layouts in which pairs of scale bytes are decoded."""
    layouts = dict(re.findall(r"^(#\w+) = (#ttg\.\w+<\{.*?\}>)$", ttgir, re.M))
    return [layouts[each] for each in re.findall(r"0x4140.*?-> tensor<\d+x\d+xb?f16, (#\w+)>", ttgir)]


@pytest.mark.parametrize(("bm", "bn", "kstep", "warps", "residual"), stored_shapes())
def test_the_two_scales_of_a_pair_are_neighbours_in_a_thread(bm, bn, kstep, warps, residual):
    """The inline PTX that decodes a pair of scale bytes writes both into one register. Nor may a thread hold any word
    twice: with loads of single bytes, or a join, Triton takes the weights for 8-bit ones and does that."""
    for operand in ("bf16",) if residual else ("bf16", "fp16"):
        text = compile_gemm("dense", bm, bn, kstep, warps, residual, operand)["ttgir"]
        layouts = scale_layouts(text)
        assert layouts and all(layout.startswith("#ttg.linear<{register = [[0, 1], ") for layout in layouts)
        assert "kWidth = 4" not in text


def test_an_expanded_weight_does_not_count_on_that_layout():
    """Its kernel has no MMA, so pairs would fall apart, as they once did."""
    pointers = {"w_ptr": "*i16", "s_ptr": "*i16", "g_ptr": "*fp32", "out_ptr": "*bf16"}
    known = {*pointers}
    text = compile_kernel(expand_kernel, pointers, {"COPIES": 2, "ASM": True}, 90, known, num_warps=4).asm["ttgir"]
    assert scale_layouts(text) == []


@pytest.mark.parametrize(("mode", "residual"), [("gather", True), ("scatter", False), ("dense", False)])
def test_gemm_uses_wgmma_on_hopper(mode, residual):
    text = gemm_ptx(mode, 32, 128, 1, 4, residual)
    assert "wgmma.mma_async.sync.aligned.m64" in text
    assert "fma.rn.bf16x2" in text  # codes times scales, two at a time
    assert "griddepcontrol.wait" in text


@pytest.mark.parametrize("capability", [90, 100])
def test_a_folded_residual_is_multiplied_in_fp16(capability):
    """Weights are decoded to fp16 and multiplied by tensor cores with fp32 sums; nothing goes by bfloat16."""
    wide = gemm_ptx("gather", 32, 128, 1, 4, operand="fp16", capability=capability)
    small = gemm_ptx("scatter", 8, 64, 1, 2, operand="fp16", capability=capability)
    for text in (wide, small):
        assert "mul.rn.f16x2" in text and "fma.rn.bf16x2" not in text
    assert "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32" in small
    if capability == 90:
        assert re.search(r"wgmma\.mma_async\.sync\.aligned\.m64n32k16\.f32\.f16\.f16", wide)


def test_the_second_of_two_launches_waits_at_its_end_in_one_program():
    """And not before it loads and multiplies."""
    text = compile_gemm("gather", 8, 64, 1, 2, late=True)["ptx"]
    assert text.index("griddepcontrol.launch_dependents") < text.index("griddepcontrol.wait")
    assert text.rindex("mma.sync") < text.rindex("griddepcontrol.wait")


def test_every_wgmma_is_waited_for_inside_the_loop():
    """The accumulator is read at the end of each iteration (see the comment in the kernel), so a wait for all
    outstanding MMAs stands before the loop's branch back."""
    text = gemm_ptx("scatter", 64, 128, 1, 4)
    last_mma = text.rindex("wgmma.mma_async")
    back = re.search(r"bra(\.uni)?\s+\$L__BB", text[last_mma:])
    assert back and "wgmma.wait_group.sync.aligned \t0" in text[last_mma : last_mma + back.start()].replace(
        "aligned 0", "aligned \t0"
    )


def test_small_token_tiles_use_warp_mma():
    text = gemm_ptx("gather", 8, 64, 2, 2)
    assert "mma.sync.aligned.m16n8k16" in text and "wgmma" not in text


@pytest.mark.parametrize(
    ("mode", "residual", "bm"), [("gather", True, 32), ("scatter", False, 32), ("dense", True, 128)]
)
def test_native_gemm_is_fp4_on_blackwell(mode, residual, bm):
    pointers = {"x_ptr": "*u8", "x_byte_ptr": "*fp8e4nv", "x_scale_ptr": "*fp32", "w_ptr": "*u8", "s_ptr": "*fp8e4nv"}
    pointers |= {"g_ptr": "*fp32", "rows_ptr": "*i32", "expert_ptr": "*i32", "out_ptr": "*bf16"}
    constants = {"TOP_K": 8, "BM": bm, "BN": 128, "BK": 256, "MODE": mode, "RESIDUAL": residual, "ASM": True}
    text = ptx(native_gemm_kernel, pointers, constants, 100, num_warps=4, num_stages=3)
    assert re.search(r"tcgen05\.mma\S*kind::mxf4nvf4\.block_scale", text)


@pytest.mark.parametrize("capability", [90, 100])
def test_quantizers_divide_exactly_and_do_not_fuse(capability):
    pointers = {"x_ptr": "*bf16", "mask_ptr": "*u8", "main_ptr": "*u8", "main_byte_ptr": "*u8", "scale_ptr": "*fp32"}
    pointers |= {"residual_ptr": "*u8", "residual_byte_ptr": "*u8", "slots_ptr": "*i32"}
    pointers |= {"partial_ptr": "*fp64", "live_ptr": "*u8", "ids_ptr": "*i64", "map_ptr": "*i32"}
    pointers |= {"expert_ptr": "*i32"}
    constants = {"KP": 128, "EVEN": True, "STORED": False, "CODES": True, "WHOLE": True}
    constants |= {"RESIDUAL": "mask", "INDEX_BITS": 7, "HAS_LIVE": False, "HAS_SLOTS": False}
    constants |= {"PLAIN": False, "TOP_K": 1, "E": 0, "BINS": 1, "CHUNK": 1, "BM": 1, "BL": 0, "ASM": True}
    constants |= {"BESIDE": False, "FOLD": False}
    rows = ptx(rows_kernel, pointers, constants, capability, num_warps=1, enable_fp_fusion=False)
    pointers |= {"main_ptr": "*fp16"}
    constants |= {"CODES": False, "WHOLE": False, "FOLD": True, "RESIDUAL": "all"}
    folded = ptx(rows_kernel, pointers, constants, capability, num_warps=1, enable_fp_fusion=False)
    assert "cvt.rn.f16" in folded
    pointers = {"x_ptr": "*bf16", "g_ptr": "*fp32", "gs_ptr": "*fp32", "packed_ptr": "*u8", "byte_ptr": "*u8"}
    constants = {"NB": 16, "PACK": True, "VALUE": False, "CAST": False, "ROW": 0, "ASM": True}
    weights = ptx(
        weight_kernel, pointers | {"value_ptr": "*bf16"}, constants, capability, num_warps=1, enable_fp_fusion=False
    )
    flags = {"HAS_LIVE": False, "HAS_SLOTS": False, "ASM": True}
    by_block = [
        ptx(
            kernel,
            {name: kind for name, kind in WORDS.items() if name in kernel.arg_names},
            {name: value for name, value in (flags | {"NB": 32, "ROWS": 16}).items() if name in kernel.arg_names},
            capability,
            num_warps=1,
            enable_fp_fusion=False,
        )
        for kernel in (pack_kernel, row_codes_kernel, quantize_repack_kernel)
    ]
    assert all("max.u16x2" in text for text in by_block)
    for text in (rows, folded, weights, *by_block):
        assert "div.rn.f32" in text
        assert "div.full" not in text and "div.approx" not in text and "rcp.approx" not in text
    # x = code * scale * g, then minus x: a subtraction of its own for each of a thread's 4 elements (two at a time on
    # sm_100), never a fused one
    assert len(re.findall(r"\bsub(?:\.rn)?\.f32", rows)) >= 2
    # and main minus residual as well, of products that are exact
    assert len(re.findall(r"\bsub(?:\.rn)?\.f32", folded)) >= 4


@pytest.mark.parametrize("large", [0, 32])
def test_routing_map_compiles(large):
    pointers = {"ids_ptr": "*i64", "live_ptr": "*u8", "map_ptr": "*i32", "expert_ptr": "*i32"}
    constants = {"TOP_K": 8, "E": 128, "BINS": 256, "CHUNK": 512, "BM": 8, "BL": large, "HAS_LIVE": True, "ASM": True}
    assert ".local" not in ptx(route_kernel, pointers, constants, 90, num_warps=4)


@pytest.mark.parametrize("capability", [90, 100])
def test_operands_folded_after_the_choice_compile(capability):
    pointers = {"score_ptr": "*fp64", "data_ptr": "*bf16", "scale_ptr": "*fp32", "out_ptr": "*fp16"}
    constants = {"UNITS": 2048, "COLUMNS": 8, "CHUNK": 512, "GROUP": 1, "BT": 64, "ASM": True}
    pointers |= {"out_scale_ptr": "*fp32"}
    text = ptx(fold_kernel, pointers, constants, capability, num_warps=4, enable_fp_fusion=False)
    assert "cvt.rn.f16" in text and ".local" not in text and "fma.rn.f32 " not in text


def test_loss_and_fp8_kernels_compile_for_hopper():
    """They run interpreted elsewhere; here the compiler sees them. Scales and temperatures divide exactly."""
    logits = {"logits_ptr": "*fp32", "targets_ptr": "*i64", "out_ptr": "*bf16", "temperature": "fp32"}
    per_row = ("normalizer_ptr", "entropy_ptr", "grad_logprob_ptr", "grad_entropy_ptr")
    gradient = ptx(gradient_kernel, logits | dict.fromkeys(per_row, "*fp32"), {"BLOCK": 4096}, 90, num_warps=8)
    stats = ptx(stats_kernel, logits | {"out_ptr": "*fp32"}, {"BLOCK": 4096}, 90, num_warps=8)
    pointers = {"x_ptr": "*bf16", "byte_ptr": "*u8", "scale_ptr": "*fp32", "value_ptr": "*bf16"}
    constants = {"BN": 128, "BK": 128, "PER_ROW": False, "POW2": True, "CODES": False, "ASM": True}
    quantize = ptx(fp8_quantize_kernel, pointers, constants, 90, num_warps=8, enable_fp_fusion=False)
    for text in (gradient, stats, quantize):
        assert "div.rn.f32" in text and ".local" not in text
    assert "div.full" not in gradient + quantize


@pytest.mark.parametrize("dtype", ["*bf16", "*fp32"])
def test_kernels_of_block_formats_compile_for_hopper(dtype):
    """Nothing is fused that is not meant to be, nothing spills, and what divides divides exactly."""
    bytes_of = dict.fromkeys(("byte_ptr", "levels_ptr", "codes_ptr"), "*u8") | dict.fromkeys(
        ("g_ptr", "gs_ptr"), "*fp32"
    )
    cases = [(mxfp4_kernel, {"NB": 16, "RULE": 2}, 2), (hif4_kernel, {"NB": 16}, 4)]
    cases += [(four_over_six_kernel, {"KP": 2048, "SQUARES": squares}, 4) for squares in (True, False)]
    for kernel, constants, warps in cases:
        for flags in ({"PACK": False, "CAST": False}, {"PACK": True, "CAST": dtype == "*fp32"}):
            pointers = bytes_of | {"x_ptr": dtype, "out_ptr": "*u8" if flags["PACK"] else dtype}
            pointers = {name: kind for name, kind in pointers.items() if name in kernel.arg_names}
            constants |= flags | {"ASM": True}
            text = ptx(kernel, pointers, constants, 90, num_warps=warps, enable_fp_fusion=False)
            assert "div.rn.f32" in text and "div.full" not in text and ".local" not in text
            assert kernel is not hif4_kernel or "fma" not in text  # the others round to E2M1 by fma
    for kernel in (mxfp4_values_kernel, hif4_values_kernel):
        pointers = {name: kind for name, kind in (bytes_of | {"out_ptr": dtype}).items() if name in kernel.arg_names}
        text = ptx(kernel, pointers, {"NB": 16, "ASM": True}, 90, num_warps=4, enable_fp_fusion=False)
        assert "fma" not in text and ".local" not in text


@pytest.mark.parametrize(("blocks", "per_thread"), [(1, 1), (32, 2), (129, 1), (128, 4)])
def test_a_thread_holds_the_words_of_its_blocks(blocks, per_thread):
    """The inline PTX reads four neighbours of a [NB, 4] tile. With fewer elements than threads, or addresses of unknown
    alignment, Triton spreads them over threads, and the codes are garbage: so it was at first, for small matrices."""
    nb, warps = launch_shape(blocks, per_thread)
    flags = {"HAS_LIVE": True, "HAS_SLOTS": False, "ASM": True, "NB": nb}
    for kernel in (pack_kernel, row_codes_kernel, quantize_repack_kernel):
        rows = {"ROWS": 32 if kernel is quantize_repack_kernel else 8}
        constants = {name: value for name, value in (flags | rows).items() if name in kernel.arg_names}
        pointers = {name: kind for name, kind in WORDS.items() if name in kernel.arg_names}
        warps = 4 if kernel is quantize_repack_kernel else warps
        compiled = compile_kernel(kernel, pointers, constants, 90, {"x_ptr"}, num_warps=warps, enable_fp_fusion=False)
        text = compiled.asm["ttgir"]
        layouts = dict(re.findall(r"^(#\w+) = #ttg\.blocked<\{sizePerThread = (\[[^\]]*\])", text, re.M))
        used = re.findall(r"packed_element = 4.*?-> \(?tensor<\d+x4xi\d+, (#\w+)>", text, re.S)
        assert used and {layouts[layout] for layout in used} == {"[1, 4]"}, (kernel, [layouts[each] for each in used])


def test_sampling_kernels_compile_for_hopper():
    """Chunks stay in registers; the sums over a row are fp64."""
    pointers = {"logits_ptr": "*bf16", "temperature_ptr": "*fp32", "maxima_ptr": "*fp32", "sums_ptr": "*fp32"}
    pointers |= {"uniform_ptr": "*fp64", "token_ptr": "*i32", "logprob_ptr": "*fp32", "rank_ptr": "*i64"}
    texts = [
        compile_kernel(
            kernel,
            {name: kind for name, kind in pointers.items() if name in kernel.arg_names},
            {"CHUNK": 2048} | ({"CP": 128} if "CP" in kernel.arg_names else {}),
            90,
            {*pointers, "stride", "V"},  # of every vocabulary that is a multiple of 16
            num_warps=warps,
        ).asm["ptx"]
        for kernel, warps in ((chunk_kernel, 4), (draw_kernel, 8), (rank_kernel, 4))
    ]
    assert all(".local" not in text for text in texts)
    assert "add.f64" in texts[1]
    assert all("div.rn.f32" in text for text in texts[:2])  # logits / temperature, as in the learner
    assert "ld.global.v4" in texts[0] and "ld.global.v4" in texts[2]
