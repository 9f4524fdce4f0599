"""Every difference of two runs: settings, versions of packages, data, and curves with intervals."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rlhf_megatron.controller.observe.metrics.metric_catalogue import find_metric
from rlhf_megatron.controller.observe.report import html_elements
from rlhf_megatron.controller.observe.report.comparison_page import (
    collect_run_settings,
    estimate_mean_difference,
    estimate_mean_over_runs,
)
from rlhf_megatron.controller.observe.report.run_files import MetricRow, RunFiles
from rlhf_megatron.controller.observe.report.run_overview import (
    IntervalEstimate,
    estimate_accuracy_gain,
    estimate_mean_reward,
    find_last_common_evaluation,
    find_last_common_step,
    find_last_step,
    name_held_out_score,
    read_held_out_score_at,
    read_held_out_scores,
    select_first_and_last_rows,
)

REWARD_KEY = "critic/rewards/mean"
# metrics that count a run on: where it is, not how it goes
BOOKKEEPING_KEY_PREFIXES = (
    "training/global_step",
    "training/epoch",
    "policy/version",
    "checkpoint/",
)
NUM_METRICS_NAMED = 5  # metrics of a step in a line
# metrics that differ in equal runs
_TIMING_KEY_PREFIXES = "timing_s/", "timing_per_token_ms/", "perf/", "memory/"
_TIMING_UNITS = ("s", "ms", "GiB", "tokens/s", "tokens/s/GPU", "TFLOP/s")


@dataclass(frozen=True)
class CurveDifference:
    """A metric at the end of two runs, and the second's minus the first's."""

    name: str
    first_estimate: IntervalEstimate
    second_estimate: IntervalEstimate
    difference: IntervalEstimate

    @property
    def is_significant(self) -> bool:
        """Return whether the interval of the difference leaves 0 out."""
        low = self.difference.low
        high = self.difference.high
        return low is not None and high is not None and not low <= 0 <= high


@dataclass(frozen=True)
class RunDifferences:
    """Rows are (name, value in the first run, value in the second)."""

    setting_rows: tuple[tuple[str, str, str], ...]
    version_rows: tuple[tuple[str, str, str], ...]
    file_rows: tuple[tuple[str, str, str], ...]  # digests of model, data, rewards and plugins
    # reward and held-out score, and each metric whose difference leaves 0 out
    curve_differences: tuple[CurveDifference, ...]
    num_common_metrics: int  # that both runs have
    first_difference_text: str  # at which step the first figure differs, in words
    notes: tuple[str, ...]


def compare_runs(first_run: RunFiles, second_run: RunFiles) -> RunDifferences:
    """Compare two runs by their files.

    Curves are compared at the last step that both runs have. Intervals are of 95 %: of rewards over
    samples, of held-out scores over items (Newcombe), else over the last steps (Welch).
    """
    runs = (first_run, second_run)
    no_lock = [run.run_dir.resolve().name for run in runs if not run.lock_section]
    notes = tuple(
        f"{name} has no config.lock.yaml: its versions and files cannot be compared"
        for name in no_lock
    )
    versions, files = (
        _list_differing_entries(*(_read_lock_texts(run, part) for run in runs))
        if not no_lock
        else ()
        for part in ("packages", "digests")
    )
    settings = _list_differing_entries(
        collect_run_settings(first_run), collect_run_settings(second_run)
    )
    curves, num_metrics = _compare_curve_ends(first_run, second_run)
    return RunDifferences(
        settings,
        versions,
        files,
        tuple(curves),
        num_metrics,
        _describe_first_differing_row(first_run, second_run),
        (*notes, *_list_notes_on_steps(runs)),
    )


def _list_notes_on_steps(runs: Sequence[RunFiles]) -> list[str]:
    """Return sentences on what is compared at which step, where the runs differ in their steps."""
    notes = []
    last_step = find_last_common_step(runs)
    if last_step is not None and len({find_last_step(run) for run in runs}) > 1:
        ends = ", ".join(
            f"{run.run_dir.resolve().name}{' ends' if i == 0 else ''} at step {find_last_step(run)}"
            for i, run in enumerate(runs)
        )
        notes.append(f"{ends}: curves are compared at step {last_step}, the last that both have")
    are_evaluated = all(read_held_out_scores(run)[1] is not None for run in runs)
    if are_evaluated and find_last_common_evaluation(runs) is None:
        notes.append(
            "the runs were not evaluated at a common step: their held-out scores are not compared"
        )
    return notes


def format_difference_lines(differences: RunDifferences) -> Iterator[str]:
    """Yield the lines that `rlhf-megatron report A B` prints, one for each difference."""
    for title, rows in (
        ("setting", differences.setting_rows),
        ("version", differences.version_rows),
        ("file", differences.file_rows),
    ):
        yield from (f"{title} {name}: {one} | {other}" for name, one, other in rows)
    if not (
        differences.setting_rows
        or differences.version_rows
        or differences.file_rows
        or differences.notes
    ):
        yield "settings, versions and files are the same"
    yield from differences.notes
    for curve in differences.curve_differences:
        texts = [
            html_elements.format_estimate(value)
            for value in (curve.first_estimate, curve.second_estimate)
        ]
        yield (
            f"{curve.name}: {texts[0]} | {texts[1]},"
            f" difference {html_elements.format_estimate(curve.difference, is_signed=True)}"
        )
    yield differences.first_difference_text


def render_differences_html(differences: RunDifferences, run_names: Sequence[str]) -> str:
    """Return the differences as HTML. `run_names`: the names of the two runs."""
    tables = (
        ("Settings", differences.setting_rows),
        ("Versions of packages", differences.version_rows),
        ("Files: digests", differences.file_rows),
    )
    parts = [
        html_elements.render_table(title, ["", *run_names], [list(row) for row in rows])
        for title, rows in tables
        if rows
    ]
    if not parts and not differences.notes:
        parts.append(
            f"<p>{html_elements.escape_text('Settings, versions and files are the same.')}</p>"
        )
    parts += [html_elements.render_missing_note(f"{note}.") for note in differences.notes]
    rows = [
        [
            c.name,
            html_elements.format_estimate(c.first_estimate),
            html_elements.format_estimate(c.second_estimate),
            html_elements.format_estimate(c.difference, is_signed=True),
        ]
        for c in differences.curve_differences
    ]
    caption = (
        f"Ends of curves with 95 % intervals: those of {differences.num_common_metrics} metrics"
        " whose difference leaves 0 out, as one in twenty does by chance; reward and held-out"
        " score always"
    )
    parts.append(
        html_elements.render_table(caption, ["", *run_names, "difference"], rows, (1, 2, 3))
        if rows
        else ""
    )
    return "".join(
        [*parts, f"<p>{html_elements.escape_text(differences.first_difference_text)}.</p>"]
    )


def _list_differing_entries(
    first: Mapping[str, str], second: Mapping[str, str]
) -> tuple[tuple[str, str, str], ...]:
    """Return (key, first value, second value) of the entries that differ; "–" for a missing
    value.
    """
    pairs = (
        (key, first.get(key, "–"), second.get(key, "–")) for key in dict.fromkeys([*first, *second])
    )
    return tuple(row for row in pairs if row[1] != row[2])


def _read_lock_texts(run: RunFiles, lock_part: str) -> dict[str, str]:
    """Return a part of the run's lock section as text, by name."""
    found = run.lock_section.get(lock_part)
    return (
        {str(key): str(value) for key, value in found.items()} if isinstance(found, Mapping) else {}
    )


def _compare_curve_ends(
    first_run: RunFiles, second_run: RunFiles
) -> tuple[list[CurveDifference], int]:
    """Return (the curves to report, the number of metrics that both runs have), at the last step
    that both runs have. The held-out score and the reward are always reported, other metrics where
    the difference leaves 0 out.
    """
    found = _compare_held_out_scores((first_run, second_run))
    last_step = find_last_common_step((first_run, second_run))
    if last_step is None:
        return found, 0
    last = [
        select_first_and_last_rows([row for row in run.steps if row.step <= last_step])[1]
        for run in (first_run, second_run)
    ]
    first = estimate_mean_reward(last[0])
    second = estimate_mean_reward(last[1])
    if first is not None and second is not None:
        place = _name_step_if_differing(last_step, [first_run.steps, second_run.steps], " up to")
        found.append(
            CurveDifference(
                f"reward, last {html_elements.format_count(len(last[1]), 'step')}{place}",
                first,
                second,
                _estimate_difference(first, second),
            )
        )
    keys = [
        key
        for key in _collect_comparable_keys(last[0])
        if key in set(_collect_comparable_keys(last[1])) and key != REWARD_KEY
    ]
    for key in keys:
        values = [
            [row.metrics[key] for row in rows if math.isfinite(row.metrics.get(key, math.nan))]
            for rows in last
        ]
        change = estimate_mean_difference(values[1], values[0])
        estimates = [estimate_mean_over_runs(each) for each in values]
        if change is not None and estimates[0] is not None and estimates[1] is not None:
            curve = CurveDifference(key, estimates[0], estimates[1], change)
            found += [curve] if curve.is_significant else []
    return found, len(keys) + 1


def _compare_held_out_scores(runs: Sequence[RunFiles]) -> list[CurveDifference]:
    """Return the difference of the held-out scores at the last step at which both runs were
    evaluated; [] where there is none.
    """
    step = find_last_common_evaluation(runs)
    if step is None:
        return []
    first, second = (read_held_out_score_at(run, step) for run in runs)
    assert first is not None and second is not None, "both runs were evaluated at this step"
    place = _name_step_if_differing(step, [run.evaluations for run in runs], " at")
    return [
        CurveDifference(
            f"held-out {name_held_out_score(runs)}{place}",
            first,
            second,
            estimate_accuracy_gain(first, second),
        )
    ]


def _name_step_if_differing(
    step: int, rows_of_runs: Sequence[Sequence[MetricRow]], preposition: str
) -> str:
    """Return words such as " at step 4"; "" where all runs end at this step."""
    is_last = all(rows[-1].step == step for rows in rows_of_runs)
    return "" if is_last else f"{preposition} step {step}"


def _estimate_difference(first: IntervalEstimate, second: IntervalEstimate) -> IntervalEstimate:
    """Return the second estimate less the first, for independent means with normal intervals."""
    value = second.value - first.value
    if first.high is None or second.high is None:
        return IntervalEstimate(value)
    half = math.hypot(first.high - first.value, second.high - second.value)
    return IntervalEstimate(value, value - half, value + half)


def _collect_comparable_keys(rows: Sequence[MetricRow]) -> list[str]:
    """Return the metrics of the rows, without those that depend on the speed of the machine, and
    without those that only count the run on.
    """
    keys = dict.fromkeys(key for row in rows for key in row.metrics)
    return [
        key
        for key in keys
        if not key.startswith((*_TIMING_KEY_PREFIXES, *BOOKKEEPING_KEY_PREFIXES))
        and not _is_timing_metric(key)
    ]


def _is_timing_metric(metric_key: str) -> bool:
    """Return whether the unit of a metric is of time, speed or memory."""
    metric = find_metric(metric_key)
    return metric is not None and metric.unit in _TIMING_UNITS


def _describe_first_differing_row(first_run: RunFiles, second_run: RunFiles) -> str:
    """Return a text with the first row and the metrics in which the curves differ, or that they are
    the same.
    """
    common = 0
    for first, second in _pair_rows_by_step(first_run, second_run):
        common += 1
        differing = [
            key
            for key in _collect_comparable_keys([first, second])
            if not _is_same_value(first.metrics.get(key), second.metrics.get(key))
        ]
        if differing:
            more = (
                f" and {len(differing) - NUM_METRICS_NAMED} more"
                if len(differing) > NUM_METRICS_NAMED
                else ""
            )
            names = ", ".join(differing[:NUM_METRICS_NAMED]) + more
            return f"curves first differ at {first.kind} {first.step}: {names}"
    return (
        f"curves are the same, bit for bit, in all {common} rows that both have"
        if common
        else "no row is in both runs"
    )


def _pair_rows_by_step(
    first_run: RunFiles, second_run: RunFiles
) -> Iterator[tuple[MetricRow, MetricRow]]:
    """Yield (row of the first run, row of the second) of each step that both runs have: warm-up,
    steps, evaluations.
    """
    for mine, theirs in (
        (first_run.warmups, second_run.warmups),
        (first_run.steps, second_run.steps),
        (first_run.evaluations, second_run.evaluations),
    ):
        by_step = {row.step: row for row in theirs}
        yield from ((row, by_step[row.step]) for row in mine if row.step in by_step)


def _is_same_value(first: float | None, second: float | None) -> bool:
    """Return whether the values are equal, or both NaN, or both None."""
    return first == second or (
        first is not None and second is not None and math.isnan(first) and math.isnan(second)
    )
