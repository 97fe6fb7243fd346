"""The estimate against what an engine really holds on a CPU, and the reference model of the KL term."""

import pytest
import torch

from quads.config_sections import QuantSettings, RLSettings, RolloutSettings
from quads.memory import GIB, estimate_memory
from quads.quant.recipes import resolve
from tests.rollout_models import CONFIG, make_engine

ROLLOUT = RolloutSettings(max_batch=32, max_prompt_tokens=16, max_new_tokens=9)  # what make_engine builds


@pytest.mark.parametrize("recipe", ["bf16", "fp8", "quads"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_engine_on_a_cpu(recipe: str, dtype: torch.dtype) -> None:
    spec = resolve(QuantSettings(recipe=recipe))
    engine = make_engine(spec, dtype=dtype)
    parts = estimate_memory(CONFIG, spec, ROLLOUT, RLSettings(), dtype, device_type="cpu").parts
    assert parts["KV cache"] * GIB == engine.decoder.cache.k.nbytes + engine.decoder.cache.v.nbytes
    stored = sum(
        sum(part.nbytes for part in getattr(tensor, "parts", {"": tensor}).values())
        for tensor in [*engine.model.parameters(), *engine.model.buffers()]
    )
    # FP8 scales of matrices smaller than a block of 128 x 128, and the fp32 scales of NVFP4, are not in the estimate
    assert parts["engine weights"] * GIB == pytest.approx(stored, rel=0.01)


def test_the_reference_model_counts() -> None:
    spec = resolve(QuantSettings(recipe="bf16"))
    plain, with_kl = (
        estimate_memory(CONFIG, spec, ROLLOUT, RLSettings(kl_coef=kl), torch.bfloat16) for kl in (0.0, 0.1)
    )
    assert (with_kl.total - plain.total) * GIB == pytest.approx(4 * CONFIG.num_parameters()[0])
