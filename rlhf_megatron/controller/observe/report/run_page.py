"""A whole page in one file without network: head with attempts and health, bar, sections, data,
scripts (assets/).
"""

from __future__ import annotations

import base64
import hashlib
import time
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from rlhf_megatron import __version__
from rlhf_megatron.controller.observe.health import HEALTH_RULES, HealthRule, HealthWatch
from rlhf_megatron.controller.observe.report import html_elements
from rlhf_megatron.controller.observe.report.chart_catalogue import REPORT_SECTIONS
from rlhf_megatron.controller.observe.report.page_payload import PagePayload
from rlhf_megatron.controller.observe.report.run_files import RunFiles
from rlhf_megatron.controller.observe.report.run_overview import (
    describe_layouts,
    determine_run_status,
    estimate_accuracy_gain,
    estimate_mean_reward,
    format_duration,
    list_changed_settings,
    list_overview_facts,
    name_held_out_score,
    read_held_out_scores,
    read_run_seconds,
    read_setting,
    select_first_and_last_rows,
)
from rlhf_megatron.controller.observe.report.run_sections import render_run_sections

SCRIPT_FILES = (
    "uplot.min.js",
    "base.js",
    "lines.js",
    "timeline.js",
    "mismatch.js",
    "samples.js",
    "heldout.js",
    "main.js",
)
SHORT_SECTION_TITLES = {section.name: section.short_title for section in REPORT_SECTIONS} | {
    "held_out_samples": "Held-out",
    "other": "Other",
}
SectionHtml = tuple[str, str, str]  # name, title, HTML

ATTEMPT_HEADINGS = ("attempt", "began", "from step", "lasted", "ended", "settings changed")

RULES_BY_NAME = {rule.name: rule for rule in HEALTH_RULES}
HEALTH_HEADINGS = ["verdict", "steps", "first", "last", "at the last of them"]


@cache
def read_asset(file_name: str) -> str:
    """Return the text of a file of assets/."""
    return (
        files("rlhf_megatron.controller.observe.report")
        .joinpath("assets", file_name)
        .read_text(encoding="utf-8")
    )


def render_run_page(
    run: RunFiles, picture_names: Sequence[str] | None, reload_s: int | None = None
) -> str:
    """Return the page of one run as one self-contained HTML file. `picture_names`: file names of
    the PNGs beside it; None: matplotlib is not installed.

    `reload_s`: seconds after which a browser loads the page again; None: never.
    """
    payload = PagePayload()
    sections = render_run_sections(run, payload)
    name = run.run_dir.resolve().name
    return render_document(
        name,
        render_run_header(run, name, payload.chart_names),
        sections,
        payload,
        render_footer(run.notes, picture_names),
        reload_s,
    )


def render_document(
    title: str,
    header_html: str,
    sections: Sequence[SectionHtml],
    payload: PagePayload,
    footer_html: str,
    reload_s: int | None = None,
) -> str:
    """Return one self-contained HTML file. Its content security policy lets only the page's own
    script run, and nothing be fetched.
    """
    script = "\n".join(read_asset(name).removeprefix('"use strict";\n') for name in SCRIPT_FILES)
    script = f'"use strict";\n{script}'
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        "default-src 'none'; style-src 'unsafe-inline'; img-src data:;"
        f" script-src 'sha256-{digest}'"
    )
    links = "".join(
        f'<a href="#{name}">{html_elements.escape_text(SHORT_SECTION_TITLES.get(name, title))}</a>'
        for name, title, _ in sections
    )
    body = "\n".join(
        html_elements.render_section(name, title, html) for name, title, html in sections
    )
    reload = "" if reload_s is None else f'<meta http-equiv="refresh" content="{reload_s}">\n'
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
{reload}<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="generator" content="rlhf-megatron {html_elements.escape_text(__version__)}">
<title>{html_elements.escape_text(title)} – training report</title>
<link rel="icon" href="data:,">
<style>
{read_asset("uplot.css")}{read_asset("report.css")}</style>
</head>
<body>
<header>{header_html}</header>
<div class="bar"><div><nav aria-label="sections">{links}</nav>
<div class="controls"><label>smoothing
<input type="range" id="smoothing" min="0" max="0.98" step="0.02" value="0"></label>
<button type="button" id="reset-zoom" hidden>reset zoom</button></div></div></div>
<main>
<noscript><p class="missing">The charts are drawn by a script inside this page, which is switched \
off here. The PNG
files beside the page show the main ones.</p></noscript>
{body}
</main>
<footer>{footer_html}</footer>
<script type="application/json" id="data">{payload.render_json()}</script>
<script>{script}</script>
</body>
</html>
"""


def render_run_header(run: RunFiles, run_name: str, chart_names: Collection[str]) -> str:
    """Return the head of the page as HTML: title, state, results, facts, attempts, health, chosen
    settings and the whole configuration. `chart_names`: the charts of the page.
    """
    state = determine_run_status(run)
    rows = [[s.key, s.value, s.default or "–", s.doc] for s in list_changed_settings(run)]
    chosen = html_elements.render_table("Settings", ["key", "value", "default", "meaning"], rows)
    parts = [
        f'<div class="title"><h1>{html_elements.escape_text(run_name)}</h1>'
        f'<span class="pill {state.state}">{html_elements.escape_text(state.state)}</span></div>'
        f'<p class="muted">{html_elements.escape_text(state.text)}</p>',
        _render_log_errors(run),
        f'<dl class="tiles">{_render_result_tiles(run)}</dl>',
        html_elements.render_fact_list(list_overview_facts(run)),
        render_attempts_block(run),
        render_health_table(run, chart_names),
        html_elements.render_details_block(
            f"{len(rows)} settings that differ from the defaults", chosen
        )
        if rows
        else "",
    ]
    if run.config_text:
        pre = f'<pre class="long" tabindex="0">{html_elements.escape_text(run.config_text)}</pre>'
        return "\n".join(
            [*parts, html_elements.render_details_block("The whole configuration", pre)]
        )
    return "\n".join(
        [
            *parts,
            html_elements.render_missing_note(
                "No settings: this run directory has no config.yaml."
            ),
        ]
    )


def _render_log_errors(run: RunFiles) -> str:
    """Return the errors in the logs of a run that did not finish, as HTML; "" where there
    are none.
    """
    if run.summary is not None or not run.log_errors:
        return ""
    errors = "".join(f"<pre>{html_elements.escape_text(error)}</pre>" for error in run.log_errors)
    return f'<div class="alert"><b>What its logs say</b>{errors}</div>'


def _render_result_tiles(run: RunFiles) -> str:
    """Return the tiles of the held-out score, gain, reward and wall time, as HTML."""
    tiles = []
    before, after = read_held_out_scores(run)
    title = f"Held-out {name_held_out_score([run])}"
    majority = (run.summary or {}).get("majority_answer_accuracy")
    baseline = (
        f"; always the most common answer: {majority:.3f}"
        if isinstance(majority, int | float)
        else ""
    )
    if after is not None:
        start = (
            f"from {html_elements.format_estimate(before)}"
            if before
            else "no evaluation before the first step"
        )
        tiles.append((title, html_elements.format_estimate(after), start + baseline))
    elif before is not None:
        tiles.append(
            (
                f"{title} before RL",
                html_elements.format_estimate(before),
                f"95 % interval{baseline}",
            )
        )
    if before is not None and after is not None:
        tiles.append(
            (
                "Gain",
                html_elements.format_estimate(
                    estimate_accuracy_gain(before, after), is_signed=True
                ),
                "95 % interval, as of independent items",
            )
        )
    if run.steps:
        first, last = (estimate_mean_reward(part) for part in select_first_and_last_rows(run.steps))
        hint = (
            f"from {html_elements.format_estimate(first)}; means of"
            f" {html_elements.format_count(len(select_first_and_last_rows(run.steps)[0]), 'step')}"
        )
        tiles.append(("Reward", html_elements.format_estimate(last), hint))
    tiles.append(("Wall time", format_duration(read_run_seconds(run)), _describe_step_time(run)))
    return "".join(html_elements.render_tile(label, value, hint) for label, value, hint in tiles)


def _describe_step_time(run: RunFiles) -> str:
    """Return a text with the number of steps, their median time and the layouts."""
    times = sorted(
        row.metrics["timing_s/step"] for row in run.steps if "timing_s/step" in row.metrics
    )
    return (
        (
            f"{html_elements.format_count(len(run.steps), 'step')}, median"
            f" {times[len(times) // 2]:.3g} s a step; {describe_layouts(run)}"
        )
        if times
        else describe_layouts(run)
    )


def render_footer(notes: Sequence[str], picture_names: Sequence[str] | None) -> str:
    """Return the footer as HTML: how to use the page, what was left out, links to the pictures."""
    links = ", ".join(
        f'<a href="{html_elements.escape_text(name)}">{html_elements.escape_text(name)}</a>'
        for name in picture_names or ()
    )
    parts = [
        (
            "Point at a chart for its values; drag across it to zoom all charts of that axis,"
            " double-click to undo. Arrow keys work in a chart that has the focus."
        ),
        f"Left out: {html_elements.escape_text('; '.join(notes))}." if notes else "",
        f"Pictures: {links}." if links else "",
        "No pictures: matplotlib was not installed where this page was made."
        if picture_names is None
        else "",
        f"Made by rlhf-megatron report {html_elements.escape_text(__version__)}.",
    ]
    return "".join(f"<p>{part}</p>" for part in parts if part)


def render_attempts_block(run: RunFiles) -> str:
    """Return the table of attempts as HTML; "" for a run of one attempt."""
    rows = list_attempt_rows(run.attempts)
    if len(rows) < 2:
        return ""
    ettr = (run.summary or {}).get("ettr")
    told = (
        f" Effective training time: {ettr:.1%} of the time since the first."
        if isinstance(ettr, int | float)
        else ""
    )
    caption = f"Attempts. What a kill undid was done again and is shown once.{told}"
    return html_elements.render_details_block(
        f"{len(rows)} attempts", html_elements.render_table(caption, ATTEMPT_HEADINGS, rows)
    )


def list_attempt_rows(attempt_lines: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Return a table row for each start of the run. A start without an end before the next start
    was killed; the last may still run.
    """
    rows: list[list[str]] = []
    starts = [i for i, line in enumerate(attempt_lines) if line.get("kind") == "start"]
    for number, (i, following) in enumerate(
        zip(starts, [*starts, len(attempt_lines)][1:], strict=True), 1
    ):
        start = attempt_lines[i]
        end = next(
            (line for line in attempt_lines[i + 1 : following] if line.get("kind") == "end"), None
        )
        is_last = following == len(attempt_lines)
        began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(start["time"]))
        step = start.get("resumed_from_step")
        changes = start.get("changes")
        changed = (
            [f"{key}: {' → '.join(map(str, pair))}" for key, pair in changes.items()]
            if changes
            else []
        )
        if end:
            outcome = str(end.get("reason", ""))
        else:
            outcome = "no end yet" if is_last else "killed"
        rows.append(
            [
                str(number),
                began,
                "–" if step is None else str(step),
                f"{measure_attempt_seconds(start, end):.0f} s" if end else "–",
                outcome,
                "; ".join(changed) or "–",
            ]
        )
    return rows


def measure_attempt_seconds(start_line: Mapping[str, Any], end_line: Mapping[str, Any]) -> float:
    """Return the seconds of an attempt by the monotonic clock; older files have two readings of the
    wall clock, which may be set back.
    """
    return float(end_line.get("seconds", max(0.0, end_line["time"] - start_line["time"])))


def render_health_table(run: RunFiles, chart_names: Collection[str]) -> str:
    """Return the table of health verdicts as HTML, with an explanation of each that its row links
    to; "" where no verdict was ever bad.
    """
    peak_lr = read_setting(run, "actor.optim.lr")
    watch = HealthWatch(peak_lr if isinstance(peak_lr, float) else None)
    for row in run.steps:
        watch.judge_step(row.step, row.metrics)
    if not watch.troubles:
        return ""
    rows = [
        [
            name + (" (now)" if found.is_now else ""),
            str(found.num_steps),
            str(found.first_step),
            str(found.last_step),
        ]
        + [found.text.partition(": ")[2]]
        for name, found in sorted(watch.troubles.items(), key=lambda item: item[1].first_step)
    ]
    names = [row[0].removesuffix(" (now)") for row in rows]
    table = html_elements.render_table(
        "Health", HEALTH_HEADINGS, rows, range(1, 4), [f"verdict-{name}" for name in names]
    )
    texts = "".join(_render_verdict(RULES_BY_NAME[name], chart_names) for name in names)
    summary = "What these verdicts mean, and what to do"
    return table + html_elements.render_details_block(summary, texts)


def _render_verdict(rule: HealthRule, chart_names: Collection[str]) -> str:
    """Return the explanation of a health verdict as HTML, with links to the charts of the page that
    show its metrics.
    """
    specs = [spec for section in REPORT_SECTIONS for spec in section.charts]
    links = {
        spec.title: html_elements.render_link(f"#chart-{spec.name}", spec.title)
        for key in rule.metric_keys
        for spec in specs
        if key in spec.metric_keys and spec.name in chart_names
    }
    metrics = html_elements.escape_text(", ".join(rule.metric_keys))
    charts = f" Charts: {', '.join(links.values())}." if links else ""
    return (
        f'<div class="card" id="verdict-{html_elements.escape_text(rule.name)}">'
        f"<h3>health/{html_elements.escape_text(rule.name)}</h3>"
        f"<p>{html_elements.escape_text(rule.meaning)} {html_elements.escape_text(rule.fix)}</p>"
        f'<p class="meaning">Metrics: {metrics}.{charts} All rules: docs/monitoring.md, section'
        " Health.</p></div>"
    )
