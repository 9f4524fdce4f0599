"""The data that a page's scripts draw: timeline, mismatch histograms, samples and charts,
gathered as JSON.

The JSON may stand inside a script element. Steps that charts share are written once.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from rlhf_megatron.controller.observe.report.charts import (
    STAGE_ORDER,
    ChartSeries,
    ReportChart,
    round_significant,
    select_evenly_spaced,
)
from rlhf_megatron.controller.observe.report.run_files import (
    HeldOutSample,
    LoggedSample,
    MismatchStep,
    TraceSpan,
    WorstToken,
)

# of which bars are embedded; of a longer run the slowest, and an even choice of the rest
MAX_TIMELINE_STEPS = 400
NUM_SLOWEST_STEPS = 100

MAX_STEP_RANGES = 120  # of the map over steps; longer runs add neighbouring steps up
MAX_VERSION_RANGES = 60  # choices of policy versions; more are added up to ranges
NUM_WORST_TOKENS = 100  # tokens over all
NUM_STEPS_WITH_WORST_TOKEN = 60  # and the worst of so many steps

# What could end the script element, or a line of a script, in any parser.
_SCRIPT_ESCAPES = {ord(c): f"\\u{ord(c):04x}" for c in "<>&\u2028\u2029"}


@dataclass(frozen=True)
class StageTimeline:
    stage_names: tuple[str, ...]  # in the order of a step; calls to hosts behind them
    num_calls: int  # of the stages: the last so many are calls
    step_spans: tuple[TraceSpan, ...]
    stage_bars: tuple[tuple[int, TraceSpan], ...]  # index into stages
    num_run_steps: int  # of the run; more than len(steps) where some were left out


def make_timeline(spans: Sequence[TraceSpan]) -> StageTimeline | None:
    """Return the timeline of stages and calls; None where no span belongs to a step. A step that
    was cut off has the extent of its stages.

    For a step that a resumed run did again, the last time counts.
    """
    spans = _drop_repeated_steps(spans)
    stages = [span for span in spans if not span.is_whole_step and span.step is not None]
    steps: dict[int | None, TraceSpan] = {}
    for span in stages:
        so_far = steps.get(span.step, span)
        start = min(so_far.start_s, span.start_s)
        end = max(so_far.start_s + so_far.seconds, span.start_s + span.seconds)
        steps[span.step] = TraceSpan(
            f"step {span.step}", start, end - start, span.step, True, False
        )
    steps |= {span.step: span for span in spans if span.is_whole_step and span.step is not None}
    if not steps:
        return None
    kept = _select_timeline_steps(
        [steps[step] for step in sorted(steps, key=lambda step: step or 0)]
    )
    calls = sorted({span.name for span in stages if span.is_host_call})
    names = sorted({span.name for span in stages} - set(calls), key=_make_stage_sort_key) + calls
    numbers = {step.step for step in kept}
    bars = tuple((names.index(span.name), span) for span in stages if span.step in numbers)
    return StageTimeline(tuple(names), len(calls), tuple(kept), bars, len(steps))


def _drop_repeated_steps(spans: Sequence[TraceSpan]) -> list[TraceSpan]:
    """Return the spans without those of a step's former attempts."""
    begins: dict[int, float] = {}
    for span in spans:
        if span.is_whole_step and span.step is not None:
            begins[span.step] = max(span.start_s, begins.get(span.step, span.start_s))
    return [
        span
        for span in spans
        if span.step is None or span.start_s >= begins.get(span.step, span.start_s)
    ]


def _make_stage_sort_key(stage_name: str) -> tuple[int, str]:
    """Return the key that sorts stages in the order of a step, others behind them by name."""
    return (
        STAGE_ORDER.index(stage_name) if stage_name in STAGE_ORDER else len(STAGE_ORDER),
        stage_name,
    )


def _select_timeline_steps(step_spans: Sequence[TraceSpan]) -> list[TraceSpan]:
    """Return the steps whose bars are embedded: all of a short run, else the slowest and evenly
    spaced others.
    """
    if len(step_spans) <= MAX_TIMELINE_STEPS:
        return list(step_spans)
    even = select_evenly_spaced(len(step_spans), MAX_TIMELINE_STEPS - NUM_SLOWEST_STEPS)
    slowest = sorted(range(len(step_spans)), key=lambda i: step_spans[i].seconds)[
        -NUM_SLOWEST_STEPS:
    ]
    return [step_spans[i] for i in sorted({*even, *slowest})]


@dataclass(frozen=True)
class HistogramCell:
    """Tokens of some steps, one range of versions and one finish reason."""

    column_index: int  # index into Mismatch.columns
    version_index: int  # index into Mismatch.versions
    reason_index: int  # index into Mismatch.reasons
    num_tokens: int
    mean: float
    max: float
    counts: tuple[int, ...]


@dataclass(frozen=True)
class MismatchHistograms:
    edges: tuple[float, ...]
    step_ranges: tuple[tuple[int, int], ...]  # first and last step of each
    version_ranges: tuple[tuple[int, int], ...]  # first and last of each
    finish_reasons: tuple[str, ...]
    cells: tuple[HistogramCell, ...]
    worst_tokens: tuple[tuple[int, WorstToken], ...]  # step and token, the largest difference first
    notes: tuple[str, ...]


def make_mismatch_histograms(steps: Sequence[MismatchStep]) -> MismatchHistograms | None:
    """Return the histograms of engine against trainer over steps and versions, with the worst
    tokens; None where there are no tokens.
    """
    edges = Counter(step.edges for step in steps).most_common(1)[0][0] if steps else ()
    used = sorted((step for step in steps if step.edges == edges), key=lambda step: step.step)
    if not any(group.num_tokens for step in used for group in step.groups):
        return None
    notes = []
    if len(used) < len(steps):
        notes.append(f"{len(steps) - len(used)} steps with other bins are left out.")
    found = sorted({group.policy_version for step in used for group in step.groups})
    version_ranges = _merge_into_ranges(found, MAX_VERSION_RANGES)
    column_ranges = _merge_into_ranges(sorted({step.step for step in used}), MAX_STEP_RANGES)
    reasons = sorted({group.finish_reason for step in used for group in step.groups})
    sums: dict[tuple[int, int, int], HistogramCell] = {}
    for step in used:
        column = _find_range_index(column_ranges, step.step)
        for group in step.groups:
            version_index = _find_range_index(version_ranges, group.policy_version)
            reason_index = reasons.index(group.finish_reason)
            cell = HistogramCell(
                column,
                version_index,
                reason_index,
                group.num_tokens,
                group.mean,
                group.max,
                group.counts,
            )
            place = (column, version_index, reason_index)
            sums[place] = _add_cells(sums[place], cell) if place in sums else cell
    return MismatchHistograms(
        edges=edges,
        step_ranges=tuple(column_ranges),
        version_ranges=tuple(version_ranges),
        finish_reasons=tuple(reasons),
        cells=tuple(sums[place] for place in sorted(sums)),
        worst_tokens=_select_worst_tokens(used),
        notes=tuple(notes),
    )


def _merge_into_ranges(values: Sequence[int], max_ranges: int) -> list[tuple[int, int]]:
    """Return at most `max_ranges` ranges (first, last) that cover the sorted values, each with
    about the same number of values.
    """
    count = min(len(values), max_ranges)
    cuts = [i * len(values) // count for i in range(count)] + [len(values)] if count else []
    return [(values[begin], values[end - 1]) for begin, end in pairwise(cuts)]


def _find_range_index(ranges: Sequence[tuple[int, int]], value: int) -> int:
    """Return the index of the range that contains the value."""
    return next(i for i, (first, last) in enumerate(ranges) if first <= value <= last)


def _add_cells(first: HistogramCell, second: HistogramCell) -> HistogramCell:
    """Return the sum of two cells of the same place."""
    tokens = first.num_tokens + second.num_tokens
    mean = (first.mean * first.num_tokens + second.mean * second.num_tokens) / max(1, tokens)
    counts = tuple(a + b for a, b in zip(first.counts, second.counts, strict=True))
    return HistogramCell(
        first.column_index,
        first.version_index,
        first.reason_index,
        tokens,
        mean,
        max(first.max, second.max),
        counts,
    )


def _select_worst_tokens(steps: Sequence[MismatchStep]) -> tuple[tuple[int, WorstToken], ...]:
    """Return (step, token), the largest difference first: the worst tokens of all steps, and the
    worst token of evenly spaced steps.
    """
    every = [(step.step, token) for step in steps for token in step.worst]
    every.sort(key=lambda entry: -entry[1].difference)
    with_tokens = [step for step in steps if step.worst]
    of_steps = [
        with_tokens[i] for i in select_evenly_spaced(len(with_tokens), NUM_STEPS_WITH_WORST_TOKEN)
    ]
    chosen = every[:NUM_WORST_TOKENS] + [
        (s.step, max(s.worst, key=lambda token: token.difference)) for s in of_steps
    ]
    return tuple(sorted(dict.fromkeys(chosen), key=lambda entry: -entry[1].difference))


class PagePayload:
    """Gathers what the page's scripts read, while the page is written. The names are those
    of assets/*.js.
    """

    def __init__(self) -> None:
        """Begin without data."""
        self._step_axes: dict[tuple[int, ...], int] = {}
        self._charts: dict[str, dict[str, Any]] = {}
        self._views: dict[str, Any] = {}

    @property
    def chart_names(self) -> tuple[str, ...]:
        """Return the names of the charts that were added."""
        return tuple(self._charts)

    def add_chart(self, chart: ReportChart) -> None:
        """Add the data of a chart."""
        self._charts[chart.name] = {
            "title": chart.title,
            "unit": chart.unit,
            "kind": chart.kind,
            "axis": chart.axis_label,
            "log": chart.is_log,
            "wide": chart.is_wide,
            "zero": chart.is_from_zero,
            "rules": [list(rule) for rule in chart.horizontal_lines],
            "series": [self._make_series_json(series) for series in chart.series],
        }

    def _make_series_json(self, series: ChartSeries) -> dict[str, Any]:
        """Return the data of a curve; the steps are written once for all curves that share them."""
        found: dict[str, Any] = {
            "label": series.label,
            "key": series.metric_key,
            "meaning": series.meaning,
        }
        found |= {
            "x": self._step_axes.setdefault(series.steps, len(self._step_axes)),
            "y": series.values,
        }
        if series.low is not None and series.high is not None:
            found |= {"lo": series.low, "hi": series.high}
        if series.colour_index is not None:
            found["group"] = series.colour_index
        return found | ({"faint": True} if series.is_faint else {})

    def add_timeline(self, timeline: StageTimeline) -> None:
        """Add the data of the timeline, which opens at the step of median length."""
        by_time = sorted(
            range(len(timeline.step_spans)), key=lambda i: timeline.step_spans[i].seconds
        )
        self._views["timeline"] = {
            "open": by_time[len(by_time) // 2],
            "stages": timeline.stage_names,
            "num_calls": timeline.num_calls,
            "steps": [
                [s.step, round(s.start_s, 4), round(s.seconds, 4)] for s in timeline.step_spans
            ],
            "bars": [
                [stage, s.step, round(s.start_s, 4), round(s.seconds, 5)]
                for stage, s in timeline.stage_bars
            ],
        }

    def add_samples(self, samples: Sequence[LoggedSample]) -> None:
        """Add the samples that the page shows."""
        self._views["samples"] = [
            _replace_non_finite_values(
                vars(sample) | {"talk": [vars(piece) for piece in sample.talk]}
            )
            for sample in samples
        ]

    def add_held_out_samples(self, samples: Sequence[HeldOutSample]) -> None:
        """Add the held-out samples that the page shows."""
        self._views["held_out"] = [_replace_non_finite_values(vars(sample)) for sample in samples]

    def add_mismatch(self, histograms: MismatchHistograms) -> None:
        """Add the data of the mismatch histograms."""
        self._views["mismatch"] = {
            "edges": [round_significant(edge) for edge in histograms.edges],
            "columns": histograms.step_ranges,
            "versions": [
                str(low) if low == high else f"{low} to {high}"
                for low, high in histograms.version_ranges
            ],
            "version_ranges": histograms.version_ranges,
            "reasons": histograms.finish_reasons,
            "cells": [_make_cell_json(cell) for cell in histograms.cells],
            "worst": [
                {"step": step, **_replace_non_finite_values(vars(token))}
                for step, token in histograms.worst_tokens
            ],
        }

    def render_json(self) -> str:
        """Return all data as ASCII JSON that is safe inside of <script type="application/json">."""
        data = {"axes": list(self._step_axes), "charts": self._charts, **self._views}
        return json.dumps(data, separators=(",", ":"), allow_nan=False).translate(_SCRIPT_ESCAPES)


def _replace_non_finite_values(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the record with numbers rounded, and None in place of numbers that JSON does
    not have.
    """
    found = dict(record)
    for key, value in record.items():
        if isinstance(value, float):
            found[key] = round_significant(value)
        elif isinstance(value, Mapping):
            found[key] = _replace_non_finite_values(value)
    return found


def _make_cell_json(cell: HistogramCell) -> dict[str, Any]:
    """Return the data of a cell, without the empty bins at both ends of its histogram."""
    used = [i for i, count in enumerate(cell.counts) if count]
    first, last = (used[0], used[-1]) if used else (0, -1)
    return {
        "column": cell.column_index,
        "version": cell.version_index,
        "reason": cell.reason_index,
        "tokens": cell.num_tokens,
        "mean": round_significant(cell.mean),
        "max": round_significant(cell.max),
        "offset": first,
        "counts": cell.counts[first : last + 1],
    }
