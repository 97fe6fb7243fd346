"""The folder vLLM opens: one path for one model and precision, so that vLLM's compilation cache finds what it kept."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quads.rollout.vllm.options import read_options, write_options
from quads.rollout.vllm.setup import model_folder
from tests.vllm_models import CONFIG


def options(**given: Any) -> dict[str, Any]:
    """A whole `quantization_config` from the keys given."""
    return write_options(read_options(given))


W4A4 = options(precision="w4a4")


def test_one_path_for_one_model_and_precision(tmp_path: Path) -> None:
    first = model_folder(tmp_path, CONFIG, W4A4)
    assert model_folder(tmp_path, CONFIG, W4A4) == first
    assert json.loads((first / "config.json").read_text())["hidden_size"] == CONFIG.hidden_size
    assert [path.name for path in first.iterdir()] == ["config.json"]
    others = {
        model_folder(tmp_path, replace(CONFIG, num_layers=3), W4A4),
        model_folder(tmp_path, CONFIG, options(residual_ratio=0.25, residual_selection="token")),
        model_folder(tmp_path, CONFIG, options(residual_selection="token")),
        first,
    }
    assert len(others) == 4


@pytest.mark.vllm
def test_vllms_cache_key_follows_model_and_precision(tmp_path: Path) -> None:
    """The key of compiled graphs, in which precision, ratio and selection are constants."""
    from vllm.engine.arg_utils import EngineArgs  # pyright: ignore[reportMissingImports]

    from quads.rollout.vllm.plugin import register
    from quads.rollout.vllm.setup import register_models

    register()
    register_models()

    def key(quantization: dict[str, Any]) -> str:
        return (
            EngineArgs(
                model=str(model_folder(tmp_path, CONFIG, quantization)),
                hf_overrides={"quantization_config": quantization},
                quantization="quads",
                load_format="dummy",
                skip_tokenizer_init=True,
                dtype="float32",
                max_model_len=64,
                enforce_eager=True,
            )
            .create_engine_config()
            .compute_hash()
        )

    keys = [key(options(residual_ratio=ratio, residual_selection="token")) for ratio in (0.5, 0.5, 0.25)]
    assert keys[0] == keys[1] != keys[2]
