"""One process: no process group, seeds that are pure functions of names, and settings that do not fit."""

import random
from pathlib import Path

import numpy
import pytest
import torch
import torch.distributed as dist

from quads.config.sections import CheckpointSettings, ParallelSettings, TrainSettings
from quads.distributed import agree, choose_device, derive_seed, has_peers, init_distributed
from quads.errors import UserError, main_guard
from quads.run.checkpoint import Checkpointer

CPU = TrainSettings(device="cpu", seed=5)


def draw() -> tuple[float, float, float]:
    return random.random(), float(numpy.random.rand()), float(torch.rand(()))


def test_one_process_has_no_process_group_and_leaves_nothing_behind() -> None:
    with init_distributed(ParallelSettings(), CPU) as world:
        assert (world.rank, world.size, world.is_main, world.meshes) == (0, 1, True, None)
        assert world.device == torch.device("cpu")
        assert not dist.is_initialized()
        assert torch.equal(world.all_reduce(torch.tensor([1.0, 2.0])), torch.tensor([1.0, 2.0]))
        world.barrier()
        assert agree(True) and not agree(False)


def test_libraries_draw_the_same_for_a_seed_and_others_for_another() -> None:
    draws = []
    for seed in (5, 5, 6):
        with init_distributed(ParallelSettings(), TrainSettings(device="cpu", seed=seed)):
            draws.append(draw())
    assert draws[0] == draws[1]
    assert all(ours != theirs for ours, theirs in zip(draws[0], draws[2], strict=True))


def test_a_generator_is_a_pure_function_of_seed_and_names() -> None:
    with init_distributed(ParallelSettings(), CPU) as world:
        first = torch.rand(3, generator=world.generator("eval", 3))
        draw()
        assert torch.equal(first, torch.rand(3, generator=world.generator("eval", 3)))
        seeds = {world.generator(*names).initial_seed() for names in (("eval", 3), ("eval", 4), ("train", 3), ("e", 3))}
        assert len(seeds) == 4
        assert world.generator("eval", 3, shared=True).initial_seed() == derive_seed(5, "eval", 3)


def test_derived_seeds_never_change() -> None:
    # A resumed run must draw what the straight one drew, also under a later version of this code.
    assert derive_seed(0, "rollout/1", 0) == 4102413755707652784
    assert 0 <= min(derive_seed("x", i) for i in range(100)) and max(derive_seed("x", i) for i in range(100)) < 2**63


@pytest.mark.parametrize(
    ("processes", "settings"),
    [
        (1, ParallelSettings(ep=2)),
        (1, ParallelSettings(fsdp=2)),
        (3, ParallelSettings(replicate=2)),
        (8, ParallelSettings(replicate=2, fsdp=8)),
        (8, ParallelSettings(ep=3)),
        (8, ParallelSettings(replicate=4, ep=4)),
    ],
)
def test_sizes_that_do_not_multiply_are_refused(
    monkeypatch: pytest.MonkeyPatch, processes: int, settings: ParallelSettings
) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    with pytest.raises(UserError, match=f"do not fit {processes} processes; replicate \\* fsdp must equal"):
        with init_distributed(settings, CPU):
            pytest.fail("started")


def test_devices_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert choose_device("auto", 3) == torch.device("cpu")
    with pytest.raises(UserError, match="torch sees no GPU"):
        choose_device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(UserError, match="--nproc_per_node=2 or fewer"):
        choose_device("auto", 2)
    assert choose_device("cpu", 2) == torch.device("cpu")


def test_of_many_processes_with_the_same_bad_input_one_reports(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    @main_guard
    def main() -> None:
        raise UserError("no such key")

    for local_rank in ("0", "1", "2"):
        monkeypatch.setenv("LOCAL_RANK", local_rank)
        with pytest.raises(SystemExit) as exit_info:
            main()
        assert exit_info.value.code == 2
    assert capsys.readouterr().err == "error: no such key\n"


def test_a_group_of_one_is_not_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """vLLM makes a default group in a single process; on a GPU it has NCCL alone and refuses tensors of the CPU."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a collective on a group of one")

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        monkeypatch.setattr(dist, "all_reduce", refuse)
        monkeypatch.setattr(dist, "barrier", refuse)
        assert agree(True) and not agree(False) and not has_peers()
        Checkpointer(tmp_path, CheckpointSettings(), "").wait()
    finally:
        dist.destroy_process_group()
