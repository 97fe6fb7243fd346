"""The folder that vLLM opens a model from, where the weights come from the learner and not from disk."""

import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from quads.model.config import HF_MODEL_TYPE, ModelConfig


def model_folder(root: Path, config: ModelConfig, quantization: dict[str, Any]) -> Path:
    """A folder below `root` with nothing but config.json: all that vLLM needs with `load_format="dummy"`.

    Its name follows from the model and from how it is quantized. vLLM's compilation cache counts the path of the model
    among what it depends on, so a path that changed with every start would compile the same model every time.

    A model without qk_norm keeps the architecture that models.py registers, under the model type whose config
    class transformers knows.
    """
    text = json.dumps(config.to_hf() | {"model_type": HF_MODEL_TYPE[True]}, indent=2, sort_keys=True)
    key = text + json.dumps(quantization, sort_keys=True)
    folder = root / hashlib.sha256(key.encode()).hexdigest()[:16]
    if not (folder / "config.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=folder, delete=False) as file:
            file.write(text)
        os.replace(file.name, folder / "config.json")  # another rank may write the same
    return folder


def cache_root() -> Path:
    """Beside vLLM's compilation cache (VLLM_CACHE_ROOT)."""
    import vllm.envs as envs  # pyright: ignore[reportMissingImports]

    return Path(envs.VLLM_CACHE_ROOT) / "quads_models"
