"""How a run lies on GPUs: what one process holds, and the settings with which it would fit.

The learner's shards are those of the real thing: the model is built on the meta device and parallelized over processes
that are only imagined. The rest is arithmetic on shapes (quads/memory.py).
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from quads.checks import DTYPES, check_sample_count
from quads.config import Config
from quads.distributed import imagined_processes
from quads.memory import GIB, MemoryEstimate, ProcessShape, estimate_memory
from quads.model.config import ModelConfig
from quads.model.model import MoEDecoder
from quads.model.parallelize import local_tensor, parallelize
from quads.quant.recipes import resolve

CONTEXT_GIB = 3.0  # CUDA context, NCCL buffers, workspaces, fragmentation


@dataclass(frozen=True)
class Plan:
    """Memory of one process of an arrangement."""

    num_gpus: int
    local_sizes: list[int]
    memory: MemoryEstimate

    @property
    def page_locked_gib(self) -> float:
        """Adam's two moments in CPU memory; torch rounds a page-locked tensor up to a power of two."""
        return sum(2 * (1 << (4 * size - 1).bit_length()) for size in self.local_sizes if size) / GIB


def count_local_sizes(cfg: Config, model_config: ModelConfig, num_gpus: int) -> list[int]:
    """Elements of each parameter that the first of `num_gpus` processes holds.

    Raises:
        UserError: [parallel] does not fit the number of GPUs or the model.
    """
    with imagined_processes(cfg.parallel, num_gpus) as world:
        check_sample_count(cfg, world)
        with torch.device("meta"):
            model = MoEDecoder(model_config, DTYPES[cfg.model.dtype])
        parallelize(model, world.meshes)
        return [local_tensor(parameter).numel() for parameter in model.parameters()]


def make_plan(cfg: Config, model_config: ModelConfig, num_gpus: int, local_sizes: list[int], gpu_gib: float) -> Plan:
    """Add up what one process holds on a GPU of this size."""
    spec, dtype = resolve(cfg.quant), DTYPES[cfg.model.dtype]
    shape = ProcessShape(
        model_config,
        spec,
        cfg.rollout,
        cfg.rl,
        dtype,
        parallel=cfg.parallel,
        num_processes=num_gpus,
        all_gather=spec.gathers(cfg.quant.all_gather),
        moments=cfg.optim.moments,
        held=sum(local_sizes),
        device_bytes=gpu_gib * GIB,
    )
    phases = estimate_memory(shape).phases
    return Plan(
        num_gpus,
        local_sizes,
        MemoryEstimate({name: {**parts, "context and reserve": CONTEXT_GIB} for name, parts in phases.items()}),
    )


def savings(cfg: Config) -> Iterator[tuple[str, str, Config]]:
    """(key, value, config with it and all before it) for everything that saves memory, the cheapest in time first."""
    if cfg.quant.all_gather == "bf16" and resolve(cfg.quant).gathers("auto") == "packed":
        cfg = replace(cfg, quant=replace(cfg.quant, all_gather="packed"))
        yield "quant.all_gather", "packed", cfg
    if cfg.parallel.activation_checkpointing != "full":
        cfg = replace(cfg, parallel=replace(cfg.parallel, activation_checkpointing="full"))
        yield "parallel.activation_checkpointing", "full", cfg
    if cfg.optim.moments == "float32":
        cfg = replace(cfg, optim=replace(cfg.optim, moments="cpu"))
        yield "optim.moments", "cpu", cfg
    while cfg.rollout.max_batch > 1 and cfg.rollout.engine == "native":
        cfg = replace(cfg, rollout=replace(cfg.rollout, max_batch=cfg.rollout.max_batch // 2))
        yield "rollout.max_batch", str(cfg.rollout.max_batch), cfg
    while cfg.rollout.gpu_memory_gib >= 2 and cfg.rollout.engine == "vllm":
        cfg = replace(cfg, rollout=replace(cfg.rollout, gpu_memory_gib=float(int(cfg.rollout.gpu_memory_gib) // 2)))
        yield "rollout.gpu_memory_gib", f"{cfg.rollout.gpu_memory_gib:g}", cfg


def ways_to_fit(cfg: Config, model_config: ModelConfig, plan: Plan, gpu_gib: float) -> list[str]:
    """Settings with which the run fits on these GPUs, and the number of GPUs on which it fits without, or with them."""

    def fits(candidate: Config, factor: int) -> bool:
        sizes = [size // factor for size in plan.local_sizes]
        return make_plan(candidate, model_config, factor * plan.num_gpus, sizes, gpu_gib).memory.total <= gpu_gib

    settings, thrifty = {}, cfg
    for key, value, thrifty in savings(cfg):
        settings[key] = value
        if fits(thrifty, 1):
            break
    words = " ".join(f"--{key} {value}" for key, value in settings.items())
    ways = [f"on {plan.num_gpus} GPUs: {words}"] if fits(thrifty, 1) else []
    for candidate, how in ((cfg, "as it is"), (thrifty, f"with {words}")):
        factor = next((factor for factor in (2, 4, 8, 16, 32) if fits(candidate, factor)), None)
        if factor is not None:
            return [*ways, f"on {factor * plan.num_gpus} GPUs {how}"]
    return ways
