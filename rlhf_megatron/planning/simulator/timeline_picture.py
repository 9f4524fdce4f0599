"""Simulations as bars over time: an SVG that needs nothing else, readable on light and on
dark pages. Pure.

`render_trace_json` writes the trace event format of Chrome's and Perfetto's viewers, as observe/
does for a run.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from rlhf_megatron.controller.observe.trace import CALL_CATEGORY, PROCESS_NUMBER, STEPS_TRACK
from rlhf_megatron.planning.simulator.simulation import (
    ENGINES_TRACK,
    SCORER_TRACK,
    TRAINER_TRACK,
    SimulationHistory,
)

PICTURE_WIDTH = 1120
LEFT_MARGIN = 132
RIGHT_MARGIN = 16
ROW_HEIGHT = 15
ROW_GAP = 3
MAX_ENGINE_ROWS = 12
NUM_TIME_BINS = 320  # of time, for the engines' loads
NUM_LOAD_LEVELS = 6  # of load that can be told apart
STAGE_LABELS = {
    "annotate": "log-probs",
    "update": "update",
    "sync": "weight sync",
    "score": "rewards",
}
LOAD_LABEL = "responses that an engine decodes: the fuller its slots the stronger"
SVG_STYLE = """
 .page{fill:#ffffff} .ink{fill:#1b212b} .muted{fill:#56606e} .row{fill:#eef2f7} \
.grid{stroke:#c9d0d9}
 .version{stroke:#b3261e;stroke-dasharray:3 3} .mark{fill:#b3261e}
 .annotate{fill:#e69f00} .update{fill:#0072b2} .sync{fill:#cc79a7} .score{fill:#7a5195} \
.load{fill:#009e73}
 text{font:12px system-ui,-apple-system,"Segoe UI",Roboto,"Liberation Sans",Arial,sans-serif}
 .title{font-size:14px;font-weight:600} .small{font-size:10.5px}
 @media (prefers-color-scheme:dark){
 .page{fill:#161b22} .ink{fill:#e4e9f0} .muted{fill:#9ba7b6} .row{fill:#222a34} \
.grid{stroke:#3a4450}
 .version{stroke:#ff8a80} .mark{fill:#ff8a80}
 .annotate{fill:#ffc04d} .update{fill:#4aa8e8} .sync{fill:#e6a1c6} .score{fill:#b99ae0} \
.load{fill:#2fc79c}}
"""

TRACE_TRACKS = (STEPS_TRACK, TRAINER_TRACK, SCORER_TRACK, ENGINES_TRACK)


@dataclass(frozen=True)
class TimelinePanel:
    """One simulation, from `begin_s` on, which is drawn at the left edge."""

    title: str
    history: SimulationHistory  # with loads
    begin_s: float


def find_time_window(
    history: SimulationHistory, num_warmup: int, num_steps: int
) -> tuple[float, float]:
    """Return (begin, length), in seconds, of `num_steps` steps after the warm-up."""
    begin = history.busy_by_step[min(num_warmup, len(history.busy_by_step) - 1)].time_s
    end = history.busy_by_step[min(num_warmup + num_steps, len(history.busy_by_step) - 1)].time_s
    return begin, max(end - begin, 1e-9)


def render_timeline_svg(panels: Sequence[TimelinePanel], seconds: float) -> str:
    """Return an SVG with the panels one below the other, each over `seconds` of time on the same
    scale.
    """
    body: list[str] = []
    top = 34.0
    for panel in panels:
        part, height = _render_panel(panel, seconds, top)
        body += part
        top += height
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {PICTURE_WIDTH} {top:.0f}"'
        f' width="{PICTURE_WIDTH}" height="{top:.0f}" role="img"'
        f' aria-label="{escape("; ".join(panel.title for panel in panels))}">'
        f"<style>{SVG_STYLE}</style>"
        f'<rect class="page" width="{PICTURE_WIDTH}" height="{top:.0f}" rx="6"/>'
    )
    return "\n".join([head, *_render_legend(), *body, "</svg>"]) + "\n"


def _render_legend() -> Iterator[str]:
    """Yield the SVG elements of the legend."""
    x = float(LEFT_MARGIN)
    for name, words in (*STAGE_LABELS.items(), ("load", LOAD_LABEL)):
        yield f'<rect class="{name}" x="{x:.0f}" y="12" width="12" height="12" rx="2"/>'
        yield f'<text class="muted" x="{x + 17:.0f}" y="22">{words}</text>'
        x += 34 + 6.4 * len(words)
    yield (
        f'<path class="version" d="M{x:.0f} 10v16"/>'
        f'<text class="muted" x="{x + 6:.0f}" y="22">new version</text>'
    )


def _render_panel(panel: TimelinePanel, seconds: float, top: float) -> tuple[list[str], float]:
    """Return (the SVG elements of a panel whose upper edge is at `top`, the height of the panel).
    The panel shows `seconds` of time.
    """
    scale = (PICTURE_WIDTH - LEFT_MARGIN - RIGHT_MARGIN) / seconds
    blocks = _group_engines_into_rows(len(panel.history.engine_loads))
    rows: list[str | range] = [TRAINER_TRACK, SCORER_TRACK, *blocks]
    first = top + 38
    height = len(rows) * (ROW_HEIGHT + ROW_GAP)
    parts = [
        f'<text class="ink title" x="{LEFT_MARGIN}" y="{top + 16:.0f}">{escape(panel.title)}</text>'
    ]
    for number, row in enumerate(rows):
        y = first + number * (ROW_HEIGHT + ROW_GAP)
        if isinstance(row, str):
            name = row
        elif len(row) == 1:
            name = f"engine {row[0]}"
        else:
            name = f"engines {row[0]}–{row[-1]}"
        parts.append(
            f'<text class="muted" x="{LEFT_MARGIN - 8}" y="{y + 12:.1f}"'
            f' text-anchor="end">{name}</text>'
        )
        parts.append(
            f'<rect class="row" x="{LEFT_MARGIN}" y="{y:.1f}"'
            f' width="{PICTURE_WIDTH - LEFT_MARGIN - RIGHT_MARGIN}" height="{ROW_HEIGHT}"/>'
        )
        if isinstance(row, range):
            parts += _render_load(panel, row, seconds, scale, y)
    parts += _render_stage_bars(panel, seconds, scale, first, len(blocks))
    parts += _render_version_marks(panel, seconds, scale, first, height)
    parts += _render_time_axis(seconds, scale, first + height)
    return parts, 38 + height + 30


def _group_engines_into_rows(num_engines: int) -> list[range]:
    """Return the engine numbers of each row; rows have several engines where there are more than
    MAX_ENGINE_ROWS.
    """
    size = -(-num_engines // MAX_ENGINE_ROWS)
    return [range(start, min(start + size, num_engines)) for start in range(0, num_engines, size)]


def _render_stage_bars(
    panel: TimelinePanel, seconds: float, pixels_per_second: float, first_y: float, num_blocks: int
) -> Iterator[str]:
    """Yield the stages of trainer and scorer and the engines' syncs, one SVG path for each row and
    stage.
    """
    rows = {TRAINER_TRACK: (0, 1), SCORER_TRACK: (1, 1), ENGINES_TRACK: (2, num_blocks)}
    paths: dict[tuple[str, str], list[str]] = {}
    for span in panel.history.spans:
        begin = max(0.0, span.start_s - panel.begin_s)
        end = min(seconds, span.end_s - panel.begin_s)
        if begin < end:
            place, count = rows[span.track]
            y = first_y + place * (ROW_HEIGHT + ROW_GAP)
            height = count * (ROW_HEIGHT + ROW_GAP) - ROW_GAP
            width = max(0.5, (end - begin) * pixels_per_second)
            box = (
                f"M{LEFT_MARGIN + begin * pixels_per_second:.1f}"
                f" {y:.1f}h{width:.1f}v{height}h-{width:.1f}z"
            )
            paths.setdefault((span.track, span.stage), []).append(box)
    for (row, stage), boxes in paths.items():
        faint = ' opacity=".55"' if row == ENGINES_TRACK else ""
        yield f'<path class="{stage}"{faint} d="{"".join(boxes)}"/>'


def _render_load(
    panel: TimelinePanel, engine_numbers: range, seconds: float, pixels_per_second: float, y: float
) -> Iterator[str]:
    """Yield the share of the slots of these engines that decode, in bins of time; neighbouring bins
    of one level are joined.
    """
    sums = [0.0] * NUM_TIME_BINS
    for number in engine_numbers:
        _add_mean_load_to_bins(sums, panel.history.engine_loads[number], panel.begin_s, seconds)
    most = len(engine_numbers) * panel.history.num_slots
    levels = [
        min(NUM_LOAD_LEVELS, -(-round(1000 * load * NUM_LOAD_LEVELS / most) // 1000))
        for load in sums
    ]
    width = seconds * pixels_per_second / NUM_TIME_BINS
    paths: dict[int, list[str]] = {}
    start = 0
    for place in range(1, NUM_TIME_BINS + 1):
        if place == NUM_TIME_BINS or levels[place] != levels[start]:
            if levels[start]:
                span = (place - start) * width
                box = (
                    f"M{LEFT_MARGIN + start * width:.1f}"
                    f" {y:.1f}h{span:.1f}v{ROW_HEIGHT}h-{span:.1f}z"
                )
                paths.setdefault(levels[start], []).append(box)
            start = place
    for level, boxes in sorted(paths.items()):
        yield (
            f'<path class="load" opacity="{0.12 + 0.88 * level / NUM_LOAD_LEVELS:.2f}"'
            f' d="{"".join(boxes)}"/>'
        )


def _add_mean_load_to_bins(
    bin_sums: list[float], load_history: Sequence[tuple[float, int]], begin_s: float, seconds: float
) -> None:
    """Add to each of the equal time bins the engine's mean load (running responses) over that bin.
    The bins together cover `seconds` from `begin_s`.
    """
    width = seconds / len(bin_sums)
    ends = [*(when for when, _ in load_history[1:]), begin_s + seconds]
    for (when, count), end in zip(load_history, ends, strict=False):
        low = max(0.0, when - begin_s)
        high = min(seconds, end - begin_s)
        if not count or low >= high:
            continue
        place = int(low / width)
        while low < high and place < len(bin_sums):
            until = min(high, (place + 1) * width)
            bin_sums[place] += count * (until - low) / width
            low = until
            place = place + 1


def _render_version_marks(
    panel: TimelinePanel, seconds: float, pixels_per_second: float, first_y: float, height: float
) -> Iterator[str]:
    """Yield a mark with the version at the end of each step, over the height of the rows."""
    for step in panel.history.steps:
        x = (step.end_s - panel.begin_s) * pixels_per_second
        if 0 <= x < seconds * pixels_per_second - 20:
            yield (
                f'<path class="version" d="M{LEFT_MARGIN + x:.1f}'
                f' {first_y - 4:.1f}v{height + 2:.1f}"/>'
            )
            yield (
                f'<text class="mark small" x="{LEFT_MARGIN + x + 3:.1f}"'
                f' y="{first_y - 2:.1f}">v{step.step}</text>'
            )


def _render_time_axis(seconds: float, pixels_per_second: float, y: float) -> Iterator[str]:
    """Yield the ticks and labels of the time axis."""
    unit, name = (60.0, "min") if seconds >= 600 else (1.0, "s")
    wanted = seconds / unit / 8
    power = 10.0 ** (len(f"{wanted:.0f}") - 1) if wanted >= 1 else 0.1
    tick = next(power * factor for factor in (1, 2, 5, 10, 20) if power * factor >= wanted)
    for number in range(int(seconds / unit / tick) + 1):
        x = LEFT_MARGIN + number * tick * unit * pixels_per_second
        yield f'<path class="grid" d="M{x:.1f} {y:.1f}v4"/>'
        yield (
            f'<text class="muted small" x="{x:.1f}"'
            f' y="{y + 15:.1f}" text-anchor="middle">{number * tick:g}'
            f"{' ' + name if not number else ''}</text>"
        )


def render_trace_json(history: SimulationHistory, process_name: str) -> str:
    """Return the simulation as a trace file for Chrome's and Perfetto's viewers, in virtual time
    from 0 on.
    """
    return (
        "[\n"
        + ",\n".join(json.dumps(event) for event in _iter_trace_events(history, process_name))
        + "\n]\n"
    )


def _iter_trace_events(history: SimulationHistory, process_name: str) -> Iterator[dict[str, Any]]:
    """Yield the events of the trace: names of tracks, steps and stages."""
    yield {"name": "process_name", "ph": "M", "pid": PROCESS_NUMBER, "args": {"name": process_name}}
    for number, track in enumerate(TRACE_TRACKS):
        yield {
            "name": "thread_name",
            "ph": "M",
            "pid": PROCESS_NUMBER,
            "tid": number,
            "args": {"name": track},
        }
    for step in history.steps:
        if step.seconds == step.seconds:
            yield _make_trace_event(
                f"step {step.step}", "step", STEPS_TRACK, step.begin_s, step.end_s, step.step
            )
    for span in history.spans:
        yield _make_trace_event(
            span.stage, CALL_CATEGORY, span.track, span.start_s, span.end_s, span.step
        )


def _make_trace_event(
    name: str, category: str, track: str, start_s: float, end_s: float, step: int
) -> dict[str, Any]:
    """Return a complete event of the trace, with times in microseconds."""
    start = round(start_s * 1e6)
    end = round(end_s * 1e6)
    event = {
        "name": name,
        "cat": category,
        "ph": "X",
        "ts": start,
        "dur": end - start,
        "pid": PROCESS_NUMBER,
    }
    return {**event, "tid": TRACE_TRACKS.index(track), "args": {"step": step}}
