"""Supervised warm-up on the tiny model: what it learns, saves and repeats."""

import json
from pathlib import Path

import pytest

from quads.data.tokenizer import Tokenizer
from quads.errors import UserError
from quads.lab.smollm2 import warmup
from quads.types import Example
from tests.helpers import REPOSITORY

MODEL = str(REPOSITORY / "assets" / "tiny_moe")
FEW = ["--steps", "6", "--rows", "16", "--check-every", "3", "--prompts", "32", "--lr", "1e-3", "--model.path", MODEL]


def run(out: Path, *extra: str) -> dict:
    warmup.main(["--config", str(REPOSITORY / "configs" / "tiny_quads.toml"), "--out", str(out), *FEW, *extra])
    return json.loads((out / "warmup.json").read_text())


def test_the_probability_of_right_answers_rises_and_the_folder_is_a_model(tmp_path):
    result = run(tmp_path / "warm")
    assert [row["step"] for row in result["checks"]] == [0, 3, 6]
    before, after = result["checks"][0]["right"], result["checks"][-1]["right"]
    assert 0.1 < before < 0.2 and after > before + 0.05  # the checkpoint errs on purpose, see scripts/make_tiny.py
    assert "--model.path" in result["about"]["command"] and result["start"] == MODEL
    assert Tokenizer(tmp_path / "warm").eos_ids == Tokenizer(MODEL).eos_ids
    again = run(tmp_path / "again")
    assert again["checks"] == result["checks"]
    first, second = (Path(tmp_path / name / "model.safetensors").read_bytes() for name in ("warm", "again"))
    assert first == second
    continued = run(tmp_path / "more", "--model.path", str(tmp_path / "warm"), "--steps", "3")
    assert continued["checks"][0]["right"] == pytest.approx(after, abs=1e-5)


def test_it_stops_where_it_is_told(tmp_path):
    result = run(tmp_path / "warm", "--stop-at", "0.1")
    assert [row["step"] for row in result["checks"]] == [0]


def test_rows_end_with_eos_and_rows_without_an_answer_are_refused():
    tokenizer = Tokenizer(MODEL)
    sample = warmup.as_sample(Example("1", "sums", "", [5, 6], {"answer": "12"}), tokenizer)
    assert (
        tokenizer.decode(sample.completion.token_ids) == "12" and sample.completion.token_ids[-1] in tokenizer.eos_ids
    )
    with pytest.raises(UserError, match="sources.code"):
        warmup.as_sample(Example("1", "code", "", [5], [("in", "out")]), tokenizer)
    with pytest.raises(UserError, match="--out"):
        warmup.main(["--config", "configs/tiny_quads.toml"])
