from dataclasses import replace

import torch

from quads.rl.packing import Sample, pack, split_by_tokens
from quads.types import Completion


def sample(prompt, response, logprobs=None, advantage=1.0, trained=True, routed=None):
    logprobs = [-1.0] * len(response) if logprobs is None else logprobs
    return Sample(prompt, Completion(response, logprobs, "stop", 0, routed), advantage, trained)


def test_layout_by_hand():
    (mb,), denominator = pack([sample([1, 2, 3], [4, 5], advantage=2.0), sample([6], [7])], 100, "sample")
    assert mb.tokens_T.tolist() == [1, 2, 3, 4, 5, 6, 7]  # longest first
    assert mb.lengths == (5, 2)
    assert mb.predict_N.tolist() == [2, 3, 5]
    assert mb.targets_N.tolist() == [4, 5, 7]
    assert (mb.tokens_T[mb.predict_N + 1] == mb.targets_N).all()
    assert mb.sequence_N.tolist() == [0, 0, 1]
    assert mb.weights_N.tolist() == [0.5, 0.5, 1.0]
    assert mb.advantages_N.tolist() == [2.0, 2.0, 1.0]
    assert denominator == 2.0


def test_token_average_counts_trained_tokens():
    samples = [sample([1], [2, 3, 4]), sample([1], [5], trained=False), sample([1], [6, 7])]
    microbatches, denominator = pack(samples, 100, "token")
    assert denominator == 5.0
    assert sum(float(mb.weights_N.sum()) for mb in microbatches) == 5.0


def test_nonfinite_engine_logprobs_leave_sum_and_length():
    (mb,), _ = pack([sample([1], [2, 3, 4], [-0.5, float("nan"), -0.25])], 100, "sample")
    assert mb.weights_N.tolist() == [0.5, 0.0, 0.5]
    assert mb.finite_N.tolist() == [True, False, True]
    assert torch.isfinite(mb.rollout_logprobs_N).all()


def test_budget_is_kept_and_nothing_is_lost():
    lengths = [5, 3, 9, 1, 7, 2, 2, 30]
    groups = split_by_tokens(lengths, 10)
    assert sorted(i for group in groups for i in group) == list(range(len(lengths)))
    for group in groups:
        assert sum(lengths[i] for i in group) <= 10 or len(group) == 1
    assert [7] in groups  # longer than the budget: alone, uncut


def test_routes_cover_every_token():
    routed = torch.arange(4 * 2 * 1, dtype=torch.int16).reshape(4, 2, 1)  # 3 prompt + 2 response - 1
    (mb,), _ = pack([sample([1, 2, 3], [4, 5], routed=routed)], 100, "sample")
    assert mb.routed_experts_TLA is not None and mb.routed_experts_TLA.shape == (5, 2, 1)
    assert (mb.routed_experts_TLA[:4] == routed).all()
    assert (mb.routed_experts_TLA[4] == -1).all()  # the last token was never fed to the engine
    (mb,), _ = pack([sample([1, 2, 3], [4, 5])], 100, "sample")
    assert mb.routed_experts_TLA is None


def test_one_mask_for_the_sum_and_what_divides_it():
    """By hand: 2 of 5 responses are trained on; a group without spread dilutes them, what is left out does not."""
    nan = float("nan")
    samples = [
        sample([1], [2, 3]),
        sample([1], [4], [nan]),  # no finite log-prob
        Sample([1], Completion([5], [-1.0], "length", 0), 0.0, trained=False, counted=False),  # masked
        sample([1], [6], trained=False),  # no spread
        sample([1], [7, 8], [nan, -1.0]),
    ]
    microbatches, denominator = pack(samples, 100, "sample")
    assert denominator == 3.0
    assert sum(float(mb.weights_N.sum()) for mb in microbatches) == 2.0  # each trained response weighs 1
    assert pack(samples, 100, "token")[1] == 3.0
    assert pack(samples[1:3], 100, "sample")[1] == 0.0


def test_the_most_likely_tokens_follow_their_response():
    def with_top(prompt, response, first):
        made = sample(prompt, response)
        ids = torch.arange(first, first + 2 * len(response), dtype=torch.int32).view(-1, 2)
        return replace(made, completion=replace(made.completion, top_ids=ids, top_logprobs=-ids.float()))

    short, long = with_top([1], [5], 10), with_top([1, 2], [6, 7], 20)
    [mb], _ = pack([short, long], 100, "sample")
    assert mb.targets_N.tolist() == [6, 7, 5]
    assert mb.top_ids_Nk.tolist() == [[20, 21], [22, 23], [10, 11]] and mb.top_ids_Nk.dtype == torch.int64
    assert torch.equal(mb.top_logprobs_Nk, -mb.top_ids_Nk.float())
    [mb], _ = pack([sample([1], [5])], 100, "sample")
    assert mb.top_ids_Nk is None and mb.top_logprobs_Nk is None


def test_denominator_of_nothing_is_zero():
    _, denominator = pack([sample([1], [2], trained=False)], 100, "token")
    assert denominator == 0.0  # parts of several processes add up; the learner takes at least 1
