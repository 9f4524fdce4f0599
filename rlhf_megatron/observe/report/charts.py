"""The charts of one run: the catalogue's entries filled with the rows of a run, thinned but for their peaks. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress

from rlhf_megatron.evaluation.intervals import Z95, t95
from rlhf_megatron.observe.report.catalogue import SECTIONS, Spec, metric, pattern
from rlhf_megatron.observe.report.files import Row, RunFiles


def seed_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """95 % interval of the mean over few runs (Student's t). None for a single one."""
    if len(values) < 2:
        return None
    mean, half = statistics.fmean(values), t95(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return mean - half, mean + half


def significant(value: float | None, digits: int = 6) -> float | None:
    """Rounded to so many digits, to keep the page small; None for what JSON has no number for."""
    return float(f"{value:.{digits}g}") if value is not None and math.isfinite(value) else None


def thin(values: Sequence[float | None], max_points: int) -> list[int]:
    """Which points of a curve to keep, in order: of each of max_points / 2 buckets the lowest and the highest.

    All where there are no more than `max_points`. First and last point always stay; None counts as no extreme.
    """
    count = len(values)
    if count <= max_points:
        return list(range(count))
    num_buckets = max(1, (max_points - 2) // 2)
    kept = {0, count - 1}
    for bucket in range(num_buckets):
        begin, end = bucket * count // num_buckets, (bucket + 1) * count // num_buckets
        found = [(value, i) for i in range(begin, end) if (value := values[i]) is not None]
        kept |= {min(found)[1], max(found)[1]} if found else {begin}
    return sorted(kept)


def spread_evenly(count: int, max_count: int) -> list[int]:
    """Return at most `max_count` indices of 0 .. count - 1, evenly spaced, the first and the last among them."""
    if count <= max_count:
        return list(range(count))
    if max_count < 2:
        return [count - 1][:max_count]
    return sorted({round(i * (count - 1) / (max_count - 1)) for i in range(max_count)})


MAX_POINTS = 500  # of a curve
REWARD_STD, NUM_SAMPLES, MASKED = "critic/rewards/std", "rollout/num_samples", "reward/masked"
STAGE_ORDER = ("next", "generate", "score", "take", "annotate", "advantages", "update", "sync")
NOT_STAGES = ("step", "evaluate", "turns")  # turns are parts of stages
Values = tuple[float | None, ...]


@dataclass(frozen=True)
class Series:
    """A curve. None: there is no finite value at that step."""

    label: str
    key: str  # of the metric
    meaning: str
    steps: tuple[int, ...]
    values: Values
    low: Values | None = None
    high: Values | None = None
    group: int | None = None  # index of the colour; None: its place in the chart
    is_faint: bool = False  # one run of several whose mean is drawn beside it


@dataclass(frozen=True)
class Chart:
    name: str
    title: str
    unit: str
    kind: str  # see Spec
    series: tuple[Series, ...]
    rules: tuple[tuple[float, str], ...] = ()  # horizontal lines: value, what it is
    note: str = ""
    axis: str = "step"
    is_log: bool = False
    is_wide: bool = False
    from_zero: bool = False


def section_charts(run: RunFiles, name: str) -> list[Chart]:
    """The charts of a section for which the run has data, in the catalogue's order."""
    specs = next(section.charts for section in SECTIONS if section.name == name)
    charts = [chart for spec in specs if (chart := make_chart(spec, rows_of(run, spec.row))) is not None]
    majority = (run.summary or {}).get("majority_answer_accuracy")
    if isinstance(majority, int | float):
        rule = ((float(majority), "always the most common answer"),)
        charts = [replace(chart, rules=rule) if chart.name == "held_out" else chart for chart in charts]
    return charts


def other_charts(run: RunFiles) -> list[Chart]:
    """A chart for each metric that no entry of the catalogue shows and that is not the same in all rows."""
    specs = [spec for section in SECTIONS for spec in section.charts]
    shown = {key for spec in specs for key in used_keys(spec, rows_of(run, spec.row))} | {"training/global_step"}
    charts: list[Chart] = []
    for kind in ("step", "evaluation", "warmup"):
        rows = rows_of(run, kind)
        for key in keys_of(rows):
            if key not in shown and len({row.metrics.get(key) for row in rows}) > 1:
                style = "points" if kind == "evaluation" else "lines"
                chart = make_chart(Spec(f"other-{len(charts)}", key, (key,), row=kind, kind=style), rows)
                charts += [chart] if chart else []
    return charts


def make_chart(spec: Spec, rows: Sequence[Row]) -> Chart | None:
    """Make a chart; None where no row has any of its metrics."""
    found = [series_of(spec, key, label, rows) for key, label in matching(spec, keys_of(rows))]
    found = [s for s in found if any(value is not None for value in s.values)]
    is_shown = [not spec.hidden or s.label != spec.hidden for s in found]
    series = list(compress(_same_steps(found, spec.kind), is_shown))
    if not series:
        return None
    notes = [spec.note, *(_lack(spec, s) for s in series[:1]), *(_not_finite(s) for s in compress(found, is_shown))]
    return Chart(
        name=spec.name,
        title=spec.title,
        unit=metric(series[0].key)[0],
        kind=spec.kind,
        series=tuple(_thinned(s, spec.kind) for s in series),
        note=" ".join(note for note in notes if note),
        axis="warm-up step" if spec.row == "warmup" else "step",
        is_log=spec.is_log,
        is_wide=spec.is_wide,
        from_zero=spec.from_zero or spec.kind == "stack",
    )


def rows_of(run: RunFiles, kind: str) -> tuple[Row, ...]:
    return {"step": run.steps, "evaluation": run.evaluations, "warmup": run.warmups}[kind]


def keys_of(rows: Sequence[Row]) -> list[str]:
    """All metrics of the rows, in the order in which they first come."""
    found: dict[str, None] = {}
    for row in rows:
        if not row.metrics.keys() <= found.keys():
            found |= dict.fromkeys(row.metrics)
    return list(found)


def matching(spec: Spec, keys: Sequence[str]) -> list[tuple[str, str]]:
    """(metric, label) of each line of a chart, in a fixed order: colours must not depend on the first row."""
    found: list[tuple[str, str]] = []
    for key in spec.keys:
        matches = [(other, match["name"]) for other in keys if (match := pattern(key).match(other))]
        if "<" not in key:
            found += [(other, spec.labels.get(key, other)) for other, _ in matches]
            continue
        if key == "timing_s/<stage>":
            matches = [(other, name) for other, name in matches if name not in NOT_STAGES]
            matches.sort(key=lambda m: (STAGE_ORDER.index(m[1]) if m[1] in STAGE_ORDER else len(STAGE_ORDER), m[1]))
        else:
            matches.sort(key=lambda m: m[1])
        if len({name for _, name in matches}) < len(matches):  # one source has best@2, best@4, ...
            matches = [(other, f"{name}, {other.rpartition('/')[2]}") for other, name in matches]
        found += matches
    return found


def series_of(spec: Spec, key: str, label: str, rows: Sequence[Row]) -> Series:
    """All points of a metric, with its band where the rows have one."""
    rows = [row for row in rows if key in row.metrics]
    low, high = _band(spec, key, label, rows)
    return Series(
        label=label,
        key=key,
        meaning=metric(key)[1],
        steps=tuple(row.step for row in rows),
        values=tuple(significant(row.metrics[key]) for row in rows),
        low=low,
        high=high,
    )


def used_keys(spec: Spec, rows: Sequence[Row]) -> set[str]:
    """Metrics that a chart shows, those of its band too."""
    lines = matching(spec, keys_of(rows))
    bands = [(REWARD_STD,) if spec.band == "interval" else _band_keys(spec, *line) or () for line in lines]
    return {key for key, _ in lines}.union(*bands)


def _band_keys(spec: Spec, key: str, label: str) -> tuple[str, str] | None:
    if isinstance(spec.band, tuple):
        low, high = (end.replace("<source>", label) for end in spec.band)
        return low, high
    prefix = key.removesuffix("/mean")
    return (f"{prefix}/min", f"{prefix}/max") if spec.band == "range" else None


def _band(spec: Spec, key: str, label: str, rows: Sequence[Row]) -> tuple[Values | None, Values | None]:
    if spec.band == "interval":
        pairs = [_reward_interval(row) for row in rows]
    else:
        ends = _band_keys(spec, key, label)
        if ends is None:
            return None, None
        pairs = [(row.metrics.get(ends[0]), row.metrics.get(ends[1])) for row in rows]
    if all(low is None or high is None for low, high in pairs):
        return None, None
    return tuple(significant(low) for low, _ in pairs), tuple(significant(high) for _, high in pairs)


def _reward_interval(row: Row) -> tuple[float | None, float | None]:
    """95 % of the mean over the samples whose reward counts, taken as independent and normal."""
    metrics: Mapping[str, float] = row.metrics
    std, count = metrics.get(REWARD_STD), metrics.get(NUM_SAMPLES, 0.0) * (1 - metrics.get(MASKED, 0.0))
    if std is None or not count >= 2:
        return None, None
    mean, half = metrics["critic/rewards/mean"], Z95 * std / math.sqrt(count)
    return mean - half, mean + half


def _lack(spec: Spec, series: Series) -> str:
    if spec.band == "interval" and series.low is None:
        return f"No band here: this run wrote no {REWARD_STD}."
    if spec.band == "range":
        return "Band: smallest to largest." if series.low is not None else ""
    return ""


def _not_finite(series: Series) -> str:
    steps = [step for step, value in zip(series.steps, series.values, strict=True) if value is None]
    if not steps:
        return ""
    which = ", ".join(map(str, steps[:5])) + (" ..." if len(steps) > 5 else "")
    return f"{series.key} is not a finite number at {len(steps)} step(s) ({which})."


def _same_steps(series: Sequence[Series], kind: str) -> list[Series]:
    """Stacked curves need the same steps: a missing share is 0."""
    if kind != "stack":
        return list(series)
    steps = tuple(sorted({step for s in series for step in s.steps}))
    filled = []
    for s in series:
        known = dict(zip(s.steps, s.values, strict=True))
        filled.append(replace(s, steps=steps, values=tuple(known.get(step) or 0.0 for step in steps)))
    return filled


def _thinned(series: Series, kind: str) -> Series:
    """Stacked curves keep the same steps: every n-th."""
    count = len(series.steps)
    if kind == "stack":
        stride = -(-count // MAX_POINTS)
        kept = list(range(0, count, stride))
    else:
        kept = thin(series.values, MAX_POINTS)
    if len(kept) == count:
        return series

    def pick(values: Values) -> Values:
        return tuple(values[i] for i in kept)

    return replace(
        series,
        steps=tuple(series.steps[i] for i in kept),
        values=pick(series.values),
        low=pick(series.low) if series.low is not None else None,
        high=pick(series.high) if series.high is not None else None,
    )
