"""The paper's run with its data on disk: the large configs as they are, with paths to local copies of the six sets.

Files have the published columns and layout (hand-made rows); what does not fit a CPU is made small: the model, the
engine, the numbers of prompts and tokens.
"""

import json
from pathlib import Path
from typing import Any

import datasets
import pytest

import train
from quads.run.folder import read_rows
from tests.helpers import REPOSITORY
from tests.tiny_run import options
from tests.unit.test_sources import READY_MADE

SOURCES = ("deepmath_103k", "deepcoder", "aime_2024", "aime_2025", "hmmt_feb_2025", "livecodebench")
SMALL: dict[str, Any] = {
    "model__arch": "tiny",
    "model__path": "",
    "model__tokenizer": REPOSITORY / "examples" / "tokenizer",
    "rollout__engine": "native",
    "rollout__max_batch": 8,
    "rollout__max_prompt_tokens": 400,
    "rollout__max_new_tokens": 8,
    "rl__prompts_per_step": 4,
    "rl__minibatch_prompts": 2,
    "rl__group_size": 2,
    "rl__microbatch_tokens": 1024,
    "quant__all_gather": "bf16",
    "parallel__ep": 1,
    "parallel__compile": "false",
    "optim__moments": "float32",
    "train__steps": 1,
    "eval__every": 1,
    "eval__prompts": 2,
    "eval__samples": 2,
}


def store(folder: Path, name: str) -> str:
    """A copy of the set as it lies on the hub: parquet files of a split, or LiveCodeBench's JSON lines."""
    rows, _ = READY_MADE[name]
    if name == "livecodebench":
        (folder / "test6.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(folder / "test6.jsonl")
    (folder / name / "data").mkdir(parents=True)
    question = "problem" if "problem" in rows[0] else "question"
    rows = [{**row, question: f"{row[question]} ({i})"} for row in rows for i in range(5)]  # different prompts
    if name == "aime_2024":
        rows = [{**row, "id": i} for i, row in enumerate(rows)]
    datasets.Dataset.from_list(rows).to_parquet(folder / name / "data" / "train-00000-of-00001.parquet")
    return str(folder / name / "data" / "train-*.parquet")


@pytest.mark.parametrize("config", ["moe25b_quads", "qwen3_30b_a3b_quads"])
def test_large_configs_run_on_local_copies(config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = {f"sources__{name}__dataset": store(tmp_path, name) for name in SOURCES}
    train.main(
        ["--config", f"{REPOSITORY}/configs/{config}.toml", *options(train__out=tmp_path / "run", **SMALL, **paths)]
    )
    printed = capsys.readouterr().out
    assert "deepmath_103k: train 5 prompts" in printed
    assert "deepcoder: train 15 prompts; left out: 5 unusable row" in printed  # a problem without tests
    assert "generated programs and answers run in a sandbox: " in printed
    (row,) = read_rows(tmp_path / "run" / "metrics.jsonl")
    assert {f"eval/{name}/pass@1" for name in SOURCES[2:]} <= row.keys()
