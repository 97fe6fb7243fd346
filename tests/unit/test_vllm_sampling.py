"""Sampling with a seed for each request: the kernels, in Triton's interpreter, against the native engine's draw."""

from tests.helpers import run_command


def test_tokens_are_those_of_the_native_engine() -> None:
    result = run_command(["-m", "tests.unit.vllm_sampling_worker"], timeout_s=120, TRITON_INTERPRET="1")
    assert result.returncode == 0, result.stderr[-3000:]
    assert "draws agree" in result.stdout
