"""Sampling for vLLM: the kernels, interpreted, against the native engine's draw; and vLLM's sampler on them."""

import pytest

from tests.helpers import run_command


def test_tokens_are_those_of_the_native_engine() -> None:
    result = run_command(["-m", "tests.unit.vllm_sampling_worker"], timeout_s=120, TRITON_INTERPRET="1")
    assert result.returncode == 0, result.stderr[-3000:]
    assert "draws agree" in result.stdout


@pytest.mark.vllm
def test_vllms_sampler_draws_with_them() -> None:
    """Every field of its output, and what is left to vLLM."""
    result = run_command(
        ["-m", "tests.unit.vllm_sampler_worker"], timeout_s=180, TRITON_INTERPRET="1", TORCH_COMPILE_DISABLE="1"
    )
    assert result.returncode == 0, result.stderr[-3000:]
    assert "sampler agrees" in result.stdout
