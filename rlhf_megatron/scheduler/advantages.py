"""From rewards, log-probs and values to what multiplies the importance ratio and what the critic learns."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rlhf_megatron.algorithms.advantages.base import AdvantageInputs, AdvantageOutputs
from rlhf_megatron.algorithms.kl_in_reward import KLController, mean_kl, token_rewards
from rlhf_megatron.algorithms.losses.kl import KLPenaltyType, kl_estimate
from rlhf_megatron.config.schema import AlgorithmConfig
from rlhf_megatron.data.batch import AnnotatedBatch, TrainBatch, gain
from rlhf_megatron.scheduler.batch_metrics import valid_samples
from rlhf_megatron.scheduler.correction import correction_columns
from rlhf_megatron.scheduler.greedy import greedy_reward_metrics
from rlhf_megatron.scheduler.plugins import Plugins

BLOCK = 65536  # tokens


class AdvantageStage:
    """Callable: a step's batch -> (the batch with advantages, metrics). Call it once a step, in order.

    Its state is `kl`, the controller of the KL term in the reward: the weight of a step is made from the KL of the
    steps before it.
    """

    def __init__(self, config: AlgorithmConfig, plugins: Plugins) -> None:
        control = config.kl_ctrl
        self.plugins = plugins
        self.kl_penalty = config.kl_penalty
        self.kl: KLController | None = None
        if config.use_kl_in_reward:
            self.kl = KLController(control.type, control.kl_coef, control.target_kl, control.horizon)

    def __call__(self, batch: AnnotatedBatch) -> tuple[TrainBatch, dict[str, float]]:
        is_valid = valid_samples(batch)
        outputs, metrics = self.estimate(batch, is_valid)
        columns, corrected = correction_columns(batch, is_valid, self.plugins.correction, self.plugins.is_bypass)
        train = gain(TrainBatch, batch, advantages=outputs.advantages_T, returns=outputs.returns_T, **columns)
        return train, metrics | outputs.metrics | corrected

    def estimate(self, batch: AnnotatedBatch, is_valid: Tensor) -> tuple[AdvantageOutputs, dict[str, float]]:
        """(what the estimator makes of the rewards, metrics of what it was given). `is_valid`: [B] bool."""
        kl, metrics = None, {}
        kl_coef = 0.0
        if self.kl is not None:
            assert batch.old_log_probs is not None and batch.ref_log_probs is not None, "KL needs both log-probs"
            kl, kl_coef = _kl_of_step(batch.old_log_probs, batch.ref_log_probs, self.kl_penalty), self.kl.coef
            mean = mean_kl(kl, is_valid, batch.response_mask, batch.offsets)
            if math.isfinite(mean.per_response):  # else the step is left out, and the weight stays as it is
                self.kl.update(mean.per_response, mean.num_samples)
            metrics = {"actor/reward_kl_penalty": mean.per_token, "actor/reward_kl_penalty_coeff": kl_coef}
        if self.plugins.needs_greedy_rewards:
            if batch.greedy_rewards is None:
                raise ValueError(
                    "algorithm.adv_estimator needs the rewards of greedy samples, and this step was recorded without"
                    " them; record a run that has this estimator."
                )
            metrics |= greedy_reward_metrics(batch)
        rewards = None
        if kl is not None or self.plugins.needs_token_rewards:
            rewards = token_rewards(batch.rewards, is_valid, batch.response_mask, batch.offsets, kl, kl_coef)
        outputs = self.plugins.estimator(
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
            self.plugins.estimator_params,
        )
        return outputs, metrics


def _kl_of_step(log_probs_T: Tensor, ref_log_probs_T: Tensor, kind: KLPenaltyType) -> Tensor:
    """[T], block by block: memory that stays in a cache is several times faster."""
    kl_T = torch.empty_like(log_probs_T)
    for start in range(0, kl_T.numel(), BLOCK):
        block = slice(start, start + BLOCK)
        kl_T[block] = kl_estimate(log_probs_T[block], ref_log_probs_T[block], kind)
    return kl_T
