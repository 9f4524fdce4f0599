"""Rules of the section `schedule`: what a schedule needs of the rest of a run.
Parameters: scheduler/schedules/.
"""

from __future__ import annotations

from typing import Any

from rlhf_megatron.config.errors import ConfigProblem
from rlhf_megatron.config.rules import OptionalProblems, make_problem_if, register_rl_rule
from rlhf_megatron.config.rules.part_rules import build_schedule
from rlhf_megatron.config.schema import RunConfig, ScheduleConfig
from rlhf_megatron.config.yaml_nodes import LoadedConfig
from rlhf_megatron.registry import load_registry

NAME = "schedule.name"
PARAMS = "schedule.params"
CORRECTION = "algorithm.rollout_correction"
FILTER = "algorithm.filter_groups.enable"
STEPS = "trainer.total_training_steps"


def may_policy_lag(config: RunConfig) -> bool:
    """Return whether the schedule may train a step on tokens that an older policy sampled. Return
    False for an unknown schedule, which another rule reports.
    """
    return getattr(build_schedule(config.schedule), "max_lag", 0) > 0


def does_schedule_take_turns(section: ScheduleConfig) -> bool:
    """Return whether engines and trainer never work at the same time in this schedule. Return True
    for an unknown schedule too.
    """
    schedule = build_schedule(section)
    return schedule is None or getattr(schedule, "takes_turns", False)


def list_turn_taking_schedules() -> str:
    """Return the names of the registered schedules in which engines and trainer take turns, joined
    by " or ".
    """
    known = load_registry("schedule")
    return " or ".join(
        name for name in known if getattr(known.get(name).build, "takes_turns", False)
    )


@register_rl_rule
def check_shared_devices(loaded: LoadedConfig) -> OptionalProblems:
    """Yield a problem if engines share devices with the trainer in a schedule where both work at
    the same time.
    """
    c = loaded.config
    yield make_problem_if(
        c.rollout.colocated and not does_schedule_take_turns(c.schedule),
        (
            f"{NAME} ({c.schedule.name}) lets engines generate while the trainer works, but"
            f" rollout.colocated (true) lets them take turns with the same devices; set {NAME}:"
            f" {list_turn_taking_schedules()}, or rollout.colocated: false."
        ),
        (NAME, "rollout.colocated"),
    )


@register_rl_rule
def check_determinism(loaded: LoadedConfig) -> OptionalProblems:
    """Yield a problem if deterministic mode is on in a schedule where a step trains on the groups
    that finished first.
    """
    c = loaded.config
    yield make_problem_if(
        c.trainer.deterministic and not does_schedule_take_turns(c.schedule),
        (
            f"trainer.deterministic (true) cannot hold with {NAME} ({c.schedule.name}): what a step"
            f" trains on depends on which groups were done first; set {NAME}:"
            f" {list_turn_taking_schedules()}, or deterministic: false."
        ),
        (NAME, "trainer.deterministic"),
    )


@register_rl_rule
def check_stale_tokens(loaded: LoadedConfig) -> OptionalProblems:
    """Yield a problem if the schedule may train on tokens of older policies and the configuration
    does not set a rollout correction.

    Nobody gets the bias of old tokens without having chosen it. Without a setting the old policy of
    the loss is the trainer's policy before the update, which knows nothing of the older policy that
    sampled a token: the importance ratio starts at 1, and the clip bounds the distance from the
    present policy, not from the one that sampled.
    """
    c = loaded.config
    if not may_policy_lag(c) or loaded.is_set(CORRECTION):
        return
    yield ConfigProblem(
        (
            f"{NAME} ({c.schedule.name}) trains on tokens of older policies, and nothing says what"
            " is made of them: by default their ratio starts at 1, as if the policy that trains had"
            f" sampled them. Set {CORRECTION}.preset: decoupled_token_is (weights of old tokens,"
            " cut at 2) or bypass_ppo_clip (the clip counts from the policy that sampled), or write"
            " disabled to do without."
        ),
        (NAME, f"{CORRECTION}.preset"),
    )


@register_rl_rule
def check_lag_bound(loaded: LoadedConfig) -> OptionalProblems:
    """Yield a problem if the schedule's max_lag is so large that no step of the run can
    reach it.
    """
    c = loaded.config
    max_lag = _get_number_or_none(c.schedule.params.get("max_lag"))
    if max_lag is not None and max_lag >= c.trainer.total_training_steps > 1:
        yield ConfigProblem(
            (
                f"{PARAMS}.max_lag ({max_lag:g}) must be below {STEPS}"
                f" ({c.trainer.total_training_steps}): it would bound nothing, and all steps could"
                " train on what the first policy wrote; use 1 to 4."
            ),
            (PARAMS, STEPS),
        )


@register_rl_rule
def check_spare_groups(loaded: LoadedConfig) -> OptionalProblems:
    """Yield a problem if the schedule starts more groups than a batch trains on and the group
    filter is off: only the filter uses the spare groups.
    """
    c = loaded.config
    yield make_problem_if(
        getattr(build_schedule(c.schedule), "needs_filter", False)
        and not c.algorithm.filter_groups.enable,
        (
            f"{PARAMS} ({c.schedule.params}) of {c.schedule.name} start groups that no step trains"
            f" on: only {FILTER} makes room for them; set {FILTER}, or change the"
            " parameters."
        ),
        (PARAMS, FILTER),
    )


def _get_number_or_none(value: Any) -> float | None:
    """Return the value if it is a number (an int or float, but no bool), else None."""
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None
