"""Runs in both processes of test_vllm_two_gpus.py: an FSDP2 learner over NCCL; an engine a rank, then one on both GPUs.

Same weights, same seeds: the same log-probs up to bf16 rounding, and on both ranks of a group the same tokens.

torchrun --nproc_per_node=2 vllm_two_gpus_worker.py
"""

from dataclasses import replace
from typing import Any

import torch

from quads.config_sections import ParallelSettings, TrainSettings
from quads.distributed import Distributed, build_meshes, in_process_group, init_distributed
from quads.model.model import MoEDecoder
from quads.model.parallelize import parallelize, write_part
from quads.quant.learner import convert_learner
from quads.quant.recipes import QuantSpec
from quads.quant.sharded import SHARDED, attach, requantize
from quads.rollout.sync import sync
from quads.rollout.vllm_engine import VLLMEngine
from quads.types import Completion, Sampling
from tests.gpu.test_vllm_gpu import CONFIG, SETTINGS, make_prompts

SPEC = QuantSpec("nvfp4", "bf16", "w4a16")
SAMPLING = Sampling(12, 0.9)
MEAN_GAP = 0.03  # of one engine's log-probs to the other's, where both drew the same tokens


def make_learner(world: Distributed) -> MoEDecoder:
    with torch.device("meta"):
        model = MoEDecoder(CONFIG, torch.bfloat16)
    convert_learner(model, SPEC, SHARDED)
    parallelize(model, build_meshes("cuda", 1, world.size, 1))
    model.to_empty(device=world.device)
    model.init_weights(torch.Generator(world.device).manual_seed(0), write_part)
    attach(model, "bf16", SPEC)
    requantize(model)
    return model


def draw(world: Distributed, model: MoEDecoder, size: int) -> list[Completion]:
    """This rank's responses from an engine that `size` ranks share; made, synced twice, slept and closed."""
    settings = replace(SETTINGS, tensor_parallel=size, gpu_memory_gib=1.0)
    engine: Any = VLLMEngine(CONFIG, SPEC, settings, torch.bfloat16, world.device, report=lambda text: None)
    everything: list[list[int]] = []
    completion = engine._completion
    engine._completion = lambda output, greedy: everything.append(list(output.token_ids)) or completion(output, greedy)
    sync(model, engine, SPEC, 0, verify=True)
    engine.wake()
    engine.sleep()
    sync(model, engine, SPEC, 1, verify=True)
    engine.wake()
    prompts = make_prompts(4)[world.rank :: 2]
    groups = engine.generate(prompts, 3, SAMPLING, [100 * world.rank + i for i in range(3 * len(prompts))])
    seen = world.gather_objects(sorted(everything))
    assert (seen[0] == seen[1]) == (size == 2), "ranks of a group must draw the same, others their own"
    engine.close()
    assert in_process_group(), "closing the engine took the trainer's process group with it"
    return [c for group in groups for c in group]


def main() -> None:
    with init_distributed(ParallelSettings(), TrainSettings(device="cuda")) as world:
        model = make_learner(world)
        alone, shared = draw(world, model, 1), draw(world, model, 2)
        same = [(a, b) for a, b in zip(alone, shared, strict=True) if a.token_ids == b.token_ids]
        gaps = [(torch.tensor(a.logprobs) - torch.tensor(b.logprobs)).abs().mean().item() for a, b in same]
        print(f"rank {world.rank}: {len(same)} of {len(alone)} responses the same, mean gaps {gaps}", flush=True)
        assert len(same) > len(alone) // 2, "one engine a rank and one engine on both draw different tokens"
        assert sum(gaps) / len(gaps) < MEAN_GAP
        world.print("two GPUs: an engine each, and one on both")


if __name__ == "__main__":
    main()
