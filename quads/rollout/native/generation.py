"""One call of the native engine's `generate`: which requests start, which decode, and what was drawn so far.

    waiting requests -> prefill (a prompt once, for all its responses) -> first tokens
    busy slots       -> decode one token each -> finished ones leave, waiting ones take their slots

The step itself, with CUDA graphs on a GPU, is decode.py; prefill is eager.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quads.model.attention import PrefillContext, routing
from quads.rollout.native.decode import Decoder
from quads.rollout.native.kv_cache import Prefix
from quads.rollout.native.scheduler import Batch, SampleLog, Waiting
from quads.rollout.sampling import seed_tensor
from quads.types import Sampling

PREFILL_TOKENS = 16384  # prompt tokens of one forward pass: bounds the memory of activations


@dataclass
class Launched:
    """What the device is drawing, on its way to the host."""

    requests: Tensor  # int64 [B] on the CPU, -1 in dead rows
    results: Tensor  # float64 [2, B], tokens and log-probs; pinned memory on a GPU
    routing: Tensor | None  # int16 [B, L, A] on the device
    top: list[Tensor]  # nothing, or ids and log-probs [B, k] of the most likely tokens; where `results` are
    arrived: torch.cuda.Event | None

    @classmethod
    def copy(
        cls, requests: Tensor, results: Tensor, routing: Tensor | None = None, top: Sequence[Tensor] = ()
    ) -> "Launched":
        """Start copying `results` and `top`, which the next step overwrites, to the host."""
        if not results.is_cuda:
            return cls(requests, results.clone(), routing, [part.clone() for part in top], None)
        copied = []
        for part in (results, *top):
            copied.append(torch.empty(part.shape, dtype=part.dtype, pin_memory=True))
            copied[-1].copy_(part, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
        return cls(requests, copied[0], routing, copied[1:], arrived)


class Run:
    """One call of `generate`.

    On a GPU the host launches step t + 1 before it reads what step t drew, so the GPU never waits for it. A response
    that stops in step t is therefore computed, dead, once more.
    """

    def __init__(
        self,
        decoder: Decoder,
        prompts: list[list[int]],
        n: int,
        sampling: Sampling,
        seeds: list[int],
        record_routing: bool,
    ) -> None:
        self.decoder, self.model, self.cache = decoder, decoder.model, decoder.cache
        self.prompts, self.n, self.sampling, self.record_routing = prompts, n, sampling, record_routing
        self.device = self.cache.k.device
        self.ahead = 0 if decoder.exact else 1
        self.seeds = seed_tensor(seeds)
        self.waiting = Waiting(len(prompts), n)
        self.batch = Batch(self.cache.num_slots)
        self.log = SampleLog(len(seeds), sampling.max_new_tokens, sampling.stop_token_ids)
        self.finished: list[int] = []
        self.launched: deque[Launched] = deque()
        self.prefix: Prefix | None = None  # of a group that did not fit into the slots at once
        decoder.begin(sampling)

    def advance(self) -> list[int]:
        """Start what can start, launch a step; returns the requests that are known to have finished since."""
        self.admit()
        if self.batch.num_busy:
            self.decode()
        self.collect(self.ahead if self.batch.num_busy else 0)
        finished, self.finished = self.finished, []
        return finished

    def admit(self) -> None:
        """Start waiting requests while enough slots are free, then close the gaps.

        A slot is not filled at once: the few prompts of a small prefill cost as much as a whole decoding step, so
        admission waits for an eighth of the slots (or for room for one group, if that is more).
        """
        whole_group = self.n <= self.cache.num_slots
        worthwhile = min(max(self.n if whole_group else 1, self.cache.num_slots // 8), len(self.waiting))
        while self.waiting and self.batch.num_free >= worthwhile:
            continues = self.waiting.split_group() > 0
            requests = self.waiting.take(self.batch.num_free, self.cache.num_slots)
            if not requests:
                break
            if continues:
                self._start_from_prefix(requests)
            else:
                self._prefill(requests)
        if self.batch.num_busy and self.decoder.rows(self.batch.num_busy) < self.decoder.rows(self.batch.size):
            sources, targets = self.batch.compact()
            if sources:
                self.decoder.move(sources, targets, self.batch.longest())

    def _prefill(self, requests: list[int]) -> None:
        """Run each prompt once, for all of its requests, in forward passes of a bounded number of tokens."""
        chunk: list[int] = []
        tokens = 0
        for start in range(0, len(requests), self.n):
            group = requests[start : start + self.n]
            length = len(self.prompts[group[0] // self.n])
            if chunk and tokens + length > PREFILL_TOKENS:
                self._prefill_chunk(chunk)
                chunk, tokens = [], 0
            chunk += group
            tokens += length
        self._prefill_chunk(chunk)

    def _prefill_chunk(self, requests: list[int]) -> None:
        first = requests[0] // self.n
        prompts = self.prompts[first : requests[-1] // self.n + 1]
        lengths = [len(prompt) for prompt in prompts]
        slots = self._reserve(requests)
        sequences = [request // self.n - first for request in requests]
        context = PrefillContext.build_for_slots(lengths, slots, sequences, self.cache)
        context.record_routing = self.record_routing
        tokens = torch.tensor([token for prompt in prompts for token in prompt], device=self.device)
        hidden_TH = self.model(tokens, context)
        logits_PV = self.model.logits(hidden_TH[context.cu_seqlens[1:].to(torch.int64) - 1])
        if self.record_routing:
            self.log.prompt_routing |= dict(enumerate(routing(context).split(lengths), first))
        if self.waiting.split_group():  # only a group alone in its chunk is ever split
            self.prefix = Prefix.of_slot(self.cache, slots[0], lengths[-1], logits_PV[-1])
        self._first_tokens(requests, slots, logits_PV[torch.tensor(sequences, device=self.device)])

    def _start_from_prefix(self, requests: list[int]) -> None:
        assert self.prefix is not None
        slots = self._reserve(requests)
        self.prefix.write(self.cache, slots)
        self._first_tokens(requests, slots, self.prefix.logits.expand(len(requests), -1))

    def _lengths(self, requests: list[int]) -> list[int]:
        return [len(self.prompts[request // self.n]) for request in requests]

    def _reserve(self, requests: list[int]) -> list[int]:
        return self.batch.reserve(requests, self._lengths(requests), self.sampling.max_new_tokens)

    def _first_tokens(self, requests: list[int], slots: list[int], logits_BV: Tensor) -> None:
        results = self.decoder.start(slots, self._lengths(requests), self.seeds[requests], logits_BV)
        k = self.sampling.top_logprobs
        top = self.decoder.most_likely(logits_BV, k) if k else ()
        self.launched.append(Launched.copy(torch.tensor(requests), results, top=top))
        self.batch.drew(requests)
        self.collect(self.ahead)  # a response that ends at once should not be fed

    def decode(self) -> None:
        """One more token for every busy slot."""
        batch, decoder = self.batch, self.decoder
        requests = batch.request[: batch.size].clone()
        results = decoder.step(decoder.rows(batch.size), decoder.window(batch.longest()), self.record_routing)
        fed = decoder.routing_SLA[: batch.size].clone() if self.record_routing else None
        top = [part[: batch.size] for part in decoder.top_Sk or ()]
        self.launched.append(Launched.copy(requests, results[:, : batch.size], fed, top))
        batch.fed()
        batch.drew(requests[requests >= 0].tolist())

    def collect(self, leave: int) -> None:
        """Take down what has been drawn, all but the last `leave` launches, and release the slots of who finished."""
        while len(self.launched) > leave:
            done = self.launched.popleft()
            if done.arrived is not None:
                done.arrived.synchronize()
            finished = self.log.add(done.requests, done.results, done.routing, done.top)
            self.batch.release(finished)
            self.finished += finished
