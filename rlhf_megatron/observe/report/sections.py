"""The sections of the page of one run, in order. Each writes its HTML and hands its data to the payload.

The samples that a page shows are those of whole steps, evenly chosen within a budget of text.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from rlhf_megatron.observe.report import html
from rlhf_megatron.observe.report.catalogue import SECTIONS, pattern
from rlhf_megatron.observe.report.charts import Chart, keys_of, other_charts, section_charts, spread_evenly
from rlhf_megatron.observe.report.facts import Estimate, ends, setting
from rlhf_megatron.observe.report.files import MISMATCH, SAMPLES, TRACE, RunFiles, Sample
from rlhf_megatron.observe.report.payload import Payload, mismatch, timeline

TEXT_BUDGET = 150_000  # characters of samples on a page
OVERHEAD = 300  # characters that a sample takes beside its texts
HEAD, TAIL = 4000, 2000  # characters kept of a longer text


def choose(samples: Sequence[Sample], budget: int = TEXT_BUDGET) -> list[Sample]:
    """Keep the samples of the first and the last step, and of as many evenly chosen steps as the budget allows."""
    by_step: dict[int, list[Sample]] = {}
    for sample in samples:
        cut = replace(sample, prompt=cut_text(sample.prompt), response=cut_text(sample.response))
        by_step.setdefault(sample.step, []).append(cut)
    sizes = {step: sum(len(s.prompt) + len(s.response) + OVERHEAD for s in found) for step, found in by_step.items()}
    steps = chosen = sorted(by_step)
    while sum(sizes[step] for step in chosen) > budget and len(chosen) > 2:
        room = int(len(chosen) * budget / sum(sizes[step] for step in chosen))
        chosen = [steps[i] for i in spread_evenly(len(steps), max(2, min(room, len(chosen) - 1)))]
    return [sample for step in chosen for sample in by_step[step]]


def cut_text(text: str) -> str:
    """A long text without its middle, and how much is missing."""
    if len(text) <= HEAD + TAIL:
        return text
    return f"{text[:HEAD]}\n[... {len(text) - HEAD - TAIL} characters left out ...]\n{text[-TAIL:]}"


TITLES = {section.name: section.title for section in SECTIONS} | {"samples": "Samples", "other": "Other metrics"}
ORDER = ("reward", "policy", "critic", "lengths", "time", "engine", "samples", "mismatch", "warmup", "other")
ORDER_OF_SFT = ("sft", "policy", "time", "other")  # of a run without engines and rewards
ONLY_WITH_ENGINES = "sync/seconds", "rollout/engine_failures"
SOURCE_REWARD = "reward/source/<source>/mean"
Write = Callable[[RunFiles, Payload], str]


def all_sections(run: RunFiles, payload: Payload) -> list[tuple[str, str, str]]:
    """(name, title, HTML) of each."""
    writers: Mapping[str, Write] = {
        "reward": _reward,
        "critic": _critic,
        "time": _time,
        "engine": _engine,
        "samples": _samples,
        "mismatch": _mismatch,
        "warmup": _warmup,
        "other": _other,
    }
    found = []
    for name in ORDER_OF_SFT if setting(run, "job") in ("sft", "reward-model") else ORDER:
        body = writers[name](run, payload) if name in writers else _charts(run, payload, name)
        found.append((name, TITLES[name], body or html.missing(_no_steps(run))))
    return found


def _no_steps(run: RunFiles) -> str:
    return "Nothing of this is in metrics.jsonl." if run.steps else "The run has not finished a step yet."


def _add(charts: Sequence[Chart], payload: Payload) -> str:
    for chart in charts:
        payload.add_chart(chart)
    return html.grid(charts)


def _charts(run: RunFiles, payload: Payload, name: str) -> str:
    return _add(section_charts(run, name), payload)


def _by_width(charts: Sequence[Chart]) -> tuple[list[Chart], list[Chart]]:
    return [chart for chart in charts if chart.is_wide], [chart for chart in charts if not chart.is_wide]


def _reward(run: RunFiles, payload: Payload) -> str:
    charts = section_charts(run, "reward")
    wide, small = _by_width(charts)
    if not _sources(run):
        small = [chart for chart in small if chart.name not in ("reward_source", "held_out_source")]
    names = {chart.name for chart in charts}
    is_ok = "reward_status" not in names and "reward/status/ok" in keys_of(run.steps)
    body = _add(wide, payload)
    if charts and not run.evaluations:
        body += html.missing("No held-out accuracy: this run made no evaluation (no held-out items, or a replay).")
    note = '<p class="note">The status of every reward was ok.</p>' if is_ok else ""
    return body + source_table(run) + _add(small, payload) + note


def source_table(run: RunFiles) -> str:
    """A row for each source: its share, reward at both ends, held-out score at both ends. Empty for one source."""
    sources = _sources(run)
    if not sources:
        return ""
    first, last = ends(run.steps)
    rows = []
    for source in sources:
        counts = [row.metrics.get(f"reward/source/{source}/count", 0.0) for row in run.steps]
        means = [
            [row.metrics[key] for row in part if (key := f"reward/source/{source}/mean") in row.metrics]
            for part in (first, last)
        ]
        before, after = _source_score(run, source, 0), _source_score(run, source, -1)
        change = f"{after.value - before.value:+.3f}" if before and after else "–"
        shown = [f"{statistics.fmean(values):.3f}" if values else "–" for values in means]
        items = next((row.metrics[k] for row in run.evaluations if (k := f"val/{source}/num_items") in row.metrics), 0)
        scores = [html.estimate(before), html.estimate(after), change, f"{items:g}"]
        rows.append([source, f"{statistics.fmean(counts):.1f}", *shown, *scores])
    headings = ["source", "samples a step", "reward, first", "reward, last"]
    headings += ["held-out before", "held-out after", "change", "held-out items"]
    window = html.count(len(first), "step")
    caption = f"Sources. First and last reward are means of {window}; held-out scores with 95 % interval."
    return html.table(caption, headings, rows, range(1, 8))


def _sources(run: RunFiles) -> list[str]:
    """Names of the data sources; none where there is only one, of which the whole run tells."""
    found = [match["name"] for key in keys_of(run.steps) if (match := pattern(SOURCE_REWARD).match(key))]
    return found if len(found) > 1 else []


def _source_score(run: RunFiles, source: str, place: int) -> Estimate | None:
    """Return the score of the first (0) or last (-1) evaluation that has the source."""
    prefix = f"val/{source}/"
    found = []
    for row in run.evaluations:
        for key, value in row.metrics.items():
            if key.startswith(f"{prefix}mean@"):
                found.append(Estimate(value, row.metrics.get(f"{prefix}low"), row.metrics.get(f"{prefix}high")))
    return found[place] if found else None


def _critic(run: RunFiles, payload: Payload) -> str:
    body = _charts(run, payload, "critic")
    if body or not run.steps:
        return body
    name = setting(run, "algorithm.adv_estimator")
    why = f"algorithm.adv_estimator is {name}, which needs no values" if name else "no metric of it was written"
    return html.missing(f"This run had no critic: {why}.")


def _time(run: RunFiles, payload: Payload) -> str:
    wide, small = _by_width(section_charts(run, "time"))
    body = _add(wide, payload)
    bars = timeline(run.spans)
    if bars is None:
        body += html.missing(f"No timeline: {run.absent.get(TRACE, f'{TRACE} has no stage of a step')}.")
    else:
        payload.add_timeline(bars)
        note = "" if len(bars.steps) == bars.num_steps else f" {len(bars.steps)} of {bars.num_steps} steps are here."
        body += (
            '<div class="card" id="view-timeline"><h3>Timeline</h3>'
            '<p class="meaning">When each stage of a step ran; grey: calls to the hosts within. The same file opens in'
            f" Perfetto (ui.perfetto.dev) or chrome://tracing.{note}</p>"
            '<div class="controls"></div><div class="plot"></div></div>'
        )
    return body + _add(small, payload)


def _engine(run: RunFiles, payload: Payload) -> str:
    charts = _charts(run, payload, "engine")
    if any(key in row.metrics for row in run.steps for key in ONLY_WITH_ENGINES):
        return charts
    why = "This run had no engine: it was trained on recorded samples." if run.steps else _no_steps(run)
    return html.missing(why) + charts


def _samples(run: RunFiles, payload: Payload) -> str:
    chosen = choose(run.samples)
    if not chosen:
        return html.missing(f"No samples: {run.absent.get(SAMPLES, f'{SAMPLES} is empty')}.")
    payload.add_samples(chosen)
    steps = len({sample.step for sample in chosen})
    part = "" if len(chosen) == len(run.samples) else f" of {len(run.samples)} in {SAMPLES}"
    return (
        f'<div class="card" id="view-samples"><p class="meaning">{len(chosen)} samples{part},'
        f" of {html.count(steps, 'step')}: those with the best and the worst reward of a step, and random ones."
        " Characters that do not print are shown by their code.</p>"
        '<div class="controls"></div><p class="count muted" role="status"></p><div class="list"></div></div>'
    )


def _mismatch(run: RunFiles, payload: Payload) -> str:
    wide, small = _by_width(section_charts(run, "mismatch"))
    body = _add(wide, payload)
    found = mismatch(run.mismatch)
    if found is None:
        body += html.missing(f"No histogram and no worst tokens: {run.absent.get(MISMATCH, 'no token was compared')}.")
    else:
        payload.add_mismatch(found)
        notes = f'<p class="note">{html.text(" ".join(found.notes))}</p>' if found.notes else ""
        body += (
            '<div class="card" id="view-mismatch"><h3>Per-token difference</h3>'
            '<p class="meaning">|log-prob of the trainer − of the engine| of the sampled tokens: what the engine'
            " samples from is what the trainer believes only where this is small.</p>"
            '<div class="controls"></div><div class="stats"></div><div class="plot histogram"></div>'
            '<h3>Over steps</h3><p class="meaning">Share of the tokens of a step in each bin; the darker the more.'
            " Click a column for its histogram and its worst tokens.</p>"
            '<div class="plot map"></div><h3>Worst tokens</h3>'
            f'<div class="worst scroll" tabindex="0"></div>{notes}</div>'
        )
    return body + _add(small, payload)


def _warmup(run: RunFiles, payload: Payload) -> str:
    return _charts(run, payload, "warmup") or html.missing(
        "This run made no supervised warm-up (warmup.max_steps is 0, or it began from a warm model)."
    )


def _other(run: RunFiles, payload: Payload) -> str:
    charts = other_charts(run)
    if not charts:
        return html.missing("Every metric of the run is shown above, or has the same value in all steps.")
    return html.block(f"{len(charts)} further metrics that changed during the run", _add(charts, payload))
