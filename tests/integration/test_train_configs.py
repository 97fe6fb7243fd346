"""The configs that a newcomer runs, for two steps each, and the example with bad rows."""

from pathlib import Path

import pytest

import train
from quads.run.folder import read_rows
from tests.helpers import run_command
from tests.tiny_run import options

FEW = {
    "train__steps": 2,
    "rl__prompts_per_step": 8,
    "rl__minibatch_prompts": 8,
    "eval__prompts": 8,
    "reward__workers": 1,
}


@pytest.mark.parametrize("name", ["tiny_quads", "tiny_gsm_symbolic"])
def test_tiny_configs_run(tmp_path: Path, name: str) -> None:
    train.main(["--config", f"configs/{name}.toml", *options(train__out=tmp_path, **FEW)])
    rows = read_rows(tmp_path / "metrics.jsonl")
    assert [row["policy/version"] for row in rows] == [1, 2]
    assert all(row["mismatch/nonfinite_tokens"] == 0 and row["mismatch/logprob_abs_mean"] > 0 for row in rows)
    assert all(row["reward/mean"] > 0 for row in rows)  # the scorer of both gives 0.01 to any number
    assert 0 <= rows[1]["eval/pass@1"] <= 1


def test_example_with_two_bad_rows() -> None:
    done = run_command(["train.py", "--config", "examples/bad_rows.toml", "--dry-run"])
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "error: [sources.math] examples/bad_rows.jsonl: 2 of 6 rows cannot be used; correct or remove them:\n"
        "  line 3: is not JSON: Expecting ',' delimiter (column 46)\n"
        "  line 5: no column 'problem'; there is: question, answer\n"
    )
