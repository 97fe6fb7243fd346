"""The estimate against peaks measured on GPUs, what an engine really holds on a CPU, and the KL term's reference."""

from dataclasses import replace

import pytest
import torch

from quads.config.sections import ParallelSettings, QuantSettings, RLSettings, RolloutSettings
from quads.memory import GIB, MemoryEstimate, ProcessShape, estimate_memory, format_estimate, targeted_parameters
from quads.model.config import ARCHITECTURES
from quads.quant.recipes import resolve
from tests.rollout_models import CONFIG, make_engine

ROLLOUT = RolloutSettings(max_batch=32, max_prompt_tokens=16, max_new_tokens=9)  # what make_engine builds


@pytest.mark.parametrize("recipe", ["bf16", "fp8", "quads"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_engine_on_a_cpu(recipe: str, dtype: torch.dtype) -> None:
    spec = resolve(QuantSettings(recipe=recipe))
    engine = make_engine(spec, dtype=dtype)
    parts = estimate_memory(ProcessShape(CONFIG, spec, ROLLOUT, RLSettings(), dtype, device_type="cpu")).parts
    assert parts["KV cache"] * GIB == engine.decoder.cache.k.nbytes + engine.decoder.cache.v.nbytes
    stored = sum(
        sum(part.nbytes for part in getattr(tensor, "parts", {"": tensor}).values())
        for tensor in [*engine.model.parameters(), *engine.model.buffers()]
    )
    # FP8 scales of matrices smaller than a block of 128 x 128, and the fp32 scales of NVFP4, are not in the estimate
    assert parts["engine weights"] * GIB == pytest.approx(stored, rel=0.01)


def test_values_that_the_reference_multiplies_on_a_gpu_count() -> None:
    """bf16, and twice where the residual stands beside the first operand; a kernel keeps none."""
    bytes_of = {
        (format, rollout): estimate_memory(
            ProcessShape(
                CONFIG, resolve(QuantSettings(format=format, rollout=rollout)), ROLLOUT, RLSettings(), torch.bfloat16
            )
        ).parts["engine weights"]
        for format in ("nvfp4", "hif4")
        for rollout in ("w4a4", "w4a4_residual")
    }
    targeted = targeted_parameters(CONFIG, ("experts", "attention")) / GIB
    packed = bytes_of["nvfp4", "w4a4"]  # HiF4 has 4.5 bits as well
    assert bytes_of["nvfp4", "w4a4_residual"] == packed
    assert bytes_of["hif4", "w4a4"] - packed == pytest.approx(2 * targeted)
    assert bytes_of["hif4", "w4a4_residual"] - packed == pytest.approx(4 * targeted)


def test_score_centering_counts() -> None:
    """64 bytes a token of a micro-batch and candidate."""
    spec = resolve(QuantSettings(recipe="bf16"))
    shapes = [
        ProcessShape(CONFIG, spec, ROLLOUT, RLSettings(score_centering=k, microbatch_tokens=1000), torch.bfloat16)
        for k in (0, 4, 20)
    ]
    logits = [estimate_memory(shape).parts["logits"] * GIB for shape in shapes]
    assert logits[2] - logits[1] == pytest.approx(64 * 16 * 1000) and logits[1] > logits[0]


def test_the_reference_model_counts() -> None:
    spec = resolve(QuantSettings(recipe="bf16"))
    shapes = [ProcessShape(CONFIG, spec, ROLLOUT, RLSettings(kl_coef=kl), torch.bfloat16) for kl in (0.0, 0.1)]
    plain, with_kl = map(estimate_memory, shapes)
    for phase in ("rollout", "sync", "learn"):
        assert (with_kl.of(phase) - plain.of(phase)) * GIB == pytest.approx(4 * CONFIG.num_parameters()[0])


# benchmarks/results: GPUs, layers of the 25.5B shape, recipe, tokens, checkpointing, compile, gathers -> GiB allocated
MEASURED_PEAKS = [
    (1, 8, "bf16", 16384, "none", True, "bf16", 97.2),
    (1, 8, "quads", 16384, "none", True, "bf16", 99.8),
    (1, 8, "bf16", 16384, "full", False, "bf16", 85.0),
    (1, 8, "quads", 16384, "full", False, "bf16", 88.0),
    (2, 12, "quads", 16384, "none", True, "bf16", 88.1),
    (2, 12, "fp8", 16384, "none", True, "bf16", 87.6),
]


@pytest.mark.parametrize("row", MEASURED_PEAKS)
def test_learner_peaks_measured_on_h200s(row: tuple) -> None:
    gpus, layers, recipe, tokens, checkpointing, compile, all_gather, measured = row
    estimate = estimate_memory(
        ProcessShape(
            replace(ARCHITECTURES["moe25b_a3b"], num_layers=layers),
            resolve(QuantSettings(recipe=recipe)),
            RolloutSettings(),
            RLSettings(microbatch_tokens=tokens),
            torch.bfloat16,
            ParallelSettings(ep=gpus, activation_checkpointing=checkpointing, compile=compile),
            gpus,
            all_gather,
            accumulated=False,
        )
    )
    learner = estimate.of("learn") - estimate.phases["learn"]["engine weights"]
    assert learner == pytest.approx(measured, rel=0.05)  # the aim is 0.1


def test_gradients_of_earlier_microbatches_count() -> None:
    args = (ARCHITECTURES["moe25b_a3b"], resolve(QuantSettings(recipe="bf16")), ROLLOUT, RLSettings(), torch.bfloat16)
    first, later = (estimate_memory(ProcessShape(*args, accumulated=accumulated)) for accumulated in (False, True))
    assert later.of("learn") > first.of("learn") and later.parts["gradients"] == later.parts["master weights"]


def phases(engine: str, device: str, gib: float = 0.0, device_gib: float = 139.8) -> dict[str, dict[str, float]]:
    model, spec = ARCHITECTURES["moe25b_a3b"], resolve(QuantSettings(recipe="quads"))
    rollout = RolloutSettings(engine=engine, gpu_memory_gib=gib, max_batch=1, max_prompt_tokens=64, max_new_tokens=64)
    shape = ProcessShape(model, spec, rollout, RLSettings(), torch.bfloat16, device_type=device)
    return estimate_memory(replace(shape, device_bytes=device_gib * GIB)).phases


def test_what_never_coexists_is_not_added_up() -> None:
    vllm = phases("vllm", "cuda", gib=48.0)
    assert vllm["rollout"]["KV cache"] == 48.0 and "KV cache" not in vllm["sync"] and "gradients" not in vllm["rollout"]
    assert not {"KV cache", "engine weights"} & vllm["learn"].keys()  # it sleeps without either
    for phase in vllm.values():
        assert {"master weights", "Adam moments", "learner's quantized weights"} <= phase.keys()
    assert {"KV cache", "engine weights"} <= phases("vllm", "cpu", gib=1.0)["learn"].keys()  # on a CPU it cannot sleep


def test_a_small_cache_of_the_native_engine_stays_with_its_graphs() -> None:
    size = phases("native", "cuda")["rollout"]["KV cache"]
    assert "KV cache" in phases("native", "cuda")["learn"]
    assert "KV cache" not in phases("native", "cuda", device_gib=size * 49)["learn"]
    assert "KV cache" not in phases("native", "cpu")["learn"] and "engine weights" in phases("native", "cpu")["learn"]


def test_the_largest_phase_counts() -> None:
    estimate = MemoryEstimate({"rollout": {"a": 1.0, "b": 4.0}, "learn": {"a": 1.0, "c": 3.0}})
    assert (estimate.largest, estimate.total, estimate.of("learn")) == ("rollout", 5.0, 4.0)
    assert estimate.parts == {"a": 1.0, "b": 4.0, "c": 3.0}
    line = format_estimate(estimate)
    assert "5.00 GiB (rollout 5.00, learn 4.00); rollout: a 1.00, b 4.00" in line
