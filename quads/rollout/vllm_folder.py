"""The folder that vLLM opens a model from, where the weights come from the learner and not from disk."""

import json
from pathlib import Path

from quads.model.config import HF_MODEL_TYPE, ModelConfig


def write_model_folder(folder: Path, config: ModelConfig) -> Path:
    """A folder with nothing but config.json: all that vLLM needs with `load_format="dummy"`.

    A model without qk_norm keeps the architecture that vllm_models.py registers, under the model type whose config
    class transformers knows.
    """
    folder.mkdir(parents=True, exist_ok=True)
    raw = config.to_hf() | {"model_type": HF_MODEL_TYPE[True]}
    (folder / "config.json").write_text(json.dumps(raw, indent=2))
    return folder
