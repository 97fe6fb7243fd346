"""The checks of the interpreter tests on the GPU, at odd and at production shapes; repeated launches; CUDA graphs."""

from pathlib import Path

import pytest
import torch

from quads.quant import nvfp4

pytestmark = pytest.mark.gpu
if torch.cuda.is_available():
    from quads.quant import conformance
    from quads.quant.triton import ops as kernels
    from quads.quant.triton import tune as kernels_tune
    from quads.quant.triton.tune import ShapeClass, Tile
    from tests.numerics import kernel_checks as check

PRECISIONS = ("w4a16", "w4a4", "w4a4_residual")


@pytest.mark.parametrize("mode", ["pow2", "amax"])
@pytest.mark.parametrize("shape", [(1, 16), (7, 48), (2, 6, 32), (1, 2064), (300, 40), (4, 256, 2048), (1000, 4096)])
def test_weight_quantizer(shape, mode):
    for dtype in (torch.float32, torch.bfloat16):
        check.check_weight_quantizer(shape, mode, "cuda", dtype)


@pytest.mark.parametrize(("rows", "k"), [(1, 16), (7, 48), (9, 144), (64, 2064), (1500, 2048), (40, 8192)])
def test_quantizer_of_packed_rows(rows, k):
    check.check_row_codes(rows, k, "cuda")


def test_quantizer_codes_of_every_bfloat16():
    check.check_codes_of_every_bfloat16("cuda", 31)


@pytest.mark.parametrize("mode", ["pow2", "amax"])
@pytest.mark.parametrize(("shape", "swiglu"), [((130, 48), False), ((2, 1536, 2048), True), ((3, 2048, 768), False)])
def test_weight_quantized_in_place(shape, swiglu, mode):
    check.check_quantize_in_place(shape, swiglu, mode, "cuda")
    check.check_quantize_parts_in_place("cuda")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("selection", ["batch", "block", "token", "2:4", "all"])
@pytest.mark.parametrize(("rows", "k"), [(1, 16), (7, 48), (64, 2064), (300, 2048), (1500, 768), (33, 4096)])
def test_activation_quantizer(rows, k, selection, dtype):
    for ratio in (0.5,) if selection in ("2:4", "all") else (0.5, 0.1, 1.0):
        check.check_activation_quantizer(rows, k, selection, ratio, "cuda", dtype)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("rows", [1, 5, 16, 40, 200, 700])
def test_linear(rows, precision):
    for n, k, selection in (
        (130, 16, "batch"),
        (40, 144, "token"),
        (512, 2048, "2:4"),
        (512, 2048, "batch"),
        (2048, 4096, "block"),
        (2048, 4096, "all"),
    ):
        check.check_linear(rows, n, k, precision, selection, "cuda")
        if precision == "w4a4_residual":
            check.check_linear(rows, n, k, precision, selection, "cuda", fold=True)


@pytest.mark.parametrize("fold", [False, True])
def test_every_code_and_scale(fold, monkeypatch):
    """By mma.sync and by wgmma, one and two steps of 128."""
    for bm, tile in ((8, Tile(64, 1, 3, 2)), (32, Tile(128, 1, 3, 4)), (64, Tile(64, 1, 3, 4))):
        row = ShapeClass(1e9, bm, {"dense": tile})
        monkeypatch.setattr(kernels, "shape_class", lambda *arguments, row=row: row)
        check.check_every_code_and_scale("cuda", fold)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("one_expert", [False, True])
def test_experts(precision, one_expert):
    for tokens, experts, top_k, hidden, width in ((1, 8, 2, 48, 16), (7, 4, 2, 272, 48), (130, 8, 4, 256, 128)):
        check.check_moe(tokens, experts, top_k, hidden, width, precision, "cuda", one_expert=one_expert)
        if precision == "w4a4_residual":
            check.check_moe(tokens, experts, top_k, hidden, width, precision, "cuda", one_expert=one_expert, fold=True)


def test_linear_with_shared_k_and_with_an_expanded_weight(monkeypatch):
    for tile in (Tile(64, 1, 3, 4, 2), Tile(64, 2, 3, 4, 4), Tile(128, 1, 3, 4, 8)):
        row = ShapeClass(1e9, 16, {"dense": tile})
        monkeypatch.setattr(kernels, "shape_class", lambda *arguments, row=row: row)
        for precision in PRECISIONS:
            check.check_linear(40, 512, 2048, precision, "token", "cuda")
        check.check_linear(40, 512, 2048, "w4a4_residual", "all", "cuda", fold=True)
    monkeypatch.setattr(kernels, "shape_class", lambda *arguments: ShapeClass(1e9, 16, {}, True))
    for precision in PRECISIONS:
        check.check_linear(300, 5120, 2048, precision, "block", "cuda")
    check.check_linear(300, 5120, 2048, "w4a4_residual", "all", "cuda", fold=True)


def test_a_gpu_without_a_tuning_file_tunes_once_and_says_so(monkeypatch, capsys):
    monkeypatch.setattr(kernels_tune, "stored", lambda name: None)
    check.check_linear(5, 256, 512, "w4a4", "token", "cuda")
    assert capsys.readouterr().out.count("no tuning file for this GPU; narrow 256x512") == 1
    check.check_linear(5, 256, 512, "w4a4", "token", "cuda")
    check.check_moe(7, 4, 2, 256, 128, "w4a4", "cuda")
    assert "narrow" not in capsys.readouterr().out


def large_layer(tokens: int, seed: int = 0):
    generator = torch.Generator("cuda").manual_seed(seed)

    def weight(shape, swiglu):
        w = torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16) * 0.02
        return kernels.KernelWeight.from_packed(*kernels.quantize(w), swiglu=swiglu)

    x = torch.randn(tokens, 2048, generator=generator, device="cuda", dtype=torch.bfloat16)
    logits = torch.randn(tokens, 128, generator=generator, device="cuda")
    gates, ids = logits.softmax(-1).topk(8)
    return x, weight((128, 1536, 2048), True), weight((128, 2048, 768), False), ids, gates.bfloat16()


@pytest.mark.parametrize("tokens", [1, 16, 64, 256, 1024, 4096])
def test_repeated_launches_of_a_folded_residual(tokens):
    """And near what two operands give. Those differ in 0.3 % of the elements, by 2**-11 of them, which moves some bf16
    roundings of h, and those a few of its codes: half a percent of the result where the residual leaves them out."""
    x, w13, w2, ids, gates = large_layer(tokens)
    dense = kernels.KernelWeight.from_packed(*kernels.quantize(torch.randn(5120, 2048, device="cuda") * 0.02))
    for selection in ("batch", "token", "all"):
        how = {"residual_sites": ("w13", "w2"), "selection": selection}

        def layer(fold, how=how):
            return kernels.moe(x, w13, w2, ids, gates, "w4a4_residual", fold=fold, **how)

        def projection(fold, selection=selection):
            return kernels.linear(x, dense, "w4a4_residual", selection=selection, fold=fold)

        for run in (layer, projection):
            first, two = run(True), run(False).float()
            assert first.isfinite().all() and float((first.float() - two).norm() / two.norm()) < 0.02
            for _ in range(12):
                assert torch.equal(first.view(torch.int16), run(True).view(torch.int16))


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("tokens", [1, 16, 64, 256, 1024, 4096])
def test_repeated_launches_give_the_same_bits(tokens, precision):
    """A compiler race (see triton/gemm.py) shows up as bits that move between launches, never in one comparison."""
    x, w13, w2, ids, gates = large_layer(tokens)
    for selection in ("batch", "token", "2:4", "all"):
        first = kernels.moe(x, w13, w2, ids, gates, precision, residual_sites=("w13", "w2"), selection=selection)
        assert first.isfinite().all()
        for _ in range(12):
            again = kernels.moe(x, w13, w2, ids, gates, precision, residual_sites=("w13", "w2"), selection=selection)
            assert torch.equal(first.view(torch.int16), again.view(torch.int16))
    dense = kernels.KernelWeight.from_packed(*kernels.quantize(torch.randn(5120, 2048, device="cuda") * 0.02))
    first = kernels.linear(x, dense, precision)
    for _ in range(12):
        assert torch.equal(first.view(torch.int16), kernels.linear(x, dense, precision).view(torch.int16))


@pytest.mark.parametrize("bm, large", [(8, 32), (8, 64), (32, 128)])
@pytest.mark.parametrize("hot", [12, 128])
@pytest.mark.parametrize("tokens", [16, 64, 256])
def test_blocks_of_two_sizes_give_what_those_of_one_do(tokens, hot, bm, large, monkeypatch):
    """Two GEMMs side by side, each with programs that have nothing to do; in a CUDA graph, whose replays must agree.
    Sums of products of 4-bit numbers are nearly always exact, so the order of a tile does not show."""
    x, w13, w2, ids, gates = large_layer(tokens)
    ids = ids % hot
    small = {"w13": Tile(64, 1, 3, 2), "w2": Tile(64, 1, 3, 2)}
    tiles = small | {"w13_large": Tile(64, 1, 3, 4), "w2_large": Tile(128, 1, 3, 4)}

    def layer(row, precision, fold):
        monkeypatch.setattr(kernels, "shape_class", lambda *arguments: row)
        how = {"residual_sites": ("w13", "w2"), "selection": "all", "fold": fold}
        return kernels.moe(x, w13, w2, ids, gates, precision, **how)

    for precision, fold in (("w4a4", False), ("w4a4_residual", True)):
        one = layer(ShapeClass(1e9, bm, small), precision, fold).float()
        row = ShapeClass(1e9, bm, tiles, large=large)
        first = layer(row, precision, fold)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = [layer(row, precision, fold) for _ in range(3)]
        for _ in range(5):
            graph.replay()
            for each in captured:
                assert torch.equal(each.view(torch.int16), first.view(torch.int16))
        assert float((first.float() - one).norm() / one.norm()) < 0.01


@pytest.mark.parametrize("tokens", [1, 16, 64, 256, 1024, 4096])
def test_large_layer_against_dequantized_weights(tokens):
    """W4A16 at the 25.5B shape against bf16 grouped matmuls over the dequantized weights: equal but for rounding."""
    x, w13, w2, ids, gates = large_layer(tokens)
    w13_full = nvfp4_dequantize(w13)
    w2_full = nvfp4_dequantize(w2)
    flat = ids.flatten()
    order = flat.argsort(stable=True)
    ends = torch.bincount(flat, minlength=128).cumsum(0).int()
    gate, up = torch._grouped_mm(x[order // 8], w13_full.transpose(1, 2), offs=ends).chunk(2, -1)
    y = torch._grouped_mm((torch.nn.functional.silu(gate) * up), w2_full.transpose(1, 2), offs=ends)
    want = torch.zeros(tokens * 8, 2048, device="cuda")
    want[order] = y.float()
    want = (want.view(tokens, 8, 2048) * gates.float().unsqueeze(-1)).sum(1)
    got = kernels.moe(x, w13, w2, ids, gates, "w4a16").float()
    assert float((got - want).norm() / want.norm()) < 0.01


def nvfp4_dequantize(weight) -> torch.Tensor:
    packed, block_scale, g = weight.to_packed()
    return kernels.dequantize(packed, block_scale, g.view(-1, 1, 1), torch.bfloat16)


def test_cuda_graph_replay_and_weights_written_in_place():
    x, w13, w2, ids, gates = large_layer(64)
    live = torch.ones(64, dtype=torch.bool, device="cuda")

    def run():
        return kernels.moe(x, w13, w2, ids, gates, "w4a4_residual", live_T=live)

    eager = run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    graph.replay()
    assert torch.equal(out, eager)
    fresh = kernels.quantize(torch.randn(128, 1536, 2048, device="cuda", dtype=torch.bfloat16) * 0.05)
    w13.load_(*fresh)
    live[40:] = False
    x.copy_(torch.randn_like(x))
    want = run()
    graph.replay()
    assert torch.equal(out, want) and (out[40:] == 0).all() and not torch.equal(out, eager)
    packed, block_scale, g = w13.to_packed()
    assert torch.equal(packed, fresh[0]) and torch.equal(g, fresh[2])
    assert torch.equal(block_scale.view(torch.uint8), fresh[1].view(torch.uint8))


def test_a_row_does_not_depend_on_its_batch_mates_with_token_selection():
    x, w13, w2, ids, gates = large_layer(64)
    whole = kernels.moe(x, w13, w2, ids, gates, "w4a4_residual", selection="token")
    part = kernels.moe(x[:48], w13, w2, ids[:48], gates[:48], "w4a4_residual", selection="token")
    assert torch.equal(whole[:48], part)  # same tiles at both sizes, and sums over K in the same order


@pytest.mark.parametrize("name", ["nvfp4_vectors.json", "residual_vectors.json"])
def test_conformance_vectors(name):
    cases = conformance.load_cases(Path(__file__).parents[1] / "golden" / name)
    assert conformance.check(cases, conformance.run_triton) == []


def test_every_block_scale_and_code_decodes_exactly():
    """All 127 scale bytes times 16 codes, through the GEMM: x is one-hot, so the output is the weight."""
    k = 256
    packed = torch.arange(256, dtype=torch.uint8).repeat(128, 1)[:, : k // 2].contiguous()
    packed[:, :] = torch.randint(0, 256, packed.shape, dtype=torch.uint8)
    scale = torch.arange(128, dtype=torch.uint8).clamp(max=126).view(128, 1).expand(128, k // 16).contiguous()
    packed[0] = 0  # scale 0 comes with code 0 only
    g = torch.tensor(0.5)
    block_scale = scale.view(torch.float8_e4m3fn)
    weight = kernels.KernelWeight.from_packed(packed.cuda(), block_scale.cuda(), g.cuda())
    got = kernels.linear(torch.eye(k, device="cuda", dtype=torch.bfloat16), weight, "w4a16")
    assert check.same_bits(got.T + 0.0, nvfp4.dequantize(packed, block_scale, g).to(torch.bfloat16) + 0.0)
