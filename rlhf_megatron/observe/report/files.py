"""Reads a run directory. Broken and cut-off lines are left out with a note; only metrics.jsonl must be there."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

from rlhf_megatron.config.errors import ConfigError
from rlhf_megatron.config.source import parse, plain
from rlhf_megatron.observe.line_file import read_attempts
from rlhf_megatron.observe.report.records import MismatchGroup, MismatchStep, Row, RunFiles, Sample, Span, WorstToken

Record = TypeVar("Record")
METRICS, SUMMARY, CONFIG = "metrics.jsonl", "summary.json", "config.yaml"
TRACE, SAMPLES, MISMATCH = "trace.json", "samples.jsonl", "mismatch.jsonl"
STEP_THREAD = 0  # of trace.json: whole steps
CALL = "call"  # category of its events that are calls to hosts
MAX_LOGS, MAX_LOG_LINES = 4, 24
_LOG_ERROR = re.compile(r"^\S+ \S+ (?:\[[^\]]*\] )?(?:ERROR|CRITICAL) ")
_LOG_LINE = re.compile(r"^\d{4}-\d\d-\d\d \d\d:")
_AFTERMATH = " ended in "  # what a host logs when its controller is gone: no cause


def read_run(path: Path) -> RunFiles:
    """Raises ValueError where there is no run to report."""
    _check_run_dir(path)
    reader = _Reader(path)
    rows = reader.lines(METRICS, _row)
    if not rows:
        raise ValueError(
            f"{path / METRICS} has no complete line; a report needs the first step, evaluation or warm-up step:"
            " wait for it, or read the messages of the run that did not get so far."
        )
    config_text = reader.text(CONFIG) or ""
    return RunFiles(
        path=path,
        steps=reader.each_once(METRICS, [row for row in rows if row.kind == "step"]),
        evaluations=reader.each_once(METRICS, [row for row in rows if row.kind == "evaluation"]),
        warmups=reader.each_once(METRICS, [row for row in rows if row.kind == "warmup"]),
        summary=reader.mapping(SUMMARY),
        config=reader.config(config_text),
        config_text=config_text,
        spans=reader.spans(),
        samples=tuple(reader.lines(SAMPLES, _sample)),
        mismatch=tuple(reader.lines(MISMATCH, _mismatch)),
        log_errors=_log_errors(path),
        attempts=tuple(read_attempts(path)),
        age_s=max(0.0, time.time() - (path / METRICS).stat().st_mtime),
        notes=tuple(reader.notes),
        absent=reader.absent,
    )


def _check_run_dir(path: Path) -> None:
    if not path.is_dir():
        what = "is a file" if path.exists() else "is not there"
        raise ValueError(f"{path} {what}; give the directory of a run, such as runs/quickstart.")
    if not (path / METRICS).exists():
        if (path / CONFIG).exists():
            raise ValueError(
                f"{path} has no {METRICS}; a report is made of it: add jsonl to trainer.logger (the default has it),"
                " or wait until the run has begun."
            )
        inside = sorted(p.parent.name for p in path.glob(f"*/{METRICS}"))
        fix = f"; below it are {', '.join(inside[:5])}" if inside else ""
        raise ValueError(f"{path} is not the directory of a run (no {METRICS}, no {CONFIG}){fix}.")


class _Reader:
    """Reads files of one directory and keeps what is to be said about them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.notes: list[str] = []
        self.absent: dict[str, str] = {}

    def text(self, name: str) -> str | None:
        """None: it is not there. Bytes that are no UTF-8 become the replacement character."""
        path = self.path / name
        if not path.exists():
            self.absent[name] = f"this run wrote no {name}: it is older, or was replayed"
            return None
        try:
            return path.read_bytes().decode("utf-8", errors="replace")
        except OSError as error:
            if name == METRICS:
                raise ValueError(f"cannot read {path}: {error.strerror}; make it a readable file.") from error
            self.absent[name] = f"{name} cannot be read: {error.strerror}"
            return None

    def lines(self, name: str, convert: Callable[[Mapping[str, Any]], Record]) -> list[Record]:
        """What `convert` makes of each line; it raises KeyError, TypeError or ValueError for one of another form."""
        text = self.text(name)
        if text is None:
            return []
        found: list[Record] = []
        broken: list[int] = []
        lines = text.split("\n")
        is_cut = False
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                found.append(convert(_mapping(json.loads(line))))
            except (KeyError, TypeError, ValueError, RecursionError):
                is_last = number == len(lines)  # a complete line ends with a line break
                is_cut |= is_last
                broken += [] if is_last else [number]
        if is_cut:
            self.notes.append(f"{name}: the last line is cut off and left out")
        if broken:
            which = ", ".join(map(str, broken[:5])) + (" ..." if len(broken) > 5 else "")
            self.notes.append(f"{name}: {len(broken)} line(s) left out that cannot be read (line {which})")
        if not found:
            self.absent[name] = f"{name} has no complete line"
        return found

    def each_once(self, name: str, rows: Sequence[Row]) -> tuple[Row, ...]:
        """In the order of steps; of a step that was done again after a resume, the last."""
        by_step = {row.step: row for row in rows}
        if len(by_step) < len(rows):
            self.notes.append(
                f"{name}: {len(rows) - len(by_step)} {rows[0].kind} line(s) were written again by a resumed run;"
                " the last counts"
            )
        return tuple(by_step[step] for step in sorted(by_step))

    def mapping(self, name: str) -> Mapping[str, Any] | None:
        text = self.text(name)
        if text is None:
            return None
        try:
            return _mapping(json.loads(text))
        except (TypeError, ValueError):
            self.notes.append(f"{name}: not a JSON object; left out")
            self.absent[name] = f"{name} cannot be read"
            return None

    def config(self, text: str) -> Mapping[str, Any] | None:
        if CONFIG in self.absent:
            return None
        try:
            return _mapping(plain(parse(text, CONFIG, 0)))
        except (ConfigError, TypeError):
            self.notes.append(f"{CONFIG}: not valid YAML; shown as text only")
            return None

    def spans(self) -> tuple[Span, ...]:
        """Complete events in the order of their begin. The closing bracket may be missing."""
        text = self.text(TRACE)
        if text is None:
            return ()
        found, num_broken = [], 0
        for event in _events(text):
            try:
                if event is not None and event.get("ph") == "X":
                    found.append(_span(event))
                num_broken += event is None
            except (KeyError, TypeError, ValueError):
                num_broken += 1
        if num_broken:
            self.notes.append(f"{TRACE}: {num_broken} event(s) left out that are cut off or cannot be read")
        if not found:
            self.absent[TRACE] = f"{TRACE} has no complete event"
            return ()
        begin = min(span.start_s for span in found)
        shifted = [replace(span, start_s=span.start_s - begin) for span in found]
        return tuple(sorted(shifted, key=lambda span: span.start_s))


def _mapping(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise TypeError("not an object")
    return value


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError("not a number")
    return float(value)


def _maybe_number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _difference(value: Any) -> float:
    """Of log-probs: null stands for infinite, where one of them was not a number."""
    return math.inf if value is None else _number(value)


def _maybe_int(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _text(value: Any) -> str:
    return "" if value is None else str(value)


def _numbers(values: Any) -> dict[str, float]:
    """The entries that are numbers; null stands for one that is not finite."""
    items = values.items() if isinstance(values, dict) else ()
    numbers = {str(key): math.nan if value is None else _maybe_number(value) for key, value in items}
    return {key: number for key, number in numbers.items() if number is not None}


def _row(line: Mapping[str, Any]) -> Row:
    kind = line["kind"]
    if kind not in ("step", "evaluation", "warmup"):
        raise ValueError("no kind of line that is known")
    metrics = {key: value for key, value in line.items() if key not in ("kind", "step", "seconds")}
    return Row(kind, int(_number(line["step"])), _number(line.get("seconds", 0.0)), _numbers(metrics))


def _sample(line: Mapping[str, Any]) -> Sample:
    return Sample(
        step=int(_number(line["step"])),
        kind=_text(line["kind"]),
        prompt=_text(line.get("prompt")),
        response=_text(line.get("response")),
        label=_text(line.get("label")),
        source=_text(line.get("source")),
        reward=_maybe_number(line.get("reward")),
        status=_text(line.get("status")),
        parts=_numbers(line.get("parts")),
        finish_reason=_text(line.get("finish_reason")),
        num_tokens=_maybe_int(line.get("num_tokens")),
        policy_version=_maybe_int(line.get("policy_version")),
        version_spans=tuple(_version_span(span) for span in line.get("version_spans") or ()),
        num_cached_tokens=_maybe_int(line.get("num_cached_tokens")),
        num_retractions=_maybe_int(line.get("num_retractions")),
    )


def _version_span(span: Any) -> tuple[int, int, int]:
    version, start, end = span
    return int(_number(version)), int(_number(start)), int(_number(end))


def _mismatch(line: Mapping[str, Any]) -> MismatchStep:
    edges = tuple(_number(edge) for edge in line["edges"])
    if len(edges) < 2 or any(low >= high for low, high in pairwise(edges)):
        raise ValueError("edges must grow")
    return MismatchStep(
        step=int(_number(line["step"])),
        edges=edges,
        groups=tuple(_group(_mapping(group), len(edges) - 1) for group in line["groups"]),
        worst=tuple(_token(_mapping(token)) for token in line.get("worst") or ()),
    )


def _group(line: Mapping[str, Any], num_bins: int) -> MismatchGroup:
    counts = tuple(int(_number(count)) for count in line["counts"])
    if len(counts) != num_bins:
        raise ValueError("a count a bin")
    return MismatchGroup(
        policy_version=_maybe_int(line.get("policy_version")),
        finish_reason=_text(line.get("finish_reason")),
        counts=counts,
        num_tokens=int(_number(line.get("num_tokens", sum(counts)))),
        mean=_difference(line["mean"]),
        p99=_difference(line["p99"]),
        max=_difference(line["max"]),
    )


def _token(line: Mapping[str, Any]) -> WorstToken:
    return WorstToken(
        token=_text(line.get("token")),
        token_id=_maybe_int(line.get("token_id")),
        position=_maybe_int(line.get("position")),
        trainer=math.nan if line["trainer"] is None else _number(line["trainer"]),
        engine=math.nan if line["engine"] is None else _number(line["engine"]),
        difference=_difference(line["difference"]),
        context=_text(line.get("context")),
        sample_id=_text(line.get("sample_id")),
        policy_version=_maybe_int(line.get("policy_version")),
        finish_reason=_text(line.get("finish_reason")),
    )


def _events(text: str) -> Iterator[Mapping[str, Any] | None]:
    """Events of a trace: a whole JSON array, or one event a line, as it is written. None: one cannot be read."""
    try:
        whole = json.loads(text)
    except ValueError:
        whole = None
    if isinstance(whole, dict):  # the format's other form
        whole = whole.get("traceEvents")
    if isinstance(whole, list):
        yield from (event if isinstance(event, dict) else None for event in whole)
        return
    for line in text.splitlines():
        line = line.strip().removeprefix("[").removesuffix("]").strip().rstrip(",")
        if line:
            try:
                yield _mapping(json.loads(line))
            except (TypeError, ValueError):
                yield None


def _span(event: Mapping[str, Any]) -> Span:
    arguments = event.get("args")
    step = _maybe_int(arguments.get("step")) if isinstance(arguments, dict) else None
    times = _number(event["ts"]) / 1e6, _number(event["dur"]) / 1e6
    return Span(_text(event["name"]), *times, step, event.get("tid") == STEP_THREAD, event.get("cat") == CALL)


def _log_errors(path: Path) -> tuple[str, ...]:
    """The first error of each log, with what follows it (a traceback), of at most MAX_LOGS logs."""
    found = []
    for log in sorted([*path.glob("logs/*.log"), *path.glob("engines/*.log")]):
        try:
            lines = log.read_bytes().decode("utf-8", errors="replace").splitlines()
        except OSError:
            continue
        for i, line in enumerate(lines):
            if _LOG_ERROR.match(line) and _AFTERMATH not in line:
                end = next((j for j in range(i + 1, len(lines)) if _LOG_LINE.match(lines[j])), len(lines))
                block = lines[i:end]
                if len(block) > MAX_LOG_LINES:
                    block = [*block[:2], "...", *block[3 - MAX_LOG_LINES :]]
                found.append(f"{log.relative_to(path)}\n" + "\n".join(block))
                break
    return tuple(found[:MAX_LOGS])
