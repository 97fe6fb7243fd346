"""Tests marked for hardware that is missing are skipped with the reason; every test starts from the same seed."""

import importlib.util
import os
import random
import signal
from typing import Any

import numpy
import pytest
import torch


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also run the tests that take minutes")


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # A shell that starts the tests with `&` has them, and all that they start, ignore Ctrl-C.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if os.environ.get("TRITON_INTERPRET") == "1":
        let_the_interpreter_count()


def let_the_interpreter_count() -> None:
    """Triton 3.6 asks NumPy for int(array of one element), an error since NumPy 2.4: no interpreted kernel could loop
    up to one of its arguments. Later versions squeeze the array first."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patch_and_squeeze(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))

    interpreter._patch_lang_tensor = patch_and_squeeze


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    missing = {}
    num_gpus = torch.cuda.device_count()
    if num_gpus < 1:
        missing["gpu"] = "needs a CUDA GPU, none here"
    if num_gpus < 2:
        missing["multi_gpu"] = f"needs two CUDA GPUs, {num_gpus} here"
    if num_gpus < 1 or torch.cuda.get_device_capability()[0] != 10:
        missing["sm100"] = "needs a Blackwell GPU (compute capability 10.x)"
    if not config.getoption("--slow"):
        missing["slow"] = "takes minutes; run with --slow"
    if importlib.util.find_spec("vllm") is None:
        missing["vllm"] = "needs the extra `vllm`"
    for item in items:
        for name, reason in missing.items():
            if item.get_closest_marker(name):  # not a keyword: the folder tests/gpu is one, too
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def seeded() -> None:
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)
