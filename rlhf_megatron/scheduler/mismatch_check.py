"""Engine against trainer on the sampled tokens: metrics every step, stop thresholds at the first of a process."""

from __future__ import annotations

from torch import Tensor

from rlhf_megatron.algorithms.mismatch import mismatch_statistics
from rlhf_megatron.config.schema import CheckConfig
from rlhf_megatron.data.batch import ScoredBatch
from rlhf_megatron.scheduler.batch_metrics import token_versions


class MismatchCheck:
    """Callable: (step, batch, trainer's log-probs [T]) -> metrics.

    Raises ValueError past a threshold at `first_step`, or the first one after it that has tokens to compare.
    """

    def __init__(self, checks: CheckConfig, trainer_dtype: str, engine_dtype: str | None) -> None:
        self.checks = checks
        self.first_step = 1  # of this process
        self.is_exact = trainer_dtype == "float32" and engine_dtype in (None, "float32")

    def __call__(
        self, step: int, batch: ScoredBatch, log_probs: Tensor, version: int | None = None
    ) -> dict[str, float]:
        """`version`: of the policy whose log-probs they are; tokens that it sampled are compared, and nothing is said
        where there are none. None: it has sampled all."""
        mask = batch.response_mask
        if version is not None:
            mask = mask & (token_versions(batch) == version)
            if not bool(mask.any()) and bool(batch.response_mask.any()):
                self.first_step += step == self.first_step
                return {}
        found = mismatch_statistics(batch.rollout_log_probs, log_probs, mask)
        if step == self.first_step:
            self._stop_past_thresholds(found)
        return found

    def _stop_past_thresholds(self, found: dict[str, float]) -> None:
        past = past_thresholds(self.checks, self.is_exact, found)
        if past:
            raise ValueError(
                "engine and trainer disagree on the sampled tokens before the first update: "
                + "; ".join(past)
                + ". The engine serves other weights or another temperature, or its arithmetic differs: compare the"
                " model configuration of both, or raise the threshold if this precision is what you want."
            )


def past_thresholds(checks: CheckConfig, is_exact: bool, found: dict[str, float]) -> list[str]:
    """Which of the `mismatch_statistics` are over their bound, in words. `is_exact`: both sides compute in float32."""
    name = "training/rollout_log_probs_diff"
    bounds = (
        [(f"{name}_max", "log_prob_max_abs_diff", checks.log_prob_max_abs_diff)]
        if is_exact
        else [
            (f"{name}_p50", "log_prob_p50_abs_diff", checks.log_prob_p50_abs_diff),
            (f"{name}_p99", "log_prob_p99_abs_diff", checks.log_prob_p99_abs_diff),
            ("training/rollout_kl", "log_prob_mean_kl", checks.log_prob_mean_kl),
        ]
    )
    return [
        f"{key} = {found[key]:.3g} (checks.{rule} = {bound:g})" for key, rule, bound in bounds if found[key] > bound
    ]
