"""From rewards, log-probs and values to what multiplies the importance ratio and what the
critic learns.

Also: The rollout correction of a step's batch on the controller: columns for the
update, and metrics.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rlhf_megatron.algorithms.advantages.advantage_estimator import (
    AdvantageInputs,
    AdvantageOutputs,
)
from rlhf_megatron.algorithms.kl_in_reward import KLController, compute_mean_kl, make_token_rewards
from rlhf_megatron.algorithms.losses.kl_estimators import KLPenaltyType, estimate_kl
from rlhf_megatron.algorithms.rollout_correction.correction_params import CorrectionParams
from rlhf_megatron.algorithms.rollout_correction.step_correction import compute_step_correction
from rlhf_megatron.config.schema import AlgorithmConfig
from rlhf_megatron.controller.observe.metrics.batch_metrics import make_valid_sample_mask
from rlhf_megatron.controller.scheduler.algorithm_setup import AlgorithmSetup
from rlhf_megatron.controller.scheduler.scored_samples import compute_greedy_reward_metrics
from rlhf_megatron.data.batch import AnnotatedBatch, TrainBatch, add_columns

KL_BLOCK_TOKENS = 65536  # tokens


def compute_correction_columns(
    batch: AnnotatedBatch, is_valid: Tensor, correction_params: CorrectionParams, is_bypass: bool
) -> tuple[dict[str, Tensor | None], dict[str, float]]:
    """Return (columns to add to a TrainBatch, metrics `rollout_corr/*`), both empty where the
    trainer's log-probs were not computed.

    In bypass mode the loss makes weights and rejection from the policy as it moves, so that here
    they are for metrics only. The mean that a batch normalisation divides by cannot be known there
    before all micro-batches are done: in both modes it is the mean for the policy before the
    update.
    """
    if batch.old_log_probs is None:
        return {}, {}
    found = compute_step_correction(
        batch.old_log_probs,
        batch.rollout_log_probs,
        batch.response_mask,
        is_valid,
        batch.offsets,
        correction_params,
    )
    if not is_bypass:
        return {"correction_weights": found.weights_T, "is_kept": found.keep_T}, found.metrics
    if found.batch_norm_factor is None:
        return {}, found.metrics
    return {
        "correction_weights": torch.full_like(batch.old_log_probs, 1 / found.batch_norm_factor)
    }, found.metrics


class AdvantageStage:
    """Callable: a step's batch -> (the batch with advantages, metrics). Call it once a
    step, in order.

    Its state is `kl_controller`, the controller of the KL term in the reward: the weight of a step
    is made from the KL of the steps before it.
    """

    def __init__(self, config: AlgorithmConfig, setup: AlgorithmSetup) -> None:
        """Make the stage, with a new KL controller where `config` uses KL in the reward."""
        control = config.kl_ctrl
        self.setup = setup
        self.kl_penalty = config.kl_penalty
        self.kl_controller: KLController | None = None
        if config.use_kl_in_reward:
            self.kl_controller = KLController(
                control.type, control.kl_coef, control.target_kl, control.horizon
            )

    def __call__(self, batch: AnnotatedBatch) -> tuple[TrainBatch, dict[str, float]]:
        """Return (the batch with advantages, returns and correction columns, the metrics of all
        three).
        """
        is_valid = make_valid_sample_mask(batch)
        outputs, metrics = self.estimate_advantages(batch, is_valid)
        columns, corrected = compute_correction_columns(
            batch, is_valid, self.setup.correction, self.setup.is_bypass
        )
        train = add_columns(
            TrainBatch, batch, advantages=outputs.advantages_T, returns=outputs.returns_T, **columns
        )
        return train, metrics | outputs.metrics | corrected

    def estimate_advantages(
        self, batch: AnnotatedBatch, is_valid: Tensor
    ) -> tuple[AdvantageOutputs, dict[str, float]]:
        """Return (the output of the estimator, metrics of its inputs), and update the KL controller
        with the KL of this step where there is one. `is_valid`: [B] bool.

        Raise ValueError where the estimator needs greedy rewards and a recorded batch has none.
        """
        kl = None
        metrics = {}
        kl_coef = 0.0
        if self.kl_controller is not None:
            assert batch.old_log_probs is not None and batch.ref_log_probs is not None, (
                "KL needs both log-probs"
            )
            kl = _compute_step_kl(batch.old_log_probs, batch.ref_log_probs, self.kl_penalty)
            kl_coef = self.kl_controller.kl_coef
            mean = compute_mean_kl(kl, is_valid, batch.response_mask, batch.offsets)
            # else the step is left out, and the weight stays as it is
            if math.isfinite(mean.nats_per_response):
                self.kl_controller.update(mean.nats_per_response, mean.num_samples)
            metrics = {
                "actor/reward_kl_penalty": mean.nats_per_token,
                "actor/reward_kl_penalty_coeff": kl_coef,
            }
        if self.setup.needs_greedy_rewards:
            if batch.greedy_rewards is None:
                raise ValueError(
                    "algorithm.adv_estimator needs the rewards of greedy samples, and this step"
                    " was recorded without them; record a run that has this estimator."
                )
            metrics |= compute_greedy_reward_metrics(batch)
        rewards = None
        if kl is not None or self.setup.needs_token_rewards:
            rewards = make_token_rewards(
                batch.rewards,
                is_valid,
                batch.response_mask,
                batch.offsets,
                kl,
                kl_coef,
                batch.process_rewards,
            )
        outputs = self.setup.estimator(
            AdvantageInputs(
                rewards_B=batch.rewards,
                group_ids_B=batch.group_ids,
                is_valid_B=is_valid,
                response_mask_T=batch.response_mask,
                offsets=batch.offsets,
                token_rewards_T=rewards,
                values_T=batch.values,
                reward_parts=batch.reward_parts,
                greedy_rewards_B=batch.greedy_rewards,
                log_probs_T=batch.old_log_probs,
                rollout_log_probs_T=batch.rollout_log_probs,
                sum_squares_T=batch.sum_squares,
            ),
            self.setup.estimator_params,
        )
        return outputs, metrics


def _compute_step_kl(
    log_probs_T: Tensor, ref_log_probs_T: Tensor, penalty_type: KLPenaltyType
) -> Tensor:
    """Return the KL estimate of each token, [T]. Computed block by block: memory that stays in a
    cache is several times faster.
    """
    kl_T = torch.empty_like(log_probs_T)
    for start in range(0, kl_T.numel(), KL_BLOCK_TOKENS):
        block = slice(start, start + KL_BLOCK_TOKENS)
        kl_T[block] = estimate_kl(log_probs_T[block], ref_log_probs_T[block], penalty_type)
    return kl_T
