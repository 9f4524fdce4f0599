"""The page of several runs: seeds of a configuration as mean and interval,
configurations side by side.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from rlhf_megatron.controller.evaluation.confidence_intervals import compute_t95_quantile
from rlhf_megatron.controller.observe.report import html_elements
from rlhf_megatron.controller.observe.report.chart_catalogue import REPORT_SECTIONS, ChartSpec
from rlhf_megatron.controller.observe.report.charts import (
    ChartSeries,
    ReportChart,
    collect_metric_keys,
    compute_seed_interval,
    make_chart,
    match_metric_keys,
    round_significant,
    select_rows,
)
from rlhf_megatron.controller.observe.report.page_payload import PagePayload
from rlhf_megatron.controller.observe.report.run_files import MetricRow, RunFiles
from rlhf_megatron.controller.observe.report.run_overview import (
    SETTINGS_WITHOUT_INFLUENCE,
    IntervalEstimate,
    determine_run_status,
    estimate_mean_reward,
    find_last_common_evaluation,
    find_last_common_step,
    find_last_step,
    flatten_written_settings,
    format_duration,
    list_default_settings,
    name_held_out_score,
    read_held_out_score_at,
    read_held_out_scores,
    read_run_seconds,
    read_setting,
    select_first_and_last_rows,
)
from rlhf_megatron.controller.observe.report.run_page import render_document, render_footer

SEED_SETTINGS = ("trainer.seed", "model.init_seed", "data.seed")
# settings that the runs of a group may differ in
SETTINGS_IGNORED_IN_GROUPING = *SEED_SETTINGS, *SETTINGS_WITHOUT_INFLUENCE

BAND_NOTE = (
    "In charts, thick: mean over the runs of a configuration; band: its 95 % interval (Student's"
    " t); thin: each run."
)


@dataclass(frozen=True)
class RunGroup:
    """Runs of one configuration that differ in their seeds only."""

    label: str
    runs: tuple[RunFiles, ...]


def group_runs(runs: Sequence[RunFiles]) -> list[RunGroup]:
    """Group runs whose settings differ in seeds and names only, in the order of their first runs.
    The labels of the groups differ.
    """
    by_settings: dict[tuple[tuple[str, str], ...], list[RunFiles]] = {}
    for run in runs:
        key = tuple(
            (k, v)
            for k, v in sorted(collect_run_settings(run).items())
            if k not in SETTINGS_IGNORED_IN_GROUPING
        )
        by_settings.setdefault(key, []).append(run)
    labels: list[str] = []
    for members in by_settings.values():
        label = _make_group_label([run.run_dir.resolve().name for run in members])
        labels.append(label if label not in labels else f"{label} ({len(labels) + 1})")
    return [
        RunGroup(label, tuple(members))
        for label, members in zip(labels, by_settings.values(), strict=True)
    ]


def collect_run_settings(run: RunFiles) -> dict[str, str]:
    """Return the settings of a run as text, by full key; a setting that its config.yaml leaves out
    has this version's default.
    """
    return {
        key: text for key, (text, _) in list_default_settings().items()
    } | flatten_written_settings(run)


def find_differing_settings(groups: Sequence[RunGroup]) -> list[tuple[str, list[str]]]:
    """Return (key, value in each group) of the settings in which groups differ, except seeds and
    names.
    """
    settings = [collect_run_settings(group.runs[0]) for group in groups]
    keys = dict.fromkeys(key for found in settings for key in found)
    rows = [
        (key, [found.get(key, "") for found in settings])
        for key in keys
        if key not in SETTINGS_IGNORED_IN_GROUPING
    ]
    return [(key, values) for key, values in rows if len(set(values)) > 1]


def estimate_mean_over_runs(values: Sequence[float]) -> IntervalEstimate | None:
    """Return the mean over runs with Student's t interval; None for no value."""
    if not values:
        return None
    interval = compute_seed_interval(values)
    return IntervalEstimate(statistics.fmean(values), *(interval or (None, None)))


def estimate_mean_difference(
    values: Sequence[float], base_values: Sequence[float]
) -> IntervalEstimate | None:
    """Return the mean of `values` minus the mean of `base_values`, runs of two configurations.
    Interval: Welch 1947. Return None where either has no value.
    """
    if not values or not base_values:
        return None
    mean = statistics.fmean(values) - statistics.fmean(base_values)
    if len(values) < 2 or len(base_values) < 2:
        return IntervalEstimate(mean)
    one = statistics.variance(values) / len(values)
    other = statistics.variance(base_values) / len(base_values)
    if one + other == 0:
        return IntervalEstimate(mean, mean, mean)
    degrees = (one + other) ** 2 / (one**2 / (len(values) - 1) + other**2 / (len(base_values) - 1))
    half = compute_t95_quantile(max(1, math.floor(degrees))) * math.sqrt(one + other)
    return IntervalEstimate(mean, mean - half, mean + half)


def _make_group_label(run_names: Sequence[str]) -> str:
    """Return the name of a single run; for several runs the common beginning of their names, and
    their number.
    """
    if len(run_names) == 1:
        return run_names[0]
    common = "".join(
        letters[0] for letters in takewhile(lambda letters: len(set(letters)) == 1, zip(*run_names))
    )
    common = common.rstrip("-_. 0123456789").removesuffix("seed").rstrip("-_. ")
    return f"{common or run_names[0]} ({len(run_names)} runs)"


def render_comparison_page(
    runs: Sequence[RunFiles],
    picture_names: Sequence[str] | None,
    reload_s: int | None = None,
    differences_html: str = "",
) -> str:
    """Return the page of at least two runs as one self-contained HTML file. `picture_names` and
    `reload_s` are as in `run_page.render_run_page`.

    `differences_html`: the section on the differences of two runs
    (run_differences.render_differences_html), or "".
    """
    groups = group_runs(runs)
    payload = PagePayload()
    sections = [("differences", "What differs", differences_html)] if differences_html else []
    sections.append(("runs", "Runs", _render_runs_table(groups)))
    for section in REPORT_SECTIONS:
        charts = make_comparison_charts(groups, section.name)
        for chart in charts:
            payload.add_chart(chart)
        if charts:
            sections.append((section.name, section.title, html_elements.render_chart_grid(charts)))
    title = " · ".join(group.label for group in groups)
    notes = [f"{run.run_dir.resolve().name}: {note}" for run in runs for note in run.notes]
    differing = "" if differences_html else _render_settings_table(groups)
    return render_document(
        title,
        _render_comparison_header(groups, title, differing),
        sections,
        payload,
        render_footer(notes, picture_names),
        reload_s,
    )


def make_comparison_charts(groups: Sequence[RunGroup], section_name: str) -> list[ReportChart]:
    """Return a chart for each metric of a section that any run has, with a colour for each
    configuration.
    """
    found: list[ReportChart] = []
    shown: set[str] = set()
    for spec in next(s.charts for s in REPORT_SECTIONS if s.name == section_name):
        rows = [
            row for group in groups for run in group.runs for row in select_rows(run, spec.row_kind)
        ]
        lines = [
            line
            for line in match_metric_keys(spec, collect_metric_keys(rows))
            if line[0] not in shown
        ]
        shown |= {key for key, _ in lines}
        for i, (key, label) in enumerate(lines):
            name = spec.name if i == 0 else f"{spec.name}-{i}"
            title = spec.title if len(lines) == 1 else f"{spec.title}: {label}"
            chart = _make_comparison_chart(
                replace(spec, name=name, title=title, metric_keys=(key,), labels={key: label}),
                groups,
            )
            found += [replace(chart, is_wide=spec.is_wide and len(lines) == 1)] if chart else []
    return found


def _make_comparison_chart(spec: ChartSpec, groups: Sequence[RunGroup]) -> ReportChart | None:
    """Return the chart of one metric over all groups, None where no run has it. The band of several
    runs is the interval of their mean; a single run keeps its interval.
    """
    kind = "lines" if spec.kind == "stack" else spec.kind
    spec = replace(spec, kind=kind, is_wide=spec.is_wide and spec.kind != "stack")
    series: list[ChartSeries] = []
    charts: list[ReportChart] = []
    for i, group in enumerate(groups):
        of_group = replace(spec, band="") if len(group.runs) > 1 or spec.band == "range" else spec
        made = [
            chart
            for run in group.runs
            if (chart := make_chart(of_group, select_rows(run, spec.row_kind)))
        ]
        of_runs = [replace(chart.series[0], label=group.label, colour_index=i) for chart in made]
        if len(of_runs) > 1:
            of_runs = [*(replace(one, is_faint=True) for one in of_runs), average_series(of_runs)]
        charts = charts + made
        series = series + of_runs
    if not charts:
        return None
    note = spec.note if any(len(group.runs) == 1 for group in groups) else ""
    return replace(charts[0], series=tuple(series), note=note)


def average_series(run_series: Sequence[ChartSeries]) -> ChartSeries:
    """Return the mean of the runs and its Student's t interval, at the steps at which all runs have
    a value.
    """
    known = [dict(zip(series.steps, series.values, strict=True)) for series in run_series]
    steps = []
    values = []
    low = []
    high = []
    for step in run_series[0].steps:
        found = [value for values_of in known if (value := values_of.get(step)) is not None]
        if len(found) < len(run_series):
            continue
        interval = compute_seed_interval(found)
        assert interval is not None, "a mean is of two runs or more"
        steps.append(step)
        values.append(round_significant(sum(found) / len(found)))
        low.append(round_significant(interval[0]))
        high.append(round_significant(interval[1]))
    return replace(
        run_series[0], steps=tuple(steps), values=tuple(values), low=tuple(low), high=tuple(high)
    )


def _render_comparison_header(groups: Sequence[RunGroup], title: str, settings_html: str) -> str:
    """Return the title, the results and the settings in which groups differ, as HTML."""
    num_runs = sum(len(group.runs) for group in groups)
    about = f"{num_runs} runs, {html_elements.format_count(len(groups), 'configuration')}"
    legend = (
        f" {html_elements.escape_text(BAND_NOTE)}"
        if any(len(group.runs) > 1 for group in groups)
        else ""
    )
    return (
        f'<div class="title"><h1>{html_elements.escape_text(title)}</h1></div>'
        f'<p class="muted">{html_elements.escape_text(about)}. Samples, timelines'
        " and histograms are on the page of"
        f" each run.{legend}</p>{_render_results_table(groups)}{settings_html}"
    )


def _render_results_table(groups: Sequence[RunGroup]) -> str:
    """Return the table of held-out scores and rewards at the last step that all runs have, a row
    for each group, as HTML. Runs without a step or an evaluation are left out of the choice.
    """
    runs = [run for group in groups for run in group.runs]
    last_step = find_last_common_step([run for run in runs if run.steps])
    evaluated_runs = [run for run in runs if read_held_out_scores(run)[1] is not None]
    last_evaluation = find_last_common_evaluation(evaluated_runs)
    rows = []
    base = None
    for group in groups:
        pairs = [
            (read_held_out_scores(run)[0], read_held_out_score_at(run, last_evaluation))
            for run in group.runs
        ]
        rewards = [
            reward.value
            for run in group.runs
            if (reward := estimate_mean_reward(_select_end_rows(run, last_step)))
        ]
        finals = [after.value for _, after in pairs if after]
        gains = [after.value - before.value for before, after in pairs if before and after]
        cells = [[before.value for before, _ in pairs if before], finals, rewards]
        row = [
            group.label,
            str(len(group.runs)),
            *(html_elements.format_estimate(estimate_mean_over_runs(cell)) for cell in cells),
        ]
        row.append(html_elements.format_estimate(estimate_mean_over_runs(gains), is_signed=True))
        if len(groups) > 1:
            row.append(
                html_elements.format_estimate(
                    None if base is None else estimate_mean_difference(finals, base), is_signed=True
                )
            )
        base = finals if base is None else base
        rows.append(row)
    headings = ["configuration", "runs", "held-out before", "held-out after", "last reward", "gain"]
    if len(groups) > 1:
        headings.append(f"after, minus that of {groups[0].label}")
    caption = (
        "Means over runs with 95 % interval (Student's t; of a difference: Welch). A single"
        f" run has none.{_describe_common_steps(runs, last_step, last_evaluation)}"
    )
    return html_elements.render_table(caption, headings, rows, range(1, 7))


def _select_end_rows(run: RunFiles, last_step: int | None) -> Sequence[MetricRow]:
    """Return the last rows of a run up to this step; [] for None."""
    if last_step is None:
        return []
    return select_first_and_last_rows([row for row in run.steps if row.step <= last_step])[1]


def _describe_common_steps(
    runs: Sequence[RunFiles], last_step: int | None, last_evaluation: int | None
) -> str:
    """Return a sentence that names the steps at which runs of different lengths are compared; ""
    where all runs end at the same step.
    """
    if len({find_last_step(run) for run in runs}) < 2:
        return ""
    if last_step is None:
        return " The runs have no step in common."
    score = "" if last_evaluation is None else f", held-out scores at step {last_evaluation}"
    return f" The runs end at different steps: rewards are compared at step {last_step}{score}."


def _render_settings_table(groups: Sequence[RunGroup]) -> str:
    """Return the table of the settings in which groups differ, as HTML; "" where there are none."""
    rows = [[key, *values] for key, values in find_differing_settings(groups)]
    headings = ["key", *(group.label for group in groups)]
    return (
        html_elements.render_table("Settings in which they differ", headings, rows) if rows else ""
    )


def _render_runs_table(groups: Sequence[RunGroup]) -> str:
    """Return the table of all runs, a row for each, as HTML."""
    rows = []
    for label, run in ((group.label, run) for group in groups for run in group.runs):
        numbers = [
            html_elements.format_estimate(found)
            for found in (
                *read_held_out_scores(run),
                estimate_mean_reward(select_first_and_last_rows(run.steps)[1]),
            )
        ]
        names = [
            run.run_dir.resolve().name,
            label,
            str(read_setting(run, "trainer.seed") or ""),
            determine_run_status(run).text,
        ]
        rows.append([*names, *numbers, format_duration(read_run_seconds(run))])
    headings = [
        "run",
        "configuration",
        "seed",
        "state",
        "held-out before",
        "held-out after",
        "last reward",
        "time",
    ]
    score = name_held_out_score([run for group in groups for run in group.runs])
    caption = (
        f"Held-out {score} with its 95 % interval over items, reward with its over samples; each"
        " at the end of its run."
    )
    return html_elements.render_table(caption, headings, rows, (2, 4, 5, 6, 7))
