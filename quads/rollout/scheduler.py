"""Continuous batching: who waits, who decodes in which slot, and what each response became.

Slots 0 .. size-1 are busy and the rest is free: decoding then works on a dense prefix of the KV cache, without
gathering. When responses finish, waiting ones take their slots; if none waits, the last busy slots move down into the
holes.

Requests are numbered prompt * n + j. They start in that order, a prompt's n responses together so that they share its
prefill; only a group larger than all slots is split.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from quads.types import Completion, Sampling


class Waiting:
    """The requests that have not started, in order.

    Example: `Waiting(2, 3)` holds requests 0 1 2 (prompt 0) and 3 4 5 (prompt 1); `take(4)` gives the first group only.
    """

    def __init__(self, num_prompts: int, n: int) -> None:
        self.n = n
        self.total = num_prompts * n
        self.next = 0  # the first request that has not started

    def __len__(self) -> int:
        return self.total - self.next

    def split_group(self) -> int:
        """Responses still waiting of a prompt some of whose responses have started; 0 if there is none."""
        return -self.next % self.n

    def take(self, num_slots: int, all_slots: int) -> list[int]:
        """Requests to start in `num_slots` free slots: whole groups, or part of one that is larger than `all_slots`."""
        if left := self.split_group():
            count = min(left, num_slots)
        else:
            count = num_slots // self.n * self.n if self.n <= all_slots else min(num_slots, self.n)
        count = min(count, len(self))
        self.next += count
        return list(range(self.next - count, self.next))


class Groups:
    """How many responses each prompt still lacks."""

    def __init__(self, num_prompts: int, n: int) -> None:
        self.n = n
        self.missing = [n] * num_prompts

    def completed_by(self, finished: list[int]) -> list[int]:
        """Prompts whose last response is among these requests."""
        complete = []
        for request in finished:
            prompt = request // self.n
            self.missing[prompt] -= 1
            if self.missing[prompt] == 0:
                complete.append(prompt)
        return complete


class Batch:
    """The state of each slot, on the device of the model; slots 0 .. size-1 are busy.

    `token` is the last token drawn (not yet in the cache), `position` the number of cached tokens, `drawn` the number
    of tokens drawn so far, all int64.
    """

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self.num_slots = num_slots
        self.size = 0
        self.holes: list[int] = []  # slots below `size` whose response has finished
        self.finished: list[int] = []  # requests that have, since they were last taken
        self.request, self.token, self.position, self.drawn = torch.zeros(
            4, num_slots, dtype=torch.int64, device=device
        )

    @property
    def num_free(self) -> int:
        return self.num_slots - self.size + len(self.holes)

    def finish(self, slots: list[int]) -> None:
        """The responses in these slots are complete."""
        if slots:
            self.holes += slots
            self.finished += self.request[slots].tolist()

    def take_finished(self) -> list[int]:
        """Requests that have finished since the last call."""
        finished, self.finished = self.finished, []
        return finished

    def reserve(self, count: int) -> list[int]:
        """Slots for `count` new requests: holes first, then behind the busy ones."""
        slots, self.holes = self.holes[:count], self.holes[count:]
        behind = count - len(slots)
        slots += range(self.size, self.size + behind)
        self.size += behind
        return slots

    def compact(self) -> tuple[list[int], list[int]]:
        """Fills the holes from the end. Returns (source slots, target slots) whose cache contents must follow."""
        busy = self.size - len(self.holes)
        gone = set(self.holes)
        sources = [slot for slot in range(busy, self.size) if slot not in gone]
        targets = [slot for slot in self.holes if slot < busy]
        self.size, self.holes = busy, []
        if sources:
            for state in (self.request, self.token, self.position, self.drawn):
                state[targets] = state[sources]
        return sources, targets


@dataclass
class SampleLog:
    """Every token drawn, in time order (no work for each token in Python), until its group is complete and leaves.

    Each entry is one step's [B] tensors (routing: [B, L, A], of the token that was fed to draw the next one).
    """

    requests: list[Tensor] = field(default_factory=list)
    tokens: list[Tensor] = field(default_factory=list)
    logprobs: list[Tensor] = field(default_factory=list)
    fed_requests: list[Tensor] = field(default_factory=list)
    fed_routing: list[Tensor] = field(default_factory=list)
    prompt_routing: dict[int, Tensor] = field(default_factory=dict)  # prompt -> [len(prompt), L, A]

    def add(self, requests_B: Tensor, tokens_B: Tensor, logprobs_B: Tensor) -> None:
        self.requests.append(requests_B)
        self.tokens.append(tokens_B)
        self.logprobs.append(logprobs_B)

    def take(self, prompt: int, n: int, sampling: Sampling, policy_version: int) -> list[Completion]:
        """Remove the n complete responses to a prompt and return them."""
        tokens, logprobs = _take_group(prompt, n, self.requests, self.tokens, self.logprobs)
        routing: Sequence[Tensor | None] = [None] * n
        if prompt in self.prompt_routing:
            routing = self._take_routing(prompt, n)
        stops = set(sampling.stop_token_ids)
        group = []
        for ids, values, routed in zip(tokens, logprobs, routing, strict=True):
            token_ids = ids.tolist()
            reason = "stop" if token_ids[-1] in stops else "length"
            group.append(Completion(token_ids, values.tolist(), reason, policy_version, routed))
        return group

    def _take_routing(self, prompt: int, n: int) -> list[Tensor]:
        """Of each response: its prompt's tokens, then all of its own but the last, which was never fed."""
        of_prompt = self.prompt_routing.pop(prompt).cpu()
        if not self.fed_requests:  # every response so far is one token long
            return [of_prompt] * n
        (fed,) = _take_group(prompt, n, self.fed_requests, self.fed_routing)
        return [torch.cat([of_prompt, part]) for part in fed]


def _take_group(prompt: int, n: int, requests: list[Tensor], *logs: list[Tensor]) -> list[Sequence[Tensor]]:
    """Cut the entries of requests prompt * n .. prompt * n + n - 1 out of logs in time order -> of each log, n tensors
    on the CPU. What stays is one entry a log."""
    everything = torch.cat(requests)
    mine = everything // n == prompt
    requests[:] = [everything[~mine]]
    local = everything[mine].cpu() - prompt * n
    order = local.argsort(stable=True)
    counts = local.bincount(minlength=n).tolist()
    taken = []
    for log in logs:
        values = torch.cat(log)
        log[:] = [values[~mine]]
        taken.append(values[mine].cpu()[order].split(counts))
    return taken
