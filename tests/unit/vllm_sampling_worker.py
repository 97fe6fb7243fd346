"""Runs in a process with TRITON_INTERPRET=1 for test_vllm_sampling.py."""

import torch
from torch import Tensor

from quads.rollout import sampling
from quads.rollout.sampling import seed_tensor, uniforms
from quads.rollout.vllm.sampler import CHUNK, batch_uniforms, draw, most_likely, next_uniforms


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


def check(logits: Tensor, temperature: Tensor, numbers: Tensor) -> None:
    """Tokens and log-probs are the native engine's, ranks those that vLLM counts."""
    tokens, logprobs, ranks = draw(logits, temperature, numbers)
    for row, t in enumerate(temperature.tolist()):
        token, logprob = sampling.draw(logits[row : row + 1], t, numbers[row : row + 1])
        assert tokens[row] == token, (row, tokens[row], token)
        assert abs(logprobs[row] - logprob) < 1e-5 * (1 + abs(logprob)), (row, logprobs[row], logprob)
        assert ranks[row] == (logits[row] >= logits[row, token]).sum(), row
    ids, top_logprobs = most_likely(logits, temperature, tokens, logprobs, 5)
    for row, t in enumerate(temperature.tolist()):
        native = sampling.most_likely(logits[row : row + 1], torch.tensor(t, dtype=torch.float64), 5)
        finite = native[1][0] > -torch.inf  # tokens of probability 0 have no order
        assert torch.allclose(top_logprobs[row][finite], native[1][0][finite], atol=1e-5, rtol=1e-5), row
        assert torch.equal(torch.isinf(top_logprobs[row]), ~finite), row
        if logits.dtype == torch.float32:  # in bf16 several are equal
            assert torch.equal(ids[row][finite], native[0][0][finite]), row


def main() -> None:
    generator = torch.Generator().manual_seed(0)
    seeds = list(range(40))
    generators = [Counted(seed, 4 * (seed % 3)) for seed in seeds]
    numbers = next_uniforms(generators, torch.device("cpu"))
    assert [g.offset for g in generators] == [4 * (seed % 3) + 4 for seed in seeds]
    counters = torch.tensor([seed % 3 for seed in seeds])
    assert torch.equal(numbers, uniforms(seed_tensor(seeds), counters))
    temperature = torch.linspace(0.5, 1.5, 40)
    for vocabulary in (5, CHUNK, 3 * CHUNK + 77):
        logits = torch.randn(40, vocabulary, generator=generator) * 3
        logits[0] = -torch.inf
        logits[0, -1] = 0.0  # one certain token, the last
        logits[1, : vocabulary // 2] = -torch.inf  # whole chunks of nothing
        logits[2, vocabulary // 2 :] = -torch.inf
        check(logits, temperature, numbers)
        padded = torch.full((40, vocabulary + 60), torch.inf, dtype=torch.bfloat16)  # vLLM pads the vocabulary
        padded[:, :vocabulary] = logits
        check(padded[:, :vocabulary], temperature, numbers)
        poisoned = logits.clone()
        poisoned[3, 1] = torch.nan
        tokens, logprobs, _ = draw(poisoned, temperature, numbers)
        assert logprobs.isnan().nonzero().tolist() == [[3]] and 0 <= tokens[3] < vocabulary
    even, edges = torch.zeros(3, 300), torch.tensor([0.0, 0.5, 1.0 - 2.0**-53], dtype=torch.float64)
    tokens, logprobs, ranks = draw(even, torch.ones(3), edges)
    assert tokens.tolist() == [0, 150, 299] and ranks.tolist() == [300] * 3
    assert torch.allclose(logprobs, -torch.tensor(300.0).log())

    torch.manual_seed(0)
    mixed = batch_uniforms(5, {1: Counted(7, 0), 4: Counted(9, 8)}, torch.device("cpu"))
    assert torch.equal(mixed[[1, 4]], uniforms(seed_tensor([7, 9]), torch.tensor([0, 2])))
    assert mixed.unique().numel() == 5 and ((mixed >= 0) & (mixed < 1)).all()
    print("draws agree")


if __name__ == "__main__":
    main()
