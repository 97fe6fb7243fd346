"""Which launch configurations `benchmarks.tune_kernels` times: a question of arithmetic, no GPU is needed for it."""

import pytest

pytest.importorskip("triton")

from benchmarks.tune_kernels import SHAPES, find_jobs  # noqa: E402

SIZES = [1, 16, 64, 256]


@pytest.mark.parametrize("multiprocessors", [24, 132, 304])
def test_tiles_of_linear_layers_fill_the_gpu_at_hand(multiprocessors: int) -> None:
    jobs = find_jobs(["dense"], SIZES, multiprocessors)
    assert {(job[0], job[1]) for job in jobs} == {(layer, tokens) for layer in ("qkv", "o") for tokens in SIZES}
    for layer, tokens, bm, tile, _ in jobs:
        token_blocks = (tokens + bm - 1) // bm
        programs = token_blocks * (SHAPES[layer][0] // tile.bn) * tile.split
        assert multiprocessors / 2 <= programs <= 8 * multiprocessors


def test_a_larger_gpu_gets_other_linear_tiles_and_the_same_routed_ones() -> None:
    small, large = (set(find_jobs(["dense"], SIZES, count)) for count in (24, 304))
    assert small - large and large - small
    assert find_jobs(["moe"], SIZES, 24) == find_jobs(["moe"], SIZES, 304)


def test_without_a_gpu_the_candidates_are_those_of_an_h200() -> None:
    assert find_jobs(["moe", "dense"], SIZES) == find_jobs(["moe", "dense"], SIZES, 132)
