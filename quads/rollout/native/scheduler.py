"""Continuous batching: who waits, who decodes in which slot, and what each response became.

Busy slots are the first ones of the KV cache: decoding then works on a prefix of it, without gathering. When responses
finish, waiting ones take their slots; if none waits, the last busy slots move down into the holes.

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

    Example: `Waiting(2, 3).take(4, 8)` -> `[0, 1, 2]`: requests 3 4 5, of the second prompt, do not fit into 4 slots.
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
    """What the host knows of each slot; slots 0 .. size-1 are busy, but for the holes among them.

    `request` is -1 in a free slot, `position` the number of cached tokens, `left` how many tokens may still be drawn,
    all int64 on the CPU. The host learns late that a response has stopped, so some of its slots may be dead already on
    the device; a position is then too high by the steps that it has not heard of.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.size = 0
        self.holes: list[int] = []  # slots below `size` whose response has finished
        self.request = torch.full((num_slots,), -1)
        self.position, self.left = torch.zeros(2, num_slots, dtype=torch.int64)
        self.slot_of: dict[int, int] = {}

    @property
    def num_busy(self) -> int:
        """Slots whose response goes on, as far as the host knows."""
        return self.size - len(self.holes)

    @property
    def num_free(self) -> int:
        """Slots for new requests, holes included."""
        return self.num_slots - self.num_busy

    def longest(self) -> int:
        """Tokens of the longest sequence once the next token is cached."""
        return int(self.position[: self.size][self.request[: self.size] >= 0].max()) + 1

    def reserve(self, requests: list[int], lengths: list[int], max_new_tokens: int) -> list[int]:
        """Slots for new requests whose prompts have these lengths: holes first, then behind the busy ones."""
        slots, self.holes = self.holes[: len(requests)], self.holes[len(requests) :]
        behind = len(requests) - len(slots)
        slots += range(self.size, self.size + behind)
        self.size += behind
        self.request[slots] = torch.tensor(requests)
        self.position[slots] = torch.tensor(lengths)
        self.left[slots] = max_new_tokens
        self.slot_of |= dict(zip(requests, slots, strict=True))
        return slots

    def release(self, requests: list[int]) -> None:
        """These have finished; those whose slots were released before are passed over."""
        slots = [self.slot_of.pop(request) for request in requests if request in self.slot_of]
        self.request[slots] = -1
        self.holes += slots

    def fed(self) -> None:
        """A step was launched for all busy slots: each caches a token. Its draw is counted by `drew`."""
        self.position[: self.size] += self.request[: self.size] >= 0

    def drew(self, requests: list[int]) -> None:
        """One token was drawn, or will be by what was launched, for each of these; full ones leave."""
        slots = [self.slot_of[request] for request in requests]
        self.left[slots] -= 1
        self.release([request for request, left in zip(requests, self.left[slots].tolist(), strict=True) if left <= 0])

    def compact(self) -> tuple[list[int], list[int]]:
        """Fills the holes from the end. Returns (source slots, target slots) whose contents must follow."""
        busy = self.num_busy
        gone = set(self.holes)
        sources = [slot for slot in range(busy, self.size) if slot not in gone]
        targets = [slot for slot in self.holes if slot < busy]
        self.size, self.holes = busy, []
        if sources:
            for state in (self.request, self.position, self.left):
                state[targets] = state[sources]
            self.slot_of |= dict(zip(self.request[targets].tolist(), targets, strict=True))
        self.request[busy:] = -1
        return sources, targets


@dataclass
class SampleLog:
    """Every token drawn, in time order (no work for each token in Python), until its group is complete and leaves.

    `add` takes what a step drew as soon as it has reached the host, and says who has finished. What a response draws
    after its stop token is ignored.
    """

    total: int  # requests
    max_new_tokens: int
    stops: tuple[int, ...]
    requests: list[Tensor] = field(default_factory=list)
    tokens: list[Tensor] = field(default_factory=list)
    logprobs: list[Tensor] = field(default_factory=list)
    top: tuple[list[Tensor], list[Tensor]] = field(default_factory=lambda: ([], []))  # ids, log-probs [B, k] a step
    fed_requests: list[Tensor] = field(default_factory=list)
    fed_routing: list[Tensor] = field(default_factory=list)  # [B, L, A] a step, of the tokens that were fed
    prompt_routing: dict[int, Tensor] = field(default_factory=dict)  # prompt -> [len(prompt), L, A]
    left: Tensor = field(init=False)  # int64 [total], tokens that may still come; 0 for who has finished

    def __post_init__(self) -> None:
        self.left = torch.full((self.total,), self.max_new_tokens)
        self._stops = torch.tensor(self.stops, dtype=torch.int64)

    def add(
        self,
        requests_B: Tensor,
        results_2B: Tensor,
        routing_BLA: Tensor | None = None,
        top: Sequence[Tensor] = (),
    ) -> list[int]:
        """Take down a step; returns the requests that finished in it.

        requests_B: int64, -1 in dead rows. results_2B: float64, tokens and log-probs. routing_BLA: of the fed tokens.
        top: ids and log-probs [B, k] of the most likely tokens, where they are asked for.
        """
        counts_B = (requests_B >= 0) & (self.left[requests_B] > 0)
        requests = requests_B[counts_B]
        tokens = results_2B[0, counts_B].to(torch.int64)
        self.requests.append(requests)
        self.tokens.append(tokens)
        self.logprobs.append(results_2B[1, counts_B])
        for log, part_Bk in zip(self.top, top, strict=False):
            log.append(part_Bk[counts_B])
        if routing_BLA is not None:
            self.fed_requests.append(torch.where(counts_B, requests_B, -1))
            self.fed_routing.append(routing_BLA)
        self.left[requests] = torch.where(torch.isin(tokens, self._stops), 0, self.left[requests] - 1)
        return requests[self.left[requests] == 0].tolist()

    def take(self, prompt: int, n: int, sampling: Sampling, policy_version: int) -> list[Completion]:
        """Remove the n complete responses to a prompt and return them."""
        asked = [log for log in self.top if log]
        tokens, logprobs, *top = _take_group(prompt, n, self.requests, self.tokens, self.logprobs, *asked)
        routing: Sequence[Tensor | None] = [None] * n
        if prompt in self.prompt_routing:
            routing = self._take_routing(prompt, n)
        stops = set(sampling.stop_token_ids)
        group = []
        for i, (ids, values, routed) in enumerate(zip(tokens, logprobs, routing, strict=True)):
            token_ids = ids.tolist()
            reason = "stop" if token_ids[-1] in stops else "length"
            best = [of_each[i].clone() for of_each in top]  # a view would travel between processes with its group
            group.append(Completion(token_ids, values.tolist(), reason, policy_version, routed, *best))
        return group

    def _take_routing(self, prompt: int, n: int) -> list[Tensor]:
        """Expert choices of each response: at its prompt's tokens, then at all of its own but the last."""
        of_prompt = self.prompt_routing.pop(prompt).cpu()
        if not self.fed_requests:  # every response so far is one token long
            return [of_prompt] * n
        (fed,) = _take_group(prompt, n, self.fed_requests, self.fed_routing)
        return [torch.cat([of_prompt, part]) for part in fed]


def _take_group(prompt: int, n: int, requests: list[Tensor], *logs: list[Tensor]) -> list[Sequence[Tensor]]:
    """Cut the entries of requests prompt * n .. prompt * n + n - 1 out of logs in time order -> of each log, n tensors
    on the CPU. What stays is one entry a log, without those of dead rows (-1)."""
    everything = torch.cat(requests)
    mine = everything // n == prompt
    others = ~mine & (everything >= 0)
    requests[:] = [everything[others]]
    local = everything[mine] - prompt * n
    order = local.argsort(stable=True)
    counts = local.bincount(minlength=n).tolist()
    taken = []
    for log in logs:
        values = torch.cat(log)
        log[:] = [values[others]]
        taken.append(values[mine].cpu()[order].split(counts))
    return taken
