"""The stages of steps as bars over time, from the spans of trace.json. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlhf_megatron.observe.report.charts import STAGE_ORDER
from rlhf_megatron.observe.report.numbers import spread_evenly
from rlhf_megatron.observe.report.records import Span

MAX_STEPS = 400  # of which bars are embedded; of a longer run the slowest, and an even choice of the rest
NUM_SLOWEST = 100


@dataclass(frozen=True)
class Bar:
    stage: int  # index into Timeline.stages
    step: int
    start_s: float  # since the trace began
    seconds: float


@dataclass(frozen=True)
class StepTime:
    step: int
    start_s: float
    seconds: float


@dataclass(frozen=True)
class Timeline:
    stages: tuple[str, ...]  # in the order of a step; calls to hosts behind them
    num_calls: int  # of the stages: the last so many are calls
    steps: tuple[StepTime, ...]
    bars: tuple[Bar, ...]
    num_steps: int  # of the run; more than len(steps) where some were left out


def timeline(spans: Sequence[Span]) -> Timeline | None:
    """None: no span belongs to a step. A step that was cut off has the extent of its stages.

    Of a step that a resumed run did again, the last time counts.
    """
    spans = _last_times(spans)
    steps = {s.step: StepTime(s.step, s.start_s, s.seconds) for s in spans if s.is_step and s.step is not None}
    stages = [(span.step, span) for span in spans if not span.is_step and span.step is not None]
    extents: dict[int, tuple[float, float]] = {}
    for step, span in stages:
        begin, end = extents.get(step, (span.start_s, 0.0))
        extents[step] = min(begin, span.start_s), max(end, span.start_s + span.seconds)
    for step, (begin, end) in extents.items():
        steps.setdefault(step, StepTime(step, begin, end - begin))
    if not steps:
        return None
    kept = _chosen([steps[step] for step in sorted(steps)])
    calls = sorted({span.name for _, span in stages if span.is_call})
    names = sorted({span.name for _, span in stages} - set(calls), key=_place) + calls
    numbers = {step.step for step in kept}
    bars = [Bar(names.index(s.name), step, s.start_s, s.seconds) for step, s in stages if step in numbers]
    return Timeline(tuple(names), len(calls), tuple(kept), tuple(bars), len(steps))


def _last_times(spans: Sequence[Span]) -> list[Span]:
    begins: dict[int, float] = {}
    for span in spans:
        if span.is_step and span.step is not None:
            begins[span.step] = max(span.start_s, begins.get(span.step, span.start_s))
    return [span for span in spans if span.step is None or span.start_s >= begins.get(span.step, span.start_s)]


def _place(name: str) -> tuple[int, str]:
    return (STAGE_ORDER.index(name) if name in STAGE_ORDER else len(STAGE_ORDER), name)


def _chosen(steps: Sequence[StepTime]) -> list[StepTime]:
    if len(steps) <= MAX_STEPS:
        return list(steps)
    even = [steps[i] for i in spread_evenly(len(steps), MAX_STEPS - NUM_SLOWEST)]
    slowest = sorted(steps, key=lambda step: step.seconds)[-NUM_SLOWEST:]
    return sorted({*even, *slowest}, key=lambda step: step.step)
