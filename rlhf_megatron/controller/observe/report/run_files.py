"""What a run directory says, typed, and how it is read. The writers of samples.jsonl and
mismatch.jsonl use the types.

Broken and cut-off lines are left out with a note; only metrics.jsonl must be there.
"""

from __future__ import annotations

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
from rlhf_megatron.config.yaml_nodes import convert_to_plain, parse_yaml
from rlhf_megatron.controller.observe.line_file import (
    MAX_NUMBER,
    drop_unusable_numbers,
    is_usable_number,
    parse_json_text,
    read_attempt_lines,
)
from rlhf_megatron.controller.observe.metrics.former_metric_names import rename_former_metrics

Record = TypeVar("Record")
METRICS_FILE = "metrics.jsonl"
SUMMARY_FILE = "summary.json"
CONFIG_FILE = "config.yaml"
TRACE_FILE = "trace.json"
SAMPLES_FILE = "samples.jsonl"
HELD_OUT_SAMPLES_FILE = "held_out_samples.jsonl"
MISMATCH_FILE = "mismatch.jsonl"
ROW_KINDS = ("step", "evaluation", "warmup")
STEP_THREAD = 0  # of trace.json: whole steps
CALL_CATEGORY = "call"  # category of its events that are calls to hosts
MAX_STEP = 1 << 53  # beyond it charts cannot tell steps apart
MAX_LOGS = 4
MAX_LOG_LINES = 24
_LOG_ERROR_PATTERN = re.compile(r"^\S+ \S+ (?:\[[^\]]*\] )?(?:ERROR|CRITICAL) ")
_LOG_LINE_PATTERN = re.compile(r"^\d{4}-\d\d-\d\d \d\d:")
_AFTERMATH_TEXT = " ended in "  # what a host logs when its controller is gone: no cause


@dataclass(frozen=True)
class MetricRow:
    """A line of metrics.jsonl."""

    kind: str  # one of KINDS
    step: int
    run_seconds: float  # since the run began
    metrics: Mapping[str, float]  # may hold values that are not finite


@dataclass(frozen=True)
class TraceSpan:
    """A complete event of trace.json."""

    name: str
    start_s: float  # since the first event
    seconds: float
    step: int | None
    is_whole_step: bool  # a whole step, not a part of one
    is_host_call: bool  # of hosts by the controller, inside of a stage


@dataclass(frozen=True)
class TalkPiece:
    """A stretch of an episode behind its first prompt: a turn of the policy, or what the
    environment and the template put before the next one.
    """

    text: str  # with special tokens
    is_sampled: bool  # by the policy: it trains
    reward: float | None = None  # of a turn, where turns have rewards


@dataclass(frozen=True)
class LoggedSample:
    """A line of samples.jsonl. Prompt, response and label are text that a model or a
    stranger wrote.
    """

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
    # (version, start, end) each; (): all of `policy_version`
    version_spans: tuple[tuple[int, int, int], ...] = ()
    # of the prompt; None, here and below: an older run did not tell
    num_cached_tokens: int | None = None
    num_retractions: int | None = None
    # of an episode with an environment; None and () where a sample is one answer
    episode_end: str | None = None
    talk: tuple[TalkPiece, ...] = ()


@dataclass(frozen=True)
class HeldOutSample:
    """A line of held_out_samples.jsonl: the first sample of a held-out item in one evaluation. An
    item has the same number in every evaluation.
    """

    step: int  # after which the evaluation was; 0: before the first
    source: str  # name of the evaluation set
    item: int  # index in the set
    prompt: str
    response: str
    label: str
    score: float | None  # main reward; None, here and below, where the status is masked
    reward: float | None  # whole reward
    status: str
    parts: Mapping[str, float | None]  # named components of the reward
    num_tokens: int  # of the response


@dataclass(frozen=True)
class MismatchGroup:
    """Tokens of one step, policy version and finish reason. Differences are |trainer - engine|
    log-probs, nats.

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

    run_dir: Path
    steps: tuple[MetricRow, ...]  # in the order of steps, each once
    evaluations: tuple[MetricRow, ...]
    warmups: tuple[MetricRow, ...]
    summary: Mapping[str, Any] | None  # None: the run did not finish
    config: Mapping[str, Any] | None
    config_text: str
    spans: tuple[TraceSpan, ...] = ()
    samples: tuple[LoggedSample, ...] = ()
    held_out_samples: tuple[HeldOutSample, ...] = ()
    mismatch_steps: tuple[MismatchStep, ...] = ()
    # what ranks and engines logged as errors, the first of each log
    log_errors: tuple[str, ...] = ()
    age_s: float = 0.0  # since the last write to metrics.jsonl
    attempts: tuple[Mapping[str, Any], ...] = ()  # lines of attempts.jsonl
    notes: tuple[str, ...] = ()  # what was left out of which file
    # file name -> why there is nothing from it
    absence_reasons: Mapping[str, str] = field(default_factory=dict)
    # the section `lock_section` of its lock file
    lock_section: Mapping[str, Any] = field(default_factory=dict)


def read_run_files(run_dir: Path) -> RunFiles:
    """Read all files of a run directory that a report needs. Raise ValueError where there is no run
    to report.
    """
    _check_run_dir(run_dir)
    reader = _RunDirReader(run_dir)
    rows = reader.read_json_lines(METRICS_FILE, _parse_metric_row)
    if not rows:
        raise ValueError(
            f"{run_dir / METRICS_FILE} has no complete line; a report needs the first step,"
            " evaluation or warm-up step: wait for it, or read the messages of the run that did"
            " not get so far."
        )
    config_text = reader.read_text(CONFIG_FILE) or ""
    return RunFiles(
        run_dir=run_dir,
        steps=reader.select_last_row_of_each_step("step", rows),
        evaluations=reader.select_last_row_of_each_step("evaluation", rows),
        warmups=reader.select_last_row_of_each_step("warmup", rows),
        summary=reader.read_json_object(SUMMARY_FILE),
        config=reader.parse_config(config_text),
        config_text=config_text,
        spans=reader.read_trace_spans(),
        samples=tuple(
            reader.read_json_lines(SAMPLES_FILE, lambda line: msgspec.convert(line, LoggedSample))
        ),
        held_out_samples=_drop_repeated_held_out_samples(
            reader.read_json_lines(
                HELD_OUT_SAMPLES_FILE, lambda line: msgspec.convert(line, HeldOutSample)
            )
        ),
        mismatch_steps=tuple(reader.read_json_lines(MISMATCH_FILE, _parse_mismatch_step)),
        log_errors=_collect_log_errors(run_dir),
        attempts=tuple(read_attempt_lines(run_dir)),
        age_s=max(0.0, time.time() - (run_dir / METRICS_FILE).stat().st_mtime),
        notes=tuple(reader.notes),
        absence_reasons=reader.absence_reasons,
        lock_section=reader.read_lock_section(),
    )


def _check_run_dir(run_dir: Path) -> None:
    """Raise ValueError, with a hint, where the directory is not that of a run with
    metrics.jsonl.
    """
    if not run_dir.is_dir():
        what = "is a file" if run_dir.exists() else "is not there"
        raise ValueError(f"{run_dir} {what}; give the directory of a run, such as runs/quickstart.")
    if not (run_dir / METRICS_FILE).exists():
        if (run_dir / CONFIG_FILE).exists():
            raise ValueError(
                f"{run_dir} has no {METRICS_FILE}; a report is made of it: add jsonl to"
                " trainer.logger (the default has it), or wait until the run has begun."
            )
        inside = sorted(p.parent.name for p in run_dir.glob(f"*/{METRICS_FILE}"))
        fix = f"; below it are {', '.join(inside[:5])}" if inside else ""
        raise ValueError(
            f"{run_dir} is not the directory of a run (no {METRICS_FILE}, no {CONFIG_FILE}){fix}."
        )


class _RunDirReader:
    """Reads files of one directory and keeps what is to be said about them."""

    def __init__(self, run_dir: Path) -> None:
        """Begin with no notes; nothing is read yet."""
        self.run_dir = run_dir
        self.notes: list[str] = []
        self.absence_reasons: dict[str, str] = {}

    def read_text(self, file_name: str) -> str | None:
        """Read a file; None, with the reason kept, where it does not exist or cannot be read. Bytes
        that are no UTF-8 become the replacement character. Raise ValueError where metrics.jsonl
        cannot be read.
        """
        path = self.run_dir / file_name
        if not path.exists():
            self.absence_reasons[file_name] = (
                f"this run wrote no {file_name}: it is older, or was replayed"
            )
            return None
        try:
            return path.read_bytes().decode("utf-8", errors="replace")
        except OSError as error:
            if file_name == METRICS_FILE:
                raise ValueError(
                    f"cannot read {path}: {error.strerror}; make it a readable file."
                ) from error
            self.absence_reasons[file_name] = f"{file_name} cannot be read: {error.strerror}"
            return None

    def read_json_lines(
        self, file_name: str, convert_line: Callable[[Mapping[str, Any]], Record]
    ) -> list[Record]:
        """Convert each line of a file; note lines that cannot be read, and leave them out. None
        stands for numbers that no figure can be, which are noted too. `convert_line` raises
        KeyError, TypeError, ValueError or OverflowError for lines of another form.
        """
        text = self.read_text(file_name)
        if text is None:
            return []
        records: list[Record] = []
        broken_lines: list[int] = []
        unusable_places: list[str] = []
        lines = text.split("\n")
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            names: list[str] = []
            try:
                value = drop_unusable_numbers(parse_json_text(line), "", names)
                records.append(convert_line(_require_mapping(value)))
                unusable_places += [f"{name} in line {number}" for name in names]
            except (KeyError, TypeError, ValueError, OverflowError):
                broken_lines.append(number)
        if broken_lines and broken_lines[-1] == len(lines):  # a complete line has a line break
            broken_lines.pop()
            self.notes.append(f"{file_name}: the last line is cut off and left out")
        if broken_lines:
            listed = ", ".join(map(str, broken_lines[:5])) + (
                " ..." if len(broken_lines) > 5 else ""
            )
            self.notes.append(
                f"{file_name}: {len(broken_lines)} line(s) left out that cannot be read"
                f" (line {listed})"
            )
        self.note_unusable_numbers(file_name, unusable_places)
        if not records:
            self.absence_reasons[file_name] = f"{file_name} has no complete line"
        return records

    def note_unusable_numbers(self, file_name: str, places: Sequence[str]) -> None:
        """Note the count of the numbers of a file that are left out, and the places of the
        first.
        """
        if places:
            listed = ", ".join(places[:3]) + (" ..." if len(places) > 3 else "")
            self.notes.append(
                f"{file_name}: {len(places)} number(s) left out that are not finite or beyond"
                f" {MAX_NUMBER:g} ({listed})"
            )

    def select_last_row_of_each_step(
        self, row_kind: str, rows: Sequence[MetricRow]
    ) -> tuple[MetricRow, ...]:
        """Return the rows of a kind in the order of steps; for a step that a resumed run did again,
        the last row.
        """
        rows = [row for row in rows if row.kind == row_kind]
        by_step = {row.step: row for row in rows}
        if len(by_step) < len(rows):
            self.notes.append(
                f"{METRICS_FILE}: {len(rows) - len(by_step)} {row_kind} line(s) were written again"
                " by a resumed run; the last counts"
            )
        return tuple(by_step[step] for step in sorted(by_step))

    def read_json_object(self, file_name: str) -> Mapping[str, Any] | None:
        """Read a file with a JSON object; None, with a note, where it cannot be read."""
        text = self.read_text(file_name)
        if text is None:
            return None
        unusable_places: list[str] = []
        try:
            value = drop_unusable_numbers(parse_json_text(text), "", unusable_places)
            self.note_unusable_numbers(file_name, unusable_places)
            return _require_mapping(value)
        except (TypeError, ValueError):
            self.notes.append(f"{file_name}: not a JSON object; left out")
            self.absence_reasons[file_name] = f"{file_name} cannot be read"
            return None

    def read_lock_section(self) -> Mapping[str, Any]:
        """Return the lock section of config.lock.yaml; {} where there is none, as in an
        older run.
        """
        path = self.run_dir / LOCK_FILE
        try:
            found = convert_to_plain(parse_yaml(path.read_text(encoding="utf-8"), LOCK_FILE, 0))
        except (OSError, UnicodeDecodeError, ConfigError):
            return {}
        lock = found.get(LOCK) if isinstance(found, dict) else None
        return lock if isinstance(lock, dict) else {}

    def parse_config(self, text: str) -> Mapping[str, Any] | None:
        """Return the run's configuration; None where it is missing or, with a note, no valid
        YAML.
        """
        if CONFIG_FILE in self.absence_reasons:
            return None
        try:
            return _require_mapping(convert_to_plain(parse_yaml(text, CONFIG_FILE, 0)))
        except (ConfigError, TypeError):
            self.notes.append(f"{CONFIG_FILE}: not valid YAML; shown as text only")
            return None

    def read_trace_spans(self) -> tuple[TraceSpan, ...]:
        """Return the complete events of trace.json in the order of their begin. The closing bracket
        may be missing.
        """
        text = self.read_text(TRACE_FILE)
        if text is None:
            return ()
        spans: list[TraceSpan] = []
        num_broken = 0
        for line in text.splitlines():
            line = line.strip().removeprefix("[").removesuffix("]").strip().rstrip(",")
            try:
                event = _require_mapping(parse_json_text(line)) if line else {}
                if event.get("ph") == "X":
                    spans.append(_parse_trace_span(event))
            except (KeyError, TypeError, ValueError):
                num_broken += 1
        if num_broken:
            self.notes.append(
                f"{TRACE_FILE}: {num_broken} event(s) left out that are cut off or cannot be read"
            )
        if not spans:
            self.absence_reasons[TRACE_FILE] = f"{TRACE_FILE} has no complete event"
            return ()
        begin = min(span.start_s for span in spans)
        shifted = [replace(span, start_s=span.start_s - begin) for span in spans]
        return tuple(sorted(shifted, key=lambda span: span.start_s))


def _require_mapping(value: Any) -> Mapping[str, Any]:
    """Return a value that is a mapping. Raise TypeError for another one."""
    if not isinstance(value, dict):
        raise TypeError("not an object")
    return value


def _require_number(value: Any) -> float:
    """Return a value that is a usable number, as a float. Raise TypeError for another one."""
    if not is_usable_number(value):
        raise TypeError("not a number, or not one that a figure can be")
    return float(value)


def _require_step(value: Any) -> int:
    """Return a value that is the number of a step. Raise TypeError for another one."""
    step = int(_require_number(value))
    if abs(step) > MAX_STEP:
        raise TypeError("no step has such a number")
    return step


def _parse_metric_row(line: Mapping[str, Any]) -> MetricRow:
    """Return a row of metrics.jsonl. Its metrics are the entries that are numbers; null means a
    number that is not finite, or one that was left out. Metrics that had another name in an earlier
    version have the name of today.
    """
    if line["kind"] not in ROW_KINDS:
        raise ValueError("no kind of line that is known")
    others = {
        key: value
        for key, value in rename_former_metrics(line).items()
        if key not in ("kind", "step", "seconds")
    }
    metrics = {
        key: math.nan if value is None else float(value)
        for key, value in others.items()
        if value is None or (isinstance(value, int | float) and not isinstance(value, bool))
    }
    seconds = line.get("seconds")
    return MetricRow(
        line["kind"],
        _require_step(line["step"]),
        0.0 if seconds is None else _require_number(seconds),
        metrics,
    )


def _parse_mismatch_step(line: Mapping[str, Any]) -> MismatchStep:
    """Return a step of mismatch.jsonl. null means a log-prob that is not a number, or an infinite
    difference.
    """
    without = {"trainer": math.nan, "engine": math.nan} | dict.fromkeys(
        ("mean", "p99", "max", "difference"), math.inf
    )

    def replace_nulls(entry: Any) -> dict[str, Any]:
        """Return the entry with numbers in place of null."""
        return {
            key: without.get(key) if value is None else value
            for key, value in _require_mapping(entry).items()
        }

    parts = {name: [replace_nulls(entry) for entry in line[name]] for name in ("groups", "worst")}
    found = msgspec.convert({**line, **parts}, MismatchStep)
    if len(found.edges) < 2 or any(low >= high for low, high in pairwise(found.edges)):
        raise ValueError("edges must grow")
    if any(len(group.counts) != len(found.edges) - 1 for group in found.groups):
        raise ValueError("a count a bin")
    return found


def _parse_trace_span(event: Mapping[str, Any]) -> TraceSpan:
    """Return a complete event of trace.json, its times in seconds."""
    arguments = event.get("args")
    step = arguments.get("step") if isinstance(arguments, dict) else None
    start_s = _require_number(event["ts"]) / 1e6
    seconds = _require_number(event["dur"]) / 1e6
    return TraceSpan(
        str(event["name"]),
        start_s,
        seconds,
        step if isinstance(step, int) else None,
        is_whole_step=event.get("tid") == STEP_THREAD,
        is_host_call=event.get("cat") == CALL_CATEGORY,
    )


def _drop_repeated_held_out_samples(
    samples: Sequence[HeldOutSample],
) -> tuple[HeldOutSample, ...]:
    """Return the samples in the order of steps; of an evaluation that a resumed run did again, the
    last.
    """
    by_place = {(sample.step, sample.source, sample.item): sample for sample in samples}
    return tuple(sorted(by_place.values(), key=lambda sample: sample.step))


def _collect_log_errors(run_dir: Path) -> tuple[str, ...]:
    """Return the first error of each log, with the lines that follow it (a traceback), for at most
    MAX_LOGS logs.
    """
    found = []
    for log in sorted([*run_dir.glob("logs/*.log"), *run_dir.glob("engines/*.log")]):
        try:
            lines = log.read_bytes().decode("utf-8", errors="replace").splitlines()
        except OSError:
            continue
        for i, line in enumerate(lines):
            if _LOG_ERROR_PATTERN.match(line) and _AFTERMATH_TEXT not in line:
                end = next(
                    (j for j in range(i + 1, len(lines)) if _LOG_LINE_PATTERN.match(lines[j])),
                    len(lines),
                )
                block = lines[i:end]
                if len(block) > MAX_LOG_LINES:
                    block = [*block[:2], "...", *block[3 - MAX_LOG_LINES :]]
                found.append(f"{log.relative_to(run_dir)}\n" + "\n".join(block))
                break
    return tuple(found[:MAX_LOGS])
