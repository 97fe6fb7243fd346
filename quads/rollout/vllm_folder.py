"""The folder that vLLM opens a model from, where the weights come from the learner and not from disk."""

import json
from pathlib import Path

from quads.errors import UserError
from quads.model.config import ModelConfig


def write_model_folder(folder: Path, config: ModelConfig) -> Path:
    """A folder with nothing but config.json: all that vLLM needs with `load_format="dummy"`.

    Raises UserError for a model that no class of vLLM computes.
    """
    if not config.qk_norm:
        raise UserError(
            "engine = 'vllm' needs a model with qk_norm (Qwen3-MoE): vLLM has no class for one without; "
            "use engine = 'native'"
        )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config.to_hf(), indent=2))
    return folder
