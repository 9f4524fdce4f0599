"""What a simulation leaves behind. Passive: made by simulation.py, read by figures, picture and trace."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

from rlhf_megatron.scheduler.schedules.flow import Event

TRAINER, SCORER, ENGINES = "trainer", "scorer", "engines"


@dataclass(frozen=True)
class Span:
    """Somebody was at something."""

    row: str  # TRAINER, SCORER or ENGINES
    stage: str  # as the run names its stages
    start_s: float
    end_s: float
    step: int  # of the trainer: that it trains


@dataclass
class StepRecord:
    """One step, from the sync before it to its own."""

    step: int
    begin_s: float
    taken_s: float
    num_tokens: int  # of prompts and responses
    num_response_tokens: int
    lags: Counter[int]  # of samples: the policy's version less that of their first token
    end_s: float = math.nan  # its weights are served

    @property
    def seconds(self) -> float:
        return self.end_s - self.begin_s


@dataclass(frozen=True)
class Busy:
    """Seconds until some moment, beside which the rest is idle."""

    when: float
    trainer: float
    scorer: float
    engines: float  # of all of them together
    paused: float  # of one engine: it waited for a weight sync to end
    drops: Counter[str]  # groups, by reason; "again": begun anew
    num_started: int  # groups, each time that one was begun


@dataclass
class History:
    """What a simulation leaves. `busy[k]`: after k steps."""

    num_engines: int
    steps: list[StepRecord] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    busy: list[Busy] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)  # of the flow, where they are kept
    loads: list[list[tuple[float, int]]] = field(default_factory=list)  # of each engine, where they are kept
    slots: int = 0  # of an engine
