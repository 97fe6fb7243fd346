"""How tokens attend: the contexts that a forward pass is given, and the KV cache.

The model has one code path; the context decides who sees whom:

    PackedContext    whole sequences laid end to end without padding; causal within each. The learner's forward.
    PrefillContext   the same for prompts, and their keys and values are written into cache slots.
    DecodeContext    one new token in each of the first B slots; attends to the slot's cached prefix and itself.

Packed attention has two paths, `attention_path(device, dtype)`: "varlen" (flash attention over cumulative lengths, on a
CUDA device in bf16 or fp16) and "padded" (sequences are gathered into right-padded batches; with a causal mask no real
token ever sees the padding behind it). "padded" puts sequences whose lengths are within a factor of two into one batch,
so that short ones do not pay for a long one.

Contexts also carry what else varies from call to call: which rows are alive, and the expert choices to replay or
record.

Shapes: T tokens, L layers, A experts a token, N query heads, G key-value heads, D head_dim, S sequences, M longest of
them.
"""

import functools
import inspect
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

AttentionPath = Literal["varlen", "padded"]


def attention_path(device: torch.device, dtype: torch.dtype) -> AttentionPath:
    """The path that packed attention takes there."""
    return "varlen" if device.type == "cuda" and dtype in (torch.bfloat16, torch.float16) else "padded"


class Context(Protocol):
    """What the model asks of a context."""

    positions_T: Tensor  # int64, the place of each token in its sequence
    live: Tensor | None  # bool [T], False for rows that are padding; None: all alive
    routed_experts: Tensor | None  # [T, L, A] expert ids to replay; a negative id: choose live
    record_routing: bool
    recorded: dict[int, Tensor]  # layer -> int64 [T, A]; a layer that runs again overwrites its own entry

    def attend(self, layer: int, q_TND: Tensor, k_TGD: Tensor, v_TGD: Tensor) -> Tensor:
        """Attention output [T, N, D] of this layer."""
        ...


def routing(ctx: Context) -> Tensor:
    """The expert ids recorded by a forward pass with `record_routing`, int16 [T, L, A]: the routers' own choice, also
    where another one was replayed."""
    return torch.stack([ctx.recorded[layer] for layer in sorted(ctx.recorded)], dim=1).to(torch.int16)


@dataclass
class Bucket:
    """Sequences of similar length as one right-padded batch."""

    rows: Tensor  # int64 [S * M], the token behind each cell; padding repeats the sequence's last token
    num_sequences: int


@dataclass
class PaddedLayout:
    """Packed tokens as padded buckets, and back."""

    buckets: list[Bucket]
    place_T: Tensor  # int64, the cell of each token in the concatenation of all buckets

    @classmethod
    def build(cls, lengths: list[int], device: torch.device) -> "PaddedLayout":
        lengths_S = torch.tensor(lengths, dtype=torch.int64)
        starts_S = lengths_S.cumsum(0) - lengths_S
        by_length_S = lengths_S.argsort(descending=True, stable=True)
        place_T = torch.empty(sum(lengths), dtype=torch.int64)
        buckets, first, cells = [], 0, 0
        while first < len(lengths):
            longest = int(lengths_S[by_length_S[first]])
            rest_S = by_length_S[first:]
            members_S = rest_S[lengths_S[rest_S] > longest // 2]
            column_M = torch.arange(longest)
            last_S1 = lengths_S[members_S, None] - 1
            rows_SM = starts_S[members_S, None] + torch.minimum(column_M, last_S1)
            real_SM = column_M <= last_S1
            place_T[rows_SM[real_SM]] = cells + real_SM.flatten().nonzero().squeeze(1)
            buckets.append(Bucket(rows_SM.flatten().to(device), len(members_S)))
            cells += rows_SM.numel()
            first += len(members_S)
        return cls(buckets, place_T.to(device))

    def attend(self, q_TND: Tensor, k_TGD: Tensor, v_TGD: Tensor) -> Tensor:
        outputs = []
        for bucket in self.buckets:
            q, k, v = (
                x.index_select(0, bucket.rows).unflatten(0, (bucket.num_sequences, -1)).transpose(1, 2)
                for x in (q_TND, k_TGD, v_TGD)
            )
            out_SNMD = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            outputs.append(out_SNMD.transpose(1, 2).flatten(0, 1))
        return torch.cat(outputs).index_select(0, self.place_T)


@dataclass
class PackedContext:
    """Several whole sequences laid end to end.

    Example: `PackedContext.build([3, 2])` has positions 0 1 2 0 1 and cumulative lengths 0 3 5.
    """

    positions_T: Tensor  # int64
    cu_seqlens: Tensor  # int32 [S + 1]
    lengths: list[int]
    live: Tensor | None = None
    routed_experts: Tensor | None = None
    record_routing: bool = False
    recorded: dict[int, Tensor] = field(default_factory=dict)
    padded: PaddedLayout | None = None

    @classmethod
    def build(cls, lengths: list[int], device: torch.device | str = "cpu") -> "PackedContext":
        """The context of sequences of these lengths (each at least 1), in the order in which their tokens are laid."""
        lengths, device = [int(length) for length in lengths], torch.device(device)
        if not lengths or min(lengths) < 1:
            raise ValueError(f"PackedContext needs sequences of at least one token, got lengths {lengths}")
        cu_seqlens = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        starts_T = cu_seqlens[:-1].to(torch.int64).repeat_interleave(torch.tensor(lengths))
        positions_T = torch.arange(starts_T.shape[0]) - starts_T
        context = cls(positions_T.to(device), cu_seqlens.to(device), lengths)
        if device.type == "cpu":
            context.padded = PaddedLayout.build(lengths, device)
        return context

    def attend(self, layer: int, q_TND: Tensor, k_TGD: Tensor, v_TGD: Tensor) -> Tensor:
        if attention_path(q_TND.device, q_TND.dtype) == "varlen":
            return _varlen_attention(q_TND, k_TGD, v_TGD, self.cu_seqlens, max(self.lengths))
        if self.padded is None:  # fp32 on a GPU
            self.padded = PaddedLayout.build(self.lengths, q_TND.device)
        return self.padded.attend(q_TND, k_TGD, v_TGD)


@dataclass
class KVCache:
    """Preallocated keys and values, in the dtype of the activations. A slot holds one sequence; its first `length`
    cells are valid, the rest is stale. Stale cells get weight zero in attention, so they must be finite: the cache
    starts as zeros.

    Example: 2 layers, 256 slots of 512 tokens, 4 key-value heads of 128 in bf16: two tensors of 0.25 GiB.
    """

    k: Tensor  # [L, slots, max_len, G, D]
    v: Tensor  # [L, slots, max_len, G, D]

    @property
    def num_slots(self) -> int:
        return self.k.shape[1]

    @property
    def max_len(self) -> int:
        return self.k.shape[2]


@dataclass(kw_only=True)
class PrefillContext(PackedContext):
    """Prompts laid end to end; their keys and values go to cache slots. Several slots may take the same prompt, so that
    n responses share one prefill.

    `target_cells` and `source_rows` list, for every (slot, prompt token), the flat cache cell slot * max_len + position
    and the packed row to store there.
    """

    cache: KVCache
    target_cells: Tensor  # int64
    source_rows: Tensor  # int64

    @classmethod
    def build_for_slots(
        cls, lengths: list[int], slots: list[int], sequences: list[int], cache: KVCache
    ) -> "PrefillContext":
        """Slot `slots[i]` takes sequence number `sequences[i]`, of `lengths[sequences[i]]` tokens."""
        packed = PackedContext.build(lengths, cache.k.device)
        slots_M, sequences_M = torch.tensor(slots), torch.tensor(sequences)
        length_M = torch.tensor(lengths)[sequences_M]
        start_M = packed.cu_seqlens[:-1].to("cpu", torch.int64)[sequences_M]
        offsets = torch.arange(int(length_M.sum())) - (length_M.cumsum(0) - length_M).repeat_interleave(length_M)
        targets = (slots_M * cache.max_len).repeat_interleave(length_M) + offsets
        sources = start_M.repeat_interleave(length_M) + offsets
        device = cache.k.device
        return cls(**vars(packed), cache=cache, target_cells=targets.to(device), source_rows=sources.to(device))

    def attend(self, layer: int, q_TND: Tensor, k_TGD: Tensor, v_TGD: Tensor) -> Tensor:
        for stored, new in ((self.cache.k[layer], k_TGD), (self.cache.v[layer], v_TGD)):
            stored.flatten(0, 1).index_copy_(0, self.target_cells, new.index_select(0, self.source_rows))
        return super().attend(layer, q_TND, k_TGD, v_TGD)


@dataclass
class DecodeContext:
    """One new token for each of the slots 0 .. B-1 (row b is slot b).

    `positions_T[b]` tokens are already cached in slot b; the new one is written behind them. Attention reads the first
    `window` cells of the B slots, so its work follows the longest live sequence and not the size of the cache; a CUDA
    graph takes a fixed `window` and marks unused rows in `live`.
    """

    cache: KVCache
    positions_T: Tensor  # int64
    window: int  # > every live position
    live: Tensor | None = None
    routed_experts: Tensor | None = None
    record_routing: bool = False
    recorded: dict[int, Tensor] = field(default_factory=dict)
    visible_T11W: Tensor = field(init=False)
    rows_T: Tensor = field(init=False)

    def __post_init__(self) -> None:
        device = self.positions_T.device
        self.rows_T = torch.arange(self.positions_T.shape[0], device=device)
        self.visible_T11W = (torch.arange(self.window, device=device) <= self.positions_T[:, None])[:, None, None]

    def attend(self, layer: int, q_TND: Tensor, k_TGD: Tensor, v_TGD: Tensor) -> Tensor:
        num_rows, num_kv_heads = q_TND.shape[0], k_TGD.shape[1]
        k_slots, v_slots = self.cache.k[layer], self.cache.v[layer]
        k_slots[self.rows_T, self.positions_T] = k_TGD
        v_slots[self.rows_T, self.positions_T] = v_TGD
        k = k_slots[:num_rows, : self.window].transpose(1, 2)
        v = v_slots[:num_rows, : self.window].transpose(1, 2)
        # The query heads that share a key-value head take the place of the query positions.
        q = q_TND.unflatten(1, (num_kv_heads, -1))
        mask = self.visible_T11W.expand(-1, 1, q.shape[2], -1)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).flatten(1, 2)


def _varlen_attention(q_TND: Tensor, k_TGD: Tensor, v_TGD: Tensor, cu_seqlens: Tensor, longest: int) -> Tensor:
    # torch 2.13 wants to be told of grouped heads, 2.11 takes them as they come.
    grouped = "enable_gqa" in inspect.signature(varlen_attn).parameters
    attend = functools.partial(varlen_attn, enable_gqa=True) if grouped else varlen_attn
    out_TND = attend(q_TND, k_TGD, v_TGD, cu_seqlens, cu_seqlens, longest, longest, window_size=(-1, 0))
    assert isinstance(out_TND, Tensor)  # a tuple only when more is asked for
    return out_TND
