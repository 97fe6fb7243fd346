"""The vLLM engine on two GPUs: an engine a rank, and tensor-parallel."""

import pytest

from tests.helpers import run_torchrun

pytestmark = [pytest.mark.multi_gpu, pytest.mark.vllm]


def test_an_engine_a_rank_and_one_on_both() -> None:
    result = run_torchrun(["tests/gpu/vllm_two_gpus_worker.py"], num_processes=2, timeout_s=400)
    assert result.returncode == 0, result.stderr[-4000:]
    assert "two GPUs: an engine each, and one on both" in result.stdout
