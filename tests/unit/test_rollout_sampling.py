"""Counter-based uniforms against the published algorithm in plain integers; drawing against the distribution."""

import pytest
import torch

from quads.rollout.sampling import draw, host_uniforms, most_likely, seed_tensor, uniforms
from tests.helpers import assert_bitwise, assert_close

MASK = 2**64 - 1


def mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def splitmix64(state: int, count: int) -> list[int]:
    """The generator as published: advance by the golden ratio, then finalize."""
    out = []
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) & MASK
        out.append(mix(state))
    return out


def test_integer_reference_is_splitmix64() -> None:
    # first outputs for state 1234567, from the reference implementation's published test vectors
    assert splitmix64(1234567, 3) == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@pytest.mark.parametrize("seed", [0, 1, 2**63 - 1, -5, 2**64 + 3])
def test_uniforms_equal_plain_integers(seed: int) -> None:
    start = mix(((seed & MASK) + 0x9E3779B97F4A7C15) & MASK)
    expected = torch.tensor([(z >> 11) * 2.0**-53 for z in splitmix64(start, 50)], dtype=torch.float64)
    ours = uniforms(seed_tensor([seed]).expand(50), torch.arange(50))
    assert_bitwise(ours, expected)
    assert_bitwise(host_uniforms([seed] * 50, list(range(50))), expected)


def test_uniforms_do_not_depend_on_their_place_and_look_uniform() -> None:
    seeds, counters = seed_tensor(list(range(2000))).repeat_interleave(10), torch.arange(10).repeat(2000)
    u = uniforms(seeds, counters)
    order = torch.randperm(20000)
    assert_bitwise(uniforms(seeds[order], counters[order]), u[order])
    assert 0.0 <= float(u.min()) and float(u.max()) < 1.0
    # 20 bins of 1000: binomial standard deviation 31, five of them
    assert (u.histc(20, 0, 1) - 1000).abs().max() < 155
    by_seed = u.view(2000, 10)
    correlation = torch.corrcoef(torch.stack([by_seed[:-1, 0], by_seed[1:, 0], by_seed[:-1, 1]]))
    assert correlation.fill_diagonal_(0).abs().max() < 5 / 2000**0.5


def test_most_likely_by_hand() -> None:
    logits = torch.tensor([[0.1, 0.2, 0.4, 0.3], [0.7, 0.1, 0.05, 0.15]]).log()
    ids, logprobs = most_likely(logits, torch.tensor(1.0, dtype=torch.float64), 3)
    assert ids.tolist() == [[2, 3, 1], [0, 3, 1]] and (ids.dtype, logprobs.dtype) == (torch.int32, torch.float32)
    assert_close(logprobs.exp(), torch.tensor([[0.4, 0.3, 0.2], [0.7, 0.15, 0.1]]), atol=1e-6)
    _, hot = most_likely(logits, torch.tensor(2.0, dtype=torch.float64), 1)
    roots = torch.tensor([0.1, 0.2, 0.4, 0.3]).sqrt()
    assert_close(hot[0].exp(), (roots.max() / roots.sum())[None], atol=1e-6)


def test_draw_by_hand() -> None:
    logits = torch.tensor([[0.1, 0.2, 0.4, 0.3]], dtype=torch.float64).log().expand(7, 4)
    u = torch.tensor([0.0, 0.099, 0.101, 0.299, 0.301, 0.699, 0.999999])
    tokens, logprobs = draw(logits, 1.0, u.double())
    assert tokens.tolist() == [0, 0, 1, 1, 2, 2, 3]
    assert_close(logprobs.exp(), torch.tensor([0.1, 0.1, 0.2, 0.2, 0.4, 0.4, 0.3]), atol=1e-7)


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_frequencies_and_logprobs_follow_the_temperature(temperature: float) -> None:
    logits = torch.tensor([1.0, -1.0, 0.5, 2.0])
    expected = (logits.double() / temperature).softmax(-1)
    tokens, logprobs = draw(
        logits.expand(20000, 4), temperature, uniforms(torch.arange(20000), torch.zeros(20000).long())
    )
    # standard deviation of a frequency is at most 0.5 / sqrt(20000) = 0.0035
    assert_close(tokens.bincount(minlength=4) / 20000, expected, atol=0.016)
    assert_close(logprobs, expected.log()[tokens], atol=1e-12)


def test_impossible_tokens_are_never_drawn() -> None:
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf]]).expand(3, 5)
    tokens, _ = draw(logits, 1.0, torch.tensor([0.0, 0.5, 1 - 2.0**-53], dtype=torch.float64))
    assert tokens.tolist() == [1, 3, 3]


def test_temperature_zero_is_greedy_and_certain() -> None:
    tokens, logprobs = draw(torch.tensor([[0.0, 3.0, 2.0]]), 0.0, torch.tensor([0.999], dtype=torch.float64))
    assert tokens.tolist() == [1] and logprobs.tolist() == [0.0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nan_logits_give_a_valid_token_and_a_nan_logprob(temperature: float) -> None:
    logits = torch.tensor([[0.0, torch.nan, 1.0], [0.0, 0.0, 0.0]])
    tokens, logprobs = draw(logits, temperature, torch.tensor([0.5, 0.5], dtype=torch.float64))
    assert 0 <= tokens[0] < 3 and logprobs[0].isnan() and not logprobs[1].isnan()
