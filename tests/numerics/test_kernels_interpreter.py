"""Every kernel against its plain-torch reference, on the CPU in Triton's interpreter. Runs in a process of its own,
because the interpreter is chosen when triton is first imported."""

import os
from pathlib import Path

import pytest

from tests.helpers import assert_passes_interpreted

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

if INTERPRETED:
    import torch

    from quads.errors import UserError
    from quads.quant import nvfp4, residual
    from quads.quant.triton import ops as kernels
    from quads.quant.triton.layout import tile
    from quads.quant.triton.routing import max_blocks, max_large_blocks, route
    from quads.quant.triton.select import select
    from quads.quant.triton.tune import ShapeClass, Tile
    from tests.numerics import kernel_checks as check

    class Watched:
        """A GEMM launcher that notes whether there was a residual."""

        def __init__(self, real):
            self.real, self.residual = real, []

        def __call__(self, operand, *args, **kwargs):
            self.residual.append(operand.residual)
            return self.real(operand, *args, **kwargs)

    @pytest.mark.parametrize("mode", ["pow2", "amax"])
    @pytest.mark.parametrize("shape", [(1, 16), (7, 48), (2, 6, 32), (1, 2064), (300, 40)])
    def test_weight_quantizer(shape, mode):
        for dtype in (torch.float32, torch.bfloat16):
            check.check_weight_quantizer(shape, mode, "cpu", dtype)

    @pytest.mark.parametrize(("rows", "k"), [(1, 16), (7, 48), (9, 144), (2, 2064)])
    def test_packed_rows_without_residual(rows, k):
        check.check_row_codes(rows, k, "cpu")

    def test_codes_of_every_bfloat16():
        check.check_codes_of_every_bfloat16("cpu", 1)

    @pytest.mark.parametrize(
        ("rows", "k", "selection", "ratio"),
        [
            (1, 16, "batch", 0.5),
            (7, 48, "token", 0.25),
            (3, 2064, "block", 0.5),
            (12, 128, "batch", 0.3),
            (9, 80, "token", 1.0),
            (6, 96, "batch", 0.0),
            (5, 144, "2:4", 0.5),
            (4, 272, "all", 1.0),
        ],
    )
    def test_activation_quantizer(rows, k, selection, ratio):
        check.check_activation_quantizer(rows, k, selection, ratio, "cpu")
        if k % 16 == 0:
            check.check_activation_quantizer(rows, k, selection, ratio, "cpu", torch.bfloat16)

    def test_channels_of_many_rows():
        """More rows than partial sums: several rows a program; dead rows do not count."""
        x = torch.randn(130, 32).bfloat16()
        x[5, 3], x[9] = torch.inf, 0.0
        live = torch.arange(130) % 3 > 0
        x[~live] *= 100
        scores = residual.channel_scores(nvfp4.qdq_rows(x) - x.float(), "batch", live)
        mask = select(x, 32, 9, False, live.view(torch.uint8), False)
        assert torch.equal(mask.bool(), residual.select_channels(scores, 9 / 32, "batch"))

    def test_equal_scores_go_to_the_lower_channel():
        x = torch.full((3, 64), 1.1)
        for selection in ("batch", "token", "block"):
            mask = kernels.compensate_packed(x, 0.25, selection).mask.expand(3, 64)
            assert mask[:, :16].all() and not mask[:, 16:].any()

    @pytest.mark.parametrize("path", ["decoded", "native_fp4"])
    @pytest.mark.parametrize("precision", ["w4a16", "w4a4", "w4a4_residual"])
    def test_linear(precision, path):
        if path == "native_fp4" and precision == "w4a16":
            pytest.skip("16-bit activations have no FP4 path")
        for rows, n, k, selection in (
            (1, 130, 16, "batch"),
            (5, 40, 144, "token"),
            (19, 16, 48, "block"),
            (3, 24, 160, "2:4"),
            (3, 24, 160, "all"),
        ):
            check.check_linear(rows, n, k, precision, selection, "cpu", path)
            if precision == "w4a4_residual" and path == "decoded":
                check.check_linear(rows, n, k, precision, selection, "cpu", fold=True)

    @pytest.mark.parametrize(
        "row", [ShapeClass(1e9, 16, {"dense": Tile(32, 1, 1, 4, 3)}), ShapeClass(1e9, 16, {}, True)]
    )
    def test_linear_with_shared_k_and_with_an_expanded_weight(row, monkeypatch):
        monkeypatch.setattr(kernels, "shape_class", lambda *arguments: row)
        check.check_linear(5, 40, 272, "w4a4_residual", "token", "cpu")
        check.check_linear(5, 40, 272, "w4a4_residual", "token", "cpu", fold=True)
        check.check_linear(2, 130, 272, "w4a16", "token", "cpu")

    @pytest.mark.parametrize(
        ("precision", "path"),
        [("w4a16", "decoded"), ("w4a4", "decoded"), ("w4a4_residual", "decoded"), ("w4a4_residual", "native_fp4")],
    )
    def test_experts(precision, path):
        check.check_moe(7, 4, 2, 48, 16, precision, "cpu", path)

    @pytest.mark.parametrize("fold", [False, True])
    def test_every_code_and_scale(fold):
        check.check_every_code_and_scale("cpu", fold)

    def test_experts_with_a_folded_residual():
        check.check_moe(7, 4, 2, 48, 16, "w4a4_residual", "cpu", fold=True)
        check.check_moe(3, 4, 2, 144, 48, "w4a4_residual", "cpu", sites=("w13",), fold=True)

    def test_four_bit_operands_are_not_folded():
        weight = kernels.KernelWeight.from_packed(*check.packed_weight((40, 48)), path="native_fp4")
        with pytest.raises(ValueError, match="only decoded ones can be folded"):
            kernels.linear(torch.randn(5, 48).bfloat16(), weight, "w4a4_residual", fold=True)

    def test_a_ratio_that_keeps_no_channel_costs_no_second_operand(monkeypatch):
        x = torch.randn(5, 48).bfloat16()
        weight = kernels.KernelWeight.from_packed(*check.packed_weight((40, 48)))
        plain = kernels.linear(x, weight, "w4a4")
        monkeypatch.setattr(kernels, "_gemm", watched := Watched(kernels._gemm))
        assert torch.equal(kernels.linear(x, weight, "w4a4_residual", ratio=0.02), plain)  # floor(0.02 * 48) is 0
        assert watched.residual == [False]
        kernels.linear(x, weight, "w4a4_residual", ratio=0.03)
        assert watched.residual == [False, True]

    def test_all_tokens_at_one_expert():
        check.check_moe(20, 3, 1, 144, 48, "w4a4", "cpu", one_expert=True)

    def test_nan_weight_block_reaches_exactly_its_output_feature():
        w = torch.randn(20, 64)
        w[3, 17] = torch.nan
        weight = kernels.KernelWeight.from_packed(*nvfp4.quantize(w))
        y = kernels.linear(torch.randn(5, 64).bfloat16(), weight, "w4a16")
        assert y[:, 3].isnan().all() and not torch.cat((y[:, :3], y[:, 4:]), 1).isnan().any()

    @pytest.mark.parametrize(("shape", "swiglu"), [((3, 300, 144), False), ((2, 96, 48), True), ((1, 32, 272), True)])
    def test_weight_layout_and_its_inverse(shape, swiglu):
        """Every byte value, NaN scales and padding; the kernel that writes equals the layout's definition."""
        packed = torch.randint(0, 256, (*shape[:2], shape[2] // 2), dtype=torch.uint8)
        scale = torch.randint(0, 128, (*shape[:2], shape[2] // 16), dtype=torch.uint8).view(torch.float8_e4m3fn)
        g = torch.rand(shape[0])
        weight = kernels.KernelWeight.from_packed(packed, scale, g, swiglu=swiglu)
        words, scales = tile(packed, scale, swiglu)
        assert torch.equal(weight.words, words) and torch.equal(weight.scales, scales)
        address = weight.words.data_ptr()
        weight.load_(packed ^ 0xFF, scale, g)
        weight.load_(packed, scale, g)
        back = weight.to_packed()
        assert weight.words.data_ptr() == address
        assert torch.equal(back[0], packed) and torch.equal(back[1].view(torch.uint8), scale.view(torch.uint8))
        assert torch.equal(back[2], g)
        native = kernels.KernelWeight.from_packed(packed, scale, g, swiglu=swiglu, path="native_fp4").to_packed()
        assert torch.equal(native[0], packed) and torch.equal(native[1].view(torch.uint8), scale.view(torch.uint8))

    @pytest.mark.parametrize("mode", ["pow2", "amax"])
    @pytest.mark.parametrize(
        ("shape", "swiglu"), [((1, 16), False), ((130, 48), False), ((3, 64, 144), True), ((2, 40, 272), False)]
    )
    def test_weight_quantized_in_place(shape, swiglu, mode):
        check.check_quantize_in_place(shape, swiglu, mode, "cpu")

    def test_parts_of_a_weight_quantized_in_place():
        check.check_quantize_parts_in_place("cpu")

    def test_routing_map():
        ids = torch.tensor([[2, 0], [2, 3], [-1, 2], [7, 2], [0, 2]])
        live = torch.tensor([1, 1, 1, 1, 0], dtype=torch.uint8)
        routing = route(ids, 4, 2, live)
        assert max_blocks(10, 4, 2) == 7 == routing.expert.numel()
        assert routing.expert.tolist() == [0, 2, 2, 3, -1, -1, -1]
        assert routing.rows.view(7, 2).tolist() == [[1, 10], [0, 2], [5, 7], [3, 10], [10, 10], [10, 10], [10, 10]]

    @pytest.mark.parametrize("live", [False, True])
    @pytest.mark.parametrize(
        ("tokens", "experts", "top_k"), [(1, 8, 2), (9, 4, 2), (40, 3, 1), (60, 5, 2), (300, 6, 8)]
    )
    def test_routing_map_with_blocks_of_two_sizes(tokens, experts, top_k, live):
        """Experts with more than 4 rows in blocks of 16, the others in one of 4; every pair once, in order."""
        ids = (torch.rand(tokens, top_k) ** 4 * experts).long()  # uneven
        alive = (torch.rand(tokens) < 0.8).view(torch.uint8) if live else None
        flat = ids.flatten()
        if live:
            flat = torch.where(alive.bool().repeat_interleave(top_k), flat, experts)
        routing = route(ids, experts, 4, alive, large=16)
        slots, small = routing.num_small * 4, routing.num_small
        regions = (
            (routing.rows[:slots].view(-1, 4), routing.expert[:small]),
            (
                routing.rows[slots:].view(-1, 16),
                routing.expert[small:],
            ),
        )
        for e in range(experts):
            want = (flat == e).nonzero().flatten().tolist()
            rows, expert = regions[len(want) > 4]
            mine = rows[expert == e]
            assert mine.shape[0] == -(-len(want) // mine.shape[1])
            assert mine.flatten().tolist() == want + [flat.numel()] * (mine.numel() - len(want))
            other, others = regions[len(want) <= 4]
            assert not (others == e).any() and (other[others == -1] == flat.numel()).all()

    @pytest.mark.parametrize(("bm", "large", "experts"), [(8, 32, 128), (4, 16, 6), (8, 16, 5), (32, 128, 128)])
    def test_bound_of_large_blocks_holds(bm, large, experts):
        generator = torch.Generator().manual_seed(0)
        for pairs in (bm + 1, 100, 512, 2048):
            for sharpness in (0.5, 1, 3, 9):
                flat = (torch.rand(pairs, generator=generator) ** sharpness * experts).long()
                counts = torch.bincount(flat, minlength=experts)
                used = int(torch.where(counts > bm, -(-counts // large), 0).sum())
                assert used <= max_large_blocks(pairs, experts, bm, large)
            hit = min(pairs // (bm + 1), experts)  # the worst: every expert just above bm
            assert hit <= max_large_blocks(pairs, experts, bm, large)

    @pytest.mark.parametrize(("precision", "fold"), [("w4a16", False), ("w4a4", False), ("w4a4_residual", True)])
    def test_experts_in_blocks_of_two_sizes(precision, fold, monkeypatch):
        tiles = {"w13": Tile(32, 1, 1, 4), "w2": Tile(32, 1, 1, 4), "w13_large": Tile(64, 1, 1, 4)}
        row = ShapeClass(1e9, 8, tiles | {"w2_large": Tile(32, 1, 1, 4)}, large=32)
        monkeypatch.setattr(kernels, "shape_class", lambda *arguments: row)
        check.check_moe(60, 5, 2, 48, 16, precision, "cpu", fold=fold, skewed=True)
        check.check_moe(5, 4, 2, 48, 16, precision, "cpu", fold=fold)

    @pytest.mark.parametrize(("bm", "experts", "pairs"), [(8, 4, 1), (8, 128, 512), (16, 3, 100), (64, 128, 32768)])
    def test_block_bound_holds_and_is_reached(bm, experts, pairs):
        worst = [pairs - min(pairs, experts) + 1] + [1] * (min(pairs, experts) - 1)
        assert sum(-(-count // bm) for count in worst) == max_blocks(pairs, experts, bm)
        even = torch.bincount(torch.arange(pairs) % experts, minlength=experts)
        assert int((-(-even // bm)).sum()) <= max_blocks(pairs, experts, bm)

    def test_paths_are_chosen_or_refused():
        assert kernels.choose("cpu", "w4a4")[0] == "decoded"
        with pytest.raises(UserError, match="w4a16, w4a4 or w4a4_residual"):
            kernels.choose("cpu", "fp8")
        with pytest.raises(UserError, match="auto, native_fp4 or decoded"):
            kernels.choose("cpu", "w4a4", "cuda")

    @pytest.mark.parametrize("name", ["nvfp4_vectors.json", "residual_vectors.json"])
    def test_conformance_vectors(name):
        from quads.quant import conformance

        cases = conformance.load_cases(Path("tests/golden") / name)[::4]
        assert conformance.check(cases, conformance.run_triton) == []

else:

    def test_in_the_interpreter():
        assert " passed" in assert_passes_interpreted(__file__, timeout_s=300)
