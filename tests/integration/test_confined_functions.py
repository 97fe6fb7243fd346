"""Functions of the user that evaluate responses, with `confined = true`: no response gets out, and none stays."""

import os
from pathlib import Path
from typing import Any

import pytest

from quads.config.sections import RewardSettings, SourceSettings
from quads.errors import UserError
from quads.rl.rewards.pool import RewardPool
from quads.sandbox.isolation import MECHANISMS, NoIsolation, find_isolation
from quads.types import Example, Verdict
from tests.integration.test_hostile_answers import payloads

FUNCTIONS = """
import os, pathlib, threading, time
from neighbour import TWO
WORDS = pathlib.Path(__file__).with_name("words.txt").read_text().split()
WRONG = -3.0
def score(prompt, response, answer, row):
    try:
        value = eval(response)
    except Exception:
        return WRONG
    return len(WORDS) + TWO * (value == answer)
def sees(prompt, response, answer, row): return response in os.environ or os.path.exists(response)
def raises(prompt, response, answer, row): raise ValueError("nothing to eval")
def large(prompt, response, answer, row): return len(bytearray(5 << 30))
"""


@pytest.fixture(params=MECHANISMS)
def mechanism(request: pytest.FixtureRequest) -> str:
    try:
        return find_isolation(request.param)
    except NoIsolation as reason:
        pytest.skip(str(reason))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "my.py").write_text(FUNCTIONS)
    (tmp_path / "mine" / "neighbour.py").write_text("TWO = 2\n")
    (tmp_path / "mine" / "words.txt").write_text("one two three")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def pool_of(sandbox: Any, function: str, **source: Any) -> RewardPool:
    settings = RewardSettings(workers=1, judge_time_s=10.0, sandbox=sandbox)
    return RewardPool(settings, {"s": SourceSettings(kind="jsonl", reward=f"mine/my.py:{function}", **source)})


def ask(pool: RewardPool, response: str) -> Verdict:
    return pool.submit(Example("s/7", "s", "", [], ("7", {})), response).result(timeout=60)


def attack(pool: RewardPool, mark: Path) -> None:
    try:
        pool.check()
        for text in (*payloads(mark, os.getpid()), "setattr(__import__('sys').modules['my'], 'WRONG', 1.0)"):
            verdict = ask(pool, text)
            assert abs(verdict.reward) <= 1e6
            assert not mark.exists(), text
            assert ask(pool, "no answer").reward == -3.0, text
        assert ask(pool, "'7'").reward == 3 + 2  # what its file has imported and read is there
    finally:
        pool.close()


def test_hostile_responses_get_nowhere(mechanism: str, folder: Path) -> None:
    attack(pool_of(mechanism, "score", confined=True), folder / "mark")


def test_the_attack_works_without_the_key(folder: Path) -> None:
    """Else nothing is shown."""
    with pytest.raises(AssertionError, match="open"):
        attack(pool_of("auto", "score"), folder / "mark")


def test_neither_files_nor_the_environment_are_in_sight(
    mechanism: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_KEY", "x")
    seen = {}
    for confined in (False, True):
        pool = pool_of(mechanism, "sees", confined=confined)
        try:
            assert pool.check() == (mechanism if confined else "")
            seen[confined] = [ask(pool, text).reward for text in ("MY_KEY", str(folder / "mine"), "nowhere")]
        finally:
            pool.close()
    there = float(mechanism == "landlock")  # which hides what is in files, not that they exist
    assert seen == {False: [1.0, 1.0, 0.0], True: [0.0, there, 0.0]}


def test_its_faults_and_its_limits(folder: Path) -> None:
    for function, words in (("raises", r"raises raised ValueError: nothing to eval"), ("large", "raised MemoryError")):
        pool = pool_of("auto", function, confined=True)
        try:
            with pytest.raises(UserError, match=rf"^\[sources.s\] reward mine/my.py:.*{words}.*for a response to s/7"):
                ask(pool, "1")
        finally:
            pool.close()


def test_a_file_that_leaves_a_thread_running_cannot_be_confined_in_namespaces(folder: Path) -> None:
    try:
        find_isolation("namespaces")
    except NoIsolation as reason:
        pytest.skip(str(reason))
    Path("mine/my.py").write_text(
        f"{FUNCTIONS}\nthreading.Thread(target=time.sleep, args=(99,), daemon=True).start()\n"
    )
    pool = pool_of("namespaces", "score", confined=True)
    try:
        with pytest.raises(UserError, match=r"^a judge cannot be confined \(.*leave no thread running"):
            pool.check()
    finally:
        pool.close()


def test_the_key_is_for_functions_and_needs_a_mechanism(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = RewardSettings(workers=1)
    with pytest.raises(UserError, match="confined is for reward = 'FILE.py:FUNCTION', and the source has math"):
        RewardPool(settings, {"s": SourceSettings(kind="jsonl", reward="math", confined=True)})

    def none_holds(wanted: str) -> str:
        raise NoIsolation("landlock: this kernel has none")

    monkeypatch.setattr("quads.rl.rewards.isolation.find_isolation", none_holds)
    pool = pool_of("auto", "score", confined=True)
    with pytest.raises(UserError, match=r"cannot be isolated here \(landlock: this kernel has none\)"):
        pool.check()
    pool.close()
