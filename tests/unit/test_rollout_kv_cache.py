"""Memory of the KV cache, and what moves between slots."""

from dataclasses import replace

import pytest
import torch

from quads.errors import UserError
from quads.model.config import ARCHITECTURES
from quads.rollout.native.kv_cache import Prefix, allocate, describe, move_slots
from tests.helpers import assert_bitwise

CPU = torch.device("cpu")
CONFIG = replace(ARCHITECTURES["tiny"], num_layers=3)  # 2 kv heads of 16


def test_description_equals_what_is_allocated() -> None:
    cache = allocate(CONFIG, 5, 7, torch.float64, CPU)
    assert cache.k.shape == cache.v.shape == (3, 5, 7, 2, 16)
    assert not cache.k.any() and not cache.v.any()  # stale cells must be finite
    gib = (cache.k.nbytes + cache.v.nbytes) / 2**30
    assert describe(CONFIG, 5, 7, torch.float64) == f"KV cache: 5 slots of 7 tokens in float64, {gib:.3g} GiB"


def test_a_cache_that_cannot_fit_is_refused_before_it_is_allocated() -> None:
    with pytest.raises(UserError, match="KV cache needs .* lower rollout.max_batch"):
        allocate(CONFIG, 10**6, 10**6, torch.bfloat16, CPU)


def test_moving_slots_copies_their_first_cells() -> None:
    cache = allocate(CONFIG, 4, 6, torch.float32, CPU)
    cache.k.normal_()
    cache.v.normal_()
    before = cache.k.clone(), cache.v.clone()
    move_slots(cache, torch.tensor([3, 2]), torch.tensor([0, 1]), length=4)
    for store, old in zip((cache.k, cache.v), before, strict=True):
        assert_bitwise(store[:, :2, :4], old[:, [3, 2], :4])
        assert_bitwise(store[:, :2, 4:], old[:, :2, 4:])
        assert_bitwise(store[:, 2:], old[:, 2:])


def test_prefix_survives_its_slot_and_fills_others() -> None:
    cache = allocate(CONFIG, 4, 6, torch.float32, CPU)
    cache.k[:, 1].normal_()
    cache.v[:, 1].normal_()
    k, v = cache.k[:, 1].clone(), cache.v[:, 1].clone()
    prefix = Prefix.of_slot(cache, 1, 3, torch.arange(5.0))
    cache.k[:, 1] = 7.0
    prefix.write(cache, [3, 0])
    for slot in (0, 3):
        assert_bitwise(cache.k[:, slot, :3], k[:, :3])
        assert_bitwise(cache.v[:, slot, :3], v[:, :3])
        assert not cache.k[:, slot, 3:].any()
