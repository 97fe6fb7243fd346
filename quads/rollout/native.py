"""The native engine: the learner's own model code with a KV cache, continuous batching and rollout-precision layers.

    waiting requests -> prefill (a prompt once, for all its responses) -> first tokens
    busy slots       -> decode one token each -> finished ones leave, waiting ones take their slots

Decoding, with CUDA graphs on a GPU, is decode.py; prefill is eager.

It runs anywhere and is the reference for numerics. On a CPU, fp32 rollouts are independent of the batch: activations
are float64 (weights keep the values of their storage dtype), so that the order in which a matmul adds up shows at
1e-16, far below the fp32 rounding where quantizers look and the 1e-5 that is promised for log-probs. With "batch" or
"block" selection of residual channels the batch enters by definition. In bf16 the engine computes in bf16, as the
learner does.

Left out: paging of the KV cache and chunked prefill of single prompts.
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quads.config_sections import RolloutSettings
from quads.model.attention import PrefillContext, routing
from quads.model.config import ModelConfig
from quads.model.model import MoEDecoder
from quads.quant.backend import choose_kernel
from quads.quant.linear import SiteSpec, product_dtype
from quads.quant.recipes import SITES, QuantSpec
from quads.quant.rollout import convert_rollout, load_weight, named_weights, weight_storage
from quads.rollout.decode import Decoder, Size
from quads.rollout.engine import OnGroup, check_request, ignore
from quads.rollout.kv_cache import Prefix, allocate, describe
from quads.rollout.sampling import seed_tensor
from quads.rollout.scheduler import Batch, Groups, SampleLog, Waiting
from quads.rollout.sync import checksum, load_all
from quads.types import Completion, Sampling

KEPT_SHARE = 0.02  # of the GPU's memory: a KV cache up to this size stays, with its graphs, while the engine sleeps
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
            rollout: max_batch slots of max_prompt_tokens + max_new_tokens tokens each; kernel; cuda_graphs.
            dtype: bf16 or fp32, the storage of everything that is not quantized.
            report: takes the lines that say how much memory the KV cache needs, before it is allocated, and how
                decoding runs.

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
        self._graphs, why = choose_graphs(rollout.cuda_graphs, self.device, self.dtype, spec, rollout.kernel)
        report(f"decoding: {why}")
        self._warm: set[Size] = set()
        self._addresses = addresses(self.model)
        self._decoder: Decoder | None = None
        self._awake = False
        self.wake()

    @property
    def decoder(self) -> Decoder:
        if self._decoder is None or not self._awake:
            raise RuntimeError("the engine sleeps; call wake() first")
        return self._decoder

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
        run = _Run(self.decoder, prompts, n, sampling, seeds, routed_experts)
        groups, completions = Groups(len(prompts), n), {}
        while len(completions) < len(prompts):
            for prompt in groups.completed_by(run.advance()):
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
        expected = [
            name for name, _ in weight_storage(self.model)
        ]  # not the values: a kernel would have to unpack them
        load_all(expected, weights, lambda name, tensor: load_weight(self.model, name, tensor))
        if addresses(self.model) != self._addresses:
            raise RuntimeError("a weight has moved: captured CUDA graphs would read the old one; report this")
        if self._decoder is not None:
            # No prefix outlives a call of generate; this clears what a non-finite policy left.
            self._decoder.cache.k.zero_()
            self._decoder.cache.v.zero_()
        self._complete = True
        self.policy_version = version

    def checksums(self) -> dict[str, int]:
        return {name: checksum(tensor) for name, tensor in named_weights(self.model)}

    def sleep(self) -> None:
        """Free the KV cache and the graphs that point into it, unless it is small (KEPT_SHARE) and has been captured:
        capturing again would take as long as drawing some dozens of tokens. Weights stay, at their addresses."""
        self._awake = False
        if self._decoder is not None and not self._kept(self._decoder):
            self._decoder = None

    def _kept(self, decoder: Decoder) -> bool:
        cache = decoder.cache
        if not decoder.graphs:
            return False
        total = torch.cuda.get_device_properties(self.device).total_memory
        return cache.k.nbytes + cache.v.nbytes <= KEPT_SHARE * total

    def wake(self) -> None:
        self._awake = True
        if self._decoder is None:
            cache = allocate(self._config, self._rollout.max_batch, self._max_len, self.dtype, self.device)
            self._decoder = Decoder(self.model, cache, self._graphs, self._warm)

    def close(self) -> None:
        self.sleep()
        self._decoder = None
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


def addresses(model: MoEDecoder) -> list[int]:
    """Where the weights lie, in model order."""
    return [part.data_ptr() for _, parts in weight_storage(model) for part in parts]


def choose_graphs(
    asked: bool, device: torch.device, dtype: torch.dtype, spec: QuantSpec, kernel: str
) -> tuple[bool, str]:
    """(capture decoding in CUDA graphs, a few words why or why not)."""
    if device.type != "cuda":
        return False, "eager (no CUDA device)"
    if not asked:
        return False, "eager (rollout.cuda_graphs = false)"
    if dtype != torch.bfloat16:
        return False, "eager (CUDA graphs need model.dtype = bfloat16: torch groups experts in fp32 on the host)"
    if spec.rollout != "bf16" and choose_kernel(kernel, device, spec.rollout) == "reference":
        sites = {SiteSpec.of(spec, site) for site in SITES}
        if any(product_dtype(site, dtype, device) != torch.bfloat16 for site in sites):
            why = f"the reference kernel of {spec.rollout} multiplies in fp32, where torch groups experts on the host"
            return False, f"eager ({why})"
    return True, "CUDA graphs, captured at the second step of each size"


@dataclass
class _Launched:
    """What the device is drawing, on its way to the host."""

    requests: Tensor  # int64 [B] on the CPU, -1 in dead rows
    results: Tensor  # float64 [2, B], tokens and log-probs; pinned memory on a GPU
    routing: Tensor | None  # int16 [B, L, A] on the device
    arrived: torch.cuda.Event | None

    @classmethod
    def copy(cls, requests: Tensor, results: Tensor, routing: Tensor | None = None) -> "_Launched":
        if not results.is_cuda:
            return cls(requests, results.clone(), routing, None)
        host = torch.empty(results.shape, dtype=results.dtype, pin_memory=True)
        host.copy_(results, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
        return cls(requests, host, routing, arrived)


class _Run:
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
        self.launched: deque[_Launched] = deque()
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
        self.launched.append(_Launched.copy(torch.tensor(requests), results))
        self.batch.drew(requests)
        self.collect(self.ahead)  # a response that ends at once should not be fed

    def decode(self) -> None:
        """One more token for every busy slot."""
        batch, decoder = self.batch, self.decoder
        requests = batch.request[: batch.size].clone()
        results = decoder.step(decoder.rows(batch.size), decoder.window(batch.longest()), self.record_routing)
        fed = decoder.routing_SLA[: batch.size].clone() if self.record_routing else None
        self.launched.append(_Launched.copy(requests, results[:, : batch.size], fed))
        batch.fed()
        batch.drew(requests[requests >= 0].tolist())

    def collect(self, leave: int) -> None:
        """Take down what has been drawn, all but the last `leave` launches, and release the slots of who finished."""
        while len(self.launched) > leave:
            done = self.launched.popleft()
            if done.arrived is not None:
                done.arrived.synchronize()
            finished = self.log.add(done.requests, done.results, done.routing)
            self.batch.release(finished)
            self.finished += finished
