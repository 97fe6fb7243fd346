"""The weight sync: in place, complete, checked, version last."""

from collections.abc import Iterable

import pytest
import torch
from torch import Tensor

from quads.errors import UserError
from quads.quant.masters import quantized_weights, requantize
from quads.quant.recipes import QuantSpec
from quads.quant.rollout import named_weights
from quads.quant.tensor import QuantizedTensor
from quads.rollout.sync import WORDS_AT_ONCE, checksum, compare_checksums, sync
from tests.rollout_models import SAMPLING, make_engine, make_learner

QUADS = QuantSpec("nvfp4", "bf16", "w4a4_residual", selection="token")
ROLLOUTS = ["bf16", "fp8", "w4a16", "w4a8", "w16a4", "w4a4", "w4a4_residual"]
EXPERTS = "model.layers.1.mlp.experts.down_proj"


def addresses(engine) -> dict[str, list[int]]:
    return {
        name: [p.data_ptr() for p in (w.parts.values() if isinstance(w, QuantizedTensor) else [w])]
        for name, w in named_weights(engine.model)
    }


@pytest.mark.parametrize("rollout", ROLLOUTS)
@pytest.mark.parametrize("learner", ["bf16", "nvfp4", "fp8"])
def test_every_pair_syncs_in_place_with_equal_checksums(learner: str, rollout: str) -> None:
    spec = QuantSpec(learner, "bf16", rollout)
    engine = make_engine(spec)
    before = addresses(engine)
    model = make_learner(spec, seed=11)
    sync(model, engine, spec, version=12, verify=True)
    assert engine.policy_version == 12
    assert addresses(engine) == before
    assert engine.checksums() == {name: checksum(tensor) for name, tensor in quantized_weights(model, spec)}
    assert list(engine.checksums()) == [name for name, _ in model.named_parameters()]


def test_new_weights_answer_as_a_fresh_engine_would() -> None:
    engine = make_engine(QUADS, seed=3)
    old = engine.generate([[5, 6, 7]], 6, SAMPLING, list(range(6)))
    sync(make_learner(QUADS, seed=4), engine, QUADS, version=4)
    new = engine.generate([[5, 6, 7]], 6, SAMPLING, list(range(6)))
    assert new != old
    assert new == make_engine(QUADS, seed=4).generate([[5, 6, 7]], 6, SAMPLING, list(range(6)))


def test_two_syncs_of_the_same_weights_give_bit_identical_outputs() -> None:
    engine, model = make_engine(QUADS), make_learner(QUADS)
    results = []
    for _ in range(2):
        requantize(model)
        sync(model, engine, QUADS, version=5, verify=True)
        results.append(engine.generate([[5, 6, 7], [8]], 3, SAMPLING, list(range(6))))
    assert results[0] == results[1]


class Corrupting:
    """An engine whose copy of one tensor loses a bit on the way."""

    def __init__(self, engine, name: str) -> None:
        self.engine, self.name = engine, name

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        self.engine.update_weights(weights, version)
        stored = dict(named_weights(self.engine.model))[self.name]
        if isinstance(stored, QuantizedTensor) and stored.format == "nvfp4":
            stored.block_scale.view(torch.uint8).view(-1)[17] ^= 1
        else:
            stored.view(-1).view(torch.int32)[3] ^= 1

    def checksums(self) -> dict[str, int]:
        return self.engine.checksums()


@pytest.mark.parametrize("name", [EXPERTS, "model.norm.weight"])
def test_one_flipped_bit_is_found_and_named(name: str) -> None:
    with pytest.raises(UserError, match=f"1 of 25 tensors differ .*: {name};"):
        sync(make_learner(QUADS), Corrupting(make_engine(QUADS), name), QUADS, 1, verify=True)  # type: ignore[arg-type]


def drop(pairs):
    return [pair for pair in pairs if pair[0] != EXPERTS]


def twice(pairs):
    return [*pairs, next(pair for pair in pairs if pair[0] == EXPERTS)]


def unknown(pairs):
    return [("model.layers.7.extra", torch.zeros(3)), *pairs]


def misshaped(pairs):
    return [(name, w[:, :4] if name == "lm_head.weight" else w) for name, w in pairs]


def wrong_kind(pairs):
    return [(name, w.dequantize() if name == EXPERTS else w) for name, w in pairs]


DAMAGE = {
    drop: f"1 tensors did not come: {EXPERTS}",
    twice: f"{EXPERTS} came twice",
    unknown: "no weight model.layers.7.extra",
    misshaped: r"lm_head.weight does not fit: .*\[40, 64\].*\[40, 4\]",
    wrong_kind: f"{EXPERTS} does not fit",
}


@pytest.mark.parametrize("damage,message", DAMAGE.items(), ids=[damage.__name__ for damage in DAMAGE])
def test_an_incomplete_or_foreign_set_is_refused_and_the_engine_stops(damage, message: str) -> None:
    engine, model = make_engine(QUADS), make_learner(QUADS)
    with pytest.raises(UserError, match=message):
        engine.update_weights(damage(list(quantized_weights(model, QUADS))), version=9)
    assert engine.policy_version == 3  # the version rises last
    with pytest.raises(RuntimeError, match="complete update_weights"):
        engine.generate([[5]], 1, SAMPLING, [0])
    sync(model, engine, QUADS, version=9)
    assert engine.generate([[5]], 1, SAMPLING, [0])[0][0].policy_version == 9


def test_comparing_names_tensors_of_one_side_only() -> None:
    compare_checksums({"a": 1}, {"a": 1})
    with pytest.raises(UserError, match="2 of 3 tensors differ .*: b, c;"):
        compare_checksums({"a": 1, "b": 2}, {"a": 1, "c": 2})


def test_checksum_by_hand_and_what_it_sees() -> None:
    words = torch.tensor([5, -3, 2**62], dtype=torch.int64)
    assert checksum(words) == (5 - 9 + 5 * 2**62) % 2**64
    assert checksum(words[[1, 0, 2]]) != checksum(words)
    odd = torch.arange(13, dtype=torch.uint8)  # padded with zeros to whole words
    assert checksum(odd) == checksum(torch.cat([odd, odd.new_zeros(3)]))
    assert checksum(torch.tensor([0.0])) != checksum(torch.tensor([-0.0]))
    base = torch.randn(7, 5).bfloat16()
    for i in range(35):
        changed = base.clone()
        changed.view(-1).view(torch.int16)[i] ^= 1
        assert checksum(changed) != checksum(base)


def test_checksum_of_a_large_tensor_counts_words_through_all_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    words = torch.randint(-(2**62), 2**62, (1000,))
    whole = checksum(words)
    assert WORDS_AT_ONCE > 1000
    monkeypatch.setattr("quads.rollout.sync.WORDS_AT_ONCE", 7)
    assert checksum(words) == whole


@pytest.mark.parametrize("value", [torch.nan, -torch.inf, 3.4e38], ids=["nan", "inf", "beyond bf16"])
@pytest.mark.parametrize("name", ["model.layers.1.mlp.experts.down_proj", "model.norm.weight"])
def test_a_weight_that_is_not_finite_is_named_and_the_engine_keeps_its_own(name: str, value: float) -> None:
    engine, model = make_engine(QUADS), make_learner(QUADS)
    sync(model, engine, QUADS, version=4)
    before = engine.checksums()
    with torch.no_grad():
        dict(model.named_parameters())[name].view(-1)[-1] = value
    requantize(model)
    with pytest.raises(UserError, match=rf"weight sync of version 5: weight {name} is not finite in bf16"):
        sync(model, engine, QUADS, version=5)
    assert engine.checksums() == before and engine.policy_version == 4
    assert engine.generate([[5]], 1, SAMPLING, [0])[0][0].policy_version == 4
