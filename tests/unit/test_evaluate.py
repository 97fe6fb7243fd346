import math

import pytest

from quads.errors import UserError
from quads.rl.evaluate import eval_metrics, evaluate, format_table, pass_at_k, strip_stop, take_option
from quads.types import Completion, Example, Sampling


def test_pass_at_k_by_hand():
    # 4 samples, 1 right: one of 2 draws is right in 3 of the 6 pairs; all of 4 always hold it
    assert pass_at_k(4, 1, 1) == 0.25
    assert pass_at_k(4, 1, 2) == 0.5
    assert pass_at_k(4, 1, 4) == 1.0
    assert pass_at_k(4, 0, 4) == 0.0
    assert pass_at_k(4, 3, 2) == 1.0


def run(scores):
    """Three prompts of source a, one of b, two samples each; the engine answers with fixed tokens."""
    examples = [Example(f"{s}/{i}", s, "p", [i + 1]) for i, s in enumerate("aaab")]
    asked = {}

    def generate(prompts, n, sampling, seeds):
        asked.update(prompts=prompts, n=n, seeds=seeds)
        stop = Completion([5, 9], [0.0, 0.0], "stop", 1)
        length = Completion([5, 6, 7, 8], [0.0] * 4, "length", 1)
        return [[stop, length] for _ in prompts]

    def score(batch):
        assert [text for _, text in batch] == ["5", "5678"] * 4  # the stop token is not part of the answer
        return scores

    sampling = Sampling(4, 1.0, (9,))
    results = evaluate(generate, score, lambda ids: "".join(map(str, ids)), examples, 2, sampling, list(range(8)))
    assert asked == {"prompts": [[1], [2], [3], [4]], "n": 2, "seeds": list(range(8))}
    return results


def test_scores_per_source_with_standard_error():
    a, b = run([1, 1, 1, 0.5, 0, 0, 0, 1])  # partial credit counts in score_mean alone
    assert (a.source, a.prompts, a.samples, a.pass_at_1) == ("a", 3, 2, 0.5)
    assert a.standard_error == pytest.approx(0.5 / math.sqrt(3))  # prompt means 1, .5, 0: sample std .5
    assert a.pass_at_k == {1: 0.5, 2: pytest.approx(2 / 3)}
    assert a.truncated_frac == 0.5 and a.length_mean == 3.0
    assert a.score_mean == pytest.approx(3.5 / 6)
    assert b.pass_at_1 == 0.5 and math.isnan(b.standard_error)
    metrics = eval_metrics([a, b])
    assert metrics["eval/pass@1"] == 0.5 and metrics["eval/a/pass@1"] == 0.5
    assert "@2 0.667" in format_table([a, b])


def test_strip_stop_only_cuts_what_ended_the_response():
    assert strip_stop(Completion([1, 9], [0, 0], "stop", 0), (9,)) == [1]
    assert strip_stop(Completion([1, 9], [0, 0], "length", 0), (9,)) == [1, 9]
    assert strip_stop(Completion([], [], "length", 0), (9,)) == []


def test_take_option():
    argv = ["--config", "x", "--out", "y"]
    assert take_option(argv, "--out") == "y" and argv == ["--config", "x"]
    assert take_option(argv, "--out") == ""
    with pytest.raises(UserError, match="needs a value"):
        take_option(["--out"], "--out")
