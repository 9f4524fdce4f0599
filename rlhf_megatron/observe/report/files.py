"""What a run directory says, typed, and how it is read. The writers of samples.jsonl and mismatch.jsonl use the types.

Broken and cut-off lines are left out with a note; only metrics.jsonl must be there.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from rlhf_megatron.config.errors import ConfigError
from rlhf_megatron.config.load import LOCK, LOCK_FILE
from rlhf_megatron.config.source import parse, plain
from rlhf_megatron.observe.line_file import read_attempts

Record = TypeVar("Record")
METRICS, SUMMARY, CONFIG = "metrics.jsonl", "summary.json", "config.yaml"
TRACE, SAMPLES, MISMATCH = "trace.json", "samples.jsonl", "mismatch.jsonl"
KINDS = ("step", "evaluation", "warmup")
STEP_THREAD = 0  # of trace.json: whole steps
CALL = "call"  # category of its events that are calls to hosts
MAX_LOGS, MAX_LOG_LINES = 4, 24
_LOG_ERROR = re.compile(r"^\S+ \S+ (?:\[[^\]]*\] )?(?:ERROR|CRITICAL) ")
_LOG_LINE = re.compile(r"^\d{4}-\d\d-\d\d \d\d:")
_AFTERMATH = " ended in "  # what a host logs when its controller is gone: no cause


@dataclass(frozen=True)
class Row:
    """A line of metrics.jsonl."""

    kind: str  # one of KINDS
    step: int
    seconds: float  # since the run began
    metrics: Mapping[str, float]  # may hold values that are not finite


@dataclass(frozen=True)
class Span:
    """A complete event of trace.json."""

    name: str
    start_s: float  # since the first event
    seconds: float
    step: int | None
    is_step: bool  # a whole step, not a part of one
    is_call: bool  # of hosts by the controller, inside of a stage


@dataclass(frozen=True)
class Sample:
    """A line of samples.jsonl. Prompt, response and label are text that a model or a stranger wrote."""

    step: int
    kind: str  # best, worst or random
    prompt: str
    response: str
    label: str
    source: str
    reward: float | None  # None where the status is masked: there is none
    status: str  # "masked:<why>": left out of training
    parts: Mapping[str, float | None]  # named components of the reward
    finish_reason: str
    num_tokens: int  # of the response
    policy_version: int
    version_spans: tuple[tuple[int, int, int], ...] = ()  # (version, start, end) each; (): all of `policy_version`
    num_cached_tokens: int | None = None  # of the prompt; None, here and below: an older run did not tell
    num_retractions: int | None = None


@dataclass(frozen=True)
class MismatchGroup:
    """Tokens of one step, policy version and finish reason. Differences are |trainer - engine| log-probs, nats.

    They are infinite where one of the two is not a number.
    """

    policy_version: int
    finish_reason: str
    counts: tuple[int, ...]  # a bin each; the last one has no upper end
    num_tokens: int
    mean: float
    p99: float
    max: float


@dataclass(frozen=True)
class WorstToken:
    """One of the tokens that differ most."""

    token: str
    token_id: int
    position: int  # among the response tokens of its sample, from 0
    trainer: float  # log-prob, nats
    engine: float
    difference: float  # infinite where one of them is not a number
    context: str  # the text before it
    sample_id: int
    policy_version: int
    finish_reason: str


@dataclass(frozen=True)
class MismatchStep:
    """A line of mismatch.jsonl."""

    step: int
    edges: tuple[float, ...]  # nats; the first is 0
    groups: tuple[MismatchGroup, ...]
    worst: tuple[WorstToken, ...]  # the worst first


@dataclass(frozen=True)
class RunFiles:
    """Everything that was found in one run directory."""

    path: Path
    steps: tuple[Row, ...]  # in the order of steps, each once
    evaluations: tuple[Row, ...]
    warmups: tuple[Row, ...]
    summary: Mapping[str, Any] | None  # None: the run did not finish
    config: Mapping[str, Any] | None
    config_text: str
    spans: tuple[Span, ...] = ()
    samples: tuple[Sample, ...] = ()
    mismatch: tuple[MismatchStep, ...] = ()
    log_errors: tuple[str, ...] = ()  # what ranks and engines logged as errors, the first of each log
    age_s: float = 0.0  # since the last write to metrics.jsonl
    attempts: tuple[Mapping[str, Any], ...] = ()  # lines of attempts.jsonl
    notes: tuple[str, ...] = ()  # what was left out of which file
    absent: Mapping[str, str] = field(default_factory=dict)  # file name -> why there is nothing from it
    lock: Mapping[str, Any] = field(default_factory=dict)  # the section `lock` of its lock file


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
        steps=reader.each_once("step", rows),
        evaluations=reader.each_once("evaluation", rows),
        warmups=reader.each_once("warmup", rows),
        summary=reader.mapping(SUMMARY),
        config=reader.config(config_text),
        config_text=config_text,
        spans=reader.spans(),
        samples=tuple(reader.lines(SAMPLES, lambda line: msgspec.convert(line, Sample))),
        mismatch=tuple(reader.lines(MISMATCH, _mismatch)),
        log_errors=_log_errors(path),
        attempts=tuple(read_attempts(path)),
        age_s=max(0.0, time.time() - (path / METRICS).stat().st_mtime),
        notes=tuple(reader.notes),
        absent=reader.absent,
        lock=reader.lock(),
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
        """Read a file; None where it is not there. Bytes that are no UTF-8 become the replacement character."""
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
        """Convert each line of a file. `convert` raises KeyError, TypeError or ValueError for lines of another form."""
        text = self.text(name)
        if text is None:
            return []
        found: list[Record] = []
        broken: list[int] = []
        lines = text.split("\n")
        for number, line in enumerate(lines, 1):
            try:
                if line.strip():
                    found.append(convert(_mapping(json.loads(line))))
            except (KeyError, TypeError, ValueError, RecursionError):
                broken.append(number)
        if broken and broken[-1] == len(lines):  # a complete line ends with a line break
            broken.pop()
            self.notes.append(f"{name}: the last line is cut off and left out")
        if broken:
            which = ", ".join(map(str, broken[:5])) + (" ..." if len(broken) > 5 else "")
            self.notes.append(f"{name}: {len(broken)} line(s) left out that cannot be read (line {which})")
        if not found:
            self.absent[name] = f"{name} has no complete line"
        return found

    def each_once(self, kind: str, rows: Sequence[Row]) -> tuple[Row, ...]:
        """Return the rows of a kind in the order of steps; the last one of a step that a resumed run did again."""
        rows = [row for row in rows if row.kind == kind]
        by_step = {row.step: row for row in rows}
        if len(by_step) < len(rows):
            self.notes.append(
                f"{METRICS}: {len(rows) - len(by_step)} {kind} line(s) were written again by a resumed run;"
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

    def lock(self) -> Mapping[str, Any]:
        """{} where there is none: of an older run."""
        path = self.path / LOCK_FILE
        try:
            found = plain(parse(path.read_text(encoding="utf-8"), LOCK_FILE, 0))
        except (OSError, UnicodeDecodeError, ConfigError):
            return {}
        lock = found.get(LOCK) if isinstance(found, dict) else None
        return lock if isinstance(lock, dict) else {}

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
        for line in text.splitlines():
            line = line.strip().removeprefix("[").removesuffix("]").strip().rstrip(",")
            try:
                event = _mapping(json.loads(line)) if line else {}
                found += [_span(event)] if event.get("ph") == "X" else []
            except (KeyError, TypeError, ValueError, RecursionError):
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


def _row(line: Mapping[str, Any]) -> Row:
    """Metrics are the entries that are numbers; null stands for one that is not finite."""
    if line["kind"] not in KINDS:
        raise ValueError("no kind of line that is known")
    others = {key: value for key, value in line.items() if key not in ("kind", "step", "seconds")}
    metrics = {
        key: math.nan if value is None else float(value)
        for key, value in others.items()
        if value is None or (isinstance(value, int | float) and not isinstance(value, bool))
    }
    return Row(line["kind"], int(_number(line["step"])), _number(line.get("seconds", 0.0)), metrics)


def _mismatch(line: Mapping[str, Any]) -> MismatchStep:
    """null stands for a log-prob that is not a number, and for a difference from it, which is infinite."""
    without = {"trainer": math.nan, "engine": math.nan} | dict.fromkeys(("mean", "p99", "max", "difference"), math.inf)

    def filled(entry: Any) -> dict[str, Any]:
        return {key: without.get(key) if value is None else value for key, value in _mapping(entry).items()}

    parts = {name: [filled(entry) for entry in line[name]] for name in ("groups", "worst")}
    found = msgspec.convert({**line, **parts}, MismatchStep)
    if len(found.edges) < 2 or any(low >= high for low, high in pairwise(found.edges)):
        raise ValueError("edges must grow")
    if any(len(group.counts) != len(found.edges) - 1 for group in found.groups):
        raise ValueError("a count a bin")
    return found


def _span(event: Mapping[str, Any]) -> Span:
    arguments = event.get("args")
    step = arguments.get("step") if isinstance(arguments, dict) else None
    times = _number(event["ts"]) / 1e6, _number(event["dur"]) / 1e6
    kinds = event.get("tid") == STEP_THREAD, event.get("cat") == CALL
    return Span(str(event["name"]), *times, step if isinstance(step, int) else None, *kinds)


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
