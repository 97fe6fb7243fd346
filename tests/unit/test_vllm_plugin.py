"""What vLLM is told of the quantization method, without a model."""

import pickle

import pytest
import torch

from quads.rollout.vllm.options import read_options

pytestmark = pytest.mark.vllm


def test_the_config_travels_to_the_process_that_builds_the_model() -> None:
    """vLLM pickles it into the engine that it spawns, also after something has looked at it here. The state stays."""
    from quads.rollout.vllm.plugin import QuadsConfig

    config = QuadsConfig.from_config({"quant_method": "quads", "precision": "w4a16", "targets": ["experts"]})
    config.state.leave("lm_head")
    copy = pickle.loads(pickle.dumps(config))
    assert copy.spec == config.spec == read_options({"precision": "w4a16", "targets": ["experts"]})
    assert "lm_head" in config.banner() and "lm_head" not in copy.banner()
    assert copy.state is copy.state is not config.state


def test_rows_beyond_the_scheduled_tokens_are_not_live() -> None:
    """The mask keeps its address; a step without tokens leaves it alone; other methods' configs are not touched."""
    from types import SimpleNamespace

    from vllm.config import VllmConfig, set_current_vllm_config  # pyright: ignore[reportMissingImports]

    from quads.rollout.vllm.plugin import QuadsConfig, _count_live_rows

    config = QuadsConfig()
    with set_current_vllm_config(VllmConfig()):
        mask = config.state.live_mask()
    for count, live in ((3, 3), (0, 3), (len(mask), len(mask)), (1, 1)):
        _count_live_rows(SimpleNamespace(quant_config=config), count)
        assert mask.sum() == live and mask[:live].all()
    assert config.state.live_mask() is mask and mask.dtype == torch.bool
    _count_live_rows(SimpleNamespace(quant_config=None), 2)
    assert mask.sum() == 1


def test_registering_twice_is_registering_once() -> None:
    from vllm.model_executor.layers.quantization import get_quantization_config  # pyright: ignore[reportMissingImports]

    from quads.rollout.vllm.plugin import QuadsConfig, register

    register()
    register()
    assert get_quantization_config("quads") is QuadsConfig
