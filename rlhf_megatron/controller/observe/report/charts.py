"""The charts of one run: the catalogue's entries filled with the rows of a run, thinned but for
their peaks. Pure.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress

from rlhf_megatron.controller.evaluation.confidence_intervals import Z95, compute_t95_quantile
from rlhf_megatron.controller.observe.report.chart_catalogue import (
    REPORT_SECTIONS,
    ChartSpec,
    compile_key_pattern,
    describe_metric,
)
from rlhf_megatron.controller.observe.report.run_files import MetricRow, RunFiles

MAX_CURVE_POINTS = 500  # of a curve
REWARD_STD_KEY = "critic/rewards/std"
NUM_SAMPLES_KEY = "rollout/num_samples"
MASKED_SHARE_KEY = "reward/masked"
STAGE_ORDER = ("next", "generate", "score", "take", "annotate", "advantages", "update", "sync")
TIMINGS_THAT_ARE_NO_STAGES = ("step", "evaluate", "turns")  # turns are parts of stages


def compute_seed_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Return the 95 % interval (low, high) of the mean over few runs (Student's t); None for a
    single run.
    """
    if len(values) < 2:
        return None
    mean = statistics.fmean(values)
    half = compute_t95_quantile(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return mean - half, mean + half


def round_significant(value: float | None, num_digits: int = 6) -> float | None:
    """Round to `num_digits` significant digits, to keep the page small. Return None for NaN and
    infinities, which JSON does not have.
    """
    return float(f"{value:.{num_digits}g}") if value is not None and math.isfinite(value) else None


def select_curve_points(values: Sequence[float | None], max_points: int) -> list[int]:
    """Return the indices of the points of a curve to keep, in order: the lowest and the highest of
    each of max_points / 2 buckets.

    Keep all points where there are no more than `max_points`. The first and the last point always
    stay; None is never an extreme.
    """
    count = len(values)
    if count <= max_points:
        return list(range(count))
    num_buckets = max(1, (max_points - 2) // 2)
    kept = {0, count - 1}
    for bucket in range(num_buckets):
        begin = bucket * count // num_buckets
        end = (bucket + 1) * count // num_buckets
        found = [(value, i) for i in range(begin, end) if (value := values[i]) is not None]
        kept |= {min(found)[1], max(found)[1]} if found else {begin}
    return sorted(kept)


def select_evenly_spaced(num_items: int, max_items: int) -> list[int]:
    """Return at most `max_items` indices of 0 .. num_items - 1, evenly spaced, the first and the
    last among them.
    """
    if num_items <= max_items:
        return list(range(num_items))
    if max_items < 2:
        return [num_items - 1][:max_items]
    return sorted({round(i * (num_items - 1) / (max_items - 1)) for i in range(max_items)})


CurveValues = tuple[float | None, ...]


@dataclass(frozen=True)
class ChartSeries:
    """A curve. None: there is no finite value at that step."""

    label: str
    metric_key: str  # of the metric
    meaning: str
    steps: tuple[int, ...]
    values: CurveValues
    low: CurveValues | None = None
    high: CurveValues | None = None
    colour_index: int | None = None  # index of the colour; None: its place in the chart
    is_faint: bool = False  # one run of several whose mean is drawn beside it


@dataclass(frozen=True)
class ReportChart:
    name: str
    title: str
    unit: str
    kind: str  # see Spec
    series: tuple[ChartSeries, ...]
    horizontal_lines: tuple[tuple[float, str], ...] = ()  # horizontal lines: value, what it is
    note: str = ""
    axis_label: str = "step"
    is_log: bool = False
    is_wide: bool = False
    is_from_zero: bool = False


def is_all_zero(chart: ReportChart) -> bool:
    """Return whether a chart has values, and all of them are 0."""
    values = {value for series in chart.series for value in series.values}
    return 0.0 in values and values <= {0.0, None}


def make_section_charts(run: RunFiles, section_name: str) -> list[ReportChart]:
    """Return the charts of a section for which the run has data, in the catalogue's order."""
    specs = next(section.charts for section in REPORT_SECTIONS if section.name == section_name)
    charts = [
        chart
        for spec in specs
        if (chart := make_chart(spec, select_rows(run, spec.row_kind))) is not None
    ]
    majority = (run.summary or {}).get("majority_answer_accuracy")
    if isinstance(majority, int | float):
        rule = ((float(majority), "always the most common answer"),)
        charts = [
            replace(chart, horizontal_lines=rule) if chart.name == "held_out" else chart
            for chart in charts
        ]
    return charts


def make_uncatalogued_charts(run: RunFiles) -> list[ReportChart]:
    """Return a chart for each metric that no entry of the catalogue shows and that is not the same
    in all rows.
    """
    specs = [spec for section in REPORT_SECTIONS for spec in section.charts]
    shown = {
        key for spec in specs for key in collect_shown_keys(spec, select_rows(run, spec.row_kind))
    } | {"training/global_step"}
    charts: list[ReportChart] = []
    for kind in ("step", "evaluation", "warmup"):
        rows = select_rows(run, kind)
        for key in collect_metric_keys(rows):
            if key not in shown and len({row.metrics.get(key) for row in rows}) > 1:
                style = "points" if kind == "evaluation" else "lines"
                chart = make_chart(
                    ChartSpec(f"other-{len(charts)}", key, (key,), row_kind=kind, kind=style), rows
                )
                charts += [chart] if chart else []
    return charts


def make_chart(spec: ChartSpec, rows: Sequence[MetricRow]) -> ReportChart | None:
    """Return the chart of `spec` filled with these rows, thinned; None where no row has any of its
    metrics.
    """
    found = [
        make_series(spec, key, label, rows)
        for key, label in match_metric_keys(spec, collect_metric_keys(rows))
    ]
    found = [s for s in found if any(value is not None for value in s.values)]
    is_shown = [not spec.hidden_label or s.label != spec.hidden_label for s in found]
    series = list(compress(_align_stacked_steps(found, spec.kind), is_shown))
    if not series:
        return None
    notes = [
        spec.note,
        *(_make_band_note(spec, s) for s in series[:1]),
        *(_make_non_finite_note(s) for s in compress(found, is_shown)),
    ]
    return ReportChart(
        name=spec.name,
        title=spec.title,
        unit=describe_metric(series[0].metric_key)[0],
        kind=spec.kind,
        series=tuple(_thin_series(s, spec.kind) for s in series),
        note=" ".join(note for note in notes if note),
        axis_label="warm-up step" if spec.row_kind == "warmup" else "step",
        is_log=spec.is_log,
        is_wide=spec.is_wide,
        is_from_zero=spec.is_from_zero or spec.kind == "stack",
    )


def select_rows(run: RunFiles, row_kind: str) -> tuple[MetricRow, ...]:
    """Return the rows of a kind: "step", "evaluation" or "warmup"."""
    return {"step": run.steps, "evaluation": run.evaluations, "warmup": run.warmups}[row_kind]


def collect_metric_keys(rows: Sequence[MetricRow]) -> list[str]:
    """Return all metrics of the rows, in the order in which they first appear."""
    found: dict[str, None] = {}
    for row in rows:
        if not row.metrics.keys() <= found.keys():
            found |= dict.fromkeys(row.metrics)
    return list(found)


def match_metric_keys(spec: ChartSpec, metric_keys: Sequence[str]) -> list[tuple[str, str]]:
    """Return (metric, label) of each line of a chart, in an order that does not depend on the order
    of `metric_keys`: colours must not depend on the first row.
    """
    found: list[tuple[str, str]] = []
    for key in spec.metric_keys:
        matches = [
            (other, match["name"])
            for other in metric_keys
            if (match := compile_key_pattern(key).match(other))
        ]
        if "<" not in key:
            found += [(other, spec.labels.get(key, other)) for other, _ in matches]
            continue
        if key == "timing_s/<stage>":
            matches = [
                (other, name) for other, name in matches if name not in TIMINGS_THAT_ARE_NO_STAGES
            ]
            matches.sort(
                key=lambda m: (
                    STAGE_ORDER.index(m[1]) if m[1] in STAGE_ORDER else len(STAGE_ORDER),
                    m[1],
                )
            )
        else:
            matches.sort(key=lambda m: m[1])
        if len({name for _, name in matches}) < len(matches):  # one source has best@2, best@4, ...
            matches = [(other, f"{name}, {other.rpartition('/')[2]}") for other, name in matches]
        found += matches
    return found


def make_series(
    spec: ChartSpec, metric_key: str, label: str, rows: Sequence[MetricRow]
) -> ChartSeries:
    """Return all points of a metric, with its band where the rows have one."""
    rows = [row for row in rows if metric_key in row.metrics]
    low, high = _make_band(spec, metric_key, label, rows)
    return ChartSeries(
        label=label,
        metric_key=metric_key,
        meaning=describe_metric(metric_key)[1],
        steps=tuple(row.step for row in rows),
        values=tuple(round_significant(row.metrics[metric_key]) for row in rows),
        low=low,
        high=high,
    )


def collect_shown_keys(spec: ChartSpec, rows: Sequence[MetricRow]) -> set[str]:
    """Return the metrics that a chart shows, the metrics of its band included."""
    lines = match_metric_keys(spec, collect_metric_keys(rows))
    bands = [
        (REWARD_STD_KEY,)
        if spec.band == "interval"
        else _find_band_keys(spec, metric_key, label) or ()
        for metric_key, label in lines
    ]
    return {key for key, _ in lines}.union(*bands)


def _find_band_keys(spec: ChartSpec, metric_key: str, label: str) -> tuple[str, str] | None:
    """Return the metrics (low, high) of the band, or None where the chart has no such band."""
    if isinstance(spec.band, tuple):
        low, high = (end.replace("<source>", label) for end in spec.band)
        return low, high
    prefix = metric_key.removesuffix("/mean")
    return (f"{prefix}/min", f"{prefix}/max") if spec.band == "range" else None


def _make_band(
    spec: ChartSpec, metric_key: str, label: str, rows: Sequence[MetricRow]
) -> tuple[CurveValues | None, CurveValues | None]:
    """Return the (low, high) ends of the band at each row, (None, None) where the chart or the rows
    have none.
    """
    if spec.band == "interval":
        pairs = [_compute_reward_interval(row) for row in rows]
    else:
        ends = _find_band_keys(spec, metric_key, label)
        if ends is None:
            return None, None
        pairs = [(row.metrics.get(ends[0]), row.metrics.get(ends[1])) for row in rows]
    if all(low is None or high is None for low, high in pairs):
        return None, None
    return tuple(round_significant(low) for low, _ in pairs), tuple(
        round_significant(high) for _, high in pairs
    )


def _compute_reward_interval(row: MetricRow) -> tuple[float | None, float | None]:
    """Return the 95 % interval of the mean over the samples whose reward counts, taken as
    independent and normal; (None, None) where the row lacks the deviation.
    """
    metrics: Mapping[str, float] = row.metrics
    std = metrics.get(REWARD_STD_KEY)
    count = metrics.get(NUM_SAMPLES_KEY, 0.0) * (1 - metrics.get(MASKED_SHARE_KEY, 0.0))
    if std is None or not count >= 2:
        return None, None
    mean = metrics["critic/rewards/mean"]
    half = Z95 * std / math.sqrt(count)
    return mean - half, mean + half


def _make_band_note(spec: ChartSpec, series: ChartSeries) -> str:
    """Return a sentence for the note below a chart: what its band shows or why it is missing; ""
    where nothing needs saying.
    """
    if spec.band == "interval" and series.low is None:
        return f"No band here: this run wrote no {REWARD_STD_KEY}."
    if spec.band == "range":
        return "Band: smallest to largest." if series.low is not None else ""
    return ""


def _make_non_finite_note(series: ChartSeries) -> str:
    """Return a sentence for the note below a chart with the steps at which a metric is not finite;
    "" where there are none.
    """
    steps = [step for step, value in zip(series.steps, series.values, strict=True) if value is None]
    if not steps:
        return ""
    which = ", ".join(map(str, steps[:5])) + (" ..." if len(steps) > 5 else "")
    return f"{series.metric_key} is not a finite number at {len(steps)} step(s) ({which})."


def _align_stacked_steps(series: Sequence[ChartSeries], chart_kind: str) -> list[ChartSeries]:
    """Return the curves of a stacked chart with the same steps in each, where a missing share is 0;
    other curves as they are.
    """
    if chart_kind != "stack":
        return list(series)
    steps = tuple(sorted({step for s in series for step in s.steps}))
    filled = []
    for s in series:
        known = dict(zip(s.steps, s.values, strict=True))
        filled.append(
            replace(s, steps=steps, values=tuple(known.get(step) or 0.0 for step in steps))
        )
    return filled


def _thin_series(series: ChartSeries, chart_kind: str) -> ChartSeries:
    """Return the curve with about MAX_CURVE_POINTS points. Stacked curves keep every n-th step, so
    that their steps stay the same.
    """
    count = len(series.steps)
    if chart_kind == "stack":
        stride = -(-count // MAX_CURVE_POINTS)
        kept = list(range(0, count, stride))
    else:
        kept = select_curve_points(series.values, MAX_CURVE_POINTS)
    if len(kept) == count:
        return series

    def select_points(values: CurveValues) -> CurveValues:
        """Return the values at the points that are kept."""
        return tuple(values[i] for i in kept)

    return replace(
        series,
        steps=tuple(series.steps[i] for i in kept),
        values=select_points(series.values),
        low=select_points(series.low) if series.low is not None else None,
        high=select_points(series.high) if series.high is not None else None,
    )
