"""Answers that attack the scorer of their data set: none leaves a file or a process, or changes the next verdict.

What a scorer of reasoning-gym evaluates runs in a confined fork. Every data set is attacked, some inside `composite`.
Two walls are tested apart: the forks, with scorers that run what they are given (unguarded_scorers.py), and what `task`
makes of those scorers, which runs nothing.
"""

import dataclasses
import os
import time
from pathlib import Path

import pytest
from reasoning_gym.factory import DATASETS

from quads.config.sections import RewardSettings, SourceSettings
from quads.data.reasoning import make_dataset
from quads.rl.rewards.pool import RewardPool
from quads.sandbox.isolation import MECHANISMS, NoIsolation, find_isolation
from quads.types import Example

KNOWN = ("countdown", "puzzle24", "simple_integration", "intermediate_integration", "polynomial_multiplication",
         "n_queens", "spiral_matrix", "binary_matrix", "string_insertion")  # fmt: skip


def characters(text: str) -> str:
    """Python for a text, without a quote, dot or bracket."""
    return "+".join(f"chr({ord(character)})" for character in text)


def payloads(mark: Path, pid: int) -> list[str]:
    """Each tries to make the file, to kill the trainer, to leave a process, and to make all later verdicts 1."""
    touch = f"open({str(mark)!r},'w').write('x')"
    system = f"__import__('os').system('touch {mark}')"
    patch = "[setattr(__import__('sys').modules['quads.rl.rewards.task'],'score',lambda *a:1.0),0][1]"
    stay = "__import__('os').fork() or __import__('time').sleep(60)"
    hidden = f"getattr(__import__({characters('os')}),{characters('system')})({characters(f'touch {mark}')})"
    kill = f"__import__('os').kill({pid},9) or __import__('os').kill(__import__('os').getppid(),9)"
    reply = "[__import__('os').write(fd,b'x'*999) for fd in range(3,64)]"
    found = [touch, system, patch, stay, hidden, kill, reply, f"eval({characters(system)})", f"exec({touch!r})"]
    return found + [f"[{attack}]" for attack in (system, hidden)] + [f"<answer>{hidden}</answer>"]


@pytest.fixture(params=MECHANISMS)
def mechanism(request: pytest.FixtureRequest) -> str:
    try:
        return find_isolation(request.param)
    except NoIsolation as reason:
        pytest.skip(str(reason))


@pytest.fixture
def unguarded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Judges of `task` whose scorers are as they come."""
    monkeypatch.setattr("quads.rl.rewards.task.__name__", "tests.integration.unguarded_scorers")


def attack(mechanism: str, name: str, mark: Path, inside: str = "", most: float = 1.0) -> None:
    """most: what an attack may be worth."""
    params = {"datasets": [{"name": inside, "weight": 1.0}]} if inside else {}
    try:
        entry = make_dataset("test", name, params, seed=5, size=4)[0]
    except (ImportError, OSError) as error:
        pytest.skip(str(error))
    source = SourceSettings(kind="reasoning_gym", dataset=name, params=params)
    settings = dataclasses.replace(RewardSettings(workers=1, judge_time_s=10.0), sandbox=mechanism)
    pool = RewardPool(settings, {"s": source})
    try:
        example = Example("0", "s", "", [], entry)
        answer = entry["answer"] or next(iter(entry["metadata"].get("valid_answers") or ["0"]))
        before = pool.submit(example, answer).result()
        wrong = pool.submit(example, "no answer at all").result()
        assert not before.failed and not wrong.failed, (before, wrong)
        for text in payloads(mark, os.getpid()):
            verdict = pool.submit(example, text).result()
            assert 0.0 <= verdict.reward <= most, (name, text)
            assert not mark.exists(), (name, text)
            assert pool.submit(example, "no answer at all").result().reward == wrong.reward, (name, text)
        assert pool.submit(example, answer).result().reward == before.reward
        (judge,) = [h._process.pid for p in pool._processes._judges.values() for h in p._pool._helpers if h._process]
        assert _wait_for(lambda: descendants(judge) == (mechanism == "namespaces"))  # process 1 of its namespace
    finally:
        pool.close()


def descendants(pid: int) -> int:
    children = [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return len(children) + sum(map(descendants, children))


def _wait_for(condition) -> bool:
    deadline = time.monotonic() + 5
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


@pytest.mark.usefixtures("unguarded")
@pytest.mark.parametrize("name", KNOWN)
def test_scorers_that_evaluate_answers(mechanism: str, name: str, tmp_path: Path) -> None:
    attack(mechanism, name, tmp_path / "mark")


@pytest.mark.parametrize("name", KNOWN)
def test_an_attack_is_worth_no_more_than_nonsense(name: str, tmp_path: Path) -> None:
    """Not even without confinement: nothing of it is run."""
    attack("none", name, tmp_path / "mark", most=0.1)  # what a scorer gives for any answer


@pytest.mark.usefixtures("unguarded")
@pytest.mark.parametrize("inside", ["countdown", "n_queens"])
def test_scorers_inside_a_composite(mechanism: str, inside: str, tmp_path: Path) -> None:
    attack(mechanism, "composite", tmp_path / "mark", inside)


@pytest.mark.slow
@pytest.mark.usefixtures("unguarded")
@pytest.mark.parametrize("name", sorted(set(DATASETS) - {"composite"}))
def test_every_scorer(mechanism: str, name: str, tmp_path: Path) -> None:
    attack(mechanism, name, tmp_path / "mark")


@pytest.mark.usefixtures("unguarded")
def test_the_attack_works_without_confinement(tmp_path: Path) -> None:
    """Else nothing is shown: a judge that is not confined makes the file."""
    with pytest.raises(AssertionError, match="countdown"):
        attack("none", "countdown", tmp_path / "mark")
