"""Updates of the learner against the same arithmetic written out with torch.optim.AdamW, values unlike any default."""

import copy
import math

import torch
from torch import Tensor

from quads.config.sections import OptimSettings, QuantSettings, RLSettings
from quads.model.attention import PackedContext
from quads.model.model import MoEDecoder
from quads.quant.recipes import resolve
from quads.rl.learner import Learner
from quads.rl.packing import Sample, pack
from tests.unit.test_learner import CONFIG, make_samples

OPTIM = OptimSettings(
    lr=3e-3, betas=(0.6, 0.8), eps=1e-3, weight_decay=0.3, warmup_steps=1, schedule="linear", max_grad_norm=0.02
)
RL = RLSettings(clip_low=0.05, clip_high=0.4, loss_average="sample")
TEMPERATURE, STEPS, UPDATES_PER_STEP = 1.7, 4, 2


def sequence_logprobs(model: MoEDecoder, sample: Sample) -> Tensor:
    """Log-probs of one response, from the logits of the whole sequence in fp32."""
    tokens = torch.tensor(sample.prompt_ids + sample.completion.token_ids)
    hidden_TH = model(tokens, PackedContext.build([len(tokens)], torch.device("cpu")))
    logits_TV = (hidden_TH @ model.output_weight().t()).float() / TEMPERATURE
    first = len(sample.prompt_ids) - 1
    rows = logits_TV[first : first + len(sample.completion.token_ids)].log_softmax(-1)
    return rows.gather(1, torch.tensor(sample.completion.token_ids).unsqueeze(1)).squeeze(1)


def ratios(model: MoEDecoder, sample: Sample) -> Tensor:
    """How much more probable the learner finds each response token than the rollout did."""
    return (sequence_logprobs(model, sample) - torch.tensor(sample.completion.logprobs)).exp()


def clipped_by_hand(model: MoEDecoder, samples: list[Sample]) -> int:
    """Tokens that the clip holds back: too probable already for a good response, or too improbable for a bad one."""
    return sum(
        int(((r > 1 + RL.clip_high) if s.advantage > 0 else (r < 1 - RL.clip_low)).sum())
        for s in samples
        for r in [ratios(model, s).detach()]
    )


def loss_by_hand(model: MoEDecoder, samples: list[Sample]) -> Tensor:
    """Mean over the samples of the mean over their tokens of the clipped surrogate."""
    losses = []
    for sample in samples:
        ratio = ratios(model, sample)
        clipped = ratio.clamp(1 - RL.clip_low, 1 + RL.clip_high)
        losses.append(-torch.minimum(ratio * sample.advantage, clipped * sample.advantage).mean())
    return torch.stack(losses).mean()


def rate_by_hand(update: int) -> float:
    """Two updates of warm-up (one step of two), then a line from the peak to 0 at the eighth."""
    return OPTIM.lr * (update + 1) / 2 if update < 2 else OPTIM.lr * (1 - (update - 2) / 6)


def test_updates_are_adamw_s() -> None:
    model = MoEDecoder(CONFIG)
    model.init_weights(torch.Generator().manual_seed(0))
    theirs = copy.deepcopy(model)
    learner = Learner(
        model,
        resolve(QuantSettings(recipe="bf16")),
        OPTIM,
        RL,
        temperature=TEMPERATURE,
        steps=STEPS,
        updates_per_step=UPDATES_PER_STEP,
    )
    matrices = [p for p in theirs.parameters() if p.dim() >= 2]
    vectors = [p for p in theirs.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": OPTIM.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=1.0, betas=(0.6, 0.8), eps=OPTIM.eps)
    clipped_norms = 0
    for update in range(4):
        samples = make_samples(seed=update)
        microbatches, denominator = pack(samples, 40, RL.loss_average)
        stats = learner.update(learner.add_fixed_logprobs(microbatches), denominator)

        adamw.zero_grad()
        clipped = clipped_by_hand(theirs, samples)
        loss = loss_by_hand(theirs, samples)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), OPTIM.max_grad_norm)
        clipped_norms += float(norm) > OPTIM.max_grad_norm
        for group in adamw.param_groups:
            group["lr"] = rate_by_hand(update)
        adamw.step()

        assert stats.touched["clipped"] == clipped and 0 < clipped < stats.tokens
        assert math.isclose(stats.loss, loss.item(), rel_tol=1e-5)
        assert math.isclose(stats.grad_norm, float(norm), rel_tol=1e-4)
        assert math.isclose(stats.lr, rate_by_hand(update), rel_tol=1e-12)
    assert clipped_norms == 4  # else max_grad_norm would not have been seen
    for (name, mine), other in zip(model.named_parameters(), theirs.parameters(), strict=True):
        # Gradients are fp32 sums in another order: 1e-4 of what four updates moved.
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=2e-6, msg=lambda text, name=name: f"{name}: {text}")
