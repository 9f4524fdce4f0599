"""The page of several runs: seeds of a configuration as mean and interval, configurations side by side."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from rlhf_megatron.evaluation.intervals import t95
from rlhf_megatron.observe.report import html
from rlhf_megatron.observe.report.catalogue import SECTIONS, Spec
from rlhf_megatron.observe.report.charts import (
    Chart,
    Series,
    keys_of,
    make_chart,
    matching,
    rows_of,
    seed_interval,
    significant,
)
from rlhf_megatron.observe.report.facts import (
    NO_INFLUENCE,
    Estimate,
    duration,
    ends,
    held_out,
    mean_reward,
    seconds,
    setting,
    status,
    usual_settings,
    written_settings,
)
from rlhf_megatron.observe.report.files import RunFiles
from rlhf_megatron.observe.report.page import document, footer
from rlhf_megatron.observe.report.payload import Payload

SEEDS = ("trainer.seed", "model.init_seed", "data.seed")
LIKE = (*SEEDS, *NO_INFLUENCE)  # settings that the runs of a group may differ in


@dataclass(frozen=True)
class Group:
    """Runs of one configuration that differ in their seeds only."""

    label: str
    runs: tuple[RunFiles, ...]


def group_runs(runs: Sequence[RunFiles]) -> list[Group]:
    """Group runs whose settings differ in seeds and names only, in the order of their first runs. Labels differ."""
    by_settings: dict[tuple[tuple[str, str], ...], list[RunFiles]] = {}
    for run in runs:
        key = tuple((k, v) for k, v in sorted(all_settings(run).items()) if k not in LIKE)
        by_settings.setdefault(key, []).append(run)
    labels: list[str] = []
    for members in by_settings.values():
        label = _label([run.path.resolve().name for run in members])
        labels.append(label if label not in labels else f"{label} ({len(labels) + 1})")
    return [Group(label, tuple(members)) for label, members in zip(labels, by_settings.values(), strict=True)]


def all_settings(run: RunFiles) -> dict[str, str]:
    """Full key -> value as text; what its config.yaml leaves out has this version's default."""
    return {key: text for key, (text, _) in usual_settings().items()} | written_settings(run)


def differing_settings(groups: Sequence[Group]) -> list[tuple[str, list[str]]]:
    """(key, value in each group) of the settings in which groups differ, seeds and names apart."""
    settings = [all_settings(group.runs[0]) for group in groups]
    keys = dict.fromkeys(key for found in settings for key in found)
    rows = [(key, [found.get(key, "") for found in settings]) for key in keys if key not in LIKE]
    return [(key, values) for key, values in rows if len(set(values)) > 1]


def mean_over_runs(values: Sequence[float]) -> Estimate | None:
    """Mean over runs with Student's t interval. None for no value."""
    if not values:
        return None
    interval = seed_interval(values)
    return Estimate(statistics.fmean(values), *(interval or (None, None)))


def difference(values: Sequence[float], base: Sequence[float]) -> Estimate | None:
    """Mean of `values` minus mean of `base`, runs of two configurations. Interval: Welch 1947. None for no value."""
    if not values or not base:
        return None
    mean = statistics.fmean(values) - statistics.fmean(base)
    if len(values) < 2 or len(base) < 2:
        return Estimate(mean)
    one, other = statistics.variance(values) / len(values), statistics.variance(base) / len(base)
    if one + other == 0:
        return Estimate(mean, mean, mean)
    degrees = (one + other) ** 2 / (one**2 / (len(values) - 1) + other**2 / (len(base) - 1))
    half = t95(max(1, math.floor(degrees))) * math.sqrt(one + other)
    return Estimate(mean, mean - half, mean + half)


def _label(names: Sequence[str]) -> str:
    """The name of a single run; of several what their names begin with in common, and their number."""
    if len(names) == 1:
        return names[0]
    common = "".join(letters[0] for letters in takewhile(lambda letters: len(set(letters)) == 1, zip(*names)))
    common = common.rstrip("-_. 0123456789").removesuffix("seed").rstrip("-_. ")
    return f"{common or names[0]} ({len(names)} runs)"


BAND_NOTE = (
    "In charts, thick: mean over the runs of a configuration; band: its 95 % interval (Student's t); thin: each run."
)


def compare_page(
    runs: Sequence[RunFiles], pictures: Sequence[str] | None, reload_s: int | None = None, what_differs: str = ""
) -> str:
    """One self-contained HTML file for at least two runs. `pictures`, `reload_s`: as of `run_page`.

    `what_differs`: HTML of the section on two runs (differences.as_html).
    """
    groups = group_runs(runs)
    payload = Payload()
    sections = [("differences", "What differs", what_differs)] if what_differs else []
    sections.append(("runs", "Runs", _runs(groups)))
    for section in SECTIONS:
        charts = compare_charts(groups, section.name)
        for chart in charts:
            payload.add_chart(chart)
        if charts:
            sections.append((section.name, section.title, html.grid(charts)))
    title = " · ".join(group.label for group in groups)
    notes = [f"{run.path.resolve().name}: {note}" for run in runs for note in run.notes]
    differing = "" if what_differs else _differences(groups)
    return document(title, _head(groups, title, differing), sections, payload, footer(notes, pictures), reload_s)


def compare_charts(groups: Sequence[Group], section: str) -> list[Chart]:
    """A chart for each metric of a section that any run has, a colour for each configuration."""
    found: list[Chart] = []
    shown: set[str] = set()
    for spec in next(s.charts for s in SECTIONS if s.name == section):
        rows = [row for group in groups for run in group.runs for row in rows_of(run, spec.row)]
        lines = [line for line in matching(spec, keys_of(rows)) if line[0] not in shown]
        shown |= {key for key, _ in lines}
        for i, (key, label) in enumerate(lines):
            name = spec.name if i == 0 else f"{spec.name}-{i}"
            title = spec.title if len(lines) == 1 else f"{spec.title}: {label}"
            chart = _chart(replace(spec, name=name, title=title, keys=(key,), labels={key: label}), groups)
            found += [replace(chart, is_wide=spec.is_wide and len(lines) == 1)] if chart else []
    return found


def _chart(spec: Spec, groups: Sequence[Group]) -> Chart | None:
    """The band of several runs is that of their mean; a single run keeps its interval."""
    kind = "lines" if spec.kind == "stack" else spec.kind
    spec = replace(spec, kind=kind, is_wide=spec.is_wide and spec.kind != "stack")
    series: list[Series] = []
    charts: list[Chart] = []
    for i, group in enumerate(groups):
        of_group = replace(spec, band="") if len(group.runs) > 1 or spec.band == "range" else spec
        made = [chart for run in group.runs if (chart := make_chart(of_group, rows_of(run, spec.row)))]
        of_runs = [replace(chart.series[0], label=group.label, group=i) for chart in made]
        if len(of_runs) > 1:
            of_runs = [*(replace(one, is_faint=True) for one in of_runs), mean_series(of_runs)]
        charts, series = charts + made, series + of_runs
    if not charts:
        return None
    note = spec.note if any(len(group.runs) == 1 for group in groups) else ""
    return replace(charts[0], series=tuple(series), note=note)


def mean_series(of_runs: Sequence[Series]) -> Series:
    """Mean and Student's t interval at the steps at which all runs have a value."""
    known = [dict(zip(series.steps, series.values, strict=True)) for series in of_runs]
    steps, values, low, high = [], [], [], []
    for step in of_runs[0].steps:
        found = [value for values_of in known if (value := values_of.get(step)) is not None]
        if len(found) < len(of_runs):
            continue
        interval = seed_interval(found)
        assert interval is not None, "a mean is of two runs or more"
        steps.append(step)
        values.append(significant(sum(found) / len(found)))
        low.append(significant(interval[0]))
        high.append(significant(interval[1]))
    return replace(of_runs[0], steps=tuple(steps), values=tuple(values), low=tuple(low), high=tuple(high))


def _head(groups: Sequence[Group], title: str, differing: str) -> str:
    num_runs = sum(len(group.runs) for group in groups)
    about = f"{num_runs} runs, {html.count(len(groups), 'configuration')}"
    legend = f" {html.text(BAND_NOTE)}" if any(len(group.runs) > 1 for group in groups) else ""
    return (
        f'<div class="title"><h1>{html.text(title)}</h1></div><p class="muted">{html.text(about)}. Samples, timelines'
        f" and histograms are on the page of each run.{legend}</p>{_results(groups)}{differing}"
    )


def _results(groups: Sequence[Group]) -> str:
    rows, base = [], None
    for group in groups:
        pairs = [held_out(run) for run in group.runs]
        rewards = [found.value for run in group.runs if (found := mean_reward(ends(run.steps)[1]))]
        finals = [after.value for _, after in pairs if after]
        gains = [after.value - before.value for before, after in pairs if before and after]
        cells = [[before.value for before, _ in pairs if before], finals, rewards]
        row = [group.label, str(len(group.runs)), *(html.estimate(mean_over_runs(cell)) for cell in cells)]
        row.append(html.estimate(mean_over_runs(gains), signed=True))
        if len(groups) > 1:
            row.append(html.estimate(None if base is None else difference(finals, base), signed=True))
        base = finals if base is None else base
        rows.append(row)
    headings = ["configuration", "runs", "held-out before", "held-out after", "last reward", "gain"]
    if len(groups) > 1:
        headings.append(f"after, minus that of {groups[0].label}")
    caption = "Means over runs with 95 % interval (Student's t; of a difference: Welch). A single run has none."
    return html.table(caption, headings, rows, range(1, 7))


def _differences(groups: Sequence[Group]) -> str:
    rows = [[key, *values] for key, values in differing_settings(groups)]
    headings = ["key", *(group.label for group in groups)]
    return html.table("Settings in which they differ", headings, rows) if rows else ""


def _runs(groups: Sequence[Group]) -> str:
    rows = []
    for label, run in ((group.label, run) for group in groups for run in group.runs):
        numbers = [html.estimate(found) for found in (*held_out(run), mean_reward(ends(run.steps)[1]))]
        names = [run.path.resolve().name, label, str(setting(run, "trainer.seed") or ""), status(run).text]
        rows.append([*names, *numbers, duration(seconds(run))])
    headings = ["run", "configuration", "seed", "state", "held-out before", "held-out after", "last reward", "time"]
    caption = "Held-out accuracy with its 95 % interval over items, reward with its over samples."
    return html.table(caption, headings, rows, (2, 4, 5, 6, 7))
