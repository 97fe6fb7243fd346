"""The native engine on a GPU, in plain torch: responses, gap to the learner, sync in place."""

import pytest
import torch

from quads.config_sections import RolloutSettings
from quads.model.attention import PackedContext
from quads.model.logprobs import token_logprobs
from quads.quant.rollout import named_weights
from quads.rollout.native import NativeEngine
from quads.rollout.sync import sync
from quads.types import Sampling
from tests.numerics.test_parity_chain import PROMPTS, N, rollout_logprobs
from tests.rollout_models import CONFIG, PLAIN, SAMPLING, flat, make_learner, make_prompts

pytestmark = pytest.mark.gpu


def make_engine(dtype: torch.dtype, slots: int = 32) -> NativeEngine:
    settings = RolloutSettings(max_batch=slots, max_prompt_tokens=16, max_new_tokens=9)
    engine = NativeEngine(CONFIG, PLAIN, settings, dtype, "cuda", report=lambda line: None)
    sync(make_learner(PLAIN, dtype=dtype).cuda(), engine, PLAIN, version=1, verify=True)
    return engine


@pytest.mark.parametrize("dtype,mean,largest", [(torch.float32, 1e-5, 1e-4), (torch.bfloat16, 0.02, 0.5)])
def test_gap_to_the_learner_is_rounding_noise(dtype: torch.dtype, mean: float, largest: float) -> None:
    groups = make_engine(dtype).generate(PROMPTS, N, Sampling(9, 0.8), list(range(len(PROMPTS) * N)))
    model = make_learner(PLAIN, dtype=dtype).cuda()
    pairs = [(p, c.token_ids) for p, group in zip(PROMPTS, groups, strict=True) for c in group]
    tokens = torch.tensor([token for prompt, response in pairs for token in prompt + response], device="cuda")
    lengths = [len(prompt) + len(response) for prompt, response in pairs]
    with torch.no_grad():
        hidden = model(tokens, PackedContext.build(lengths, "cuda"))
        logprobs, _ = token_logprobs(hidden, model.output_weight(), tokens.roll(-1), temperature=0.8)
    parts = zip(logprobs.cpu().split(lengths), pairs, strict=True)
    ours = torch.cat([part[len(prompt) - 1 : len(prompt) + len(response) - 1] for part, (prompt, response) in parts])
    gap = (ours - rollout_logprobs(groups)).abs()
    assert gap.mean() < mean and gap.max() < largest


def test_fp32_tokens_do_not_depend_on_the_batch() -> None:
    prompts, seeds = make_prompts(12), list(range(12))
    together = flat(make_engine(torch.float32).generate(prompts, 1, SAMPLING, seeds))
    few_slots = flat(make_engine(torch.float32, slots=3).generate(prompts, 1, SAMPLING, seeds))
    assert [c.token_ids for c in together] == [c.token_ids for c in few_slots]


def test_sync_keeps_addresses() -> None:
    engine = make_engine(torch.bfloat16)
    before = [weight.data_ptr() for _, weight in named_weights(engine.model)]
    sync(make_learner(PLAIN, seed=5, dtype=torch.bfloat16).cuda(), engine, PLAIN, version=2, verify=True)
    assert [weight.data_ptr() for _, weight in named_weights(engine.model)] == before
    assert engine.policy_version == 2
