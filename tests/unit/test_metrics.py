"""The log of a run: rows, what a resume cuts, an earlier run moved aside, times, console line."""

import builtins
import json
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from quads.config import Config, load_config
from quads.config.sections import LogSettings, TrainSettings
from quads.errors import UserError
from quads.model.config import ModelConfig
from quads.run.folder import git_commit, open_run_folder, read_rows
from quads.run.measure import Timers, mfu, peak_resident_gib
from quads.run.metrics import RunLog, console_line
from quads.types import Completion, Example
from tests.helpers import run_command

QUIET = Config(log=LogSettings(tensorboard=False), train=TrainSettings(steps=20))


def run(out: Path, first: int, last: int, resume_step: int = 0, cfg: Config = QUIET) -> None:
    log = RunLog(out, cfg, resume_step)
    for step in range(first, last + 1):
        log.write(step, {"reward/mean": step / 10})
    log.close()


def without_times(out: Path) -> list[dict[str, Any]]:
    rows = read_rows(out / "metrics.jsonl")
    return [{key: row[key] for key in row if not key.startswith(("time/", "memory/"))} for row in rows]


def test_a_row_is_one_json_object_with_null_for_what_is_not_finite(tmp_path: Path) -> None:
    log = RunLog(tmp_path, QUIET)
    with log.timer("rollout"):
        time.sleep(0.02)
    log.write(7, {"a/nan": float("nan"), "a/inf": float("inf"), "a/tensor": torch.tensor(2.5), "a/int": 3})
    text = (tmp_path / "metrics.jsonl").read_text()  # flushed: the file is not closed yet
    row = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert (row["step"], row["a/nan"], row["a/inf"], row["a/tensor"], row["a/int"]) == (7, None, None, 2.5, 3)
    assert 0.02 <= row["time/rollout_s"] <= row["time/step_s"] < 1
    assert row["memory/rollout_gib"] > 0.05  # this process holds torch
    log.write(8, {})
    assert "time/rollout_s" not in read_rows(tmp_path / "metrics.jsonl")[1]
    log.close()


def test_resumed_and_straight_runs_leave_the_same_rows(tmp_path: Path) -> None:
    run(tmp_path / "straight", 1, 6)
    run(tmp_path / "resumed", 1, 5)  # checkpoint at step 3, killed after step 5
    with open(tmp_path / "resumed" / "metrics.jsonl", "a") as file:
        file.write('{"step": 6, "rewa')  # while writing a row
    run(tmp_path / "resumed", 4, 6, resume_step=3)
    assert without_times(tmp_path / "resumed") == without_times(tmp_path / "straight")
    assert [row["step"] for row in without_times(tmp_path / "resumed")] == [1, 2, 3, 4, 5, 6]


def test_a_fresh_start_moves_an_earlier_run_aside(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.txt").write_text("not a run's")
    run(tmp_path, 1, 2)
    run(tmp_path, 1, 3)
    run(tmp_path, 1, 1)
    assert [len(without_times(tmp_path / name)) for name in ("previous_1", "previous_2", ".")] == [2, 3, 1]
    assert (tmp_path / "mine.txt").exists()
    assert "held an earlier run" in capsys.readouterr().out


def test_config_is_saved_with_its_origin_and_reads_back(tmp_path: Path) -> None:
    source = tmp_path / "x.toml"
    source.write_text(
        '[model]\npath = "m"\n[task]\ntrain = ["a"]\n[sources.a]\nkind = "jsonl"\npath = "p"\nreward = "exact"\n'
    )
    cfg = load_config(["--config", str(source), "--train.steps", "3"])
    open_run_folder(tmp_path / "out", cfg, 0)
    text = (tmp_path / "out" / "config.toml").read_text()
    for word in ("# commit: " + git_commit(), "torch " + torch.__version__, "# command: "):
        assert word in text
    assert load_config(["--config", str(tmp_path / "out" / "config.toml")]) == cfg


def test_samples_hold_prompt_responses_and_rewards(tmp_path: Path) -> None:
    log = RunLog(tmp_path, QUIET)
    examples = [Example(f"s/{i}", "s", f"prompt {i}", [1]) for i in range(2)]
    groups = [[Completion([5, 6], [-0.1, -0.2], "stop", 4), Completion([7], [-0.3], "length", 4)]] * 3
    log.samples(2, lambda ids: "-".join(map(str, ids)), examples, groups, torch.tensor([[1.0, 0.0]] * 3))
    log.close()
    rows = read_rows(tmp_path / "samples.jsonl")
    assert [row["prompt"] for row in rows] == ["prompt 0", "prompt 1"]
    assert rows[0]["responses"][0] == {"text": "5-6", "reward": 1.0, "tokens": 2, "finish": "stop"}
    assert (rows[0]["responses"][1]["finish"], rows[0]["policy_version"], rows[0]["step"]) == ("length", 4, 2)


def test_tensorboard_has_the_scalars(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run(tmp_path, 1, 3, cfg=Config(log=LogSettings(tensorboard=True)))
    events = EventAccumulator(str(tmp_path / "tb")).Reload().Scalars("reward/mean")
    assert [(event.step, round(event.value, 6)) for event in events] == [(1, 0.1), (2, 0.2), (3, 0.3)]


def test_wandb_is_imported_only_when_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "wandb", None)  # makes `import wandb` fail, installed or not
    run(tmp_path / "without", 1, 1)
    with pytest.raises(UserError, match="pip install wandb"):
        RunLog(tmp_path / "with", Config(log=LogSettings(wandb_project="p")))
    assert not (tmp_path / "with").exists()


def test_other_processes_keep_time_and_write_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builtins, "open", lambda *args, **kwargs: pytest.fail("a second process opened a file"))
    monkeypatch.setattr("quads.run.measure.used_memory_gib", lambda device: 1.5)  # opens /proc/self/statm
    log = RunLog(tmp_path / "out", QUIET, is_main=False)
    with log.timer("learn"):
        pass
    assert log.seconds("learn") > 0
    log.write(1, {"reward/mean": 0.0})
    log.close()
    assert not (tmp_path / "out").exists()


def test_console_line_shows_what_the_row_has() -> None:
    assert console_line(3, 60, {"reward/mean": 0.5, "mismatch/logprob_abs_max": 0.01234}) == (
        "step  3/60  reward 0.500  max 0.012"
    )


def test_phases_add_up_and_the_clock_starts_with_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([10.0, 11.0, 15.0, 17.0, 20.0])  # two phases of 1 s and 2 s, 4 s apart; 3 s later the step ends
    monkeypatch.setattr("quads.run.measure.time.perf_counter", lambda: next(clock))
    monkeypatch.setattr("quads.run.measure.used_memory_gib", lambda device: 1.5)
    timers = Timers(torch.device("cpu"))
    for _ in range(2):
        with timers.phase("learn"):
            pass
    assert timers.metrics() == {"time/learn_s": 3.0, "time/step_s": 10.0, "memory/learn_gib": 1.5}
    timers.reset()
    assert timers.metrics() == {"time/step_s": 0.0}


def test_flops_against_a_hand_count_and_mfu_of_known_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    config = ModelConfig(10, 8, 2, 4, 2, 8, 4, 8, 2, max_position=512)
    # attention: q and o 8 x 32, k and v 8 x 16, two norms of a head; two experts of 3 * 8 * 4; router; two norms; then
    # the last norm and the head
    layer = 2 * 8 * 32 + 2 * 8 * 16 + 2 * 8 + 2 * 3 * 8 * 4 + 8 * 8 + 2 * 8
    met = 2 * layer + 8 + 8 * 10
    # scores and values of a pair: 2 * 2 FLOPs a channel, head and layer, three times that with the backward
    pairs = (100 * 100 + 20 * 20) / 2
    expected = 6 * met * 120 + 3 * (2 * 2 * 2 * 4 * 8) * pairs
    assert config.train_flops([100, 20]) == replace(config, tie_embeddings=True).train_flops([100, 20]) == expected
    assert mfu(1e14, torch.device("cpu")) is None
    for name, expected in (("NVIDIA H200", 1e14 / 989e12), ("NVIDIA GB200", 0.04), ("NVIDIA T4", None)):
        monkeypatch.setattr("torch.cuda.get_device_name", lambda device, name=name: name)
        assert mfu(1e14, torch.device("cuda")) == expected


def test_memory_of_a_phase_is_the_most_while_it_lasted() -> None:
    timers = Timers(torch.device("cpu"))
    with timers.phase("small"):
        pass
    with timers.phase("large"):
        held = torch.ones(64 * 2**20)  # 256 MiB
        time.sleep(0.3)
        del held
    with timers.phase("after"):
        pass
    gib = {name: timers.metrics()[f"memory/{name}_gib"] for name in ("small", "large", "after")}
    assert gib["large"] - gib["small"] == pytest.approx(0.25, abs=0.05)
    assert gib["large"] - gib["after"] == pytest.approx(0.25, abs=0.05)
    assert 0.05 < gib["after"] <= peak_resident_gib() + 0.01 < 1000


def test_rows_are_cut_at_newlines_alone_and_within_a_character(tmp_path: Path) -> None:
    run(tmp_path, 1, 1)
    separators = "a\u2028b\u2029c\x85d\x0be"  # line ends for str.splitlines; JSON may hold the first three as they are
    rows = "".join(json.dumps({"step": step, "text": separators}, ensure_ascii=False) + "\n" for step in (1, 2, 3))
    (tmp_path / "samples.jsonl").write_bytes(rows.encode() + '{"step": 4, "text": "é'.encode()[:-1])
    assert [row["step"] for row in read_rows(tmp_path / "samples.jsonl")] == [1, 2, 3]
    open_run_folder(tmp_path, QUIET, resume_step=2)
    assert [row["text"] for row in read_rows(tmp_path / "samples.jsonl")] == [separators, separators]


def test_a_resumed_run_keeps_its_header_and_a_finished_one_its_config(tmp_path: Path) -> None:
    run(tmp_path, 1, 3)
    config = tmp_path / "config.toml"
    first = config.read_text().splitlines()
    header = [line for line in first if line.startswith("# ")]
    run(tmp_path, 3, 4, resume_step=2)
    again = config.read_text().splitlines()
    assert again[: len(header)] == header
    assert (
        again[len(header)].startswith("# resumed: after step 2, 20") and f"commit {git_commit()}" in again[len(header)]
    )
    assert again[len(header) + 1 :] == first[len(header) :]
    before = config.stat().st_mtime_ns
    run(tmp_path, 21, 20, resume_step=20)  # all 20 steps are done
    assert config.stat().st_mtime_ns == before


@pytest.mark.parametrize("name", ["metrics.jsonl", "samples.jsonl", "tb"])
def test_a_row_that_does_not_fit_ends_the_run_with_one_line_and_no_half_row(tmp_path: Path, name: str) -> None:
    """In a process of its own, which may write no file beyond 2,000 bytes."""
    done = run_command(["-c", FULL_DISK.format(out=str(tmp_path), name=name)])
    assert done.returncode == 2, done.stderr
    assert done.stderr == (
        f"error: {tmp_path / name} cannot be written: File too large; free some space there, or choose another "
        "train.out\n"
    )
    for file in ("metrics.jsonl", "samples.jsonl"):
        data = (tmp_path / file).read_bytes()
        assert len(data) <= 2000 and (not data or data.endswith(b"}\n"))


FULL_DISK = """
import os, resource
from pathlib import Path
import torch
from quads.config import Config
from quads.config.sections import LogSettings, TrainSettings
from quads.errors import main_guard
from quads.run.metrics import RunLog
from quads.types import Completion, Example

@main_guard
def main():
    out = Path("{out}")
    log = RunLog(out, Config(log=LogSettings(tensorboard="{name}" == "tb"), train=TrainSettings(steps=20)))
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
    group = [Completion([1], [0.0], "stop", 0)]
    for step in range(1, 99):
        if "{name}" == "samples.jsonl":
            log.samples(step, lambda ids: "x" * 100, [Example("a", "p", "x", [1])], [group], torch.zeros(1, 1))
        else:
            log.write(1, {{f"a/{{i}}": 0.5 for i in range(5)}})
            if "{name}" == "tb":  # metrics.jsonl would fill first
                os.truncate(out / "metrics.jsonl", 0)

main()
"""


def test_a_folder_that_is_removed_under_a_run_is_noticed(tmp_path: Path) -> None:
    log = RunLog(tmp_path / "run", QUIET)
    log.write(1, {})
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(UserError, match="metrics.jsonl cannot be written: it was removed while the run was writing it"):
        log.write(2, {})
    assert not (tmp_path / "run").exists()


def test_a_step_without_spread_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = RunLog(tmp_path, QUIET)
    for step, share in ((1, 1.0), (2, 0.875)):
        log.write(step, {"reward/mean": 0.0, "group/zero_std_frac": share})
    log.close()
    out = capsys.readouterr().out
    assert out.count("nothing was learned in this step: in no group did rewards differ") == 1
    lines = [line.strip() for line in out.splitlines()]
    assert lines[0].startswith("step") and lines[1].startswith("nothing was learned") and lines[2].startswith("step")
