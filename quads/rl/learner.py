"""The learner: fp32 master weights, forwards through quantized weights, one GRPO update a mini-batch.

After every update the targeted weights are quantized once (`requantize`); the packed bytes serve the next forward and
the rollout alike. An update is skipped if its loss or gradient norm is not finite, or the log-probs of more than a
tenth of its tokens, on either side; three in a row stop the run. With several processes
each computes the loss of its own responses over the global denominator, and gradients add up.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from quads.config.sections import OptimSettings, RLSettings
from quads.distributed import Distributed
from quads.errors import UserError
from quads.model.attention import PackedContext
from quads.model.finite_weights import first_broken_weight
from quads.model.logprobs import candidate_logprobs
from quads.model.model import MoEDecoder
from quads.quant.convert import convert_learner
from quads.quant.masters import requantize
from quads.quant.recipes import QuantSpec
from quads.rl.corrections import ais_share, log_weights, weight_moments
from quads.rl.loss import LossConfig, grpo_loss
from quads.rl.mismatch import routing_agreement
from quads.rl.optimizer import build_adamw, clip_gradients, learning_rate, set_learning_rate
from quads.rl.packing import Microbatch
from quads.rl.updates import TOUCHED, UpdateStats, UpdateSums

MAX_SKIPPED_IN_A_ROW = 3
MAX_NONFINITE_SHARE = 0.1  # of response tokens: a stray overflow is masked, more means that the weights are broken


class Learner:
    """Owns the model's master weights, the optimizer and the update count.

    Args:
        model: fp32 parameters on their device, `model.dtype` for activations. Converted in place to `spec`'s learner
            side, unless it was before, and quantized.
        optim, rl: these sections of the config.
        temperature: the rollout's; log-probs are of softmax(logits / temperature).
        steps, updates_per_step: of the whole run, for the schedule.
        reference: a frozen copy of the starting model, only for rl.kl_coef > 0.
        world: the processes that share the model and split the samples. None: this one alone.
    """

    def __init__(
        self,
        model: MoEDecoder,
        spec: QuantSpec,
        optim: OptimSettings,
        rl: RLSettings,
        *,
        temperature: float,
        steps: int,
        updates_per_step: int,
        reference: MoEDecoder | None = None,
        world: Distributed | None = None,
    ) -> None:
        self.model = model
        self.world = world
        self.reference = reference
        for part in (model, reference):
            if part is not None:
                convert_learner(part, spec)
                requantize(part)
        self.spec, self.optim, self.rl = spec, optim, rl
        self.temperature = temperature
        self.total_updates, self.warmup_updates = steps * updates_per_step, optim.warmup_steps * updates_per_step
        self.loss_config = LossConfig.of(rl)
        if not model.config.router_learns:
            # Its gradient is 0 but for rounding, which Adam with a tiny eps would make full steps of.
            for name, parameter in model.named_parameters():
                if name.endswith(".mlp.gate.weight"):
                    parameter.requires_grad_(False)
        betas = (optim.betas[0], optim.betas[1])
        self.optimizer = build_adamw(model, optim.lr, betas, optim.eps, optim.weight_decay, optim.moments)
        self.updates = 0
        self.skipped = 0
        self.skipped_in_a_row = 0

    @property
    def device(self) -> torch.device:
        """Where the master weights are."""
        return next(self.model.parameters()).device

    def forward_logprobs(
        self, model: MoEDecoder, batch: Microbatch, record_routing: bool = False
    ) -> tuple[Tensor, Tensor, dict[int, Tensor], Tensor]:
        """(log-probs, entropies) of the response tokens, fp32 [N]; the routers' own choices by layer, if recorded; the
        log-probs of the rollout's most likely tokens, fp32 [N, k], k = 0 without score centering."""
        context = PackedContext.build(list(batch.lengths), self.device)
        context.routed_experts = batch.routed_experts_TLA if self.rl.routing_replay else None
        context.record_routing = record_routing
        hidden_TH = model(batch.tokens_T, context)
        candidates_Nk = batch.targets_N.new_empty(len(batch.targets_N), 0)
        if self.rl.score_centering:
            assert batch.top_ids_Nk is not None, "score centering needs the engine's top log-probs"
            candidates_Nk = batch.top_ids_Nk
        logprobs_N, entropy_N, of_candidates_Nk = candidate_logprobs(
            hidden_TH[batch.predict_N], model.output_weight(), batch.targets_N, candidates_Nk, self.temperature
        )
        return logprobs_N, entropy_N, context.recorded, of_candidates_Nk

    @torch.no_grad()
    def add_fixed_logprobs(self, microbatches: Sequence[Microbatch]) -> list[Microbatch]:
        """A mini-batch with what stays fixed through its updates, where used: the learner's own log-probs, the
        reference's, and how much AIS corrects. Collective."""
        moved = [mb.to(self.device) for mb in microbatches]
        if self.loss_config.old_logprobs == "learner":
            moved = [replace(mb, old_logprobs_N=self.forward_logprobs(self.model, mb)[0]) for mb in moved]
        if self.reference is not None:
            moved = [replace(mb, ref_logprobs_N=self.forward_logprobs(self.reference, mb)[0]) for mb in moved]
        if self.loss_config.correction == "ais":
            share = self._ais_share(moved)
            moved = [replace(mb, ais_share=share) for mb in moved]
        return moved

    def _ais_share(self, microbatches: Sequence[Microbatch]) -> Tensor:
        """`ais_share` of a mini-batch over all processes, so that it does not depend on how that was split."""
        moments = torch.zeros(3, dtype=torch.float64, device=self.device)
        for mb in microbatches:
            assert mb.old_logprobs_N is not None
            mismatch_N, trained_N = mb.old_logprobs_N - mb.rollout_logprobs_N, mb.weights_N > 0
            log_weights_N = log_weights(mismatch_N, mb.sequence_N, trained_N, self.loss_config.correction_level)
            moments += weight_moments(log_weights_N, trained_N)
        return ais_share(moments if self.world is None else self.world.all_reduce(moments))

    def update(self, microbatches: Sequence[Microbatch], denominator: float) -> UpdateStats:
        """One optimizer update on one mini-batch.

        Args:
            microbatches: from `pack`, on the device, with the fixed log-probs the loss needs; equally many on every
                process, each with responses of its own.
            denominator: of the whole mini-batch, over all processes. 0 if nothing of it is trained on.

        Raises:
            UserError: when the third update in a row was skipped.
        """
        self.optimizer.zero_grad(set_to_none=True)
        denominator = max(denominator, 1.0)
        sums = UpdateSums(self.device)
        learner, rollout, finite = [], [], []
        for batch in microbatches:
            recording = batch.routed_experts_TLA is not None
            logprobs_N, entropy_N, recorded, candidates_Nk = self.forward_logprobs(self.model, batch, recording)
            loss, batch_sums = grpo_loss(logprobs_N, batch, self.loss_config, denominator, candidates_Nk)
            loss.backward()
            sums.add(**batch_sums, loss=loss.detach(), entropy=entropy_N.detach().sum(), entropy_tokens=len(entropy_N))
            if batch.routed_experts_TLA is not None:
                repeated, routes = routing_agreement(recorded, batch.routed_experts_TLA)
                sums.add(routes_repeated=repeated, routes=routes)
            sums.add(finite=(logprobs_N.detach().isfinite() & batch.finite_N).sum())
            learner.append(logprobs_N.detach())
            rollout.append(batch.rollout_logprobs_N)
            finite.append(batch.finite_N)
        norm = float(clip_gradients(self.model.parameters(), self.optim.max_grad_norm, self.world))
        total = sums.read(self.world)
        lr = learning_rate(self.updates, self.optim.lr, self.warmup_updates, self.total_updates, self.optim.schedule)
        broken = what_is_broken(total["loss"], norm, 1.0 - total["finite"] / max(total["entropy_tokens"], 1.0))
        self._apply(lr, broken)
        return UpdateStats(
            loss=total["loss"],
            grad_norm=norm,
            lr=lr,
            skipped=bool(broken),
            tokens=int(total["tokens"]),
            touched={name: int(total[name]) for name in TOUCHED},
            kl_sum=None if self.reference is None else total["kl"],
            entropy_sum=total["entropy"],
            entropy_tokens=int(total["entropy_tokens"]),
            learner_logprobs_N=torch.cat(learner),
            rollout_logprobs_N=torch.cat(rollout),
            finite_N=torch.cat(finite),
            routes_repeated=int(total["routes_repeated"]),
            routes=int(total["routes"]),
        )

    def _apply(self, lr: float, broken: str) -> None:
        """The optimizer step and the quantization that must follow it, or the count of a skipped one."""
        self.updates += 1
        if not broken:
            set_learning_rate(self.optimizer, lr)
            self.optimizer.step()
            requantize(self.model)
            self.skipped_in_a_row = 0
            return
        self.optimizer.zero_grad(set_to_none=True)
        self.skipped += 1
        self.skipped_in_a_row += 1
        if self.skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
            weight = first_broken_weight(self.model)
            advice = "lower optim.lr, or resume" if weight is None else f"weight {weight} is not finite: resume"
            raise UserError(
                f"{broken} in {MAX_SKIPPED_IN_A_ROW} updates in a row, which were skipped; {advice} from an earlier "
                "checkpoint with --checkpoint.resume PATH"
            )

    def counters(self) -> dict[str, int]:
        """Plain numbers that belong to the optimizer state."""
        return {"updates": self.updates, "skipped": self.skipped, "skipped_in_a_row": self.skipped_in_a_row}

    def load_counters(self, counters: dict[str, int]) -> None:
        """After the tensors were loaded in place: restore the counters and quantize what was loaded."""
        self.updates, self.skipped = counters["updates"], counters["skipped"]
        self.skipped_in_a_row = counters["skipped_in_a_row"]
        requantize(self.model)


def what_is_broken(loss: float, norm: float, nonfinite_share: float) -> str:
    """Why an update must not be applied, "" if it may. nonfinite_share: of its response tokens, those whose log-prob is
    not finite in the rollout or in the learner. All over all processes."""
    if not (math.isfinite(loss) and math.isfinite(norm)):
        return "loss or gradient was not finite"
    if nonfinite_share > MAX_NONFINITE_SHARE:
        return f"log-probs of {nonfinite_share:.0%} of the tokens were not finite"
    return ""
