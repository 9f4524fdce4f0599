"""A whole page in one file without network: head with attempts and health, bar, sections, data, scripts (assets/)."""

from __future__ import annotations

import base64
import hashlib
import time
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from rlhf_megatron import __version__
from rlhf_megatron.observe.health import HealthWatch
from rlhf_megatron.observe.report import html
from rlhf_megatron.observe.report.catalogue import SECTIONS
from rlhf_megatron.observe.report.facts import (
    duration,
    ends,
    facts,
    gain,
    held_out,
    layouts,
    mean_reward,
    seconds,
    setting,
    settings,
    status,
)
from rlhf_megatron.observe.report.files import RunFiles
from rlhf_megatron.observe.report.payload import Payload
from rlhf_megatron.observe.report.sections import all_sections

SCRIPTS = ("uplot.min.js", "base.js", "lines.js", "timeline.js", "mismatch.js", "samples.js", "main.js")
SHORT = {section.name: section.short for section in SECTIONS} | {"other": "Other"}
Section = tuple[str, str, str]  # name, title, HTML


@cache
def asset(name: str) -> str:
    return files("rlhf_megatron.observe.report").joinpath("assets", name).read_text(encoding="utf-8")


def run_page(run: RunFiles, pictures: Sequence[str] | None, reload_s: int | None = None) -> str:
    """The page of one run. `pictures`: file names of the PNGs beside it; None: matplotlib is not installed.

    `reload_s`: seconds after which a browser reads it again.
    """
    payload = Payload()
    sections = all_sections(run, payload)
    name = run.path.resolve().name
    return document(name, head(run, name), sections, payload, footer(run.notes, pictures), reload_s)


def document(
    title: str, header: str, sections: Sequence[Section], payload: Payload, foot: str, reload_s: int | None = None
) -> str:
    """One self-contained HTML file. The policy lets run only the page's own script, and lets nothing be fetched."""
    script = "\n".join(asset(name).removeprefix('"use strict";\n') for name in SCRIPTS)
    script = f'"use strict";\n{script}'
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{digest}'"
    links = "".join(f'<a href="#{name}">{html.text(SHORT.get(name, title))}</a>' for name, title, _ in sections)
    body = "\n".join(html.section(*section) for section in sections)
    reload = "" if reload_s is None else f'<meta http-equiv="refresh" content="{reload_s}">\n'
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
{reload}<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="generator" content="rlhf-megatron {html.text(__version__)}">
<title>{html.text(title)} – training report</title>
<link rel="icon" href="data:,">
<style>
{asset("uplot.css")}{asset("report.css")}</style>
</head>
<body>
<header>{header}</header>
<div class="bar"><div><nav aria-label="sections">{links}</nav>
<div class="controls"><label>smoothing
<input type="range" id="smoothing" min="0" max="0.98" step="0.02" value="0"></label>
<button type="button" id="reset-zoom" hidden>reset zoom</button></div></div></div>
<main>
<noscript><p class="missing">The charts are drawn by a script inside this page, which is switched off here. The PNG
files beside the page show the main ones.</p></noscript>
{body}
</main>
<footer>{foot}</footer>
<script type="application/json" id="data">{payload.as_json()}</script>
<script>{script}</script>
</body>
</html>
"""


def head(run: RunFiles, name: str) -> str:
    """Title, state, key results, what was run, chosen settings, the whole configuration."""
    state = status(run)
    rows = [[s.key, s.value, s.default or "–", s.doc] for s in settings(run)]
    chosen = html.table("Settings", ["key", "value", "default", "meaning"], rows)
    parts = [
        f'<div class="title"><h1>{html.text(name)}</h1>'
        f'<span class="pill {state.word}">{html.text(state.word)}</span></div>'
        f'<p class="muted">{html.text(state.text)}</p>',
        _alert(run),
        f'<dl class="tiles">{_tiles(run)}</dl>',
        html.fact_list(facts(run)),
        attempts_block(run),
        health_block(run),
        html.block(f"{len(rows)} settings that differ from the defaults", chosen) if rows else "",
    ]
    if run.config_text:
        pre = f'<pre class="long" tabindex="0">{html.text(run.config_text)}</pre>'
        return "\n".join([*parts, html.block("The whole configuration", pre)])
    return "\n".join([*parts, html.missing("No settings: this run directory has no config.yaml.")])


def _alert(run: RunFiles) -> str:
    if run.summary is not None or not run.log_errors:
        return ""
    errors = "".join(f"<pre>{html.text(error)}</pre>" for error in run.log_errors)
    return f'<div class="alert"><b>What its logs say</b>{errors}</div>'


def _tiles(run: RunFiles) -> str:
    tiles = []
    before, after = held_out(run)
    majority = (run.summary or {}).get("majority_answer_accuracy")
    baseline = f"; always the most common answer: {majority:.3f}" if isinstance(majority, int | float) else ""
    if after is not None:
        start = f"from {html.estimate(before)}" if before else "no evaluation before the first step"
        tiles.append(("Held-out accuracy", html.estimate(after), start + baseline))
    elif before is not None:
        tiles.append(("Held-out accuracy before RL", html.estimate(before), f"95 % interval{baseline}"))
    if before is not None and after is not None:
        tiles.append(
            ("Gain", html.estimate(gain(before, after), signed=True), "95 % interval, as of independent items")
        )
    if run.steps:
        first, last = (mean_reward(part) for part in ends(run.steps))
        hint = f"from {html.estimate(first)}; means of {html.count(len(ends(run.steps)[0]), 'step')}"
        tiles.append(("Reward", html.estimate(last), hint))
    tiles.append(("Wall time", duration(seconds(run)), _pace(run)))
    return "".join(html.tile(*tile) for tile in tiles)


def _pace(run: RunFiles) -> str:
    times = sorted(row.metrics["timing_s/step"] for row in run.steps if "timing_s/step" in row.metrics)
    return (
        f"{html.count(len(run.steps), 'step')}, median {times[len(times) // 2]:.3g} s a step; {layouts(run)}"
        if times
        else layouts(run)
    )


def footer(notes: Sequence[str], pictures: Sequence[str] | None) -> str:
    """How to use the page, what was left out, the pictures."""
    links = ", ".join(f'<a href="{html.text(name)}">{html.text(name)}</a>' for name in pictures or ())
    parts = [
        "Point at a chart for its values; drag across it to zoom all charts of that axis, double-click to undo."
        " Arrow keys work in a chart that has the focus.",
        f"Left out: {html.text('; '.join(notes))}." if notes else "",
        f"Pictures: {links}." if links else "",
        "No pictures: matplotlib was not installed where this page was made." if pictures is None else "",
        f"Made by rlhf-megatron report {html.text(__version__)}.",
    ]
    return "".join(f"<p>{part}</p>" for part in parts if part)


ATTEMPT_HEADINGS = ("attempt", "began", "from step", "lasted", "ended", "settings changed")


def attempts_block(run: RunFiles) -> str:
    """Empty for a run of one attempt."""
    rows = attempt_rows(run.attempts)
    if len(rows) < 2:
        return ""
    ettr = (run.summary or {}).get("ettr")
    told = f" Effective training time: {ettr:.1%} of the time since the first." if isinstance(ettr, int | float) else ""
    caption = f"Attempts. What a kill undid was done again and is shown once.{told}"
    return html.block(f"{len(rows)} attempts", html.table(caption, ATTEMPT_HEADINGS, rows))


def attempt_rows(lines: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """A row a start. One without an end before the next start was killed, unless it is the last."""
    rows: list[list[str]] = []
    starts = [i for i, line in enumerate(lines) if line.get("kind") == "start"]
    for number, (i, following) in enumerate(zip(starts, [*starts, len(lines)][1:], strict=True), 1):
        start = lines[i]
        end = next((line for line in lines[i + 1 : following] if line.get("kind") == "end"), None)
        is_last = following == len(lines)
        began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(start["time"]))
        step = start.get("resumed_from_step")
        changes = start.get("changes")
        changed = [f"{key}: {' → '.join(map(str, pair))}" for key, pair in changes.items()] if changes else []
        rows.append(
            [
                str(number),
                began,
                "–" if step is None else str(step),
                f"{lasted(start, end):.0f} s" if end else "–",
                str(end.get("reason", "")) if end else ("no end yet" if is_last else "killed"),
                "; ".join(changed) or "–",
            ]
        )
    return rows


def lasted(start: Mapping[str, Any], end: Mapping[str, Any]) -> float:
    """Seconds by the monotonic clock; older files have two readings of the wall clock, which may be set back."""
    return float(end.get("seconds", max(0.0, end["time"] - start["time"])))


HEALTH_HEADINGS = ["verdict", "steps", "first", "last", "at the last of them"]


def health_block(run: RunFiles) -> str:
    """Empty where no verdict was ever bad."""
    peak_lr = setting(run, "actor.optim.lr")
    watch = HealthWatch(peak_lr if isinstance(peak_lr, float) else None)
    for row in run.steps:
        watch.seen(row.step, row.metrics)
    if not watch.troubles:
        return ""
    rows = [
        [name + (" (now)" if found.is_now else ""), str(found.num_steps), str(found.first_step), str(found.last_step)]
        + [found.text.partition(": ")[2]]
        for name, found in sorted(watch.troubles.items(), key=lambda item: item[1].first_step)
    ]
    return html.table("Health", HEALTH_HEADINGS, rows, range(1, 4))
