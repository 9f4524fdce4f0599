"""Every difference of two runs: settings, versions of packages, data, and curves with intervals."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rlhf_megatron.observe.metrics.names import find
from rlhf_megatron.observe.report import html
from rlhf_megatron.observe.report.compare import all_settings, difference, mean_over_runs
from rlhf_megatron.observe.report.facts import Estimate, ends, gain, held_out, mean_reward
from rlhf_megatron.observe.report.files import Row, RunFiles

REWARD = "critic/rewards/mean"
NUM_NAMED = 5  # metrics of a step in a line
_CLOCKS = ("timing_s/", "timing_per_token_ms/", "perf/", "memory/")  # metrics that differ in equal runs
_UNITS_OF_CLOCKS = ("s", "ms", "GiB", "tokens/s", "tokens/s/GPU", "TFLOP/s")


@dataclass(frozen=True)
class Curve:
    """A metric at the end of two runs, and the second's minus the first's."""

    name: str
    one: Estimate
    other: Estimate
    change: Estimate

    @property
    def is_apart(self) -> bool:
        """Whether the interval of the difference leaves 0 out."""
        low, high = self.change.low, self.change.high
        return low is not None and high is not None and not low <= 0 <= high


@dataclass(frozen=True)
class Differences:
    """Rows are (name, value in the first run, value in the second)."""

    settings: tuple[tuple[str, str, str], ...]
    versions: tuple[tuple[str, str, str], ...]
    files: tuple[tuple[str, str, str], ...]  # digests of model, data, rewards and plugins
    curves: tuple[Curve, ...]  # reward and held-out accuracy, and each metric whose difference leaves 0 out
    num_metrics: int  # that both runs have
    bits: str  # at which step the first figure differs, in words
    notes: tuple[str, ...]


def differences(one: RunFiles, other: RunFiles) -> Differences:
    """Compare two runs as their files tell.

    Intervals are of 95 %: of rewards over samples, of accuracy over items (Newcombe), else over the last steps (Welch).
    """
    runs = (one, other)
    no_lock = [run.path.resolve().name for run in runs if not run.lock]
    notes = tuple(f"{name} has no config.lock.yaml: its versions and files cannot be compared" for name in no_lock)
    versions, files = (
        _rows(*(_texts(run, part) for run in runs)) if not no_lock else () for part in ("packages", "digests")
    )
    settings = _rows(all_settings(one), all_settings(other))
    curves, num_metrics = _curves(one, other)
    return Differences(settings, versions, files, tuple(curves), num_metrics, _bits(one, other), notes)


def told(found: Differences) -> Iterator[str]:
    """Yield what `rlhf-megatron report A B` prints: a line a difference."""
    for title, rows in (("setting", found.settings), ("version", found.versions), ("file", found.files)):
        yield from (f"{title} {name}: {one} | {other}" for name, one, other in rows)
    if not (found.settings or found.versions or found.files or found.notes):
        yield "settings, versions and files are the same"
    yield from found.notes
    for curve in found.curves:
        texts = [html.estimate(value) for value in (curve.one, curve.other)]
        yield f"{curve.name}: {texts[0]} | {texts[1]}, difference {html.estimate(curve.change, signed=True)}"
    yield found.bits


def as_html(found: Differences, names: Sequence[str]) -> str:
    """Return the differences as HTML. `names`: of the two runs."""
    tables = (
        ("Settings", found.settings),
        ("Versions of packages", found.versions),
        ("Files: digests", found.files),
    )
    parts = [html.table(title, ["", *names], [list(row) for row in rows]) for title, rows in tables if rows]
    if not parts and not found.notes:
        parts.append(f"<p>{html.text('Settings, versions and files are the same.')}</p>")
    parts += [html.missing(f"{note}.") for note in found.notes]
    rows = [
        [c.name, html.estimate(c.one), html.estimate(c.other), html.estimate(c.change, signed=True)]
        for c in found.curves
    ]
    caption = (
        f"Ends of curves with 95 % intervals: those of {found.num_metrics} metrics whose difference leaves 0 out, as"
        " one in twenty does by chance; reward and held-out accuracy always"
    )
    parts.append(html.table(caption, ["", *names, "difference"], rows, (1, 2, 3)) if rows else "")
    return "".join([*parts, f"<p>{html.text(found.bits)}.</p>"])


def _rows(one: Mapping[str, str], other: Mapping[str, str]) -> tuple[tuple[str, str, str], ...]:
    pairs = ((key, one.get(key, "–"), other.get(key, "–")) for key in dict.fromkeys([*one, *other]))
    return tuple(row for row in pairs if row[1] != row[2])


def _texts(run: RunFiles, part: str) -> dict[str, str]:
    found = run.lock.get(part)
    return {str(key): str(value) for key, value in found.items()} if isinstance(found, Mapping) else {}


def _curves(one: RunFiles, other: RunFiles) -> tuple[list[Curve], int]:
    found: list[Curve] = []
    pairs = [(held_out(one)[1], held_out(other)[1])]
    for first, second in pairs:
        if first is not None and second is not None:
            found.append(Curve("held-out accuracy", first, second, gain(first, second)))
    last = ends(one.steps)[1], ends(other.steps)[1]
    first, second = mean_reward(last[0]), mean_reward(last[1])
    if first is not None and second is not None:
        found.append(Curve(f"reward, last {html.count(len(last[1]), 'step')}", first, second, _minus(first, second)))
    keys = [key for key in _keys(last[0]) if key in set(_keys(last[1])) and key != REWARD]
    for key in keys:
        values = [[row.metrics[key] for row in rows if math.isfinite(row.metrics.get(key, math.nan))] for rows in last]
        change = difference(values[1], values[0])
        estimates = [mean_over_runs(each) for each in values]
        if change is not None and estimates[0] is not None and estimates[1] is not None:
            curve = Curve(key, estimates[0], estimates[1], change)
            found += [curve] if curve.is_apart else []
    return found, len(keys) + 1


def _minus(one: Estimate, other: Estimate) -> Estimate:
    """The difference of two independent means with normal intervals."""
    value = other.value - one.value
    if one.high is None or other.high is None:
        return Estimate(value)
    half = math.hypot(one.high - one.value, other.high - other.value)
    return Estimate(value, value - half, value + half)


def _keys(rows: Sequence[Row]) -> list[str]:
    """Metrics of steps that do not tell how fast the machine was."""
    keys = dict.fromkeys(key for row in rows for key in row.metrics)
    return [key for key in keys if not key.startswith(_CLOCKS) and not _is_clock(key)]


def _is_clock(key: str) -> bool:
    metric = find(key)
    return metric is not None and metric.unit in _UNITS_OF_CLOCKS


def _bits(one: RunFiles, other: RunFiles) -> str:
    common = 0
    for first, second in _pairs(one, other):
        common += 1
        differing = [
            key for key in _keys([first, second]) if not _is_same(first.metrics.get(key), second.metrics.get(key))
        ]
        if differing:
            more = f" and {len(differing) - NUM_NAMED} more" if len(differing) > NUM_NAMED else ""
            names = ", ".join(differing[:NUM_NAMED]) + more
            return f"curves first differ at {first.kind} {first.step}: {names}"
    return (
        f"curves are the same, bit for bit, in all {common} rows that both have" if common else "no row is in both runs"
    )


def _pairs(one: RunFiles, other: RunFiles) -> Iterator[tuple[Row, Row]]:
    for mine, theirs in ((one.warmups, other.warmups), (one.steps, other.steps), (one.evaluations, other.evaluations)):
        by_step = {row.step: row for row in theirs}
        yield from ((row, by_step[row.step]) for row in mine if row.step in by_step)


def _is_same(one: float | None, other: float | None) -> bool:
    return one == other or (one is not None and other is not None and math.isnan(one) and math.isnan(other))
