"""Runs in every process of test_parallel.py: torchrun --nproc_per_node=2|4 parallel_worker.py"""

from quads.config.sections import ParallelSettings, TrainSettings
from quads.distributed import init_distributed
from tests.integration import parallel_learner_checks, parallel_model_checks

if __name__ == "__main__":
    with init_distributed(ParallelSettings(), TrainSettings(device="cpu")) as world:
        parallel_model_checks.run(world)
        parallel_learner_checks.run(world)
