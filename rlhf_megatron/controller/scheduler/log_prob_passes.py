"""Whether steps have a pass for the trainer's log-probs before the update. Without torch: the
simulator asks, too.
"""

from __future__ import annotations

from collections.abc import Collection

from rlhf_megatron.algorithms.losses import PICKS
from rlhf_megatron.config.rollout_correction_rules import is_bypass_mode, resolve_rollout_correction
from rlhf_megatron.config.schema import ActorConfig, AlgorithmConfig

_TRAINER_LOG_PROB_NEEDS = {"log_probs", "old_log_probs", "sum_squares"}


def needs_log_probs_pass(algorithm: AlgorithmConfig, estimator_needs: Collection[str]) -> bool:
    """Return whether the trainer's log-probs are needed. The loss needs them unless a correction
    puts the engine's log-probs in their place; a KL in the reward, an estimator or a mean of
    weights over the step may need them even then. `estimator_needs` holds the names of the columns
    that the estimator needs.
    """
    correction = resolve_rollout_correction(algorithm.rollout_correction)
    is_mean = correction.rollout_is is not None and bool(correction.rollout_is_batch_normalize)
    return (
        correction.mode != "bypass"
        or algorithm.use_kl_in_reward
        or is_mean
        or bool(_TRAINER_LOG_PROB_NEEDS & {*estimator_needs})
    )


def update_returns_old_log_probs(
    actor: ActorConfig,
    algorithm: AlgorithmConfig,
    num_samples: int,
    estimator_needs: Collection[str],
) -> bool:
    """Return whether a step is one optimizer step over all its `num_samples`, and nothing reads the
    trainer's log-probs before that optimizer step. Then the update returns the log-probs, the step
    needs no pass for them, and the importance ratio is 1 to the bit.
    """
    correction = resolve_rollout_correction(algorithm.rollout_correction)
    is_one = actor.ppo_epochs == 1 and actor.mini_batch_size == num_samples
    is_read = (
        *(algorithm.use_kl_in_reward, algorithm.pf_ppo.enable, actor.router_replay == "r2"),
        *(
            correction.rollout_is is not None,
            correction.rollout_rs,
            correction.rollout_token_veto_threshold is not None,
        ),
        *(
            is_bypass_mode(algorithm.rollout_correction),
            _TRAINER_LOG_PROB_NEEDS & {*estimator_needs},
            actor.policy_loss.loss_mode in PICKS,
        ),
    )
    return is_one and not any(is_read)
