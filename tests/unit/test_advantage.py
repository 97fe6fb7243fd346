import torch

from quads.rl.advantage import group_advantages


def test_group_std_by_hand():
    # rewards 1,0,0,1: mean .5, population std .5
    advantages, zero_spread = group_advantages(torch.tensor([[1.0, 0.0, 0.0, 1.0]]), "group_std")
    assert advantages.tolist() == [[1.0, -1.0, -1.0, 1.0]]
    assert zero_spread.tolist() == [False]


def test_group_mean_keeps_the_scale():
    advantages, _ = group_advantages(torch.tensor([[1.0, 0.0, 0.0, 0.0]]), "group_mean")
    assert advantages.tolist() == [[0.75, -0.25, -0.25, -0.25]]


def test_no_spread_is_exactly_zero_and_flagged():
    # 1/3 sixteen times has a mean that rounds: an inexact comparison would divide noise by noise.
    rewards = torch.tensor([[1 / 3] * 16, [0.0] * 15 + [1.0]])
    advantages, zero_spread = group_advantages(rewards, "group_std")
    assert zero_spread.tolist() == [True, False]
    assert advantages[0].abs().max() == 0.0
    assert abs(float(advantages[1].sum())) < 1e-5


def test_uncounted_responses_do_not_move_the_group():
    rewards = torch.tensor([[1.0, 0.0, 0.0, 7.0]])
    counted = torch.tensor([[True, True, False, False]])
    advantages, zero_spread = group_advantages(rewards, "group_std", counted)
    assert advantages.tolist() == [[1.0, -1.0, 0.0, 0.0]]
    only_one = torch.tensor([[True, False, False, False]])
    advantages, zero_spread = group_advantages(rewards, "group_std", only_one)
    assert zero_spread.tolist() == [True] and advantages.abs().max() == 0.0
    nobody = torch.zeros(1, 4, dtype=torch.bool)
    advantages, zero_spread = group_advantages(rewards, "group_std", nobody)
    assert zero_spread.tolist() == [True] and advantages.abs().max() == 0.0
