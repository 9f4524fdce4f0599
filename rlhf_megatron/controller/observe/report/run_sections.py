"""The sections of the page of one run, in order. Each writes its HTML and hands its data
to the payload.

The samples that a page shows are those of whole steps, evenly chosen within a budget of text.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from rlhf_megatron.controller.observe.report import html_elements
from rlhf_megatron.controller.observe.report.chart_catalogue import (
    REPORT_SECTIONS,
    compile_key_pattern,
)
from rlhf_megatron.controller.observe.report.charts import (
    ReportChart,
    collect_metric_keys,
    make_section_charts,
    make_uncatalogued_charts,
    select_evenly_spaced,
)
from rlhf_megatron.controller.observe.report.page_payload import (
    PagePayload,
    make_mismatch_histograms,
    make_timeline,
)
from rlhf_megatron.controller.observe.report.run_files import (
    HELD_OUT_SAMPLES_FILE,
    MISMATCH_FILE,
    SAMPLES_FILE,
    TRACE_FILE,
    HeldOutSample,
    LoggedSample,
    RunFiles,
)
from rlhf_megatron.controller.observe.report.run_overview import (
    IntervalEstimate,
    read_setting,
    select_first_and_last_rows,
)

MAX_SAMPLE_CHARACTERS = 150_000  # characters of samples on a page
SAMPLE_OVERHEAD_CHARACTERS = 300  # characters that a sample takes beside its texts
# characters kept of a longer text
HEAD_CHARACTERS = 4000
TAIL_CHARACTERS = 2000

SECTION_TITLES = {section.name: section.title for section in REPORT_SECTIONS} | {
    "samples": "Samples",
    "held_out_samples": "Held-out samples",
    "other": "Other metrics",
}
SECTION_ORDER = (
    "reward",
    "policy",
    "critic",
    "lengths",
    "time",
    "engine",
    "samples",
    "held_out_samples",
    "mismatch",
    "warmup",
    "other",
)
SFT_SECTION_ORDER = ("sft", "policy", "time", "other")  # of a run without engines and rewards
SECTIONS_OF_SOME_RUNS = ("critic", "held_out_samples")  # left out where they would be empty
ENGINE_METRIC_KEYS = "sync/seconds", "rollout/engine_failures"
SOURCE_REWARD_KEY = "reward/source/<source>/mean"


Sample = TypeVar("Sample", LoggedSample, HeldOutSample)


def choose_page_samples(
    samples: Sequence[Sample], max_characters: int = MAX_SAMPLE_CHARACTERS
) -> list[Sample]:
    """Return the samples of the first and the last step, and of as many evenly spaced steps as fit
    into `max_characters`. Long texts are shortened.
    """
    by_step: dict[int, list[Sample]] = {}
    for sample in samples:
        cut = replace(
            sample, prompt=shorten_text(sample.prompt), response=shorten_text(sample.response)
        )
        by_step.setdefault(sample.step, []).append(cut)
    sizes = {
        step: sum(len(s.prompt) + len(s.response) + SAMPLE_OVERHEAD_CHARACTERS for s in found)
        for step, found in by_step.items()
    }
    steps = chosen = sorted(by_step)
    while sum(sizes[step] for step in chosen) > max_characters and len(chosen) > 2:
        room = int(len(chosen) * max_characters / sum(sizes[step] for step in chosen))
        chosen = [
            steps[i] for i in select_evenly_spaced(len(steps), max(2, min(room, len(chosen) - 1)))
        ]
    return [sample for step in chosen for sample in by_step[step]]


def shorten_text(text: str) -> str:
    """Return a long text without its middle, saying how much is left out."""
    if len(text) <= HEAD_CHARACTERS + TAIL_CHARACTERS:
        return text
    return (
        f"{text[:HEAD_CHARACTERS]}\n[... {len(text) - HEAD_CHARACTERS - TAIL_CHARACTERS} characters"
        f" left out ...]\n{text[-TAIL_CHARACTERS:]}"
    )


RenderSection = Callable[[RunFiles, PagePayload], str]


def render_run_sections(run: RunFiles, payload: PagePayload) -> list[tuple[str, str, str]]:
    """Return (name, title, HTML) of each section, and add its data to `payload`."""
    writers: Mapping[str, RenderSection] = {
        "reward": _render_reward_section,
        "time": _render_time_section,
        "engine": _render_engine_section,
        "samples": _render_samples_section,
        "held_out_samples": _render_held_out_samples_section,
        "mismatch": _render_mismatch_section,
        "warmup": _render_warmup_section,
        "other": _render_other_section,
    }
    found = []
    for name in (
        SFT_SECTION_ORDER if read_setting(run, "job") in ("sft", "reward-model") else SECTION_ORDER
    ):
        body = (
            writers[name](run, payload)
            if name in writers
            else _render_section_charts(run, payload, name)
        )
        if not body and name in SECTIONS_OF_SOME_RUNS:
            continue
        found.append(
            (
                name,
                SECTION_TITLES[name],
                body or html_elements.render_missing_note(_explain_empty_section(run)),
            )
        )
    return found


def _explain_empty_section(run: RunFiles) -> str:
    """Return why a section has nothing to show."""
    return (
        "Nothing of this is in metrics.jsonl."
        if run.steps
        else "The run has not finished a step yet."
    )


def _render_charts(charts: Sequence[ReportChart], payload: PagePayload) -> str:
    """Add the charts to `payload` and return their grid."""
    for chart in charts:
        payload.add_chart(chart)
    return html_elements.render_chart_grid(charts)


def _render_section_charts(run: RunFiles, payload: PagePayload, section_name: str) -> str:
    """Return the charts of a section of the catalogue as HTML; "" where the run has no data."""
    return _render_charts(make_section_charts(run, section_name), payload)


def _split_by_width(charts: Sequence[ReportChart]) -> tuple[list[ReportChart], list[ReportChart]]:
    """Return (the wide charts, the others)."""
    return [chart for chart in charts if chart.is_wide], [
        chart for chart in charts if not chart.is_wide
    ]


def _render_reward_section(run: RunFiles, payload: PagePayload) -> str:
    """Return the section of rewards and held-out scores as HTML."""
    charts = make_section_charts(run, "reward")
    wide, small = _split_by_width(charts)
    if not _find_sources(run):
        small = [chart for chart in small if chart.name not in ("reward_source", "held_out_source")]
    names = {chart.name for chart in charts}
    is_ok = "reward_status" not in names and "reward/status/ok" in collect_metric_keys(run.steps)
    body = _render_charts(wide, payload)
    if charts and not run.evaluations:
        body += html_elements.render_missing_note(
            "No held-out score: this run made no evaluation (no held-out items, or a replay)."
        )
    note = '<p class="note">The status of every reward was ok.</p>' if is_ok else ""
    return body + render_source_table(run) + _render_charts(small, payload) + note


def render_source_table(run: RunFiles) -> str:
    """Return a table with a row for each data source: samples, reward and held-out score at both
    ends of the run. "" for one source.
    """
    sources = _find_sources(run)
    if not sources:
        return ""
    first, last = select_first_and_last_rows(run.steps)
    rows = []
    for source in sources:
        counts = [row.metrics.get(f"reward/source/{source}/count", 0.0) for row in run.steps]
        means = [
            [
                row.metrics[key]
                for row in part
                if (key := f"reward/source/{source}/mean") in row.metrics
            ]
            for part in (first, last)
        ]
        before = _read_source_score(run, source, 0)
        after = _read_source_score(run, source, -1)
        change = f"{after.value - before.value:+.3f}" if before and after else "–"
        shown = [f"{statistics.fmean(values):.3f}" if values else "–" for values in means]
        items = next(
            (
                row.metrics[k]
                for row in run.evaluations
                if (k := f"val/{source}/num_items") in row.metrics
            ),
            0,
        )
        scores = [
            html_elements.format_estimate(before),
            html_elements.format_estimate(after),
            change,
            f"{items:g}",
        ]
        rows.append([source, f"{statistics.fmean(counts):.1f}", *shown, *scores])
    headings = ["source", "samples a step", "reward, first", "reward, last"]
    headings += ["held-out before", "held-out after", "change", "held-out items"]
    window = html_elements.format_count(len(first), "step")
    caption = (
        f"Sources. First and last reward are means of {window}; held-out scores with 95 % interval."
    )
    return html_elements.render_table(caption, headings, rows, range(1, 8))


def _find_sources(run: RunFiles) -> list[str]:
    """Return the names of the data sources; [] where there is only one, whose figures are those of
    the whole run.
    """
    found = [
        match["name"]
        for key in collect_metric_keys(run.steps)
        if (match := compile_key_pattern(SOURCE_REWARD_KEY).match(key))
    ]
    return found if len(found) > 1 else []


def _read_source_score(
    run: RunFiles, source: str, evaluation_index: int
) -> IntervalEstimate | None:
    """Return the score of the first (`evaluation_index` 0) or last (-1) evaluation that has the
    source; None where there is none.
    """
    prefix = f"val/{source}/"
    found = []
    for row in run.evaluations:
        for key, value in row.metrics.items():
            if key.startswith(f"{prefix}mean@"):
                found.append(
                    IntervalEstimate(
                        value, row.metrics.get(f"{prefix}low"), row.metrics.get(f"{prefix}high")
                    )
                )
    return found[evaluation_index] if found else None


def _render_time_section(run: RunFiles, payload: PagePayload) -> str:
    """Return the charts of times and the timeline as HTML."""
    wide, small = _split_by_width(make_section_charts(run, "time"))
    body = _render_charts(wide, payload)
    bars = make_timeline(run.spans)
    if bars is None:
        body += html_elements.render_missing_note(
            "No timeline:"
            f" {run.absence_reasons.get(TRACE_FILE, f'{TRACE_FILE} has no stage of a step')}."
        )
    else:
        payload.add_timeline(bars)
        note = (
            ""
            if len(bars.step_spans) == bars.num_run_steps
            else f" {len(bars.step_spans)} of {bars.num_run_steps} steps are here."
        )
        body += (
            '<div class="card" id="view-timeline"><h3>Timeline</h3>'
            '<p class="meaning">When each stage of a step ran; grey: calls to the hosts within.'
            " The same file opens in"
            f" Perfetto (ui.perfetto.dev) or chrome://tracing.{note}</p>"
            '<div class="controls"></div><div class="plot"></div></div>'
        )
    return body + _render_charts(small, payload)


def _render_engine_section(run: RunFiles, payload: PagePayload) -> str:
    """Return the charts of the engines as HTML, or why there was no engine."""
    charts = _render_section_charts(run, payload, "engine")
    if any(key in row.metrics for row in run.steps for key in ENGINE_METRIC_KEYS):
        return charts
    why = (
        "This run had no engine: it was trained on recorded samples."
        if run.steps
        else _explain_empty_section(run)
    )
    return html_elements.render_missing_note(why) + charts


def _render_samples_section(run: RunFiles, payload: PagePayload) -> str:
    """Return the frame of the samples as HTML, or why there are none."""
    chosen = choose_page_samples(run.samples)
    if not chosen:
        return html_elements.render_missing_note(
            f"No samples: {run.absence_reasons.get(SAMPLES_FILE, f'{SAMPLES_FILE} is empty')}."
        )
    payload.add_samples(chosen)
    steps = len({sample.step for sample in chosen})
    part = "" if len(chosen) == len(run.samples) else f" of {len(run.samples)} in {SAMPLES_FILE}"
    return (
        f'<div class="card" id="view-samples"><p class="meaning">{len(chosen)} samples{part},'
        f" of {html_elements.format_count(steps, 'step')}: those with the best and the worst"
        " reward of a step, and random ones. Characters that do not print are shown by"
        " their code.</p>"
        '<div class="controls"></div><p class="count muted" role="status"></p><div class="list">'
        "</div></div>"
    )


def _render_held_out_samples_section(run: RunFiles, payload: PagePayload) -> str:
    """Return the frame of the held-out samples as HTML; "" for a run that was never evaluated, and
    why there are none where an evaluated run has none.
    """
    chosen = choose_page_samples(run.held_out_samples)
    if not chosen and not run.evaluations:
        return ""
    if not chosen:
        reason = run.absence_reasons.get(HELD_OUT_SAMPLES_FILE, f"{HELD_OUT_SAMPLES_FILE} is empty")
        return html_elements.render_missing_note(f"No held-out samples: {reason}.")
    payload.add_held_out_samples(chosen)
    num_all = len(run.held_out_samples)
    part = "" if len(chosen) == num_all else f" of {num_all} in {HELD_OUT_SAMPLES_FILE}"
    num_evaluations = len({sample.step for sample in chosen})
    return (
        f'<div class="card" id="view-held_out"><p class="meaning">{len(chosen)} samples{part}, of'
        f" {html_elements.format_count(num_evaluations, 'evaluation')}: the first sample of the"
        " first items of each set. Choose a prompt to see its answers over the steps, or all"
        " prompts and a step.</p>"
        '<div class="controls"></div><p class="count muted" role="status"></p><div class="list">'
        "</div></div>"
    )


def _render_mismatch_section(run: RunFiles, payload: PagePayload) -> str:
    """Return the charts and the frame of the mismatch histograms as HTML."""
    wide, small = _split_by_width(make_section_charts(run, "mismatch"))
    body = _render_charts(wide, payload)
    found = make_mismatch_histograms(run.mismatch_steps)
    if found is None:
        body += html_elements.render_missing_note(
            "No histogram and no worst"
            f" tokens: {run.absence_reasons.get(MISMATCH_FILE, 'no token was compared')}."
        )
    else:
        payload.add_mismatch(found)
        notes = (
            f'<p class="note">{html_elements.escape_text(" ".join(found.notes))}</p>'
            if found.notes
            else ""
        )
        body += (
            '<div class="card" id="view-mismatch"><h3>Per-token difference</h3>'
            '<p class="meaning">|log-prob of the trainer − of the engine| of the sampled tokens:'
            " what the engine"
            " samples from is what the trainer believes only where this is small.</p>"
            '<div class="controls"></div><div class="stats"></div><div class="plot'
            ' histogram"></div>'
            '<h3>Over steps</h3><p class="meaning">Share of the tokens of a step in each bin; the'
            " darker the more."
            " Click a column for its histogram and its worst tokens.</p>"
            '<div class="plot map"></div><h3>Worst tokens</h3>'
            f'<div class="worst scroll" tabindex="0"></div>{notes}</div>'
        )
    return body + _render_charts(small, payload)


def _render_warmup_section(run: RunFiles, payload: PagePayload) -> str:
    """Return the charts of the warm-up as HTML, or why there was none."""
    return _render_section_charts(run, payload, "warmup") or html_elements.render_missing_note(
        "This run made no supervised warm-up (warmup.max_steps is 0, or it began from a"
        " warm model)."
    )


def _render_other_section(run: RunFiles, payload: PagePayload) -> str:
    """Return the charts of metrics that the catalogue does not have, as HTML."""
    charts = make_uncatalogued_charts(run)
    if not charts:
        return html_elements.render_missing_note(
            "Every metric of the run is shown above, or has the same value in all steps."
        )
    return html_elements.render_details_block(
        f"{len(charts)} further metrics that changed during the run",
        _render_charts(charts, payload),
    )
