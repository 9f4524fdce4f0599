"""Rules of the section `schedule`: what a schedule needs of the rest of a run. Parameters: scheduler/schedules/."""

from __future__ import annotations

from typing import Any

from rlhf_megatron.config.errors import Problem
from rlhf_megatron.config.rules import Findings, rule_of_rl, wrong
from rlhf_megatron.config.rules.parts import schedule_of
from rlhf_megatron.config.schema import RunConfig, ScheduleConfig
from rlhf_megatron.config.source import Loaded
from rlhf_megatron.registry import parts_of

NAME, PARAMS = "schedule.name", "schedule.params"
CORRECTION, FILTER = "algorithm.rollout_correction", "algorithm.filter_groups.enable"
STEPS = "trainer.total_training_steps"


def may_lag(config: RunConfig) -> bool:
    """Whether a step may train on tokens of an older policy than it trains. Of an unknown schedule nothing is said:
    whoever looks it up says that there is none of that name."""
    return getattr(schedule_of(config.schedule), "max_lag", 0) > 0


def takes_turns(section: ScheduleConfig) -> bool:
    """Whether engines and trainer never work at the same time; also where the schedule is not known."""
    schedule = schedule_of(section)
    return schedule is None or getattr(schedule, "takes_turns", False)


def that_take_turns() -> str:
    known = parts_of("schedule")
    return " or ".join(name for name in known if getattr(known.get(name).build, "takes_turns", False))


@rule_of_rl
def shared_devices(loaded: Loaded) -> Findings:
    """Refuse shared devices where engines generate while the trainer works."""
    c = loaded.config
    yield wrong(
        c.rollout.colocated and not takes_turns(c.schedule),
        f"{NAME} ({c.schedule.name}) lets engines generate while the trainer works, but rollout.colocated (true)"
        f" lets them take turns with the same devices; set {NAME}: {that_take_turns()}, or rollout.colocated:"
        " false.",
        (NAME, "rollout.colocated"),
    )


@rule_of_rl
def determinism(loaded: Loaded) -> Findings:
    """Refuse deterministic mode where a step trains on the groups that finished first."""
    c = loaded.config
    yield wrong(
        c.trainer.deterministic and not takes_turns(c.schedule),
        f"trainer.deterministic (true) cannot hold with {NAME} ({c.schedule.name}): what a step trains on depends"
        f" on which groups were done first; set {NAME}: {that_take_turns()}, or deterministic: false.",
        (NAME, "trainer.deterministic"),
    )


@rule_of_rl
def stale_tokens(loaded: Loaded) -> Findings:
    """Nobody gets the bias of old tokens without having chosen it.

    Without a setting the old policy of the loss is the trainer's before the update. Of a token of an older policy it
    knows nothing: the importance ratio starts at 1, and the clip bounds the way from here, not from where it was
    sampled.
    """
    c = loaded.config
    if not may_lag(c) or loaded.is_set(CORRECTION):
        return
    yield Problem(
        f"{NAME} ({c.schedule.name}) trains on tokens of older policies, and nothing says what is made of them: by"
        f" default their ratio starts at 1, as if the policy that trains had sampled them. Set {CORRECTION}.preset:"
        " decoupled_token_is (weights of old tokens, cut at 2) or bypass_ppo_clip (the clip counts from the policy that"
        " sampled), or write disabled to do without.",
        (NAME, f"{CORRECTION}.preset"),
    )


@rule_of_rl
def bound_on_lag(loaded: Loaded) -> Findings:
    """A bound that no step can reach."""
    c = loaded.config
    max_lag = _number(c.schedule.params.get("max_lag"))
    if max_lag is not None and max_lag >= c.trainer.total_training_steps > 1:
        yield Problem(
            f"{PARAMS}.max_lag ({max_lag:g}) must be below {STEPS} ({c.trainer.total_training_steps}): it would bound"
            " nothing, and all steps could train on what the first policy wrote; use 1 to 4.",
            (PARAMS, STEPS),
        )


@rule_of_rl
def spare_groups(loaded: Loaded) -> Findings:
    """Groups beyond a batch, of a schedule that trains on all that it starts: only the filter makes room for them."""
    c = loaded.config
    yield wrong(
        getattr(schedule_of(c.schedule), "needs_filter", False) and not c.algorithm.filter_groups.enable,
        f"{PARAMS} ({c.schedule.params}) of {c.schedule.name} start groups that no step trains on: only {FILTER}"
        " makes room for them; set that, or change the parameters.",
        (PARAMS, FILTER),
    )


def _number(value: Any) -> float | None:
    """A parameter, as far as its schedule will take it for a number."""
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None
