"""Rewards of responses, computed in other processes: a pool that takes them one by one (grading.py has a batch).

`exact` compares text here; judges (judges.py) and sandboxes (sandbox/pool.py) do the rest. What cannot be judged in
time has no verdict.
"""

import functools
import importlib
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import fields
from typing import Any

from quads.config.sections import REWARDS, RewardSettings, SourceSettings
from quads.config.sources import reward_name, weighted_rewards
from quads.errors import UserError
from quads.rl.rewards.function import Function
from quads.rl.rewards.isolation import isolation, program_limits
from quads.rl.rewards.judges import Judge, JudgePool
from quads.rl.rewards.reward import Graders, Reward
from quads.rl.rewards.weighted import Weighted
from quads.sandbox.pool import Sandbox
from quads.types import Example, Verdict


class RewardPool:
    """The rewards of a run's sources, and the processes they judge in. `close` ends those.

    Processes start with the first response that needs them.

    Raises:
        UserError: a reward does not suit its source.

    Example: `RewardPool(settings, {"sums": source}).submit(example, "The answer is 7.").result().reward` -> 1.0
    """

    def __init__(self, settings: RewardSettings, sources: Mapping[str, SourceSettings]):
        self._processes = _Processes(settings)
        self.rewards: dict[str, Reward] = {
            name: make_reward(f"[sources.{name}]", source, self._processes) for name, source in sources.items()
        }

    def check(self) -> str:
        """Find out now, not after the first rollout, what may not work here -> the mechanism that isolates generated
        programs and judged answers, "" if no source has any.

        Raises:
            UserError: a function of the user cannot be used, or programs and answers cannot be isolated.
        """
        return self._processes.check()

    def submit(self, example: Example, text: str) -> "Future[Verdict]":
        """Start scoring one response."""
        return self.rewards[example.source].submit(example, example.answer, text)

    def close(self) -> None:
        """Kill the processes and what runs in them."""
        self._processes.close()


def make_reward(where: str, settings: SourceSettings, graders: Graders) -> Reward:
    """The reward of a source; of several in its list their weighted sum.

    Raises:
        UserError: settings that do not suit it, among them keys of rewards that the source does not have.
    """
    members = []
    for weighted in weighted_rewards(settings):
        reward = reward_class(weighted.reward)(where, weighted.reward, settings, graders)
        if "" in reward.columns:
            raise UserError(f"{where} answer_column is empty; reward {weighted.reward!r} needs the answer")
        members.append((reward_name(weighted.reward), weighted.weight, reward))
    used = {key for _, _, reward in members for key in reward.keys}
    defaults = {field.name: field.default for field in fields(SourceSettings)}
    for word in (*REWARDS, "FILE.py:FUNCTION"):
        for key in reward_class(word).keys:
            if key not in used and getattr(settings, key) != defaults[key]:
                names = ", ".join(name for name, _, _ in members)
                raise UserError(f"{where} {key} is for reward = {word!r}, and the source has {names}; remove it")
    return Weighted(members) if settings.rewards else members[0][2]


def reward_class(word: str) -> type[Reward]:
    """`math` -> the class Math of the file math.py; FILE.py:FUNCTION -> Function."""
    if word not in REWARDS:
        return Function
    return getattr(importlib.import_module(f"quads.rl.rewards.{word}"), word.capitalize())


class _Processes:
    """`Graders`: a pool of judges for each module, and one of sandboxes."""

    def __init__(self, settings: RewardSettings):
        self.settings = settings
        self.programs = False  # whether any reward runs generated programs
        self._judges: dict[tuple[str, bool], JudgePool] = {}
        self._sandbox: Sandbox | None = None

    def judge(self, module: str, maker: str, *setup: Any, confined: bool = True) -> Judge:
        key, s = (module, confined), self.settings
        if key not in self._judges:
            self._judges[key] = JudgePool(module, s.workers, s.judge_time_s, confined, lambda: self.mechanism)
        return self._judges[key].add(maker, *setup)

    def need_sandbox(self) -> None:
        self.programs = True

    @functools.cached_property
    def mechanism(self) -> str:
        return isolation(self.settings.sandbox)

    @property
    def sandbox(self) -> Sandbox:
        if self._sandbox is None:
            s = self.settings
            self._sandbox = Sandbox(self.mechanism, program_limits(s), s.code_total_s, s.workers)
        return self._sandbox

    def check(self) -> str:
        mechanism = self.mechanism if self.programs or any(confined for _, confined in self._judges) else ""
        for (module, _), pool in self._judges.items():
            if module == Function.__module__:
                pool.start()
        return mechanism

    def close(self) -> None:
        for pool in (*self._judges.values(), self._sandbox):
            if pool:
                pool.close()
