"""Which schedule and which split of GPUs makes the shortest steps: all are simulated with the same responses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from rlhf_megatron.config.schedule_rules import SYNCHRONOUS
from rlhf_megatron.config.schema import RunConfig, ScheduleConfig
from rlhf_megatron.scheduler.schedules import load_schedule
from rlhf_megatron.scheduler.simulation.durations import Durations
from rlhf_megatron.scheduler.simulation.figures import Figures, figures
from rlhf_megatron.scheduler.simulation.history import History
from rlhf_megatron.scheduler.simulation.lengths import Workload
from rlhf_megatron.scheduler.simulation.plan import Split, make_plan, splits
from rlhf_megatron.scheduler.simulation.simulate import simulate
from rlhf_megatron.scheduler.simulation.simulation import Stuck

CANDIDATES = (
    ScheduleConfig("synchronous"),
    ScheduleConfig("streaming"),
    ScheduleConfig("streaming", {"oversampling": 1.25, "tail": "drop"}),
    ScheduleConfig("streaming", {"oversampling": 1.5, "tail": "carry_over", "max_lag": 1}),
    ScheduleConfig("one_step_off"),
    ScheduleConfig("asynchronous", {"max_lag": 1}),
    ScheduleConfig("asynchronous", {"max_lag": 2}),
    ScheduleConfig("asynchronous", {"max_lag": 4}),
    ScheduleConfig("asynchronous", {"max_lag": 2, "partial_rollouts": False}),
    ScheduleConfig("asynchronous", {"max_lag": 2, "late": "drop"}),
    ScheduleConfig("asynchronous", {"max_lag": 2, "late": "again"}),
)
"""What is compared where nothing else is asked for."""


@dataclass(frozen=True)
class Case:
    """One row of the comparison. `figures` None: `why_not` says why there are none."""

    schedule: ScheduleConfig
    split: Split
    figures: Figures | None
    why_not: str = ""

    @property
    def name(self) -> str:
        return schedule_name(self.schedule)

    def as_json(self) -> dict[str, Any]:
        found = {"schedule": asdict(self.schedule), "split": asdict(self.split)}
        return found | {"figures": self.figures.as_json() if self.figures else None, "why_not": self.why_not}


def schedule_name(schedule: ScheduleConfig) -> str:
    """ "asynchronous max_lag 2" """
    return " ".join([schedule.name, *(f"{key} {_plain(value)}" for key, value in schedule.params.items())])


def _plain(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


@dataclass(frozen=True)
class Study:
    """A run and how it is simulated."""

    config: RunConfig
    durations: Durations
    workload: Workload
    num_steps: int
    num_warmup: int

    def history(self, schedule: ScheduleConfig, split: Split, keeps_all: bool = False) -> History:
        """Raises ConfigError, Stuck."""
        plan = make_plan(self.config, self.durations, split, self.num_steps)
        return simulate(plan, load_schedule(schedule), self.workload, keeps_all)

    def case(self, schedule: ScheduleConfig, split: Split) -> Case:
        """Raises ConfigError."""
        if split.is_colocated and schedule.name != SYNCHRONOUS:
            return Case(schedule, split, None, "trainer and engines take turns with the same GPUs")
        try:
            history = self.history(schedule, split)
        except Stuck as error:
            return Case(schedule, split, None, str(error))
        return Case(schedule, split, figures(history, split, self.num_warmup))

    def shorter(self, num_steps: int) -> Study:
        """The same, for a first look."""
        return replace(self, num_steps=num_steps)

    def best_split(self, schedule: ScheduleConfig, gpus: int, most: int) -> list[Case]:
        """A coarse choice of splits, then those around the best of them, at most `most` in all; the best first."""
        every = splits(self.config, self.durations, gpus, 1 << 20)
        coarse = splits(self.config, self.durations, gpus, max(2, most - most // 3))
        cases: dict[Split, Case] = {}
        for split in coarse:
            if not split.is_colocated or schedule.name == SYNCHRONOUS:
                cases[split] = self.case(schedule, split)
        apart = [split for split in every if not split.is_colocated]
        while apart and len(cases) < most:
            halfway = self._halfway(apart, cases)
            if not halfway:
                break
            for split in halfway[: most - len(cases)]:
                cases[split] = self.case(schedule, split)
        return sorted(cases.values(), key=_order)

    def _halfway(self, apart: list[Split], cases: dict[Split, Case]) -> list[Split]:
        """Between the best split that is known and its neighbours, where there are others between them."""
        known = [i for i, split in enumerate(apart) if split in cases]
        place = min(range(len(known)), key=lambda k: _order(cases[apart[known[k]]]))
        ends = [known[k] for k in (place - 1, place + 1) if 0 <= k < len(known)]
        between = sorted({(known[place] + end) // 2 for end in ends} - set(known))
        return [apart[i] for i in between]


def _order(case: Case) -> tuple[float, int]:
    """Shorter steps first; of equal ones the one that needs fewer GPUs for generation."""
    return (case.figures.step_s if case.figures else float("inf"), case.split.num_engines)


def ranked(cases: Sequence[Case]) -> list[Case]:
    """Those with figures, the shortest steps first."""
    return sorted((case for case in cases if case.figures is not None), key=_order)


def pick(cases: Sequence[Case], tolerance: float, most_lost: float) -> Case:
    """The one to choose: with the smallest largest lag of those within `tolerance` of the shortest steps.

    Of those that lose more than `most_lost` of their groups none is chosen where there are others: they lose the long
    ones first, so their steps are short because what they train on is.
    """
    rows = [case for case in ranked(cases) if _lost(case) <= most_lost] or ranked(cases)
    assert rows and rows[0].figures is not None, "no case has figures"
    bound = rows[0].figures.step_s * (1 + tolerance)
    close = [case for case in rows if case.figures is not None and case.figures.step_s <= bound]
    return min(close, key=lambda case: (case.figures.lag_max if case.figures else 0, _lost(case), _order(case)))


def _lost(case: Case) -> float:
    return case.figures.lost if case.figures else 1.0
