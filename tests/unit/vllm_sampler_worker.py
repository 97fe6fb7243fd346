"""Runs in a process with TRITON_INTERPRET=1 and vLLM for test_vllm_sampling.py: vLLM's own sampler, patched."""

# pyright: reportMissingImports=false
# vLLM is an extra.

from dataclasses import replace
from types import SimpleNamespace

import torch
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.logits_processor.builtin import MinPLogitsProcessor, MinTokensLogitsProcessor
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler

from quads.rollout.sampling import draw, seed_tensor, uniforms
from quads.rollout.vllm.patches import install_sampler
from quads.rollout.vllm.sampler import only_temperature
from tests.unit.vllm_sampling_worker import Counted

ROWS, VOCABULARY = 6, 700


def metadata() -> SamplingMetadata:
    config = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=ROWS))
    processors = [kind(config, torch.device("cpu"), False) for kind in (MinPLogitsProcessor, MinTokensLogitsProcessor)]
    return SamplingMetadata(
        temperature=torch.linspace(0.5, 1.5, ROWS),
        all_greedy=False,
        all_random=True,
        top_p=None,
        top_k=None,
        generators={row: Counted(row + 3, 4 * row) for row in range(ROWS)},  # pyright: ignore[reportArgumentType]
        max_num_logprobs=0,
        no_penalties=True,
        prompt_token_ids=None,
        frequency_penalties=torch.zeros(ROWS),
        presence_penalties=torch.zeros(ROWS),
        repetition_penalties=torch.ones(ROWS),
        output_token_ids=[[] for _ in range(ROWS)],
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=LogitsProcessors(processors),
    )


def main() -> None:
    logits = torch.randn(ROWS, VOCABULARY, generator=torch.Generator().manual_seed(0)) * 3
    sampler = Sampler(logprobs_mode="processed_logprobs")
    stock = Sampler.forward
    install_sampler()
    install_sampler()
    assert Sampler.forward is not stock

    output = sampler(logits=logits.clone(), sampling_metadata=metadata())
    numbers = uniforms(seed_tensor([row + 3 for row in range(ROWS)]), torch.arange(ROWS))
    tensors = output.logprobs_tensors
    for row, t in enumerate(metadata().temperature.tolist()):
        token, logprob = draw(logits[row : row + 1], t, numbers[row : row + 1])
        assert output.sampled_token_ids[row].tolist() == tensors.logprob_token_ids[row].tolist() == token.tolist()
        assert abs(tensors.logprobs[row] - logprob) < 1e-5
    # What vLLM reports of the same tokens
    theirs = Sampler.gather_logprobs(
        (logits / metadata().temperature[:, None]).log_softmax(-1), 0, output.sampled_token_ids[:, 0].long()
    )
    for mine, stocks in zip(tensors[:3], theirs[:3], strict=True):
        assert mine.shape == stocks.shape and mine.dtype == stocks.dtype
        assert torch.allclose(mine.double(), stocks.double(), atol=1e-5)
    asked = replace(metadata(), max_num_logprobs=3)
    assert only_temperature(asked)
    mine = sampler(logits=logits.clone(), sampling_metadata=asked).logprobs_tensors
    theirs = Sampler.gather_logprobs(
        (logits / metadata().temperature[:, None]).log_softmax(-1), 3, output.sampled_token_ids[:, 0].long()
    )
    assert torch.equal(mine.logprob_token_ids, theirs.logprob_token_ids)
    assert [t.dtype for t in mine[:2]] == [t.dtype for t in theirs[:2]]
    assert torch.allclose(mine.logprobs, theirs.logprobs, atol=1e-5)
    without = sampler(logits=logits.clone(), sampling_metadata=replace(metadata(), max_num_logprobs=None))
    assert without.logprobs_tensors is None

    # Everything else is left to vLLM
    assert only_temperature(metadata())
    busy = metadata()
    busy.logitsprocs.argmax_invariant[0].min_p_count = 1
    assert not only_temperature(busy)
    for change in (
        {"all_random": False},
        {"top_p": torch.full((ROWS,), 0.9)},
        {"top_k": torch.full((ROWS,), 5)},
        {"no_penalties": False},
        {"allowed_token_ids_mask": torch.zeros(ROWS, VOCABULARY, dtype=torch.bool)},
        {"bad_words_token_ids": {0: [[1]]}},
        {"logprob_token_ids": {0: [1, 2]}},
    ):
        assert not only_temperature(replace(metadata(), **change)), change
    greedy = replace(metadata(), all_greedy=True, all_random=False, temperature=None, generators={})
    output = sampler(logits=logits.clone(), sampling_metadata=greedy)
    assert torch.equal(output.sampled_token_ids[:, 0].long(), logits.argmax(-1))
    raw = Sampler(logprobs_mode="raw_logprobs")(
        logits=logits.clone(), sampling_metadata=replace(metadata(), generators={})
    )
    gathered = logits.log_softmax(-1).gather(-1, raw.sampled_token_ids.long())
    assert torch.allclose(raw.logprobs_tensors.logprobs, gathered)
    print("sampler agrees")


if __name__ == "__main__":
    main()
