"""The simulator against the real scheduler with engines, rewards and a trainer that sleep: order of
events, step time.

A machine that is busy with other things wakes sleepers late. So the groups' times are chosen apart
from each other, and a run that differs is made again with everything slower: what is wrong with the
simulator differs at any speed.
"""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest
from sleeping_run import PROMPT_TOKENS, Slept, sleep_through

from rlhf_megatron.config.schema import ScheduleConfig
from rlhf_megatron.controller.scheduler.schedules import load_schedule
from rlhf_megatron.controller.scheduler.schedules.synchronous import SynchronousSchedule
from rlhf_megatron.planning.simulator.durations import LengthsConfig, SimulatedWorkload
from rlhf_megatron.planning.simulator.simulated_runs import (
    BackgroundSimulation,
    ForegroundSimulation,
)
from rlhf_megatron.planning.simulator.simulation_plan import SimulationPlan

NUM_STEPS = 4
GROUP_SIZE = 2
SLOTS = 5
PLAN = SimulationPlan(
    num_steps=NUM_STEPS,
    last_step=NUM_STEPS,
    batch_size=4,
    group_size=GROUP_SIZE,
    num_engines=2,
    seconds_per_token=(0.0, *(0.006 + 0.001 * n for n in range(1, SLOTS + 1))),
    prefill_tokens_per_s=float("inf"),
    score_fixed_s=0.06,
    score_per_sample_s=0.01,
    num_score_workers=1,
    annotate_s_per_token=0.0005,
    annotate_fixed_s=0.05,
    advantages_s=0.02,
    update_s_per_token=0.001,
    update_fixed_s=0.3,
    sync_s=0.2,
    recomputes_cache=False,
    min_annotated_samples=4,
)
SECTIONS = (
    ScheduleConfig("synchronous"),
    ScheduleConfig("one_step_off"),
    ScheduleConfig("streaming"),
    ScheduleConfig("streaming", {"oversampling": 1.5, "tail": "drop"}),
    ScheduleConfig("streaming", {"oversampling": 1.5, "tail": "carry_over", "max_lag": 1}),
    ScheduleConfig("asynchronous", {"max_lag": 1}),
    ScheduleConfig("asynchronous", {"max_lag": 2, "partial_rollouts": False}),
    ScheduleConfig("asynchronous", {"max_lag": 1, "late": "drop"}),
    ScheduleConfig("asynchronous", {"max_lag": 1, "late": "again"}),
)
SHORT = SECTIONS[1], SECTIONS[5]


@dataclass(frozen=True)
class Simulated:
    ends: list[float]
    events: list[str]
    gap_s: float  # between the two nearest moments at which something happens


class Clocked(list[Any]):
    """Events, and when each was told."""

    def __init__(self) -> None:
        super().__init__()
        self.times: list[float] = []
        self.simulation: Any = None

    def append(self, event: Any) -> None:
        super().append(event)
        self.times.append(self.simulation.now)


def simulated(
    plan: SimulationPlan, section: ScheduleConfig, workload: SimulatedWorkload
) -> Simulated:
    schedule = load_schedule(section)
    kind = (
        ForegroundSimulation if isinstance(schedule, SynchronousSchedule) else BackgroundSimulation
    )
    simulation = kind(plan, schedule, workload, keeps_details=True)
    events = Clocked()
    events.simulation = simulation
    simulation.flow.events = events
    history = simulation.run()
    gaps = [late - early for early, late in pairwise(sorted({round(t, 9) for t in events.times}))]
    return Simulated(
        [step.end_s for step in history.steps], [str(e) for e in history.flow_events], min(gaps)
    )


def slowed(plan: SimulationPlan, factor: float) -> SimulationPlan:
    """Everything takes so many times as long."""
    names = [name for name in plan.__dataclass_fields__ if name.endswith(("_s", "_s_a_token"))]
    changes: dict[str, Any] = {name: factor * getattr(plan, name) for name in names}
    pace = tuple(factor * seconds for seconds in plan.seconds_per_token)
    return replace(plan, **changes, seconds_per_token=pace)


def chosen(plan: SimulationPlan, section: ScheduleConfig) -> SimulatedWorkload:
    """Of many sets of lengths the one whose events lie furthest apart; where groups may be late, of
    those with some.
    """
    can_be_late = section.params.get("late") in ("drop", "again")

    def workload(seed: int) -> SimulatedWorkload:
        rng = random.Random(seed)
        kinds = [(10, 60), (40, 160), *([(300, 450)] if can_be_late and seed % 2 else [])]
        values = tuple(float(rng.randint(*rng.choice(kinds))) for _ in range(97))
        prompts = LengthsConfig("constant", median=PROMPT_TOKENS)
        return SimulatedWorkload(
            LengthsConfig("cycle", values=values), prompts, GROUP_SIZE, 10**6, 10**6, 1
        )

    def is_sure(workload: SimulatedWorkload, events: list[str]) -> bool:
        """Somebody is late, and nobody by so little that it would be otherwise if one thing
        took 2 % longer.
        """
        told = any("(lag)" in event or "(again)" in event for event in events)
        slower = [
            replace(plan, seconds_per_token=tuple(f * s for s in plan.seconds_per_token))
            for f in (0.98, 1.02)
        ]
        slower += [
            replace(plan, **{name: 1.02 * getattr(plan, name)})
            for name in ("update_fixed_s", "sync_s")
        ]
        slower += [replace(plan, score_fixed_s=plan.score_fixed_s + 0.005)]
        return told and all(
            simulated(other, section, workload).events == events for other in slower
        )

    def merit(workload: SimulatedWorkload) -> tuple[bool, float]:
        found = simulated(plan, section, workload)
        return not can_be_late or is_sure(workload, found.events), found.gap_s

    found = max((workload(seed) for seed in range(300 if can_be_late else 80)), key=merit)
    assert merit(found)[0], f"no group is late for sure: {section}"
    return found


def difference(slept: Slept, expected: Simulated) -> float:
    """Of the mean step time, as a share."""
    return slept.ends[-1] / expected.ends[-1] - 1


def compare(
    run: SimulationPlan, section: ScheduleConfig, factors: tuple[float, ...], bar: float
) -> str:
    """What was found, "" with the first factor at which order and step time are right."""
    workload = chosen(run, section)
    found = ""
    for factor in factors:
        plan = slowed(run, factor)
        expected = simulated(plan, section, workload)
        slept = sleep_through(plan, section, workload)
        off = difference(slept, expected)
        line = (
            f"{section.name} {section.params}: {len(expected.events)} events,"
            f" {expected.ends[-1]:.2f} s, off {off:+.2%}"
        )
        print(f"{line}, nearest events {expected.gap_s * 1e3:.0f} ms apart, x {factor:g}")
        if slept.events == expected.events and abs(off) <= bar:
            return ""
        differ = [
            i
            for i, pair in enumerate(zip(slept.events, expected.events, strict=False))
            if len({*pair}) > 1
        ]
        first = differ[0] if differ else -1
        found += (
            f"\n{line}; first difference at {first}: slept"
            f" {slept.events[first - 2 : first + 4]}, simulated"
        )
        found += f" {expected.events[first - 2 : first + 4]}"
    return found


def compare_all(
    run: SimulationPlan,
    sections: tuple[ScheduleConfig, ...],
    factors: tuple[float, ...],
    bar: float,
) -> None:
    """At the same time: they only sleep."""
    with ThreadPoolExecutor(len(sections)) as pool:
        found = list(pool.map(lambda section: compare(run, section, factors, bar), sections))
    assert not any(found), "".join(found)


def test_events_come_in_the_order_of_the_real_scheduler() -> None:
    compare_all(replace(PLAN, num_steps=3, last_step=3), SHORT, (0.5, 2.0, 6.0), 0.1)


@pytest.mark.long
def test_step_time_and_order_of_every_schedule() -> None:
    compare_all(PLAN, SECTIONS, (4.0, 8.0), 0.03)
