"""Opening and closing vLLM inside a process that belongs to someone else: the trainer.

`vllm.LLM` assumes that the process is its own. It reseeds the global random generators, draws from them while
sampling (also when every request has a seed), replaces `torch.set_num_threads`, overwrites LOCAL_WORLD_SIZE, and
destroys the default process group on shutdown. `guest` gives all of that back; `close` shuts an engine down and leaves
the trainer's process groups alive. It also hides all objects of the process from the garbage collector; that stays
until the engine closes, as vLLM collects garbage each time it falls asleep, and a look at the 750,000 objects there
takes a third of a second. For what has to be replaced inside vLLM for this see patches.py.

vLLM's own groups must be made over the trainer's default group, so that group has to exist before the engine does.
"""

# pyright: reportMissingImports=false
# vLLM is an extra.

import gc
import os
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from quads.rollout.vllm.patches import destroy_own_groups, keeping_default_group

KEPT_VARIABLES = ("LOCAL_WORLD_SIZE", "LD_PRELOAD", "TORCHINDUCTOR_COMPILE_THREADS")


@contextmanager
def untouched_rng() -> Iterator[None]:
    """Puts the process-wide random states (python, numpy, torch, the current GPU) back to what they were."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    cuda_state = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
        if cuda_state is not None:
            torch.cuda.set_rng_state(cuda_state)


@contextmanager
def guest() -> Iterator[None]:
    """Around the construction of an engine: gives back what vLLM changes for the whole process."""
    variables = {name: os.environ.get(name) for name in KEPT_VARIABLES}
    functions = torch.set_num_threads, sys.excepthook
    try:
        with untouched_rng():
            yield
    except BaseException:
        gc.unfreeze()
        raise
    finally:
        torch.set_num_threads, sys.excepthook = functions
        for name, value in variables.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def make_group_of_one(device: torch.device) -> None:
    """The default process group of a trainer that is alone, before vLLM makes one.

    vLLM's would have NCCL alone on a GPU, and others use the default group too: saving a checkpoint in the background
    asks for a backend of the CPU in it.
    """
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    store = dist.TCPStore("localhost", 0, world_size=1, is_master=True)
    dist.init_process_group(backend, store=store, rank=0, world_size=1)


def close(llm: Any, keep_default_group: bool) -> None:
    """Shut the engine behind a `vllm.LLM` down; its memory is free once the caller has let go of it.

    keep_default_group: the default process group was the trainer's before the engine came: only vLLM's groups are
    destroyed. Groups are shared by all ranks, so all ranks close together.
    """
    client = llm.llm_engine.engine_core
    if finalizer := getattr(client, "_finalizer", None):  # newer versions shut down again when the client is collected
        finalizer.detach()
    with keeping_default_group() if keep_default_group else nullcontext():
        client.engine_core.shutdown()


def abandon(keep_default_group: bool) -> None:
    """After a `vllm.LLM` that could not be made: destroy the groups it left."""
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    if keep_default_group:
        destroy_own_groups()
    else:
        cleanup_dist_env_and_memory()


def free_memory() -> None:
    """After the last reference to a closed engine is gone: weights and KV cache go back to the GPU."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
