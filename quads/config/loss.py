"""Which options of the loss in [rl] go together."""

from quads.config.sections import RLSettings
from quads.errors import UserError


def check_loss(rl: RLSettings) -> None:
    """UserError for options of [rl] that contradict each other, or of which one would do nothing."""
    if 0 < rl.cumulative_ratio_clip <= 1:
        raise UserError(f"[rl] cumulative_ratio_clip = {rl.cumulative_ratio_clip} must be 0 (off) or above 1")
    if 0 < rl.dual_clip <= 1:
        raise UserError(f"[rl] dual_clip = {rl.dual_clip} must be 0 (off) or above 1")
    if rl.old_logprobs == "rollout" and rl.correction not in ("", "none"):
        raise UserError(
            f'[rl] correction = "{rl.correction}" needs old_logprobs = "learner": with "rollout" the ratio is taken '
            "against the engine's log-probs already, and nothing is left to correct"
        )
    corrects = rl.old_logprobs == "learner" and rl.correction != "none"
    if rl.correction_level != "token" and not corrects:
        raise UserError(
            f'[rl] correction_level = "{rl.correction_level}" has no correction to act on; set old_logprobs = '
            '"learner" and correction, or leave it at "token"'
        )
    if rl.score_centering and not (rl.old_logprobs == "learner" and rl.correction_level == "token"):
        raise UserError(
            f'[rl] score_centering = {rl.score_centering} needs old_logprobs = "learner" and correction_level = '
            '"token": it centers what the weights of single tokens leave'
        )
    if rl.score_centering and rl.surrogate == "tbpo":
        raise UserError(
            f'[rl] score_centering = {rl.score_centering} does not fit surrogate = "tbpo", whose ratio is of a whole '
            "response; keep one"
        )
    if rl.surrogate == "acr" and not (corrects and rl.correction in ("", "tis")):
        raise UserError(
            '[rl] surrogate = "acr" clips by the truncated weight; it needs old_logprobs = "learner" and '
            'correction = "tis"'
        )
    if rl.surrogate == "tbpo" and rl.dual_clip:
        raise UserError(
            f'[rl] dual_clip = {rl.dual_clip} would never act under surrogate = "tbpo", which drops a response '
            "whose ratio leaves [1 - clip_low, 1 + clip_high]; keep one"
        )
