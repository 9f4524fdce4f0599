"""What the configuration says about registered parts, which it must not import, is what they
say themselves.
"""

from dataclasses import fields

from rlhf_megatron.algorithms.advantages import ADV_ESTIMATORS
from rlhf_megatron.algorithms.losses import POLICY_LOSSES
from rlhf_megatron.config.schema import RunConfig
from rlhf_megatron.config.verl_names import VERL_NAMES
from rlhf_megatron.rewards.scorers import REWARDS


def test_defaults_name_registered_parts() -> None:
    default = RunConfig()
    assert (
        default.algorithm.adv_estimator in ADV_ESTIMATORS
        and default.actor.policy_loss.loss_mode in POLICY_LOSSES
    )
    assert default.reward.name in REWARDS


def test_hints_name_parameters_that_exist() -> None:
    known = {
        "algorithm.params": (ADV_ESTIMATORS, "grpo"),
        "actor.policy_loss.params": (POLICY_LOSSES, "ppo_clip"),
    }
    params = {
        section: {f.name for f in fields(registry.get(name).params)}
        for section, (registry, name) in known.items()
    }
    checked = 0
    for entry in VERL_NAMES:
        section, _, name = (entry.target or "").rpartition(".")
        if section in params:
            assert name in params[section], entry
            checked += 1
    assert checked >= 5
