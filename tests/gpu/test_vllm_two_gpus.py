"""The vLLM engine on two GPUs: an engine a rank, and tensor-parallel."""

from pathlib import Path

import pytest
import torch

from tests.helpers import run_torchrun

pytestmark = [pytest.mark.multi_gpu, pytest.mark.vllm]


@pytest.mark.parametrize("size", [1, 2], ids=["an engine a rank", "one engine on both"])
def test_two_ranks_roll_out(size: int, tmp_path: Path) -> None:
    """A process can make one engine on a GPU, so each size has processes of its own, and leaves its responses."""
    for shared in {1, size}:
        command = ["tests/gpu/vllm_two_gpus_worker.py", str(shared), str(tmp_path)]
        result = run_torchrun(command, num_processes=2, timeout_s=300)
        assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]
        assert f"two ranks rolled out, {shared} sharing an engine" in result.stdout
    if size == 2:
        alone, both = (torch.load(tmp_path / f"{shared}.pt") for shared in (1, 2))
        same = [(a, b) for a, b in zip(alone, both, strict=True) if a[0] == b[0]]
        assert len(same) > len(alone) // 3, "one engine a rank and one on both draw different tokens"
        gaps = torch.cat([(torch.tensor(a[1]) - torch.tensor(b[1])).abs() for a, b in same])
        assert float(gaps.mean()) < 0.03
