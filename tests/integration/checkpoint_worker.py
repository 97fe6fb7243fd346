"""Runs in every process of test_checkpoint_processes.py: resume, train, save, and print the losses.

torchrun --nproc_per_node=N checkpoint_worker.py FOLDER STEPS EP [fail]
"""

import sys
from pathlib import Path

import torch

from quads.config.sections import CheckpointSettings, ParallelSettings, TrainSettings
from quads.distributed import Distributed, init_distributed
from quads.errors import UserError, main_guard
from quads.model.model import MoEDecoder
from quads.run.checkpoint import Checkpointer
from quads.run.checkpoint_state import TrainState
from tests.integration.parallel_model_checks import BATCHES, loss_of, parallel_model, single_process_model


class Trainer:
    """AdamW on all batches a step; eps is large so that rounding noise of tiny gradients stays small."""

    def __init__(self, model: MoEDecoder) -> None:
        self.model, self.updates = model, 0
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)

    def counters(self) -> dict[str, int]:
        return {"updates": self.updates}

    def load_counters(self, counters: dict[str, int]) -> None:
        self.updates = counters["updates"]

    def step(self, world: Distributed) -> float:
        self.optimizer.zero_grad()
        total = torch.zeros(())
        for batch in BATCHES[world.rank :: world.size]:
            loss = loss_of(self.model, batch)
            loss.backward()
            total += loss.detach()
        self.optimizer.step()
        self.updates += 1
        return float(world.all_reduce(total))


@main_guard
def main(argv: list[str]) -> None:
    folder, steps, ep = Path(argv[0]), int(argv[1]), int(argv[2])
    with init_distributed(ParallelSettings(ep=ep), TrainSettings(device="cpu")) as world:
        trainer = Trainer(parallel_model(world, "none") if world.size > 1 else single_process_model())
        checkpointer = Checkpointer(folder, CheckpointSettings(resume="latest", keep=0, async_save=True))
        state = checkpointer.resume(trainer)
        assert trainer.updates == state.step
        for step in range(state.step + 1, steps + 1):
            loss = trainer.step(world)
            world.print(f"step {step} loss {loss:.6f}")
            checkpointer.save(TrainState(step=step), trainer)  # the next step runs while this is written
            if "fail" in argv and world.rank == world.size - 1:
                raise UserError("the disk of this machine is full; free some space")
        checkpointer.wait()


if __name__ == "__main__":
    main(sys.argv[1:])
