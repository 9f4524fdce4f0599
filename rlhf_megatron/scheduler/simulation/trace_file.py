"""A simulation in the trace event format of Chrome's and Perfetto's viewers, as scheduler/trace.py writes a run's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from rlhf_megatron.scheduler.simulation.history import ENGINES, SCORER, TRAINER, History
from rlhf_megatron.scheduler.trace import CALL, PROCESS, STEPS

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
