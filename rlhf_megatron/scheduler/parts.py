"""The registered parts that a configuration names, looked up and checked before any process is started."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rlhf_megatron.algorithms.advantages import ADV_ESTIMATORS
from rlhf_megatron.algorithms.advantages.base import AdvantageEstimator
from rlhf_megatron.algorithms.losses import POLICY_LOSSES
from rlhf_megatron.algorithms.rollout_correction.params import CorrectionParams
from rlhf_megatron.config.correction_presets import is_bypass
from rlhf_megatron.config.errors import ConfigError
from rlhf_megatron.config.rules.run import has_critic, needs_reference
from rlhf_megatron.config.schema import RunConfig
from rlhf_megatron.config.typed import look_up
from rlhf_megatron.data.tasks import TASKS
from rlhf_megatron.registry import Entry
from rlhf_megatron.rewards.service.components import load_components
from rlhf_megatron.scheduler.schedules import Schedule, load_schedule
from rlhf_megatron.scheduler.schedules.synchronous import Synchronous
from rlhf_megatron.workers.correction import correction_params

ESTIMATOR_PROVIDED = {
    "rewards",
    "group_ids",
    "token_rewards",
    "reward_parts",
    "log_probs",
    "rollout_log_probs",
    "sum_squares",
    "greedy_rewards",
}
PROVIDED = {
    "advantages",
    "old_log_probs",
    "rollout_log_probs",
    "entropies",
    "log_probs",
    "response_mask",
    "is_picked",
    "sequences",
}


@dataclass(frozen=True)
class Plugins:
    """Functions with their parameters, ready to call."""

    estimator: Callable[..., Any]
    estimator_params: Any
    needs_reference: bool
    needs_values: bool = False  # there is a critic
    needs_token_rewards: bool = False  # per-token rewards, also without KL in them
    needs_log_probs: bool = True  # of the trainer's policy before the update, in every step
    correction: CorrectionParams = field(default_factory=CorrectionParams)
    is_bypass: bool = False  # the engine's log-probs are the old ones, and the loss makes the correction
    needs_sum_squares: bool = False  # of the probabilities of the actor
    needs_greedy_rewards: bool = False  # of one greedy sample a prompt
    schedule: Schedule = field(default_factory=Synchronous)


def load_plugins(config: RunConfig) -> Plugins:
    """Raises ConfigError with all unknown names and wrong parameters at once."""
    problems: list[str] = []
    estimator, estimator_params = look_up(
        ADV_ESTIMATORS, config.algorithm.adv_estimator, config.algorithm.params, "algorithm", problems
    )
    loss, _ = look_up(
        POLICY_LOSSES,
        config.actor.policy_loss.loss_mode,
        config.actor.policy_loss.params,
        "actor.policy_loss",
        problems,
    )
    schedule: Schedule = Synchronous()
    try:
        load_components(config.reward)
    except ConfigError as error:
        problems += error.problems
    try:
        schedule = load_schedule(config.schedule)
    except ConfigError as error:
        problems += error.problems
    if config.data.task is not None:
        look_up(TASKS, config.data.task, config.data.task_params, "data", problems, "task_params")
    if estimator is not None:
        problems += _missing_fields(estimator, ESTIMATOR_PROVIDED | ({"values"} if has_critic(config) else set()))
    provided = PROVIDED | ({"ref_log_probs"} if needs_reference(config) else set())
    if loss is not None:
        for need in sorted(set(loss.needs) - provided):
            problems.append(f"actor.policy_loss.loss_mode={loss.name!r} needs {need}, which this run does not compute.")
    if problems or estimator is None:
        raise ConfigError(problems)
    return Plugins(
        estimator.build,
        estimator_params,
        needs_reference(config),
        needs_values="values" in estimator.needs,
        needs_token_rewards="token_rewards" in estimator.needs,
        needs_log_probs=_needs_log_probs(config, estimator),
        correction=correction_params(config.algorithm.rollout_correction),
        is_bypass=is_bypass(config.algorithm.rollout_correction),
        needs_sum_squares="sum_squares" in estimator.needs,
        needs_greedy_rewards="greedy_rewards" in estimator.needs,
        schedule=schedule,
    )


def _needs_log_probs(config: RunConfig, estimator: Entry[AdvantageEstimator]) -> bool:
    """Without a correction that puts the engine's in their place the loss needs them; else a KL in the reward, an
    estimator or a mean of weights over the step may."""
    section = config.algorithm.rollout_correction
    others = config.algorithm.use_kl_in_reward or correction_params(section).use_batch_norm
    return not is_bypass(section) or others or bool({"log_probs", "old_log_probs", "sum_squares"} & {*estimator.needs})


def _missing_fields(estimator: Entry[AdvantageEstimator], provided: set[str]) -> list[str]:
    missing = ", ".join(sorted(set(estimator.needs) - provided))
    usable = ", ".join(name for name in ADV_ESTIMATORS if set(ADV_ESTIMATORS.get(name).needs) <= provided)
    key = f"algorithm.adv_estimator={estimator.name!r}"
    return [f"{key} needs {missing}, which this run does not compute; use one of {usable}."] if missing else []
