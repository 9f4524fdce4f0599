"""The data of a page as JSON that may stand inside of a script element. Steps that charts share are written once."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rlhf_megatron.observe.report.charts import Chart, Series
from rlhf_megatron.observe.report.mismatch import Cell, Mismatch
from rlhf_megatron.observe.report.numbers import significant
from rlhf_megatron.observe.report.records import Sample, WorstToken
from rlhf_megatron.observe.report.timeline import Timeline

# What could end the script element, or a line of a script, in any parser.
_ESCAPES = {ord(c): f"\\u{ord(c):04x}" for c in "<>&\u2028\u2029"}


class Payload:
    """Gathers what the page's scripts read, while the page is written. The names are those of assets/*.js."""

    def __init__(self) -> None:
        self._axes: dict[tuple[int, ...], int] = {}
        self._charts: dict[str, dict[str, Any]] = {}
        self._views: dict[str, Any] = {}

    def add_chart(self, chart: Chart) -> None:
        self._charts[chart.name] = {
            "title": chart.title,
            "unit": chart.unit,
            "kind": chart.kind,
            "axis": chart.axis,
            "log": chart.is_log,
            "wide": chart.is_wide,
            "zero": chart.from_zero,
            "rules": [list(rule) for rule in chart.rules],
            "series": [self._series(series) for series in chart.series],
        }

    def _series(self, series: Series) -> dict[str, Any]:
        found: dict[str, Any] = {"label": series.label, "key": series.key, "meaning": series.meaning}
        found |= {"x": self._axes.setdefault(series.steps, len(self._axes)), "y": series.values}
        if series.low is not None and series.high is not None:
            found |= {"lo": series.low, "hi": series.high}
        if series.group is not None:
            found["group"] = series.group
        return found | ({"faint": True} if series.is_faint else {})

    def add_timeline(self, timeline: Timeline) -> None:
        self._views["timeline"] = {
            "stages": timeline.stages,
            "num_calls": timeline.num_calls,
            "steps": [[s.step, round(s.start_s, 4), round(s.seconds, 4)] for s in timeline.steps],
            "bars": [[b.stage, b.step, round(b.start_s, 4), round(b.seconds, 5)] for b in timeline.bars],
        }

    def add_samples(self, samples: Sequence[Sample]) -> None:
        self._views["samples"] = [_finite(vars(sample)) for sample in samples]

    def add_mismatch(self, mismatch: Mismatch) -> None:
        self._views["mismatch"] = {
            "edges": [significant(edge) for edge in mismatch.edges],
            "columns": mismatch.columns,
            "versions": mismatch.versions,
            "version_ranges": mismatch.version_ranges,
            "reasons": mismatch.reasons,
            "cells": [_cell(cell) for cell in mismatch.cells],
            "worst": [_worst(step, token) for step, token in mismatch.worst],
        }

    def as_json(self) -> str:
        """ASCII; safe inside of <script type="application/json">."""
        data = {"axes": list(self._axes), "charts": self._charts, **self._views}
        return json.dumps(data, separators=(",", ":"), allow_nan=False).translate(_ESCAPES)


def _finite(record: Mapping[str, Any]) -> dict[str, Any]:
    """The same with null in place of what JSON has no number for."""
    found = dict(record)
    for key, value in record.items():
        if isinstance(value, float):
            found[key] = significant(value)
        elif isinstance(value, Mapping):
            found[key] = _finite(value)
    return found


def _cell(cell: Cell) -> dict[str, Any]:
    """Counts without the empty bins at both ends."""
    used = [i for i, count in enumerate(cell.counts) if count]
    first, last = (used[0], used[-1]) if used else (0, -1)
    return {
        "column": cell.column,
        "version": cell.version,
        "reason": cell.reason,
        "tokens": cell.num_tokens,
        "mean": significant(cell.mean),
        "max": significant(cell.max),
        "offset": first,
        "counts": cell.counts[first : last + 1],
    }


def _worst(step: int, token: WorstToken) -> dict[str, Any]:
    return {"step": step, **_finite(vars(token))}
