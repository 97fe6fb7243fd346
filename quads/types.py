"""What travels between tasks, engines and the learner. Plain data: no methods that do work."""

from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """How a response is drawn. Log-probs are always those of `softmax(logits / temperature)`: no truncation.

    Example: `Sampling(max_new_tokens=16, temperature=1.0, stop_token_ids=(2,))`
    """

    max_new_tokens: int
    temperature: float = 1.0
    stop_token_ids: tuple[int, ...] = ()


@dataclass
class Completion:
    """One sampled response.

    Example: `Completion([17, 9, 2], [-0.1, -0.7, -0.01], "stop", policy_version=3)`
    """

    token_ids: list[int]  # [N], the stop token included when finish_reason is "stop"
    logprobs: list[float]  # [N], natural log, of the distribution the token was drawn from
    finish_reason: Literal["stop", "length"]
    policy_version: int  # the weights that drew it
    routed_experts: Tensor | None = None  # int16 [len(prompt) + N - 1, num_layers, top_k]


@dataclass
class Example:
    """One row of a task: a prompt with what its scorer needs.

    Example: `Example("chain_sum/17", "chain_sum", "3 + 4 =", [5, 9], answer="7")`
    """

    id: str
    source: str  # the [sources.NAME] it came from
    prompt: str | list[dict[str, str]]  # text, or chat messages
    prompt_ids: list[int]
    answer: Any = None
    meta: dict[str, Any] = field(default_factory=dict)
