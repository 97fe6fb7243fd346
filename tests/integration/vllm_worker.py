"""Runs in both processes of test_vllm_processes.py: an FSDP2 learner and a vLLM engine in each, gloo between them.

torchrun --nproc_per_node=2 vllm_worker.py
"""

import os

import torch

from quads.config.sections import ParallelSettings, TrainSettings
from quads.distributed import Distributed, build_meshes, in_process_group, init_distributed
from quads.model.attention import PackedContext
from quads.model.logprobs import token_logprobs
from quads.model.model import MoEDecoder
from quads.model.parallelize import parallelize, write_part
from quads.quant.convert import convert_learner
from quads.quant.masters import attach, requantize
from quads.quant.recipes import QuantSpec
from quads.rollout.sync import sync
from quads.types import Sampling
from tests.vllm_models import CONFIG, LOGPROB_TOLERANCE, make_prompts, make_vllm

SPEC = QuantSpec("nvfp4", "bf16", "w4a16")  # both sides multiply the same numbers, so log-probs must agree
RESPONSE = Sampling(max_new_tokens=7)


def make_learner(world: Distributed, spec: QuantSpec = SPEC) -> MoEDecoder:
    with torch.device("meta"):
        model = MoEDecoder(CONFIG)
    convert_learner(model, spec)
    parallelize(model, build_meshes("cpu", 1, world.size, 1))
    model.to_empty(device="cpu")
    model.init_weights(torch.Generator().manual_seed(0), write_part)
    attach(model, "bf16", spec)
    requantize(model)
    return model


def rollout(engine, world: Distributed):
    """Each rank its own prompts, and not equally many."""
    prompts = make_prompts(4)[: 1 + 2 * world.rank]
    groups = engine.generate(prompts, 2, RESPONSE, [10 * world.rank + i for i in range(2 * len(prompts))])
    return [(prompt, completion) for prompt, group in zip(prompts, groups, strict=True) for completion in group]


def train_step(model: MoEDecoder, optimizer: torch.optim.Optimizer, drawn) -> float:
    """Makes what was drawn less likely; returns the largest gap to the engine's log-probs before the step."""
    lengths = [len(prompt) + len(c.token_ids) for prompt, c in drawn]
    tokens = torch.tensor([t for prompt, c in drawn for t in prompt + c.token_ids])
    hidden = model(tokens, PackedContext.build(lengths))
    logprobs, _ = token_logprobs(hidden, model.output_weight(), tokens.roll(-1))
    gaps, start = [], 0
    for prompt, completion in drawn:
        rows = slice(start + len(prompt) - 1, start + len(prompt) + len(completion.token_ids) - 1)
        gaps.append((logprobs[rows].detach() - torch.tensor(completion.logprobs)).abs().max().item())
        start += len(prompt) + len(completion.token_ids)
    logprobs.mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    requantize(model)
    return max(gaps)


def main() -> None:
    with init_distributed(ParallelSettings(), TrainSettings(device="cpu")) as world:
        local_world_size = os.environ["LOCAL_WORLD_SIZE"]
        model = make_learner(world)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-2)
        drawn_by_life = []
        for life in range(2):
            engine = make_vllm(SPEC)
            assert os.environ["LOCAL_WORLD_SIZE"] == local_world_size == "2"
            for step in range(2):
                version = 2 * life + step
                sync(model, engine, SPEC, version, verify=True)
                drawn = rollout(engine, world)
                assert {c.policy_version for _, c in drawn} == {version}
                drawn_by_life.append([c.logprobs for _, c in drawn])
                gap = train_step(model, optimizer, drawn)
                assert gap < LOGPROB_TOLERANCE, f"rank {world.rank}, version {version}: {gap}"
            engine.close()
            assert in_process_group(), "closing the engine took the trainer's process group with it"
            assert world.gather_objects(world.rank) == [0, 1]
        assert drawn_by_life[0] != drawn_by_life[2], "the weights never moved"
        world.print("engines opened, synced and closed twice on 2 processes")


if __name__ == "__main__":
    main()
