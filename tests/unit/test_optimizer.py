import pytest
import torch
from torch import nn

from quads.rl.optimizer import build_adamw, clip_gradients, set_learning_rate
from tests.helpers import assert_bitwise


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 1))


def train(moments, steps=4):
    made = model()
    optimizer = build_adamw(made, 1e-2, (0.9, 0.95), 1e-8, 0.1, moments)
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(1))
    for step in range(steps):
        set_learning_rate(optimizer, 1e-2 / (1 + step))
        optimizer.zero_grad()
        made(x).square().mean().backward()
        optimizer.step()
    return made, optimizer


def test_streamed_moments_are_torchs_adamw():
    reference, expected = train("float32")
    streamed, actual = train("cpu")
    for mine, theirs in zip(streamed.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-7)  # its foreach update fuses products differently
        for name in ("exp_avg", "exp_avg_sq", "step"):
            torch.testing.assert_close(actual.state[mine][name], expected.state[theirs][name], rtol=1e-6, atol=1e-12)


def test_streamed_state_is_read_by_torchs_adamw():
    made, optimizer = train("cpu")
    resumed = build_adamw(made, 1e-2, (0.9, 0.95), 1e-8, 0.1)
    resumed.load_state_dict(optimizer.state_dict())
    for parameter in made.parameters():
        assert_bitwise(resumed.state[parameter]["exp_avg"], optimizer.state[parameter]["exp_avg"])
        assert float(resumed.state[parameter]["step"]) == 4.0


def test_moments_where_they_belong_are_taken_as_they_are():
    """A resume of a large model must not hold them twice."""
    made, optimizer = train("cpu")
    addresses = {p: optimizer.state[p]["exp_avg"].data_ptr() for p in made.parameters()}
    resumed = build_adamw(made, 1e-2, (0.9, 0.95), 1e-8, 0.1, "cpu")
    resumed.load_state_dict(optimizer.state_dict())
    assert {p: resumed.state[p]["exp_avg"].data_ptr() for p in made.parameters()} == addresses
    assert all(float(resumed.state[p]["step"]) == 4.0 for p in made.parameters())


@pytest.mark.gpu
def test_moments_stay_in_cpu_memory_after_a_load():
    parameter = nn.Parameter(torch.ones(8, 16, device="cuda"))
    parameter.grad = torch.ones_like(parameter)
    optimizer = build_adamw(nn.ParameterList([parameter]), 1e-2, (0.9, 0.95), 1e-8, 0.0, "cpu")
    optimizer.step()
    torch.cuda.synchronize()
    resumed = build_adamw(nn.ParameterList([parameter]), 1e-2, (0.9, 0.95), 1e-8, 0.0, "cpu")
    resumed.load_state_dict(optimizer.state_dict())
    for name in ("exp_avg", "exp_avg_sq"):
        moment = resumed.state[parameter][name]
        assert moment.device.type == "cpu" and moment.is_pinned()
        assert_bitwise(moment, optimizer.state[parameter][name])
    assert float(resumed.state[parameter]["exp_avg"][0, 0]) == pytest.approx(0.1)


@pytest.mark.slow
def test_8bit_moments_stay_near_float32():
    reference, _ = train("float32")
    quantized, optimizer = train("8bit")
    first, theirs = next(quantized.parameters()), next(reference.parameters())
    start = next(model().parameters())
    moved, error = (theirs - start).abs().mean(), (first - theirs).abs().mean()
    assert error < 0.1 * moved  # 8 bits over blocks of 256: a few percent of each step
    assert type(optimizer.state[first]["exp_avg"]).__name__ == "OptimState8bit"


def test_decay_only_moves_matrices():
    made = model()
    before = [p.detach().clone() for p in made.parameters()]
    optimizer = build_adamw(made, 0.1, (0.9, 0.95), 1e-8, 0.5)
    for parameter in made.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for parameter, old in zip(made.parameters(), before, strict=True):
        torch.testing.assert_close(parameter.detach(), old * 0.95 if old.dim() == 2 else old)


def test_gradients_below_the_limit_are_left_alone():
    made = model()
    for parameter in made.parameters():
        parameter.grad = torch.full_like(parameter, 1e-3)
    norm = clip_gradients(made.parameters(), 10.0)
    assert 0.0 < float(norm) < 1.0 and all(bool((p.grad == 1e-3).all()) for p in made.parameters())


def test_clip_by_hand():
    made = model()
    for parameter in made.parameters():
        parameter.grad = torch.full_like(parameter, 2.0)
    count = sum(p.numel() for p in made.parameters())
    norm = clip_gradients(made.parameters(), 1.0)
    assert float(norm) == pytest.approx(2.0 * count**0.5)
    torch.testing.assert_close(made[0].weight.grad, torch.full((96, 64), 1.0 / count**0.5), rtol=1e-4, atol=0)
    made[0].weight.grad[0, 0] = torch.inf
    kept = made[1].weight.grad.clone()
    assert not torch.isfinite(clip_gradients(made.parameters(), 1.0))
    assert_bitwise(made[1].weight.grad, kept)
