"""Residual compensation: identities at ratio 0 and 1, who shares a selection, ties, dead rows."""

import pytest
import torch

from quads.quant import nvfp4, residual
from quads.quant.matmul import grouped_linear, linear, widen
from tests.helpers import assert_close


def rows(num_rows=6, num_channels=48, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_rows, num_channels, generator=generator)
    x[:, 5] *= 30  # an outlier channel: its block loses most
    return x


@pytest.mark.parametrize("selection", ["batch", "block", "token"])
def test_ratio_zero_and_one(selection):
    x = rows()
    main, none = residual.compensate(x, 0.0, selection)
    assert torch.equal(main, nvfp4.qdq_rows(x)) and none.count_nonzero() == 0
    main, full = residual.compensate(x, 1.0, selection)
    assert torch.equal(full, nvfp4.qdq_rows(main - x))
    # Each pass leaves about a tenth of what it quantizes, so two leave about a hundredth. Bounds are twice that.
    relative = (main - full - x).norm() / x.norm()
    assert relative < 0.02 < (main - x).norm() / x.norm() < 0.2


@pytest.mark.parametrize("selection", ["batch", "block", "token"])
@pytest.mark.parametrize("ratio", [0.1, 0.34, 0.5, 0.75])
def test_mask_size_and_masked_channels(selection, ratio):
    x = rows(5, 96)
    main, packed_residual, mask = residual.compensate_packed(x, ratio, selection)
    count = int(ratio * 6) * 16 if selection == "block" else int(ratio * 96)
    assert mask.shape == ((5, 96) if selection == "token" else (96,))
    assert (mask.sum(-1) == count).all()
    main_TK, residual_TK = residual.compensate(x, ratio, selection)
    assert torch.equal(main_TK, nvfp4.dequantize(*main))
    assert torch.equal(residual_TK, torch.where(mask, nvfp4.dequantize(*packed_residual), 0.0))
    assert not residual_TK[~mask.expand(5, 96)].signbit().any()


def test_block_selection_keeps_whole_blocks():
    x = rows(7, 80)
    mask = residual.compensate_packed(x, 0.5, "block").mask
    by_block = mask.view(5, 16)
    assert torch.equal(by_block.all(-1), by_block.any(-1)) and by_block.any(-1).sum() == 2
    scores = (nvfp4.qdq_rows(x) - x).double().square().sum(0).view(5, 16).sum(-1)
    assert set(by_block.any(-1).nonzero().flatten().tolist()) == set(scores.topk(2).indices.tolist())


def test_ragged_channels_are_padded_to_whole_blocks():
    x = rows(3, 40)
    mask = residual.compensate_packed(x, 0.67, "block").mask
    assert mask.shape == (40,) and mask.sum() in (24, 32)  # two of three blocks, the last one has 8 channels
    assert residual.compensate_packed(x, 1.0, "block").mask.all()


def test_equal_scores_keep_the_lower_index():
    scores = torch.tensor([1.0, 2, 2, 2, 0, 2]).double()
    assert residual.select_channels(scores, 0.5, "batch").tolist() == [False, True, True, True, False, False]
    assert (
        residual.select_channels(torch.zeros(2, 4).double(), 0.5, "token").tolist() == [[True, True, False, False]] * 2
    )
    assert residual.select_channels(torch.ones(64).double(), 0.5, "block").tolist() == [True] * 32 + [False] * 32


def test_batch_scores_by_hand():
    r = torch.tensor([[1.0, -2.0, 0.5], [3.0, 0.0, 0.5]])
    assert residual.channel_scores(r, "batch").tolist() == [10.0, 4.0, 0.5]
    assert residual.channel_scores(r, "batch", torch.tensor([True, False])).tolist() == [1.0, 4.0, 0.25]
    assert residual.channel_scores(r, "token").tolist() == [[1.0, 4.0, 0.25], [9.0, 0.0, 0.25]]


def test_token_selection_does_not_depend_on_batch_mates():
    x = rows(9, 64)
    main, res = residual.compensate(x, 0.25, "token")
    for t in range(9):
        main_1, res_1 = residual.compensate(x[t : t + 1], 0.25, "token")
        assert torch.equal(main_1[0], main[t]) and torch.equal(res_1[0], res[t])


@pytest.mark.parametrize("selection", ["batch", "block"])
def test_dead_rows_take_no_part(selection):
    x = rows(4, 64)
    main, res = residual.compensate(x, 0.25, selection)
    garbage = torch.zeros(3, 64)
    garbage[:, 48:] = 1e4 * torch.randn(3, 16, generator=torch.Generator().manual_seed(1))
    padded = torch.cat([x, garbage])
    live = torch.tensor([True] * 4 + [False] * 3)
    main_p, res_p = residual.compensate(padded, 0.25, selection, live)
    assert torch.equal(main_p[:4], main) and torch.equal(res_p[:4], res)
    assert main_p.isfinite().all() and torch.equal(main_p[4:], nvfp4.qdq_rows(garbage))
    unmasked = residual.compensate(padded, 0.25, selection)[1]
    assert not torch.equal(unmasked[:4], res)  # the garbage rows would have decided the selection


def test_a_poisoned_row_does_not_decide_the_selection():
    x = rows(4, 64)
    expected = residual.compensate_packed(x, 0.25, "batch").mask
    bad = torch.cat([x, torch.full((1, 64), torch.nan)])
    main, res = residual.compensate(bad, 0.25, "batch")
    assert torch.equal(residual.compensate_packed(bad, 0.25, "batch").mask, expected)
    assert main[4].isnan().all() and main[:4].isfinite().all() and res[:4].isfinite().all()


def test_bf16_input_is_taken_as_it_is():
    x = rows().bfloat16()
    for a, b in zip(residual.compensate(x, 0.5, "token"), residual.compensate(x.float(), 0.5, "token"), strict=True):
        assert a.dtype == torch.float32 and torch.equal(a, b)


@pytest.mark.parametrize("selection", ["batch", "block", "token"])
def test_the_packed_pair_stands_for_the_same_terms_where_one_channel_is_huge(selection: str) -> None:
    """A channel 3000 times as large as the others makes the scales of the two passes differ by far: an implementation
    that took the scale of the first pass for the second would round all of the residual away."""
    x_TK = torch.randn(5, 48, generator=torch.Generator().manual_seed(4))
    x_TK[:, 17] *= 3000
    main_TK, residual_TK = residual.compensate(x_TK, 0.5, selection)
    pair = residual.compensate_packed(x_TK, 0.5, selection)
    assert torch.equal(nvfp4.dequantize(*pair.main), main_TK)
    kept = torch.where(pair.mask, nvfp4.dequantize(*pair.residual), 0.0)
    assert torch.equal(kept, residual_TK)
    assert (pair.residual[2] < pair.main[2] / 8).all() and residual_TK.any(dim=1).all()


def test_fold_by_hand():
    """One row, g = 2: differences are rounded to fp16 in units of g / 8, ties to even, and stay what they are there."""
    main = torch.tensor([[12.0, -1.0, 2688.0 * 2, 0.0, torch.nan]])
    rest = torch.tensor([[-(2.0**-8), 2.0**-12, 0.0, -3.0, 1.0]])
    operand, scale = residual.fold(main, rest, torch.tensor([[2.0]]))
    assert operand.dtype == torch.float16 and scale.tolist() == [[0.25]]
    # 12 + 2**-8 is 48 + 2**-6 in units of 1/4, whose fp16 step is 2**-5: a tie, to the even 48
    assert operand[0, :4].tolist() == [48.0, -4.0, 21504.0, 12.0]  # -4 - 2**-10: below half a step of 2**-8
    assert operand[0, 4].isnan()


@pytest.mark.parametrize("size", [1e-38, 1.0, 3e38])
@pytest.mark.parametrize("selection", ["batch", "token", "all"])
def test_a_folded_operand_is_the_difference_rounded_once(size, selection):
    """In units of g / 8, whatever the size of the row: fp16 neither overflows nor runs out at the lower end."""
    x = rows(5, 80) * (size / 64)
    main, rest = residual.compensate(x, 0.5, selection)
    operand, scale = residual.compensate_folded(x, 0.5, selection)
    g = nvfp4.quantize_rows(x)[2]
    assert torch.equal(scale, g / 8) and bool(operand.isfinite().all())
    assert torch.equal(operand.double(), ((main - rest).double() * 8 / g.double()).half().double())


def test_a_format_without_a_scale_of_rows_is_not_folded():
    with pytest.raises(ValueError, match="mxfp4 has no scale of rows"):
        residual.compensate_folded(rows(2, 64), 0.5, "all", None, "mxfp4")
    operand, scale = residual.compensate_folded(rows(2, 64), 0.5, "all", None, "nvfp4_46")
    main, rest = residual.compensate(rows(2, 64), 0.5, "all", None, "nvfp4_46")
    assert torch.allclose(operand.float() * scale, main - rest, rtol=2**-11, atol=0)


def test_two_of_four():
    """By hand: of four neighbours the two largest, on a tie the lower one; the last group is short."""
    r_TK = torch.tensor([[1.0, -3.0, 3.0, 2.0, 1.0, 1.0, 1.0, 1.0, 0.0, 5.0]])
    scores = residual.channel_scores(r_TK, "2:4")
    mask = residual.select_channels(scores, 0.5, "2:4")
    assert mask.int().tolist() == [[0, 1, 1, 0, 1, 1, 0, 0, 1, 1]]
    with pytest.raises(ValueError, match="half"):
        residual.select_channels(scores, 0.25, "2:4")


def test_all_keeps_every_channel_and_asks_nobody():
    x = rows()
    main, kept = residual.compensate(x, 0.5, "all")
    assert torch.equal(main, nvfp4.qdq_rows(x)) and torch.equal(kept, nvfp4.qdq_rows(main - x))
    alone = torch.cat([residual.compensate(row, 0.5, "all")[1] for row in x.split(1)])
    assert torch.equal(kept, alone)


def test_two_of_four_by_hand():
    scores = torch.tensor([[1.0, 3.0, 2.0, 2.0, 0.0, 0.0, 0.0, 5.0, 4.0, 9.0]])
    mask = residual.select_channels(scores, 0.5, "2:4")
    # Of equal ones the lower channel; a tail of two keeps both, its padding none.
    assert mask.int().tolist() == [[0, 1, 1, 0, 1, 0, 0, 1, 1, 1]]


def test_errors_fall_from_batch_over_two_of_four_to_token_and_all():
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    errors = {}
    for selection in ("batch", "2:4", "token", "all"):
        main, kept = residual.compensate(x, 0.5, selection)
        errors[selection] = float((main - kept - x).norm())
    assert errors["batch"] > errors["2:4"] > errors["token"] > errors["all"]


def test_two_operands_may_stand_side_by_side_over_a_weight_that_stands_there_twice():
    operands = tuple(t.double() for t in residual.compensate(torch.randn(5, 64), 0.5, "token"))
    w = torch.randn(3, 64, dtype=torch.float64)
    ends = torch.tensor([2, 2, 5], dtype=torch.int32)
    wide, twice = widen(w, torch.float64), widen(w, torch.float64, twice=True)
    assert twice.shape == (3, 128)
    assert_close(linear(operands, twice, torch.float64), linear(operands, wide, torch.float64), atol=1e-13)
    experts = torch.randn(3, 7, 64, dtype=torch.float64)
    both = [grouped_linear(operands, widen(experts, torch.float64, two), ends, torch.float64) for two in (True, False)]
    assert_close(*both, atol=1e-13)
