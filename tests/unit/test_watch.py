"""Who is waited for is named: a process that has stopped, one that stays behind, and by whom."""

import time
from collections.abc import Callable
from datetime import timedelta

from torch.distributed import TCPStore

from quads.watch import Watch
from tests.helpers import free_port

PATIENCE_S = 0.6


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def watches(size: int) -> tuple[list[Watch], list[list[str]], TCPStore]:
    port = free_port()
    server = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30))
    said: list[list[str]] = [[] for _ in range(size)]
    stores = [TCPStore("127.0.0.1", port, wait_for_workers=False) for _ in range(size)]
    return [Watch(store, r, size, PATIENCE_S, said[r].append) for r, store in enumerate(stores)], said, server


def test_nobody_is_named_while_all_go_on_together() -> None:
    all_of_them, said, _server = watches(3)
    for _ in range(8):
        for watch in all_of_them:
            watch.at("rollout")
        time.sleep(PATIENCE_S / 4)
    for watch in all_of_them:
        watch.close()
    assert said == [[], [], []]


def test_who_stays_behind_is_named_with_the_phase_and_then_ever_less_often() -> None:
    (zero, one, two), said, _server = watches(3)
    for watch in (zero, one, two):
        watch.at("rollout")
    for watch in (zero, two):
        watch.at("a barrier")
    until(lambda: len(said[0]) >= 2)
    assert said[0][0].startswith("waiting for rank 1, which is still in 'rollout' for ")
    assert said[1:] == [[], []] and len(said[0]) == 2
    one.at("a barrier")
    time.sleep(4 * PATIENCE_S)
    for watch in (zero, one, two):
        watch.close()
    assert len(said[0]) <= 3  # it has come: nothing more to say, but for a report that was on its way


def test_who_has_stopped_is_named_by_the_first_that_has_not() -> None:
    (zero, one, two), said, _server = watches(3)
    for watch in (zero, one, two):
        watch.at("learn")
    time.sleep(PATIENCE_S / 2)
    zero.close()  # as SIGSTOP or a lost machine would have it
    until(lambda: bool(said[1]))
    assert said[1][0].startswith("waiting for rank 0, which has not answered for ")
    assert said[1][0].endswith(" s, last in 'learn'")
    one.close()
    two.close()
    assert said[0] == [] and said[2] == []
