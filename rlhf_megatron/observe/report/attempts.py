"""The attempts of a run that was started more than once: when each began, where it went on, and how it ended."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from rlhf_megatron.observe.report import html
from rlhf_megatron.observe.report.records import RunFiles

HEADINGS = ("attempt", "began", "from step", "lasted", "ended", "settings changed")


def num_attempts(run: RunFiles) -> int:
    return sum(line.get("kind") == "start" for line in run.attempts)


def attempts_block(run: RunFiles) -> str:
    """Empty for a run of one attempt."""
    rows = attempt_rows(run.attempts)
    if len(rows) < 2:
        return ""
    ettr = (run.summary or {}).get("ettr")
    told = f" Effective training time: {ettr:.1%} of the time since the first." if isinstance(ettr, int | float) else ""
    caption = f"Attempts. What a kill undid was done again and is shown once.{told}"
    return html.block(f"{len(rows)} attempts", f'<div class="card">{html.table(caption, HEADINGS, rows)}</div>')


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
                f"{end['time'] - start['time']:.0f} s" if end else "–",
                str(end.get("reason", "")) if end else ("no end yet" if is_last else "killed"),
                "; ".join(changed) or "–",
            ]
        )
    return rows
