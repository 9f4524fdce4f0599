"""Simulations as bars over time: an SVG that needs nothing else, readable on light and on dark pages. Pure.

`trace_json` writes the trace event format of Chrome's and Perfetto's viewers, as observe/ does for a run.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from rlhf_megatron.observe.trace import CALL, PROCESS, STEPS
from rlhf_megatron.simulator.simulation import ENGINES, SCORER, TRAINER, History

WIDTH, LEFT, RIGHT = 1120, 132, 16
ROW, GAP = 15, 3
MAX_ENGINE_ROWS = 12
NUM_BINS = 320  # of time, for the engines' loads
NUM_LEVELS = 6  # of load that can be told apart
STAGES = {"annotate": "log-probs", "update": "update", "sync": "weight sync", "score": "rewards"}
LOAD = "responses that an engine decodes: the fuller its slots the stronger"
STYLE = """
 .page{fill:#ffffff} .ink{fill:#1b212b} .muted{fill:#56606e} .row{fill:#eef2f7} .grid{stroke:#c9d0d9}
 .version{stroke:#b3261e;stroke-dasharray:3 3} .mark{fill:#b3261e}
 .annotate{fill:#e69f00} .update{fill:#0072b2} .sync{fill:#cc79a7} .score{fill:#7a5195} .load{fill:#009e73}
 text{font:12px system-ui,-apple-system,"Segoe UI",Roboto,"Liberation Sans",Arial,sans-serif}
 .title{font-size:14px;font-weight:600} .small{font-size:10.5px}
 @media (prefers-color-scheme:dark){
 .page{fill:#161b22} .ink{fill:#e4e9f0} .muted{fill:#9ba7b6} .row{fill:#222a34} .grid{stroke:#3a4450}
 .version{stroke:#ff8a80} .mark{fill:#ff8a80}
 .annotate{fill:#ffc04d} .update{fill:#4aa8e8} .sync{fill:#e6a1c6} .score{fill:#b99ae0} .load{fill:#2fc79c}}
"""


@dataclass(frozen=True)
class Panel:
    """One simulation, from `begin_s` on, which is drawn at the left edge."""

    title: str
    history: History  # with loads
    begin_s: float


def window(history: History, num_warmup: int, num_steps: int) -> tuple[float, float]:
    """(begin, seconds) of that many steps behind the warm-up."""
    begin = history.busy[min(num_warmup, len(history.busy) - 1)].when
    end = history.busy[min(num_warmup + num_steps, len(history.busy) - 1)].when
    return begin, max(end - begin, 1e-9)


def timeline_svg(panels: Sequence[Panel], seconds: float) -> str:
    """All panels one below the other, on one scale of time."""
    body: list[str] = []
    top = 34.0
    for panel in panels:
        part, height = _panel(panel, seconds, top)
        body += part
        top += height
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top:.0f}" width="{WIDTH}" height="{top:.0f}"'
        f' role="img" aria-label="{escape("; ".join(panel.title for panel in panels))}"><style>{STYLE}</style>'
        f'<rect class="page" width="{WIDTH}" height="{top:.0f}" rx="6"/>'
    )
    return "\n".join([head, *_legend(), *body, "</svg>"]) + "\n"


def _legend() -> Iterator[str]:
    x = float(LEFT)
    for name, words in (*STAGES.items(), ("load", LOAD)):
        yield f'<rect class="{name}" x="{x:.0f}" y="12" width="12" height="12" rx="2"/>'
        yield f'<text class="muted" x="{x + 17:.0f}" y="22">{words}</text>'
        x += 34 + 6.4 * len(words)
    yield f'<path class="version" d="M{x:.0f} 10v16"/><text class="muted" x="{x + 6:.0f}" y="22">new version</text>'


def _panel(panel: Panel, seconds: float, top: float) -> tuple[list[str], float]:
    scale = (WIDTH - LEFT - RIGHT) / seconds
    blocks = _blocks(len(panel.history.loads))
    rows: list[str | range] = [TRAINER, SCORER, *blocks]
    first = top + 38
    height = len(rows) * (ROW + GAP)
    parts = [f'<text class="ink title" x="{LEFT}" y="{top + 16:.0f}">{escape(panel.title)}</text>']
    for number, row in enumerate(rows):
        y = first + number * (ROW + GAP)
        name = row if isinstance(row, str) else f"engine {row[0]}" if len(row) == 1 else f"engines {row[0]}–{row[-1]}"
        parts.append(f'<text class="muted" x="{LEFT - 8}" y="{y + 12:.1f}" text-anchor="end">{name}</text>')
        parts.append(f'<rect class="row" x="{LEFT}" y="{y:.1f}" width="{WIDTH - LEFT - RIGHT}" height="{ROW}"/>')
        if isinstance(row, range):
            parts += _load(panel, row, seconds, scale, y)
    parts += _bars(panel, seconds, scale, first, len(blocks))
    parts += _versions(panel, seconds, scale, first, height)
    parts += _axis(seconds, scale, first + height)
    return parts, 38 + height + 30


def _blocks(num_engines: int) -> list[range]:
    size = -(-num_engines // MAX_ENGINE_ROWS)
    return [range(start, min(start + size, num_engines)) for start in range(0, num_engines, size)]


def _bars(panel: Panel, seconds: float, scale: float, first: float, num_blocks: int) -> Iterator[str]:
    """Draw the stages of trainer and scorer and the engines' syncs: one path a row and stage."""
    rows = {TRAINER: (0, 1), SCORER: (1, 1), ENGINES: (2, num_blocks)}
    paths: dict[tuple[str, str], list[str]] = {}
    for span in panel.history.spans:
        begin, end = max(0.0, span.start_s - panel.begin_s), min(seconds, span.end_s - panel.begin_s)
        if begin < end:
            place, count = rows[span.row]
            y, height = first + place * (ROW + GAP), count * (ROW + GAP) - GAP
            width = max(0.5, (end - begin) * scale)
            box = f"M{LEFT + begin * scale:.1f} {y:.1f}h{width:.1f}v{height}h-{width:.1f}z"
            paths.setdefault((span.row, span.stage), []).append(box)
    for (row, stage), boxes in paths.items():
        faint = ' opacity=".55"' if row == ENGINES else ""
        yield f'<path class="{stage}"{faint} d="{"".join(boxes)}"/>'


def _load(panel: Panel, block: range, seconds: float, scale: float, y: float) -> Iterator[str]:
    """Draw how many of a block's slots decode, in bins of time; bins of one level are joined."""
    sums = [0.0] * NUM_BINS
    for number in block:
        _add_load(sums, panel.history.loads[number], panel.begin_s, seconds)
    most = len(block) * panel.history.slots
    levels = [min(NUM_LEVELS, -(-round(1000 * load * NUM_LEVELS / most) // 1000)) for load in sums]
    width = seconds * scale / NUM_BINS
    paths: dict[int, list[str]] = {}
    start = 0
    for place in range(1, NUM_BINS + 1):
        if place == NUM_BINS or levels[place] != levels[start]:
            if levels[start]:
                span = (place - start) * width
                box = f"M{LEFT + start * width:.1f} {y:.1f}h{span:.1f}v{ROW}h-{span:.1f}z"
                paths.setdefault(levels[start], []).append(box)
            start = place
    for level, boxes in sorted(paths.items()):
        yield f'<path class="load" opacity="{0.12 + 0.88 * level / NUM_LEVELS:.2f}" d="{"".join(boxes)}"/>'


def _add_load(sums: list[float], load: Sequence[tuple[float, int]], begin_s: float, seconds: float) -> None:
    width = seconds / len(sums)
    ends = [*(when for when, _ in load[1:]), begin_s + seconds]
    for (when, count), end in zip(load, ends, strict=False):
        low, high = max(0.0, when - begin_s), min(seconds, end - begin_s)
        if not count or low >= high:
            continue
        place = int(low / width)
        while low < high and place < len(sums):
            until = min(high, (place + 1) * width)
            sums[place] += count * (until - low) / width
            low, place = until, place + 1


def _versions(panel: Panel, seconds: float, scale: float, first: float, height: float) -> Iterator[str]:
    for step in panel.history.steps:
        x = (step.end_s - panel.begin_s) * scale
        if 0 <= x < seconds * scale - 20:
            yield f'<path class="version" d="M{LEFT + x:.1f} {first - 4:.1f}v{height + 2:.1f}"/>'
            yield f'<text class="mark small" x="{LEFT + x + 3:.1f}" y="{first - 2:.1f}">v{step.step}</text>'


def _axis(seconds: float, scale: float, y: float) -> Iterator[str]:
    unit, name = (60.0, "min") if seconds >= 600 else (1.0, "s")
    wanted = seconds / unit / 8
    power = 10.0 ** (len(f"{wanted:.0f}") - 1) if wanted >= 1 else 0.1
    tick = next(power * factor for factor in (1, 2, 5, 10, 20) if power * factor >= wanted)
    for number in range(int(seconds / unit / tick) + 1):
        x = LEFT + number * tick * unit * scale
        yield f'<path class="grid" d="M{x:.1f} {y:.1f}v4"/>'
        yield (
            f'<text class="muted small" x="{x:.1f}" y="{y + 15:.1f}" text-anchor="middle">{number * tick:g}'
            f"{' ' + name if not number else ''}</text>"
        )


TRACKS = (STEPS, TRAINER, SCORER, ENGINES)


def trace_json(history: History, name: str) -> str:
    """Virtual time from 0 on."""
    return "[\n" + ",\n".join(json.dumps(event) for event in _events(history, name)) + "\n]\n"


def _events(history: History, name: str) -> Iterator[dict[str, Any]]:
    yield {"name": "process_name", "ph": "M", "pid": PROCESS, "args": {"name": name}}
    for number, track in enumerate(TRACKS):
        yield {"name": "thread_name", "ph": "M", "pid": PROCESS, "tid": number, "args": {"name": track}}
    for step in history.steps:
        if step.seconds == step.seconds:
            yield _event(f"step {step.step}", "step", STEPS, step.begin_s, step.end_s, step.step)
    for span in history.spans:
        yield _event(span.stage, CALL, span.row, span.start_s, span.end_s, span.step)


def _event(name: str, category: str, track: str, start_s: float, end_s: float, step: int) -> dict[str, Any]:
    start, end = round(start_s * 1e6), round(end_s * 1e6)
    event = {"name": name, "cat": category, "ph": "X", "ts": start, "dur": end - start, "pid": PROCESS}
    return {**event, "tid": TRACKS.index(track), "args": {"step": step}}
