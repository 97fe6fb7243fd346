"""The time of a rollout on one engine: continuous batching of responses of given lengths, simulated.

A decode step of B sequences reads the weights once and the keys and values of every token so far:

    time(B, live tokens) = max(weights(B) + live tokens * KV bytes a token / read rate,  host(B))

weights(B) is measured: a decode step of the 25.5B model in vLLM 0.26 on one H200, less the keys and values that it
read. What does not fit into the KV cache waits, or is set back and computed again, as in vLLM.
"""

from collections import deque
from dataclasses import dataclass, field

from quads.model.config import ModelConfig

READ_BYTES_PER_S = 4.43e12  # an H200, measured
MEASURED_CONTEXT = 278  # tokens of context, on average, in the decode steps below
MEASURED_KV_BYTES = 81_920  # a token of the 25.5B model, bf16
MEASURED_ACTIVE = 2.93e9  # its active parameters
# Milliseconds of a decode step by sequences; benchmarks/results/vllm_h200_202611.md. bf16: from tokens/s of whole
# rollouts, with their prefill in it. A W4A16 step has not been measured and counts as w4a4.
DECODE_MS = {
    "bf16": ((16, 10.99), (64, 15.80), (256, 22.16)),
    "fp8": ((16, 7.20), (64, 9.90), (256, 14.08)),
    "w4a4": ((16, 5.18), (64, 7.29), (256, 11.28)),
    "w4a4_residual": ((16, 5.25), (64, 7.35), (256, 12.62)),
}
HOST_MS_PER_SEQUENCE = 9.5 / 256  # an 8-layer cut at 256 sequences takes 9.5 ms: scheduler and output processing
PREFILL_TOKENS_PER_S = 60_000.0  # 256 prompts of 128 tokens in 0.55 s, w4a4_residual
WATERMARK = 16  # tokens that each running sequence may still draw when another one is let in: a block of vLLM's cache
TAIL = 8  # below an eighth of the full batch it is the tail


@dataclass
class RolloutTime:
    """Seconds of one engine's rollout, by what bounds them; the parts of decoding add up with prefill to `total`."""

    parts: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(("weights", "keys and values", "host", "prefill"), 0.0)
    )
    tail: float = 0.0  # of the total, while less than an eighth of the full batch is left
    set_back: int = 0  # tokens that were computed again, as the KV cache was full

    @property
    def total(self) -> float:
        return sum(self.parts.values())


def kv_bytes_per_token(config: ModelConfig, element_bytes: int = 2) -> int:
    """Bytes of keys and values of one token over all layers."""
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * element_bytes


def weights_seconds(rollout: str, sequences: int, config: ModelConfig) -> float:
    """Of a decode step, without keys and values: linear between measured batches, flat below 16 (an upper bound, as few
    sequences hit fewer experts), growing beyond 256 as between 64 and 256. Scaled by active parameters."""
    table = DECODE_MS.get(rollout, DECODE_MS["w4a4"])
    measured = [
        (count, ms / 1e3 - count * MEASURED_CONTEXT * MEASURED_KV_BYTES / READ_BYTES_PER_S) for count, ms in table
    ]
    (low, at_low), (high, at_high) = measured[:2] if sequences <= measured[1][0] else measured[1:]
    seconds = at_low + (at_high - at_low) * max(sequences - low, 0) / (high - low)
    return seconds * config.num_parameters()[1] / MEASURED_ACTIVE


def rollout_seconds(
    config: ModelConfig,
    rollout: str,
    lengths: list[int],
    prompt_tokens: int,
    group_size: int,
    max_batch: int,
    kv_tokens: float,
    engine_gpus: int = 1,
) -> RolloutTime:
    """Draw all responses on one engine.

    Args:
        rollout: precision word of the engine.
        lengths: tokens of each response of this engine, in the order of the queue.
        prompt_tokens: of each prompt; the responses of a group share one copy of its keys and values.
        kv_tokens: how many tokens of keys and values the cache holds; where it is full a response waits or is set back.
        engine_gpus: GPUs that hold one copy of the weights between them.
    """
    time = RolloutTime()
    queue = deque((length, 0) for length in lengths)  # (tokens to draw, of which drawn)
    running: list[list[int]] = []  # [to draw, drawn], in the order of admission
    per_token = kv_bytes_per_token(config) / READ_BYTES_PER_S / engine_gpus
    shared = prompt_tokens / group_size  # a group is in flight at once: each carries its share of the prompt
    full = min(max_batch, len(lengths))
    time.parts["prefill"] = len(lengths) * shared / PREFILL_TOKENS_PER_S / engine_gpus
    while queue or running:
        live = sum(drawn for _, drawn in running) + shared * len(running)
        while queue and len(running) < max_batch:
            after = live + queue[0][1] + shared
            if running and after + WATERMARK * len(running) > kv_tokens:  # room for the next tokens of all of them
                break
            length, drawn = queue.popleft()
            running.append([length, drawn])
            live += drawn + shared
            time.set_back += drawn
            time.parts["prefill"] += drawn / PREFILL_TOKENS_PER_S / engine_gpus
        room = (kv_tokens - live) / len(running)
        if room < 1 and len(running) > 1:
            queue.appendleft((running[-1][0], running[-1][1]))
            running.pop()
            continue
        steps = min(min(length - drawn for length, drawn in running), int(max(min(room, 256), 1)))
        weights = weights_seconds(rollout, len(running), config) / engine_gpus
        read = (live + len(running) * steps / 2) * per_token
        wait = max(HOST_MS_PER_SEQUENCE * len(running) / 1e3 - weights - read, 0.0)
        for name, seconds in (("weights", weights), ("keys and values", read), ("host", wait)):
            time.parts[name] += steps * seconds
        if len(running) * TAIL < full:
            time.tail += steps * (weights + read + wait)
        for response in running:
            response[1] += steps
        running = [response for response in running if response[1] < response[0]]
    return time
