"""What the vLLM engine gives back of the process it lives in, as far as a CPU can tell."""

import pytest
import torch

from quads.rollout.vllm.patches import others_on_the_gpu


def test_memory_that_others_take_during_a_sleep_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM measures before and after, and asserts that the difference is not negative."""
    readings = iter([(50, 100), (40, 100), (70, 100), (60, 100)])
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda *device: next(readings))
    measure = torch.accelerator.get_memory_info
    with pytest.raises(ZeroDivisionError), others_on_the_gpu():
        before, after = torch.accelerator.get_memory_info()[0], torch.accelerator.get_memory_info()[0]
        assert after - before == 0
        assert torch.accelerator.get_memory_info("cuda:0") == (70, 100)
        raise ZeroDivisionError
    assert torch.accelerator.get_memory_info is measure
    assert torch.accelerator.get_memory_info() == (60, 100)
