"""Runs in both processes of test_vllm_processes.py: an FSDP2 learner, and two ranks that share one vLLM copy.

torchrun --nproc_per_node=2 vllm_tp_worker.py
"""

from dataclasses import replace
from typing import Any

import torch

from quads.config.sections import ParallelSettings, TrainSettings
from quads.distributed import Distributed, in_process_group, init_distributed
from quads.errors import UserError
from quads.quant.recipes import QuantSpec
from quads.rollout.sync import sync
from quads.rollout.vllm.engine import VLLMEngine
from tests.integration.vllm_worker import make_learner, rollout, train_step
from tests.vllm_models import CONFIG, CPU, LOGPROB_TOLERANCE, SETTINGS

SPECS = [
    QuantSpec("nvfp4", "bf16", "w4a16"),
    QuantSpec("nvfp4", "bf16", "w4a16", targets=("experts",)),  # attention projections as plain layers
]


def make_engine(spec: QuantSpec, size: int = 2) -> Any:
    settings = replace(SETTINGS, tensor_parallel=size)
    return VLLMEngine(
        CONFIG, spec, settings, torch.float32, CPU, report=lambda text: None, llm_options={"block_size": 32}
    )


def assert_refused(spec: QuantSpec) -> None:
    try:
        make_engine(spec, 3)
    except UserError as error:
        assert "needs a multiple of 3 processes, not 2" in str(error)
    else:
        raise AssertionError("three ranks of two were accepted")


def one_life(spec: QuantSpec, world: Distributed) -> None:
    model = make_learner(world, spec)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-2)
    engine = make_engine(spec)
    weights = engine._on_model(lambda model: sum(p.numel() * p.element_size() for p in model.parameters()))
    assert weights < 0.6 * sum(p.numel() * 4 for p in model.parameters()), "each rank holds about half"
    all_drawn: list[list[int]] = []  # of the whole group, as this rank saw them
    completion = engine._completion
    engine._completion = lambda output, greedy: all_drawn.append(list(output.token_ids)) or completion(output, greedy)
    for version in range(2):
        sync(model, engine, spec, version, verify=True)  # both ranks' parts together are the learner's bytes
        drawn = rollout(engine, world)
        assert len(drawn) == 2 * (1 + 2 * world.rank), "each rank takes its own responses"
        here, there = world.gather_objects(all_drawn)
        assert here == there, "the ranks of a group drew different tokens"
        gap = train_step(model, optimizer, drawn)
        assert gap < LOGPROB_TOLERANCE, f"rank {world.rank}, version {version}: {gap}"
    engine.close()
    assert in_process_group(), "closing the engine took the trainer's process group with it"


def main() -> None:
    with init_distributed(ParallelSettings(), TrainSettings(device="cpu")) as world:
        assert_refused(SPECS[0])
        for spec in SPECS:
            one_life(spec, world)
        world.print("two ranks shared one engine, twice")


if __name__ == "__main__":
    main()
