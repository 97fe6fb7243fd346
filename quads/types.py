"""What travels between tasks, engines and the learner. Plain data: no methods that do work."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:  # the judges' processes read this file, and import no torch
    from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """How a response is drawn. Log-probs are always those of `softmax(logits / temperature)`: no truncation.

    Example: `Sampling(max_new_tokens=16, temperature=1.0, stop_token_ids=(2,))`
    """

    max_new_tokens: int
    temperature: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    top_logprobs: int = 0  # also return the log-probs of this many most likely tokens of each position


@dataclass
class Completion:
    """One sampled response.

    Example: `Completion([17, 9, 2], [-0.1, -0.7, -0.01], "stop", policy_version=3)`
    """

    token_ids: list[int]  # [N], the stop token included when finish_reason is "stop"
    logprobs: list[float]  # [N], natural log, of the distribution the token was drawn from
    finish_reason: Literal["stop", "length"]
    policy_version: int  # the weights that drew it
    routed_experts: "Tensor | None" = None  # int16 [len(prompt) + N - 1, num_layers, top_k]
    top_ids: "Tensor | None" = None  # int32 [N, k], the k most likely tokens of each position, best first
    top_logprobs: "Tensor | None" = None  # fp32 [N, k], theirs, of the distribution the token was drawn from


@dataclass
class Example:
    """One row of a task: a prompt with what its scorer needs.

    Example: `Example("chain_sum/17", "chain_sum", "3 + 4 =", [5, 9], answer="7")`
    """

    id: str
    source: str  # the [sources.NAME] it came from
    prompt: str | list[dict[str, str]]  # text, or chat messages
    prompt_ids: list[int]
    answer: Any = None  # what the reward of its source has read from the row


@dataclass(frozen=True)
class Verdict:
    """How good a response is, and how long it took to find out (waiting for a free grader left out).

    Example: `Verdict(0.7, 0.01, parts={"math": 1.0, "short": -0.5}).correctness` -> 1.0
    """

    reward: float
    seconds: float
    failed: bool = False  # the grader ran out of time or died, and gave no verdict
    parts: dict[str, float] = field(default_factory=dict)  # of several weighted rewards: each one's own, in their order

    @property
    def correctness(self) -> float:
        """What pass@1 asks: the first of several rewards, or the only one."""
        return next(iter(self.parts.values()), self.reward)
