"""Comparisons that say where tensors differ, and commands run as a user would."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import torch
from torch import Tensor

REPOSITORY = Path(__file__).resolve().parent.parent


def assert_close(actual: Tensor, expected: Tensor, *, atol: float, rtol: float = 0.0) -> None:
    """|actual - expected| <= atol + rtol * |expected| everywhere; NaN equals NaN. Names the first bad element."""
    assert actual.shape == expected.shape, f"shape {tuple(actual.shape)} != {tuple(expected.shape)}"
    a, e = actual.detach().double().cpu(), expected.detach().double().cpu()
    error = torch.where((a == e) | (a.isnan() & e.isnan()), 0.0, (a - e).abs())
    bad = ~(error <= atol + rtol * e.abs().nan_to_num())
    if bad.any():
        first = tuple(bad.nonzero()[0].tolist())
        raise AssertionError(
            f"{int(bad.sum())} of {bad.numel()} elements differ by more than {atol} + {rtol} * |expected|; "
            f"largest difference {error.nan_to_num(torch.inf).max():.3e}; "
            f"first at {first}: {a[first]} against {e[first]}"
        )


def assert_bitwise(actual: Tensor, expected: Tensor) -> None:
    """Same dtype, shape and bits (so -0.0 differs from 0.0, and NaN payloads count)."""
    assert actual.dtype == expected.dtype, f"dtype {actual.dtype} != {expected.dtype}"
    assert actual.shape == expected.shape, f"shape {tuple(actual.shape)} != {tuple(expected.shape)}"
    a, e = (t.detach().cpu().contiguous().reshape(-1) for t in (actual, expected))
    width = a.element_size()
    bad = (
        (a.view(torch.uint8).view(-1, width) != e.view(torch.uint8).view(-1, width)).any(-1) if a.numel() else a.bool()
    )
    if bad.any():
        flat = int(bad.nonzero()[0])
        index = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), actual.shape)) if actual.dim() else ()
        raise AssertionError(
            f"{int(bad.sum())} of {bad.numel()} elements differ; first at {index}: {a[flat]} against {e[flat]}"
        )


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


def run_command(
    args: list[str], *, cwd: Path = REPOSITORY, timeout_s: float = 240, **env: str
) -> subprocess.CompletedProcess[str]:
    """Run Python with `args` (a script, or "-m", module) from the repository; stdout and stderr as text."""
    return subprocess.run(
        [sys.executable, *args], cwd=cwd, env=command_env(**env), timeout=timeout_s, capture_output=True, text=True
    )


def assert_passes_interpreted(test_file: str, timeout_s: float = 240) -> str:
    """Run a file of kernel tests with TRITON_INTERPRET=1 in a process of its own, on the CPU -> what pytest printed."""
    options = ["-q", "-x", "-W", "ignore", "-p", "no:cacheprovider"]
    done = run_command(
        ["-m", "pytest", *options, test_file], timeout_s=timeout_s, TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES=""
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    return done.stdout


def run_torchrun(
    args: list[str], *, num_processes: int, timeout_s: float = 240, **env: str
) -> subprocess.CompletedProcess[str]:
    """Run `args` (a script and its arguments) in `num_processes` processes of one thread each."""
    launch = ["-m", "torch.distributed.run", f"--nproc_per_node={num_processes}", f"--master_port={free_port()}"]
    return run_command([*launch, *args], timeout_s=timeout_s, **env)


def command_env(**env: str) -> dict[str, str]:
    """The environment with this repository importable and idle OpenMP threads asleep (they spin by default)."""
    paths = os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", **env}
