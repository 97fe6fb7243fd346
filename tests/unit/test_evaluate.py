import math
from concurrent.futures import Future

import pytest

from quads.config.options import take_option
from quads.errors import UserError
from quads.rl.grading import Grading
from quads.rl.scores import eval_metrics, evaluate, format_side_by_side, format_table, pass_at_k
from quads.types import Completion, Example, Sampling, Verdict


def test_pass_at_k_by_hand():
    # 4 samples, 1 right: one of 2 draws is right in 3 of the 6 pairs; all of 4 always hold it
    assert pass_at_k(4, 1, 1) == 0.25
    assert pass_at_k(4, 1, 2) == 0.5
    assert pass_at_k(4, 1, 4) == 1.0
    assert pass_at_k(4, 0, 4) == 0.0
    assert pass_at_k(4, 3, 2) == 1.0


def run(scores, ungraded=()):
    """Three prompts of source a, one of b, two samples each; the engine answers with fixed tokens, last prompt first.

    ungraded: numbers of responses whose grader hangs.
    """
    examples = [Example(f"{s}/{i}", s, "p", [i + 1]) for i, s in enumerate("aaab")]
    asked = {}

    def generate(prompts, n, sampling, seeds, on_group):
        asked.update(prompts=prompts, n=n, seeds=seeds)
        stop = Completion([5, 9], [0.0, 0.0], "stop", 1)
        length = Completion([5, 6, 7, 8], [0.0] * 4, "length", 1)
        for prompt in reversed(range(len(prompts))):
            on_group(prompt, [stop, length])
        return [[stop, length] for _ in prompts]

    def submit(example, text):
        assert text in ("5", "5678")  # the stop token is not part of the answer
        response = 2 * examples.index(example) + ["5", "5678"].index(text)
        future = Future()
        failed = response in ungraded
        future.set_result(Verdict(0.0 if failed else scores[response], 0.1, failed))
        return future

    decode = lambda batch: ["".join(map(str, ids)) for ids in batch]  # noqa: E731
    grading = Grading(submit, decode, (9,), examples, truncated=True)
    results = evaluate(generate, grading, 2, Sampling(4, 1.0, (9,)), list(range(8)))
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


def test_a_response_without_a_verdict_is_left_out_and_said():
    a, b = run([1, 0, 0, 1, 0, 0.5, 1, 1], ungraded=(0, 3, 6, 7))  # prompts of a: -0, 0-, 0 and a half; b: none
    assert (a.pass_at_1, a.ungraded, b.ungraded) == (0.0, 2, 2)
    assert a.score_mean == 0.125 and a.pass_at_k == {1: 0.0, 2: 0.0}
    assert math.isnan(b.pass_at_1) and math.isnan(b.pass_at_1_prompts[0]) and b.pass_at_k == {}
    assert "2 responses got no verdict" in format_table([a, b])
    a, b = run([1, 0, 1, 1, 0, 0, 1, 1], ungraded=(2, 3))  # 10, --, 00
    assert (a.pass_at_1, a.ungraded, b.pass_at_1) == (0.25, 2, 1.0)
    a, b = run([1, 0, 1, 0, 1, 1, 1, 1], ungraded=(1, 6, 7))  # 1-, 10, 11
    assert a.pass_at_1 == pytest.approx(2.5 / 3) and a.pass_at_k == {1: pytest.approx(2.5 / 3), 2: 1.0}
    metrics = eval_metrics([a, b])  # prompts without any verdict do not count as wrong ones
    assert metrics["eval/pass@1"] == pytest.approx(2.5 / 3) and metrics["eval/ungraded"] == 3
    side = format_side_by_side({"x": [a], "y": [run([1] * 8, ungraded=(0, 1))[0]]})
    assert "+0.2500 ± 0.2500" in side  # of the two prompts that both have


def test_two_precisions_side_by_side_with_the_error_of_the_difference():
    results = {"bf16": run([1, 1, 1, 0, 0, 0, 1, 1]), "w4a4": run([1, 0, 1, 0, 0, 0, 1, 0])}
    table = format_side_by_side(results)
    title, head, a, b = table.splitlines()
    assert title.startswith("pass@1 side by side")
    assert head.split() == ["source", "prompts", "samples", "bf16", "w4a4", "w4a4", "-", "bf16"]
    # of the three prompts one changes, from 1 to 0.5: mean -1/6, and the standard error of (-.5, 0, 0) is 1/6
    assert a.split() == "a 3 2 0.5000 ± 0.2887 0.3333 ± 0.1667 -0.1667 ± 0.1667".split()
    assert b.split() == "b 1 2 1.0000 ± nan 0.5000 ± nan -0.5000 ± nan".split()


def test_take_option():
    argv = ["--config", "x", "--out", "y"]
    assert take_option(argv, "--out") == "y" and argv == ["--config", "x"]
    assert take_option(argv, "--out") == ""
    with pytest.raises(UserError, match="needs a value"):
        take_option(["--out"], "--out")
