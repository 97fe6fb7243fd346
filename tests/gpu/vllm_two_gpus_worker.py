"""Runs in both processes of test_vllm_two_gpus.py: an FSDP2 learner over NCCL, an engine a rank or one on both GPUs.

torchrun --nproc_per_node=2 vllm_two_gpus_worker.py SIZE FOLDER

SIZE ranks share an engine; all responses, by rank, go to FOLDER/SIZE.pt as (token ids, log-probs).
"""

import faulthandler
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from quads.config.sections import ParallelSettings, TrainSettings
from quads.distributed import Distributed, build_meshes, in_process_group, init_distributed
from quads.model.model import MoEDecoder
from quads.model.parallelize import parallelize, write_part
from quads.quant.convert import convert_learner
from quads.quant.masters import attach, requantize
from quads.quant.recipes import QuantSpec
from quads.rollout.sync import sync
from quads.rollout.vllm.engine import VLLMEngine
from quads.types import Completion, Sampling
from tests.gpu.test_vllm_gpu import CONFIG, SETTINGS, make_prompts

SPEC = QuantSpec("nvfp4", "bf16", "w4a16")
SAMPLING = Sampling(12, 0.9)


def make_learner(world: Distributed) -> MoEDecoder:
    with torch.device("meta"):
        model = MoEDecoder(CONFIG, torch.bfloat16)
    convert_learner(model, SPEC)
    parallelize(model, build_meshes("cuda", 1, world.size, 1))
    model.to_empty(device=world.device)
    model.init_weights(torch.Generator(world.device).manual_seed(0), write_part)
    attach(model, "bf16", SPEC)
    requantize(model)
    return model


def draw(world: Distributed, model: MoEDecoder, size: int) -> list[Completion]:
    """This rank's responses from an engine that `size` ranks share; made, synced twice, slept and closed."""
    settings = replace(SETTINGS, tensor_parallel=size, gpu_memory_gib=1.0)
    start = time.monotonic()

    def done(what: str) -> None:
        print(f"rank {world.rank} of {size} sharing, {time.monotonic() - start:.0f} s: {what}", flush=True)

    engine: Any = VLLMEngine(CONFIG, SPEC, settings, torch.bfloat16, world.device, report=lambda text: None)
    done("engine")
    everything: list[list[int]] = []
    completion = engine._completion
    engine._completion = lambda output, greedy: everything.append(list(output.token_ids)) or completion(output, greedy)
    sync(model, engine, SPEC, 0, verify=True)
    engine.wake()
    done("first sync")
    engine.sleep()
    done("sleep")
    sync(model, engine, SPEC, 1, verify=True)
    engine.wake()
    done("second sync")
    prompts = make_prompts(4)[world.rank :: 2]
    groups = engine.generate(prompts, 3, SAMPLING, [100 * world.rank + i for i in range(3 * len(prompts))])
    done("responses")
    seen = world.gather_objects(sorted(everything))
    assert (seen[0] == seen[1]) == (size == 2), "ranks of a group must draw the same, others their own"
    engine.close()
    done("closed")
    assert in_process_group(), "closing the engine took the trainer's process group with it"
    return [c for group in groups for c in group]


def main() -> None:
    faulthandler.dump_traceback_later(140)  # who waits for whom
    size, folder = int(sys.argv[1]), Path(sys.argv[2])
    with init_distributed(ParallelSettings(), TrainSettings(device="cuda")) as world:
        drawn = [(c.token_ids, c.logprobs) for c in draw(world, make_learner(world), size)]
        by_rank = world.gather_objects(drawn)
        if world.is_main:
            torch.save([response for mine in by_rank for response in mine], folder / f"{size}.pt")
        world.print(f"two ranks rolled out, {size} sharing an engine")
    faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main()
