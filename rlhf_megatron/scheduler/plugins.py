"""The registered parts that a configuration names, looked up and checked before any process is started."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_megatron.algorithms.advantages import ADV_ESTIMATORS
from rlhf_megatron.algorithms.losses import POLICY_LOSSES
from rlhf_megatron.config.errors import ConfigError
from rlhf_megatron.config.params import params_from_mapping
from rlhf_megatron.config.schema import RunConfig
from rlhf_megatron.data.tasks import TASKS
from rlhf_megatron.registry import Registry
from rlhf_megatron.rewards import REWARDS, RewardResult, RewardSample
from rlhf_megatron.rewards.base import masked

PROVIDED = {"advantages", "old_log_probs", "rollout_log_probs", "entropies", "log_probs", "response_mask"}


@dataclass(frozen=True)
class Plugins:
    """Functions with their parameters, ready to call."""

    estimator: Callable[..., Any]
    estimator_params: Any
    reward: Callable[[Sequence[RewardSample]], list[RewardResult]]
    needs_reference: bool


def _look_up(
    registry: Registry[Any], name: str, params: dict[str, Any], key: str, problems: list[Any], field: str = "params"
) -> Any:
    """(entry, its parameters), or a pair of None and the problems told."""
    try:
        entry = registry.get(name)
        if params and entry.params is None:
            problems.append(f"{key}.{field} ({params}) must be empty: {registry.kind} {name!r} has no parameters.")
        return entry, (params_from_mapping(entry.params, params, f"{key}.{field}") if entry.params else None)
    except ConfigError as error:
        problems += error.problems
    except ValueError as error:
        problems.append(f"{key}: {error}")
    return None, None


def load_plugins(config: RunConfig) -> Plugins:
    """Raises ConfigError with all unknown names and wrong parameters at once."""
    problems: list[Any] = []
    estimator, estimator_params = _look_up(
        ADV_ESTIMATORS, config.algorithm.adv_estimator, config.algorithm.params, "algorithm", problems
    )
    loss, _ = _look_up(
        POLICY_LOSSES,
        config.actor.policy_loss.loss_mode,
        config.actor.policy_loss.params,
        "actor.policy_loss",
        problems,
    )
    reward, reward_params = _look_up(REWARDS, config.reward.name, config.reward.params, "reward", problems)
    if config.data.task is not None:
        _look_up(TASKS, config.data.task, config.data.task_params, "data", problems, "task_params")
    provided = PROVIDED | ({"ref_log_probs"} if config.actor.use_kl_loss else set())
    if loss is not None:
        for need in sorted(set(loss.needs) - provided):
            problems.append(f"actor.policy_loss.loss_mode={loss.name!r} needs {need}, which this run does not compute.")
    if problems:
        raise ConfigError(problems)

    def score(samples: Sequence[RewardSample]) -> list[RewardResult]:
        return [
            masked("aborted") if sample.finish_reason == "abort" else reward.build(sample, reward_params)
            for sample in samples
        ]

    return Plugins(estimator.build, estimator_params, score, needs_reference=config.actor.use_kl_loss)
