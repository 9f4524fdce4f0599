"""The rollout correction of a step's batch on the controller: columns for the update, and metrics."""

from __future__ import annotations

import torch
from torch import Tensor

from rlhf_megatron.algorithms.rollout_correction.params import CorrectionParams
from rlhf_megatron.algorithms.rollout_correction.step import correct_step
from rlhf_megatron.data.batch import AnnotatedBatch


def correction_columns(
    batch: AnnotatedBatch, is_valid: Tensor, params: CorrectionParams, is_bypass: bool
) -> tuple[dict[str, Tensor | None], dict[str, float]]:
    """(columns of a TrainBatch, metrics `rollout_corr/*`). Nothing where the trainer's log-probs were not computed.

    In bypass mode the loss makes weights and rejection from the policy as it moves, so that here they are for metrics
    only. The mean that a batch normalisation divides by cannot be known there before all micro-batches are done: it is
    that of the policy before the update, in both modes.
    """
    if batch.old_log_probs is None:
        return {}, {}
    found = correct_step(
        batch.old_log_probs, batch.rollout_log_probs, batch.response_mask, is_valid, batch.offsets, params
    )
    if not is_bypass:
        return {"correction_weights": found.weights_T, "is_kept": found.keep_T}, found.metrics
    if found.batch_norm_factor is None:
        return {}, found.metrics
    return {"correction_weights": torch.full_like(batch.old_log_probs, 1 / found.batch_norm_factor)}, found.metrics
