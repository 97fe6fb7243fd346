"""A run in which groups are graded while others are drawn does what one does that grades everything afterwards."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quads.rl.grading import Grading
from quads.rollout.native.engine import NativeEngine
from quads.types import Completion
from tests.tiny_run import CONFIG, computed, make_world, train_rows

PROMPTS = 8  # of tests/tiny_run.py


def test_rewards_beside_the_rollout_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_world(tmp_path / "world")
    events: list[str] = []
    generate, add, finish = NativeEngine.generate, Grading.add, Grading.finish

    def noted_add(grading: Grading, prompt: int, group: list[Completion]) -> None:
        events.append("add")
        add(grading, prompt, group)

    def noted_finish(grading: Grading) -> Any:
        events.append("finish")
        return finish(grading)

    def noted_generate(engine: NativeEngine, *args: Any, **options: Any) -> list[list[Completion]]:
        groups = generate(engine, *args, **options)
        events.append("rollout ends")
        return groups

    monkeypatch.setattr(Grading, "add", noted_add)
    monkeypatch.setattr(Grading, "finish", noted_finish)
    monkeypatch.setattr(NativeEngine, "generate", noted_generate)
    beside = train_rows(config, tmp_path / "beside", train__steps=3)
    assert events[: PROMPTS + 2] == ["add"] * PROMPTS + ["rollout ends", "finish"]

    def afterwards(engine: NativeEngine, *args: Any, on_group: Any, **options: Any) -> list[list[Completion]]:
        groups = generate(engine, *args, **options)
        events.append("rollout ends")
        for prompt, group in enumerate(groups):
            on_group(prompt, group)
        return groups

    monkeypatch.setattr(NativeEngine, "generate", afterwards)
    events.clear()
    after = train_rows(config, tmp_path / "after", train__steps=3)
    assert events[: PROMPTS + 2] == ["rollout ends"] + ["add"] * PROMPTS + ["finish"]
    assert computed(beside) == computed(after)
    assert all(row["reward/ungraded"] == 0 and row["time/reward_s"] >= 0 for row in beside)


@pytest.mark.vllm
def test_vllm_tells_of_groups_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each prompt's group once and whole, with what `generate` returns in the end."""
    from quads.rollout.vllm.engine import VLLMEngine

    config = make_world(tmp_path / "world", replace(CONFIG, head_dim=32))  # a head size that vLLM has on a CPU
    generate, told = VLLMEngine.generate, {}

    def checked(engine: VLLMEngine, *args: Any, on_group: Any, **options: Any) -> list[list[Completion]]:
        def tell(prompt: int, group: list[Completion]) -> None:
            assert prompt not in told
            told[prompt] = group
            on_group(prompt, group)

        groups = generate(engine, *args, on_group=tell, **options)
        assert [told[prompt] for prompt in range(len(groups))] == groups
        return groups

    monkeypatch.setattr(VLLMEngine, "generate", checked)
    (row,) = train_rows(config, tmp_path / "run", train__steps=1, eval__every=0, rollout__engine="vllm")
    assert len(told) == PROMPTS and row["reward/ungraded"] == 0
