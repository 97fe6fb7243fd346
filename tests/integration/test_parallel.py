"""Two and four processes compute what one does: losses, gradients, norms, updated and quantized weights."""

from pathlib import Path

import pytest

from tests.helpers import run_torchrun

WORKER = str(Path(__file__).with_name("parallel_worker.py"))


@pytest.mark.parametrize(("num_processes", "num_checks"), [(2, 14), (4, 16)])
def test_parallel_equals_single_process(num_processes: int, num_checks: int) -> None:
    result = run_torchrun([WORKER], num_processes=num_processes, timeout_s=200)
    assert result.returncode == 0, result.stderr[-4000:]
    assert result.stdout.count("ok ") == num_checks, result.stdout
