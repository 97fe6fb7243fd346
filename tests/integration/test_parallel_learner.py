"""Sharded quantization-aware training: the bits of one process, whatever is gathered."""

from pathlib import Path

import pytest

from tests.helpers import run_torchrun

WORKER = str(Path(__file__).with_name("parallel_learner_worker.py"))


@pytest.mark.parametrize("num_processes", [2, 4])
def test_sharded_learner_equals_single_process(num_processes: int) -> None:
    result = run_torchrun([WORKER], num_processes=num_processes)
    assert result.returncode == 0, result.stderr[-4000:]
    assert result.stdout.count("ok ") == 8, result.stdout
