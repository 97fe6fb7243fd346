"""The vLLM layer on the Triton kernels, in Triton's interpreter: loads, layout, arithmetic, padding, fake operator."""

import pytest

from tests.helpers import run_command

pytestmark = pytest.mark.vllm


def test_the_gpu_site_computes_what_the_reference_does() -> None:
    result = run_command(
        ["-m", "tests.integration.vllm_triton_worker"], timeout_s=250, TRITON_INTERPRET="1", TORCH_COMPILE_DISABLE="0"
    )
    assert result.returncode == 0, result.stderr[-3000:]
    assert "sites agree" in result.stdout
