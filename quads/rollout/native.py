"""The native engine: the learner's own model code with a KV cache, continuous batching and rollout-precision layers.

    waiting requests -> prefill (a prompt once, for all its responses) -> first tokens
    busy slots       -> decode one token each -> finished ones leave, waiting ones take their slots

It runs anywhere and is the reference for numerics. On a CPU, fp32 rollouts are independent of the batch: activations
are float64 (weights keep the values of their storage dtype), so that the order in which a matmul adds up shows at
1e-16, far below the fp32 rounding where quantizers look and the 1e-5 that is promised for log-probs. With "batch" or
"block" selection of residual channels the batch enters by definition. In bf16 the engine computes in bf16, as the
learner does.

Left out: paging of the KV cache and chunked prefill of single prompts.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from quads.config_sections import RolloutSettings
from quads.model.attention import DecodeContext, KVCache, PrefillContext, routing
from quads.model.config import ModelConfig
from quads.model.model import MoEDecoder
from quads.quant.backend import choose_kernel
from quads.quant.recipes import QuantSpec
from quads.quant.rollout import convert_rollout, load_weight, named_weights
from quads.rollout.engine import OnGroup, check_request, ignore
from quads.rollout.kv_cache import Prefix, allocate, describe, move_slots
from quads.rollout.sampling import draw, seed_tensor, uniforms
from quads.rollout.scheduler import Batch, Groups, SampleLog, Waiting
from quads.rollout.sync import checksum, load_all
from quads.types import Completion, Sampling

PREFILL_TOKENS = 16384  # prompt tokens of one forward pass: bounds the memory of activations


class NativeEngine:
    """An engine as `engine.Engine` describes it."""

    def __init__(
        self,
        model_config: ModelConfig,
        spec: QuantSpec,
        rollout: RolloutSettings,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        report: Callable[[str], Any] = print,
    ) -> None:
        """
        Args:
            spec: `spec.rollout` is the precision of the targeted layers.
            rollout: max_batch slots of max_prompt_tokens + max_new_tokens tokens each; kernel.
            dtype: bf16 or fp32, the storage of everything that is not quantized.
            report: takes the line that says how much memory the KV cache needs, before it is allocated.

        Raises:
            UserError: too little memory, or a kernel that cannot be had.
        """
        self.device = torch.device(device)
        self.policy_version = -1
        self._complete = False  # a whole set of weights has arrived
        self._config = model_config
        self._rollout = rollout
        self._max_len = rollout.max_prompt_tokens + rollout.max_new_tokens
        self.dtype = torch.float64 if self.device.type == "cpu" and dtype == torch.float32 else dtype
        self.model = build_model(model_config, spec, rollout.kernel, dtype, self.dtype, self.device)
        report(describe(model_config, rollout.max_batch, self._max_len, self.dtype))
        self._cache: KVCache | None = None
        self.wake()

    @property
    def cache(self) -> KVCache:
        if self._cache is None:
            raise RuntimeError("the engine sleeps; call wake() first")
        return self._cache

    @torch.no_grad()
    def generate(
        self,
        prompts: list[list[int]],
        n: int,
        sampling: Sampling,
        seeds: list[int],
        routed_experts: bool = False,
        on_group: OnGroup = ignore,
    ) -> list[list[Completion]]:
        """`n` responses to each prompt; see `engine.Engine`."""
        self._check(prompts, n, sampling, seeds)
        if not prompts:
            return []
        run = _Run(self.model, self.cache, prompts, n, sampling, seeds, routed_experts)
        groups, completions = Groups(len(prompts), n), {}
        while run.waiting or run.batch.size:
            run.admit()
            if run.batch.size:
                run.decode()
            for prompt in groups.completed_by(run.batch.take_finished()):
                completions[prompt] = run.log.take(prompt, n, sampling, self.policy_version)
                on_group(prompt, completions[prompt])
        return [completions[prompt] for prompt in range(len(prompts))]

    def _check(self, prompts: list[list[int]], n: int, sampling: Sampling, seeds: list[int]) -> None:
        if not self._complete:
            raise RuntimeError("generate() before a complete update_weights()")
        check_request(prompts, n, sampling, seeds, self._max_len, self._config.vocab_size)

    @torch.no_grad()
    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Overwrite all weights in place; see `engine.Engine`."""
        self._complete = False
        expected = [name for name, _ in named_weights(self.model)]
        load_all(expected, weights, lambda name, tensor: load_weight(self.model, name, tensor))
        if self._cache is not None:  # no prefix outlives a call of generate; this clears what a non-finite policy left
            self._cache.k.zero_()
            self._cache.v.zero_()
        self._complete = True
        self.policy_version = version

    def checksums(self) -> dict[str, int]:
        return {name: checksum(tensor) for name, tensor in named_weights(self.model)}

    def sleep(self) -> None:
        """Free the KV cache. Weights stay, at their addresses."""
        self._cache = None

    def wake(self) -> None:
        if self._cache is None:
            slots = self._rollout.max_batch
            self._cache = allocate(self._config, slots, self._max_len, self.dtype, self.device)

    def close(self) -> None:
        self.sleep()
        self._complete = False


def build_model(
    config: ModelConfig, spec: QuantSpec, kernel: str, storage: torch.dtype, compute: torch.dtype, device: torch.device
) -> MoEDecoder:
    """The decoder with rollout layers, without values. Memory never holds more than one layer unquantized.

    Args:
        storage: dtype of what is not quantized. compute: dtype of the activations.
    """
    with torch.device("meta"):
        model = MoEDecoder(config, compute)
    model.to(storage).requires_grad_(False).eval()
    chosen = choose_kernel(kernel, device, spec.rollout)
    for layer in model.model.layers:
        layer.to_empty(device=device)
        convert_rollout(layer, spec, chosen)
    for module in (model.model.embed_tokens, model.model.norm, model.lm_head):
        if module is not None:
            module.to_empty(device=device)
    return model


class _Run:
    """One call of `generate`."""

    def __init__(
        self,
        model: MoEDecoder,
        cache: KVCache,
        prompts: list[list[int]],
        n: int,
        sampling: Sampling,
        seeds: list[int],
        record_routing: bool,
    ) -> None:
        self.model, self.cache, self.device = model, cache, cache.k.device
        self.prompts, self.n, self.sampling, self.record_routing = prompts, n, sampling, record_routing
        self.seeds = seed_tensor(seeds, self.device)
        self.stops = torch.tensor(sampling.stop_token_ids, dtype=torch.int64, device=self.device)
        self.waiting = Waiting(len(prompts), n)
        self.batch = Batch(cache.num_slots, self.device)
        self.log = SampleLog()
        self.prefix: Prefix | None = None  # of a group that did not fit into the slots at once

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
        moves = self.batch.compact()
        if moves[0]:
            sources, targets = (torch.tensor(slots, device=self.device) for slots in moves)
            move_slots(self.cache, sources, targets, int(self.batch.position[targets].max()))

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
        slots = self.batch.reserve(len(requests))
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
        slots = self.batch.reserve(len(requests))
        self.prefix.write(self.cache, slots)
        self._first_tokens(requests, slots, self.prefix.logits.expand(len(requests), -1))

    def _first_tokens(self, requests: list[int], slots: list[int], logits_BV: Tensor) -> None:
        lengths = [len(self.prompts[request // self.n]) for request in requests]
        where = torch.tensor(slots, device=self.device)
        self.batch.request[where] = torch.tensor(requests, device=self.device)
        self.batch.position[where] = torch.tensor(lengths, device=self.device)
        self.batch.drawn[where] = 0
        self._draw(where, logits_BV)

    def decode(self) -> None:
        """One more token for every busy slot."""
        size = self.batch.size
        positions_B = self.batch.position[:size]
        context = DecodeContext(self.cache, positions_B, window=int(positions_B.max()) + 1)
        context.record_routing = self.record_routing
        hidden_TH = self.model(self.batch.token[:size], context)
        if self.record_routing:
            self.log.fed_requests.append(self.batch.request[:size].clone())
            self.log.fed_routing.append(routing(context))
        positions_B += 1  # what was fed is cached now
        self._draw(torch.arange(size, device=self.device), self.model.logits(hidden_TH))

    def _draw(self, slots_B: Tensor, logits_BV: Tensor) -> None:
        """Draw the next token of these slots, write it down, and mark the slots of finished responses as holes."""
        requests_B, drawn_B = self.batch.request[slots_B], self.batch.drawn[slots_B]
        tokens_B, logprobs_B = draw(logits_BV, self.sampling.temperature, uniforms(self.seeds[requests_B], drawn_B))
        self.log.add(requests_B, tokens_B, logprobs_B)
        self.batch.token[slots_B] = tokens_B
        self.batch.drawn[slots_B] = drawn_B + 1
        finished_B = torch.isin(tokens_B, self.stops) | (drawn_B + 1 >= self.sampling.max_new_tokens)
        self.batch.finish(slots_B[finished_B].tolist())
