"""Each correction of the loss against its identity, and against numbers worked out by hand."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from quads.rl.corrections import (
    acr_ceiling,
    ais_share,
    centering_coefficients,
    dual_clip,
    effective_share,
    importance_weights,
    log_weights,
    response_sums,
    second_moment,
    tbpo_surrogate,
    weight_moments,
)

SEQUENCE = torch.tensor([0, 0, 0, 1, 1, 2])
TRAINED = torch.tensor([True, True, True, True, False, True])
MISMATCH = torch.tensor([0.1, -0.4, 1.5, -2.0, 7.0, 0.0])


def test_log_weights_of_tokens_responses_and_means() -> None:
    close = torch.testing.assert_close
    close(log_weights(MISMATCH, SEQUENCE, TRAINED, "token"), torch.tensor([0.1, -0.4, 1.5, -2.0, 0.0, 0.0]))
    close(log_weights(MISMATCH, SEQUENCE, TRAINED, "sequence"), torch.tensor([1.2, 1.2, 1.2, -2.0, 0.0, 0.0]))
    close(log_weights(MISMATCH, SEQUENCE, TRAINED, "geometric"), torch.tensor([0.4, 0.4, 0.4, -2.0, 0.0, 0.0]))


def test_a_response_of_one_token_has_the_token_s_weight() -> None:
    one_each, trained = torch.arange(6), torch.ones(6, dtype=torch.bool)
    token = log_weights(MISMATCH, one_each, trained, "token")
    assert torch.equal(log_weights(MISMATCH, one_each, trained, "sequence"), token)
    assert torch.equal(log_weights(MISMATCH, one_each, trained, "geometric"), token)


def test_log_weights_are_bounded() -> None:
    far = torch.tensor([300.0, -300.0])
    assert log_weights(far, torch.tensor([0, 1]), torch.ones(2, dtype=torch.bool), "token").tolist() == [20.0, -20.0]


def test_truncated_and_masked_weights_by_hand() -> None:
    logs = torch.tensor([0.5, 2.0, 3.0, 0.25, 1.0]).log()
    close = torch.testing.assert_close
    close(importance_weights(logs, "tis", 2.0, None), torch.tensor([0.5, 2.0, 2.0, 0.25, 1.0]))
    close(importance_weights(logs, "mis", 2.5, None), torch.tensor([0.5, 2.0, 0.0, 0.0, 1.0]))
    close(importance_weights(logs, "none", 2.0, None), torch.ones(5))
    close(importance_weights(logs, "mis", math.inf, None), logs.exp())


def test_ais_corrects_nothing_where_all_weights_are_one_and_more_where_few_count() -> None:
    trained = torch.ones(4, dtype=torch.bool)
    equal = torch.zeros(4)
    assert torch.equal(importance_weights(equal, "ais", 2.0, ais_share(weight_moments(equal, trained))), torch.ones(4))
    logs = torch.tensor([1.0, 1.0, 1.0, 9.0]).log()  # ESS / N = 144 / (4 * 84) = 3 / 7
    share = 1 - 3 / 7
    torch.testing.assert_close(
        importance_weights(logs, "ais", 2.0, ais_share(weight_moments(logs, trained))),
        torch.tensor([1.0, 1.0, 1.0, 1 - share + share * 2]),
    )
    # The two ends: nothing, and truncation.
    assert torch.equal(importance_weights(logs, "ais", 2.0, torch.tensor(0.0)), torch.ones(4))
    tis = importance_weights(logs, "tis", 2.0, None)
    assert torch.equal(importance_weights(logs, "ais", 2.0, torch.tensor(1.0)), tis)


def test_effective_share_and_second_moment() -> None:
    logs, trained = torch.tensor([1.0, 1.0, 1.0, 9.0, 5.0]).log(), torch.tensor([True] * 4 + [False])
    assert weight_moments(logs, trained).tolist() == pytest.approx([4.0, 12.0, 84.0], rel=1e-6)
    assert effective_share(weight_moments(logs, trained)).item() == pytest.approx(3 / 7, rel=1e-6)
    assert effective_share(weight_moments(torch.full((4,), 3.0), trained[:4])).item() == 1.0
    assert effective_share(weight_moments(torch.zeros(4), torch.zeros(4, dtype=torch.bool))).item() == 1.0
    parts = weight_moments(logs[:2], trained[:2]) + weight_moments(logs[2:], trained[2:])
    torch.testing.assert_close(parts, weight_moments(logs, trained))
    assert math.isclose(second_moment(MISMATCH, TRAINED).item(), (0.01 + 0.16 + 2.25 + 4.0) / 5, rel_tol=1e-6)
    assert second_moment(MISMATCH, torch.zeros(6, dtype=torch.bool)).item() == 0.0


def test_acr_s_ceiling_is_ppo_s_but_for_a_token_that_the_rollout_overrated() -> None:
    # (1 + 0.2) / 0.5 = 2.4: the token may rise to 2.4 times its probability. Weights above 1 leave PPO's ceiling.
    got = acr_ceiling(torch.tensor([1.0, 0.5, 1.7]), 0.2)
    torch.testing.assert_close(got, torch.tensor([1.2, 2.4, 1.2]))


def test_tbpo_in_the_band_is_gspo_with_its_gradient() -> None:
    logs = torch.tensor([0.1, -0.2, 0.4, 0.05, 0.0, -0.1], requires_grad=True)
    advantages = torch.tensor([1.0, 1.0, 1.0, -2.0, -2.0, 0.5])
    surrogate, dropped = tbpo_surrogate(logs, advantages, SEQUENCE, TRAINED, 0.2, 0.28)
    assert not dropped.any()
    mean = [math.exp(0.1), math.exp(0.05), math.exp(-0.1)]
    expected = torch.tensor([mean[s] for s in SEQUENCE.tolist()]) * advantages
    torch.testing.assert_close(surrogate.detach(), expected)
    (surrogate * TRAINED).sum().backward()
    # Every token of the first response gets d(3 s A)/dlog = s A * (3 tokens / 3), the untrained one nothing.
    wanted = torch.tensor([mean[0], mean[0], mean[0], -2 * mean[1], 0.0, 0.5 * mean[2]])
    torch.testing.assert_close(logs.grad, wanted)


def test_tbpo_drops_responses_outside_the_band() -> None:
    logs = torch.tensor([0.5, 0.5, 0.5, -0.4, 9.0, 0.0])
    surrogate, dropped = tbpo_surrogate(logs, torch.ones(6), SEQUENCE, TRAINED, 0.2, 0.28)
    assert dropped.tolist() == [True, True, True, True, True, False]
    assert surrogate.tolist() == [0.0, 0.0, 0.0, 0.0, 0.0, 1.0]


def test_dual_clip_bounds_negative_advantages_alone() -> None:
    surrogate, advantages = torch.tensor([-9.0, -2.0, 4.0]), torch.tensor([-1.0, -1.0, 1.0])
    assert dual_clip(surrogate, advantages, 3.0).tolist() == [-3.0, -2.0, 4.0]
    assert dual_clip(surrogate, advantages, 0.0) is surrogate


def truncated(cap: float) -> Callable[[Tensor], Tensor]:
    return lambda ratio: ratio.clamp(max=cap)


def test_centering_by_hand() -> None:
    q, p = torch.tensor([[0.5, 0.3]]), torch.tensor([[0.4, 0.4]])
    torch.testing.assert_close(centering_coefficients(p, q, torch.ones_like), torch.tensor([[0.1, -0.1]]))
    assert centering_coefficients(q, q, truncated(2.0)).abs().max() < 1e-7
    # With the exact importance weight nothing is left to center; truncation leaves 2 q - p where p > 2 q.
    assert centering_coefficients(p, q, truncated(1e9)).abs().max() < 1e-7
    got = centering_coefficients(torch.tensor([[0.6, 0.2]]), torch.tensor([[0.2, 0.6]]), truncated(2.0))
    torch.testing.assert_close(got, torch.tensor([[0.4 - 0.6, 0.2 - 0.2]]))


def test_centering_lets_the_rest_be_off_as_a_whole() -> None:
    """rho = (1 - .5) / (1 - .8) = 2.5, w(1 / rho) = .4: alpha = 1."""
    p, q = torch.tensor([[0.5, 0.3]]), torch.tensor([[0.3, 0.2]])
    got = centering_coefficients(p, q, truncated(1.2))
    torch.testing.assert_close(got, torch.tensor([[0.3 * 1.2 - 0.5, 0.2 * 1.2 - 0.3]]))
    got = centering_coefficients(q, p, truncated(1.2))  # rho = .4, w(2.5) = 1.2: alpha = .48
    torch.testing.assert_close(got, torch.tensor([[0.3 - 0.48 * 0.3, 0.2 - 0.48 * 0.2]]))


def test_centering_of_all_tokens_makes_the_expected_score_zero() -> None:
    """Over the whole vocabulary, with w = 1: E_q[score] - sum_H coefficient * score = E_p[score] = 0."""
    p, q = torch.randn(3, 11).softmax(-1), torch.randn(3, 11).softmax(-1)
    coefficients = centering_coefficients(p, q, torch.ones_like)
    torch.testing.assert_close(q - coefficients, p, atol=1e-6, rtol=1e-5)


def test_sums_over_responses() -> None:
    assert response_sums(torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]), SEQUENCE).tolist() == [6, 6, 6, 9, 9, 6]
    assert response_sums(torch.zeros(0), torch.zeros(0, dtype=torch.int64)).tolist() == []
