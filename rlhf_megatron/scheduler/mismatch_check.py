"""Engine against trainer on the sampled tokens: metrics every step, stop thresholds at the first of a process."""

from __future__ import annotations

import torch
from torch import Tensor

from rlhf_megatron.algorithms.mismatch import mismatch_statistics
from rlhf_megatron.config.schema import CheckConfig
from rlhf_megatron.data.batch import ScoredBatch
from rlhf_megatron.scheduler.version_metrics import is_fresh


class MismatchCheck:
    """Callable: (step, batch, trainer's log-probs [T]) -> metrics.

    Raises ValueError past a threshold at `first_step`.
    """

    def __init__(self, checks: CheckConfig, trainer_dtype: str, engine_dtype: str | None) -> None:
        self.checks = checks
        self.first_step = 1  # of this process
        self.is_exact = trainer_dtype == "float32" and engine_dtype in (None, "float32")

    def __call__(
        self, step: int, batch: ScoredBatch, log_probs: Tensor, version: int | None = None
    ) -> dict[str, float]:
        """`version`: of the policy whose log-probs they are; None: it made all samples. Metrics are of all tokens; the
        thresholds hold for samples of this version alone, at the first step that has any."""
        found = mismatch_statistics(batch.rollout_log_probs, log_probs, batch.response_mask)
        if step == self.first_step:
            is_of_version = (
                is_fresh(version, batch) if version is not None else torch.ones(len(batch), dtype=torch.bool)
            )
            if bool(is_of_version.all()):
                self._stop_past_thresholds(found)
            elif bool(is_of_version.any()):
                mask = batch.response_mask & is_of_version.repeat_interleave(batch.lengths)
                self._stop_past_thresholds(mismatch_statistics(batch.rollout_log_probs, log_probs, mask))
            else:
                self.first_step += 1
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
