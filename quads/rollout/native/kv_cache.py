"""The memory of the native engine's KV cache: how much it takes, allocating it, moving and keeping what slots hold.

One contiguous slot of `max_len` tokens a sequence, no paging: simple, and decoding reads whole rows. The price is that
memory follows the longest allowed response, not the actual ones.

Shapes: L layers, G key-value heads, D head_dim, P tokens of a prompt.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from quads.errors import UserError
from quads.memory import GIB, KEPT_CACHE, available_gib, kv_cache_bytes
from quads.model.attention import KVCache
from quads.model.config import ModelConfig


def describe(config: ModelConfig, slots: int, max_len: int, dtype: torch.dtype) -> str:
    """One line: what the cache will take."""
    gib = kv_cache_bytes(config, slots, max_len, dtype.itemsize) / GIB
    return f"KV cache: {slots} slots of {max_len} tokens in {str(dtype).removeprefix('torch.')}, {gib:.3g} GiB"


def allocate(config: ModelConfig, slots: int, max_len: int, dtype: torch.dtype, device: torch.device) -> KVCache:
    """A cache of zeros. Raises UserError, before allocating, if it is more than what is free."""
    gib, free = kv_cache_bytes(config, slots, max_len, dtype.itemsize) / GIB, available_gib(device)
    if gib > free:
        raise UserError(
            f"the KV cache needs {gib:.1f} GiB on {device} ({slots} slots of {max_len} tokens) but {free:.1f} GiB are "
            "free; lower rollout.max_batch, or rollout.max_prompt_tokens and max_new_tokens"
        )
    shape = (config.num_layers, slots, max_len, config.num_kv_heads, config.head_dim)
    return KVCache(*(torch.zeros(shape, dtype=dtype, device=device) for _ in range(2)))


def is_kept(cache: KVCache, device: torch.device) -> bool:
    """Whether a GPU is so large that this cache may stay while the engine sleeps."""
    return cache.k.nbytes + cache.v.nbytes <= KEPT_CACHE * torch.cuda.get_device_properties(device).total_memory


def move_slots(cache: KVCache, sources: Tensor, targets: Tensor, length: int) -> None:
    """Copies the first `length` cells of each source slot to its target slot. No slot may be in both."""
    for store in (cache.k, cache.v):
        store[:, targets, :length] = store[:, sources, :length]


@dataclass
class Prefix:
    """What the prefill of a prompt left behind, kept for responses that find no slot yet."""

    k: Tensor  # [L, P, G, D]
    v: Tensor  # [L, P, G, D]
    logits: Tensor  # [V], at the last token of the prompt

    @classmethod
    def of_slot(cls, cache: KVCache, slot: int, length: int, logits_V: Tensor) -> "Prefix":
        """A copy, so that the slot may go on."""
        return cls(cache.k[:, slot, :length].clone(), cache.v[:, slot, :length].clone(), logits_V.clone())

    def write(self, cache: KVCache, slots: list[int]) -> None:
        """Into the first P cells of each of these slots."""
        length = self.k.shape[1]
        for store, kept in ((cache.k, self.k), (cache.v, self.v)):
            store[:, torch.tensor(slots, device=kept.device), :length] = kept[:, None]
