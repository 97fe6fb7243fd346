"""Decoding one token for each slot of a batch: the state of the slots on the device, and CUDA graphs of the step.

    rows, window = decoder.rows(busy), decoder.window(longest)     rounded up to a few sizes on a GPU
    drawn = decoder.step(rows, window)                             tokens and log-probs; nothing waits for the device

A step reads and writes tensors that never move and makes no decision on the host, so it can be captured: the host
launches one graph in place of some thousand kernels. The first step of a size runs eagerly (which compiles and tunes
its kernels), the next one captures, the others replay. With graphs switched off the same sizes run eagerly, so
responses are the same bit for bit. On a CPU sizes are exact.

Rows that do not decode (a free slot, a response that has just ended) are dead: they are computed, but take no part in
what rows share (channel scores, expert slots), and their state stays.

Shapes: S slots, B rows of a step, V vocabulary, L layers, A experts a token.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from quads.model.attention import DecodeContext, KVCache, routing
from quads.model.model import MoEDecoder
from quads.rollout.native.kv_cache import move_slots
from quads.rollout.sampling import draw, most_likely, uniforms
from quads.types import Sampling

SMALLEST_WINDOW = 64


class Size(NamedTuple):
    """What a graph is captured for."""

    rows: int
    window: int
    greedy: bool
    record_routing: bool
    top: int  # log-probs that are returned beside the drawn one's


def rounded(size: int, smallest: int, largest: int) -> int:
    """`size` rounded up to 1, 2, 3, 4, 6, 8, 12, 16, ... times `smallest`, at most `largest`.

    Example: `rounded(70, 64, 1000)` -> `128`, `rounded(130, 64, 1000)` 192, `rounded(900, 64, 1000)` 1000.
    """
    step = smallest
    while step < size:
        if step > smallest and size <= step // 2 * 3:
            step = step // 2 * 3
        else:
            step *= 2
    return min(step, largest)


class Decoder:
    """The slots of a KV cache and the step that decodes them. Valid for this cache; a new cache needs a new decoder."""

    def __init__(self, model: MoEDecoder, cache: KVCache, graphs: bool, warm: set[Size]) -> None:
        """
        Args:
            graphs: capture steps (a CUDA device).
            warm: sizes whose kernels are compiled, kept by the caller over several decoders.
        """
        self.model, self.cache, self.graphs, self.warm = model, cache, graphs, warm
        device, slots, config = cache.k.device, cache.num_slots, model.config
        self.token, self.position, self.drawn, self.seed = torch.zeros(4, slots, dtype=torch.int64, device=device)
        self.live = torch.zeros(slots, dtype=torch.bool, device=device)
        self.temperature = torch.ones((), dtype=torch.float64, device=device)
        self.max_new_tokens = torch.zeros((), dtype=torch.int64, device=device)
        self.is_stop_V = torch.zeros(config.vocab_size, dtype=torch.bool, device=device)
        self.results_2S = torch.zeros(2, slots, dtype=torch.float64, device=device)
        self.routing_SLA = torch.zeros(slots, config.num_layers, config.top_k, dtype=torch.int16, device=device)
        self.greedy = False
        self._tops: dict[int, tuple[Tensor, Tensor]] = {}  # by k; graphs point into them
        self.top_Sk: tuple[Tensor, Tensor] | None = None  # ids int32 and log-probs fp32 of `Sampling.top_logprobs`
        self.exact = device.type == "cpu"  # no rounding of sizes
        self._captured: dict[Size, torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle() if graphs else None

    def begin(self, sampling: Sampling) -> None:
        """Take the settings of a call of generate; all slots are free."""
        self.live.zero_()
        self.greedy = sampling.temperature == 0.0
        self.top_Sk = self._top_buffers(sampling.top_logprobs) if sampling.top_logprobs else None
        self.temperature.fill_(sampling.temperature)
        self.max_new_tokens.fill_(sampling.max_new_tokens)
        self.is_stop_V.zero_()
        self.is_stop_V[torch.tensor(sampling.stop_token_ids, dtype=torch.int64, device=self.live.device)] = True

    def _top_buffers(self, k: int) -> tuple[Tensor, Tensor]:
        if k not in self._tops:
            ids_Sk = torch.zeros(self.cache.num_slots, k, dtype=torch.int32, device=self.live.device)
            self._tops[k] = ids_Sk, torch.zeros_like(ids_Sk, dtype=torch.float32)
        return self._tops[k]

    def rows(self, busy: int) -> int:
        """How many rows a step of `busy` slots computes."""
        return busy if self.exact else rounded(busy, 1, self.cache.num_slots)

    def window(self, longest: int) -> int:
        """How many cells it attends to, of sequences of up to `longest` tokens."""
        return longest if self.exact else rounded(longest, SMALLEST_WINDOW, self.cache.max_len)

    def start(self, slots: list[int], lengths: list[int], seeds_B: Tensor, logits_BV: Tensor) -> Tensor:
        """Slots whose prompts of these lengths are cached: draw their first tokens. Returns float64 [2, B], as
        `step`."""
        device = self.live.device
        where, seeds_B = torch.tensor(slots, device=device), seeds_B.to(device)
        counters_B = torch.zeros_like(seeds_B)
        tokens_B, logprobs_B = self._draw(logits_BV, seeds_B, counters_B)
        self.token[where], self.seed[where] = tokens_B, seeds_B
        self.position[where] = torch.tensor(lengths, device=device)
        self.drawn[where] = counters_B + 1
        self.live[where] = self._goes_on(tokens_B, counters_B + 1)
        return torch.stack([tokens_B.to(torch.float64), logprobs_B])

    def move(self, sources: list[int], targets: list[int], length: int) -> None:
        """The responses of some slots, of up to `length` cells, move to others."""
        source, target = (torch.tensor(slots, device=self.live.device) for slots in (sources, targets))
        for state in (self.token, self.position, self.drawn, self.seed, self.live):
            state[target] = state[source]
        self.live[source] = False
        move_slots(self.cache, source, target, length)

    def step(self, rows: int, window: int, record_routing: bool = False) -> Tensor:
        """One more token for the live ones of the first `rows` slots. `window` is above all their positions.

        Returns float64 [2, rows], tokens and log-probs (of dead rows: anything), overwritten by the next step. With
        `record_routing`, `routing_SLA[:rows]` are the experts of the tokens that were fed; with top log-probs, the
        rows of `top_Sk` are theirs.
        """
        size = Size(rows, window, self.greedy, record_routing, self.top_Sk[0].shape[1] if self.top_Sk else 0)
        if not self.graphs or size not in self.warm:
            self._step(size)
            self.warm.add(size)
        else:
            if size not in self._captured:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                    self._step(size)
                self._captured[size] = graph
            self._captured[size].replay()
        return self.results_2S[:, :rows]

    def _step(self, size: Size) -> None:
        token, position, drawn, seed, live = (
            state[: size.rows] for state in (self.token, self.position, self.drawn, self.seed, self.live)
        )
        context = DecodeContext(self.cache, position, size.window, live, record_routing=size.record_routing)
        hidden_BH = self.model(token, context)
        logits_BV = self.model.logits(hidden_BH)
        tokens_B, logprobs_B = self._draw(logits_BV, seed, drawn)
        if size.top:
            for kept_Sk, now_Bk in zip(self._tops[size.top], self.most_likely(logits_BV, size.top), strict=True):
                kept_Sk[: size.rows] = now_Bk
        self.results_2S[0, : size.rows] = tokens_B
        self.results_2S[1, : size.rows] = logprobs_B
        if size.record_routing:
            self.routing_SLA[: size.rows] = routing(context)
        token.copy_(torch.where(live, tokens_B, token))
        position += live
        drawn += live
        live &= self._goes_on(tokens_B, drawn)

    def _draw(self, logits_BV: Tensor, seeds_B: Tensor, counters_B: Tensor) -> tuple[Tensor, Tensor]:
        return draw(logits_BV, 0.0 if self.greedy else self.temperature, uniforms(seeds_B, counters_B))

    def most_likely(self, logits_BV: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """See `sampling.most_likely`; at the temperature of this call of generate."""
        return most_likely(logits_BV, self.temperature, k)

    def _goes_on(self, tokens_B: Tensor, drawn_B: Tensor) -> Tensor:
        return ~self.is_stop_V[tokens_B] & (drawn_B < self.max_new_tokens)
