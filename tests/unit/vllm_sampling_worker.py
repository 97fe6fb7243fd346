"""Runs in a process with TRITON_INTERPRET=1 for test_vllm_sampling.py."""

import torch

from quads.rollout.sampling import draw, seed_tensor, uniforms
from quads.rollout.vllm_sampling import CHUNK, next_uniforms, place


class Counted:
    """What a CUDA generator has and a CPU one lacks: an offset."""

    def __init__(self, seed: int, offset: int) -> None:
        self.seed, self.offset = seed, offset

    def initial_seed(self) -> int:
        return self.seed

    def get_offset(self) -> int:
        return self.offset

    def set_offset(self, offset: int) -> None:
        self.offset = offset


def main() -> None:
    generator = torch.Generator().manual_seed(0)
    for vocabulary in (5, CHUNK, 3 * CHUNK + 77):
        logits = torch.randn(40, vocabulary, generator=generator) * 3
        logits[0] = -torch.inf
        logits[0, -1] = 0.0  # one certain token, the last
        logits[1, : vocabulary // 2] = -torch.inf  # whole chunks of nothing
        seeds = list(range(40))
        generators = [Counted(seed, 4 * (seed % 3)) for seed in seeds]
        numbers = next_uniforms(generators, torch.device("cpu"))
        assert [g.offset for g in generators] == [4 * (seed % 3) + 4 for seed in seeds]
        counters = torch.tensor([seed % 3 for seed in seeds])
        assert torch.equal(numbers, uniforms(seed_tensor(seeds), counters))
        tokens = place(logits.softmax(-1), numbers)
        expected, _ = draw(logits, 1.0, numbers)
        assert torch.equal(tokens, expected), (vocabulary, tokens, expected)
    probs = torch.full((3, 300), 1 / 300)
    edges = torch.tensor([0.0, 0.5, 1.0 - 2.0**-53], dtype=torch.float64)
    assert place(probs, edges).tolist() == [0, 150, 299]
    print("draws agree")


if __name__ == "__main__":
    main()
