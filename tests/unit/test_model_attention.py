"""Contexts against attention written out, one sequence at a time; packed, prefill and decode agree."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from quads.model.attention import (
    DecodeContext,
    KVCache,
    PackedContext,
    PaddedLayout,
    PrefillContext,
    attention_path,
    routing,
)
from quads.model.config import ARCHITECTURES
from quads.model.model import MoEDecoder, apply_rope, rope_tables
from tests.helpers import assert_bitwise, assert_close

CONFIG = replace(ARCHITECTURES["tiny"], vocab_size=50)


def make_model(dtype: torch.dtype = torch.float32, **changes) -> MoEDecoder:
    model = MoEDecoder(replace(CONFIG, **changes), dtype)
    model.init_weights(torch.Generator().manual_seed(3))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(5.0)  # sharp attention and routing
    return model


def make_cache(slots: int, max_len: int, dtype: torch.dtype = torch.float32, fill: float = 0.0) -> KVCache:
    shape = (CONFIG.num_layers, slots, max_len, CONFIG.num_kv_heads, CONFIG.head_dim)
    return KVCache(torch.full(shape, fill, dtype=dtype), torch.full(shape, fill, dtype=dtype))


def attention_by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    length, group = q.shape[0], q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("ind,jnd->nij", q, k) * q.shape[-1] ** -0.5
    scores = scores.masked_fill(~torch.ones(length, length, dtype=torch.bool).tril(), -torch.inf)
    return torch.einsum("nij,jnd->ind", scores.softmax(-1), v)


def test_packed_attention_is_causal_within_each_sequence() -> None:
    lengths = [5, 1, 17, 9, 2, 5]
    q, k, v = torch.randn(39, 4, 8), torch.randn(39, 2, 8), torch.randn(39, 2, 8)
    out = PackedContext.build(lengths).attend(0, q, k, v)
    parts = zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True)
    assert_close(out, torch.cat([attention_by_hand(*part) for part in parts]), atol=2e-6)


def test_padded_layout_buckets_by_length() -> None:
    layout = PaddedLayout.build([3, 100, 2, 60, 4], torch.device("cpu"))
    assert [bucket.num_sequences for bucket in layout.buckets] == [2, 2, 1]  # 100 60 | 4 3 | 2
    rows = torch.cat([bucket.rows for bucket in layout.buckets])
    assert_bitwise(rows[layout.place_T], torch.arange(169))


def test_path_is_named() -> None:
    assert attention_path(torch.device("cpu"), torch.bfloat16) == "padded"
    assert attention_path(torch.device("cuda"), torch.float32) == "padded"
    assert attention_path(torch.device("cuda"), torch.bfloat16) == "varlen"


def test_empty_sequences_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one token"):
        PackedContext.build([3, 0])


def test_rope_by_hand() -> None:
    cos, sin = rope_tables(torch.tensor([3]), 4, theta=100.0, dtype=torch.float32)
    angles = torch.tensor([3.0, 0.3])  # position / theta ** (0, 1/2)
    x = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]])
    expected = torch.cat(
        [x[..., :2] * angles.cos() - x[..., 2:] * angles.sin(), x[..., 2:] * angles.cos() + x[..., :2] * angles.sin()],
        -1,
    )
    assert_close(apply_rope(x, cos, sin), expected, atol=1e-6)


def test_gradients_of_packed_are_the_sum_over_separate_sequences() -> None:
    lengths = [6, 11, 2]
    tokens = torch.randint(50, (19,))
    model = make_model(torch.float64).double()
    weight = torch.randn(19, 50, dtype=torch.float64)

    def gradients(groups: list[tuple[int, int, list[int]]]) -> list[Tensor]:
        model.zero_grad()
        for start, stop, group in groups:
            logits = model.logits(model(tokens[start:stop], PackedContext.build(group)))
            (logits * weight[start:stop]).sum().backward()
        return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]

    packed = gradients([(0, 19, lengths)])
    separate = gradients([(0, 6, [6]), (6, 17, [11]), (17, 19, [2])])
    assert len(packed) == len(separate) == len(list(model.parameters()))
    for a, b in zip(packed, separate, strict=True):
        assert_close(a, b, atol=1e-11 * float(b.abs().max()) + 1e-13)


@pytest.mark.parametrize("dtype,atol", [(torch.float64, 1e-12), (torch.float32, 2e-5), (torch.bfloat16, 0.15)])
def test_prefill_and_decode_equal_the_packed_forward(dtype: torch.dtype, atol: float) -> None:
    # atol: fp32 noise of 1e-7 through sharp softmaxes, logits of size about 5; bf16 rounding is 2**-8 of them
    model, lengths, prompt = make_model(dtype), [9, 7, 12], [4, 6, 1]
    tokens = torch.randint(50, (28,)).split(lengths)
    with torch.no_grad():
        packed = model.logits(model(torch.cat(tokens), PackedContext.build(lengths))).split(lengths)
        cache = make_cache(slots=4, max_len=16, dtype=dtype)
        prompts = torch.cat([t[:p] for t, p in zip(tokens, prompt, strict=True)])
        context = PrefillContext.build_for_slots(prompt, [0, 1, 2], [0, 1, 2], cache)
        prefill = model.logits(model(prompts, context)).split(prompt)
        for a, b, p in zip(prefill, packed, prompt, strict=True):
            assert_close(a, b[:p], atol=atol)
        for step in range(6):
            live = torch.tensor([p + step < length for p, length in zip(prompt, lengths, strict=True)])
            positions = torch.tensor([min(p + step, length - 1) for p, length in zip(prompt, lengths, strict=True)])
            new = torch.stack([t[i] for t, i in zip(tokens, positions.tolist(), strict=True)])
            context = DecodeContext(cache, positions, window=int(positions.max()) + 1, live=live)
            decoded = model.logits(model(new, context))
            for row, at in enumerate(positions.tolist()):
                assert_close(decoded[row], packed[row][at], atol=atol)


def test_decode_does_not_depend_on_window_or_stale_cells() -> None:
    model = make_model(torch.float64)
    with torch.no_grad():
        results = []
        for window, stale in ((6, 0.0), (16, 0.0), (16, 9.0)):
            cache = make_cache(slots=3, max_len=16, dtype=torch.float64, fill=stale)
            model(torch.arange(8), PrefillContext.build_for_slots([5, 3], [0, 1], [0, 1], cache))
            results.append(model(torch.tensor([7, 8]), DecodeContext(cache, torch.tensor([5, 3]), window)))
    assert_close(results[1], results[0], atol=1e-13)
    assert_close(results[2], results[0], atol=1e-13)


def test_shared_prefill_fills_every_slot_of_a_group_and_no_other() -> None:
    model, cache = make_model(), make_cache(slots=5, max_len=8, fill=torch.nan)
    tokens = torch.randint(50, (7,))
    with torch.no_grad():
        model(tokens, PrefillContext.build_for_slots([3, 4], [4, 1, 2], [0, 0, 1], cache))
    for store in (cache.k, cache.v):
        assert_bitwise(store[:, 4, :3], store[:, 1, :3])
        assert store[:, [0, 3]].isnan().all() and store[:, 1, 3:].isnan().all()
        assert not store[:, 2, :4].isnan().any()


def test_recorded_routing_replays_to_the_same_output() -> None:
    model, tokens = make_model(), torch.randint(50, (10,))
    context = PackedContext.build([10])
    context.record_routing = True
    with torch.no_grad():
        first = model(tokens, context)
        ids = routing(context)
        assert ids.shape == (10, CONFIG.num_layers, CONFIG.top_k) and ids.dtype == torch.int16
        replay = PackedContext.build([10])
        replay.routed_experts = ids
        assert_bitwise(model(tokens, replay), first)
        replay.routed_experts = (ids + 1) % CONFIG.num_experts
        assert (model(tokens, replay) - first).abs().max() > 1e-2


def test_initial_weights_follow_the_generator_alone() -> None:
    a, b = MoEDecoder(CONFIG), MoEDecoder(CONFIG)
    a.init_weights(torch.Generator().manual_seed(1))
    torch.manual_seed(99)
    b.init_weights(torch.Generator().manual_seed(1))
    for (name, p), q in zip(a.named_parameters(), b.parameters(), strict=True):
        assert_bitwise(p.detach(), q.detach())
        assert (p == 1).all() if p.dim() == 1 else abs(float(p.detach().std()) - 0.02) < 0.002, name
