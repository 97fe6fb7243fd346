"""Registers the quantization method `quads` with vLLM.

vLLM finds `register` through the entry point `vllm.general_plugins`, in every process it starts; the engine of this
project calls it by itself, so it does not depend on how the package was installed. vLLM is imported only inside.
"""

# pyright: reportMissingImports=false
# vLLM is an extra.

from typing import Any


def register() -> None:
    """Make `quantization="quads"` known to vLLM in this process. Any number of calls does the same as one."""
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS, register_quantization_config

    from quads.rollout.vllm.options import METHOD

    if METHOD in QUANTIZATION_METHODS:
        return
    from quads.rollout.vllm.quant_config import QuadsConfig

    register_quantization_config(METHOD)(QuadsConfig)
    _tell_layers_how_many_rows_are_real(QuadsConfig)


def _tell_layers_how_many_rows_are_real(config_class: type) -> None:
    """Before each forward the config learns how many tokens are scheduled: graph replay pads the batch with rows of
    garbage.

    Channel selection over a batch must leave those rows out. The worker's `execute_model` is the one place that every
    runner of vLLM goes through and that still knows the number.
    """
    import torch
    from vllm.v1.worker.gpu_worker import Worker

    execute_model = Worker.execute_model

    def counted(self: Any, scheduler_output: Any) -> Any:
        config = self.vllm_config.quant_config
        if isinstance(config, config_class):
            with torch.inference_mode():
                config.set_num_live(scheduler_output.total_num_scheduled_tokens)
        return execute_model(self, scheduler_output)

    Worker.execute_model = counted
