"""What a run directory says, typed. Passive: made by files.py, read by everything else in report/."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Row:
    """A line of metrics.jsonl."""

    kind: str  # "step", "evaluation" or "warmup"
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
    kind: str  # "best", "worst" or "random"
    prompt: str
    response: str
    label: str
    source: str
    reward: float | None
    status: str
    parts: Mapping[str, float]
    finish_reason: str
    num_tokens: int | None
    policy_version: int | None
    version_spans: tuple[tuple[int, int, int], ...] = ()  # (version, start, end) each; (): all of `policy_version`
    num_cached_tokens: int | None = None  # of the prompt; None, here and below: an older run did not tell
    num_retractions: int | None = None


@dataclass(frozen=True)
class MismatchGroup:
    """Tokens of one step, policy version and finish reason. Differences are |trainer - engine| log-probs, nats.

    They are infinite where one of the two is not a number.
    """

    policy_version: int | None
    finish_reason: str
    counts: tuple[int, ...]  # a bin each; the last one has no upper end
    num_tokens: int
    mean: float
    p99: float
    max: float


@dataclass(frozen=True)
class WorstToken:
    token: str
    token_id: int | None
    position: int | None  # in the response
    trainer: float  # log-prob, nats
    engine: float
    difference: float
    context: str  # the text before it
    sample_id: str
    policy_version: int | None
    finish_reason: str


@dataclass(frozen=True)
class MismatchStep:
    """A line of mismatch.jsonl."""

    step: int
    edges: tuple[float, ...]  # nats; the first is 0
    groups: tuple[MismatchGroup, ...]
    worst: tuple[WorstToken, ...]


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
