"""Numbers on command lines that cannot be meant: one line that names the range, exit code 2, nothing computed."""

from collections.abc import Callable
from typing import Any

import pytest

from quads.config.options import real, whole
from quads.lab import channels, drift, gap, ratio
from quads.lab.runs import recipes, scores
from quads.lab.smollm2 import upcycle, warmup
from quads.plan.__main__ import main as plan_main
from quads.rl.rewards import __main__ as rewards

CONFIG = ["--config", "configs/tiny_quads.toml"]


def test_bounds() -> None:
    assert whole(0)("0") == 0 and whole(-1)("-1") == -1 and isinstance(whole(1)("7"), int)
    assert real(above=0.0)("1e-9") == 1e-9 and real(low=0.0, high=1.0)("1") == 1.0 and real(low=0.0)("0") == 0.0
    for parse, text in [
        (whole(1), "0"),
        (whole(1), "2.5"),
        (whole(1), "many"),
        (real(above=0.0), "0"),
        (real(above=0.0), "nan"),
        (real(above=0.0), "inf"),
        (real(low=0.0, high=1.0), "1.01"),
        (real(low=0.0), "-1e-9"),
    ]:
        with pytest.raises(Exception, match=f"{text} must be a"):
            parse(text)


@pytest.mark.parametrize(
    ("main", "argv", "message"),
    [
        (rewards.main, ["math", "FILE", "--time-s", "0"], "0 must be a number above 0"),
        (rewards.main, ["math", "FILE", "--time-s", "nan"], "nan must be a number above 0"),
        (rewards.main, ["math", "FILE", "--workers", "-1"], "-1 must be a whole number of at least 0"),
        (rewards.main, ["code", "FILE", "--sandbox", "jail"], "invalid choice: 'jail'"),
        (plan_main, [*CONFIG, "--gpus", "2.5"], "--gpus 2.5 must be a whole number of at least 1"),
        (plan_main, [*CONFIG, "--gpus", "inf"], "--gpus inf must be a whole number of at least 1"),
        (plan_main, [*CONFIG, "--gpu-memory", "nan"], "--gpu-memory nan must be a number above 0"),
        (plan_main, [*CONFIG, "--response-tokens", "0"], "--response-tokens 0 must be a whole number of at least 1"),
        (recipes.main, [*CONFIG, "--minutes", "0"], "0 must be a number above 0"),
        (recipes.main, [*CONFIG, "--seeds", "0"], "0 must be a whole number of at least 1"),
        (recipes.main, [*CONFIG, "--at", "-3"], "-3 must be a whole number of at least 0"),
        (scores.main, ["--runs", "x", "--jobs", "0"], "0 must be a whole number of at least 1"),
        (warmup.main, [*CONFIG, "--out", "x", "--lr", "-1"], "-1 must be a number above 0"),
        (warmup.main, [*CONFIG, "--out", "x", "--rows", "0"], "0 must be a whole number of at least 1"),
        (upcycle.main, ["smollm2", "x", "--noise", "nan"], "nan must be a number of at least 0"),
        (gap.main, [*CONFIG, "--drift", "0.1,much"], "much must be a number of at least 0"),
        (ratio.main, [*CONFIG, "--cost", "2"], "2 must be a number of at least 0 and of at most 1"),
        (ratio.main, [*CONFIG, "--sites", "w13;w31"], "--sites w13;w31: sites are w13, w2, qkv, o"),
        (drift.main, [*CONFIG, "--prompts", "0"], "0 must be a whole number of at least 1"),
        (drift.main, [*CONFIG, "--layer", "3"], "--layer 3: the model has layers 0 to 2"),
        (channels.main, [*CONFIG, "--layer", "9"], "--layer 9: the model has layers 0 to 2"),
    ],
)
def test_a_number_out_of_range_is_refused(
    main: Callable[[list[str]], Any], argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises((SystemExit, Exception)) as failed:
        main(argv)
    said = capsys.readouterr().err + str(failed.value)
    assert message in said
