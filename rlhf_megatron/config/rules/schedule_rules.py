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
    """Whether a step may train on tokens of an older policy than it trains. Of an unknown schedule
    nothing is said:
    whoever looks it up says that there is none of that name.
    """
    return getattr(build_schedule(config.schedule), "max_lag", 0) > 0


def does_schedule_take_turns(section: ScheduleConfig) -> bool:
    """Whether engines and trainer never work at the same time; also where the
    schedule is not known.
    """
    schedule = build_schedule(section)
    return schedule is None or getattr(schedule, "takes_turns", False)


def list_turn_taking_schedules() -> str:
    known = load_registry("schedule")
    return " or ".join(
        name for name in known if getattr(known.get(name).build, "takes_turns", False)
    )


@register_rl_rule
def check_shared_devices(loaded: LoadedConfig) -> OptionalProblems:
    """Refuse shared devices where engines generate while the trainer works."""
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
    """Refuse deterministic mode where a step trains on the groups that finished first."""
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
    """Nobody gets the bias of old tokens without having chosen it.

    Without a setting the old policy of the loss is the trainer's before the update. Of a token of
    an older policy it knows nothing: the importance ratio starts at 1, and the clip bounds the way
    from here, not from where it was sampled.
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
    """A bound that no step can reach."""
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
    """Groups beyond a batch, of a schedule that trains on all that it starts: only the filter makes
    room for them.
    """
    c = loaded.config
    yield make_problem_if(
        getattr(build_schedule(c.schedule), "needs_filter", False)
        and not c.algorithm.filter_groups.enable,
        (
            f"{PARAMS} ({c.schedule.params}) of {c.schedule.name} start groups that no step trains"
            f" on: only {FILTER} makes room for them; set that, or change the parameters."
        ),
        (PARAMS, FILTER),
    )


def _get_number_or_none(value: Any) -> float | None:
    """A parameter, as far as its schedule will take it for a number."""
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None
