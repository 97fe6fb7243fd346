"""Noise on the rollout's norms: the schedule, no accumulation, checksums that cover it, nothing else that moves."""

import torch

from quads.config.sections import QuantSettings
from quads.quant.masters import quantized_weights
from quads.quant.recipes import QuantSpec, resolve
from quads.quant.tensor import QuantizedTensor
from quads.rollout.noise import norm_noise_sigma, with_noise
from quads.rollout.sync import checksum, sync
from tests.rollout_models import make_engine, make_learner

QERL = resolve(QuantSettings(recipe="qerl"))


def test_the_schedule_by_hand() -> None:
    """Ten stages of ten versions: silence, then 1e-2 falling by the same factor to 1e-4."""
    sigmas = [norm_noise_sigma(QERL, version, 100) for version in range(0, 110, 10)]
    assert sigmas[0] == norm_noise_sigma(QERL, 9, 100) == 0.0 and sigmas[1] == 0.01
    torch.testing.assert_close(torch.tensor(sigmas[1:10]), torch.logspace(-2, -4, 9), rtol=1e-5, atol=0)
    assert sigmas[10] == sigmas[9]  # the version after the last step
    assert norm_noise_sigma(QuantSpec("nvfp4", "bf16", "w4a16"), 50, 100) == 0.0


def test_noise_is_of_its_size_and_a_function_of_seed_version_and_name() -> None:
    ones = torch.ones(20_000)
    noisy = with_noise("model.layers.0.input_layernorm.weight", ones, 0.01, 7, 3)
    assert abs(float((noisy - ones).std()) - 0.01) < 2e-4 and abs(float((noisy - ones).mean())) < 3e-4
    assert torch.equal(noisy, with_noise("model.layers.0.input_layernorm.weight", ones, 0.01, 7, 3))
    others = [("model.layers.0.input_layernorm.weight", 8, 3), ("model.layers.0.input_layernorm.weight", 7, 4),
              ("model.layers.1.input_layernorm.weight", 7, 3)]  # fmt: skip
    assert not any(torch.equal(noisy, with_noise(name, ones, 0.01, seed, version)) for name, seed, version in others)
    for name in ("model.norm.weight", "model.layers.0.self_attn.q_norm.weight", "model.layers.0.mlp.gate.weight"):
        assert with_noise(name, ones, 0.01, 7, 3) is ones


def test_syncs_do_not_accumulate_noise_and_their_checksums_cover_it() -> None:
    spec = QuantSpec("nvfp4", "bf16", "w4a16")
    model, engine = make_learner(spec), make_engine(spec)
    plain = {name: checksum(tensor) for name, tensor in quantized_weights(model, spec)}
    for version in (1, 2, 2):
        sync(model, engine, spec, version, verify=True, sigma=0.05, seed=3)  # verify compares what was shipped
        held = engine.checksums()
        changed = {name for name in held if held[name] != plain[name]}
        assert changed == {name for name in held if name.endswith("layernorm.weight")} and len(changed) == 4
        last = {name: tensor.clone() for name, tensor in engine_norms(engine).items()}
    for name, tensor in engine_norms(engine).items():
        assert torch.equal(tensor, last[name])
        master = dict(model.named_parameters())[name].detach()
        assert torch.equal(tensor, with_noise(name, master, 0.05, 3, 2).to(tensor.dtype))
    sync(model, engine, spec, 3, verify=True)
    assert engine.checksums() == plain


def engine_norms(engine) -> dict[str, torch.Tensor]:
    named = dict(engine.model.named_parameters())
    return {name: tensor for name, tensor in named.items() if name.endswith("layernorm.weight")}


def test_codes_are_shipped_as_they_are() -> None:
    spec = QuantSpec("nvfp4", "bf16", "w4a16")
    shipped = dict(quantized_weights(make_learner(spec), spec))
    packed = [name for name, tensor in shipped.items() if isinstance(tensor, QuantizedTensor)]
    assert packed and all(with_noise(name, shipped[name], 0.05, 0, 1) is shipped[name] for name in packed)
