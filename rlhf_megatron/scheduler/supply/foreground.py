"""A step's groups are generated and scored in the step itself: trainer and engines wait for each other.

Everything follows from the prompts of the step, so a run in deterministic mode can be repeated bit for bit. The Flow is
told what happens for whoever compares, and the schedule is asked whether it would decide the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from rlhf_megatron.data.batch import PromptBatch, RolloutBatch, ScoredBatch
from rlhf_megatron.recovery.keeper import Stage
from rlhf_megatron.scheduler.schedules.base import Schedule
from rlhf_megatron.scheduler.schedules.flow import Event, Flow, GroupStage
from rlhf_megatron.scheduler.supply.base import Progress


class Makes(Protocol):
    """What a supply in the foreground asks of `stages.Stages`."""

    on_generated: Callable[[Sequence[int]], None]  # told of groups as soon as their samples have come

    def next_prompts(self, step: int) -> PromptBatch: ...

    def generate(self, step: int, prompts: PromptBatch) -> RolloutBatch: ...

    def score(self, step: int, rollout: RolloutBatch) -> ScoredBatch: ...

    @property
    def num_drawn(self) -> int:
        """Prompts of the stream so far."""

    @property
    def version(self) -> int:
        """Of the policy."""


class Foreground:
    """A `base.Supply`, with the stages next, generate and score. Without a Flow and a schedule nobody is told: the
    samples are those of a record."""

    def __init__(
        self,
        stages: Makes,
        flow: Flow | None = None,
        schedule: Schedule | None = None,
        on_events: Callable[[Sequence[Event]], None] = lambda events: None,
    ) -> None:
        self._stages = stages
        self._flow = flow
        self._schedule = schedule
        self._on_events = on_events
        self._next_number = stages.num_drawn
        if flow is not None:
            stages.on_generated = self._generated

    def __enter__(self) -> Foreground:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def take(self, step: int, stage: Stage) -> ScoredBatch:
        with stage("next"):
            prompts = self._stages.next_prompts(step)
            self._start(prompts.group_ids)
        with stage("generate"):
            rollout = self._stages.generate(step, prompts)
        with stage("score"):
            scored = self._stages.score(step, rollout)
            self._take(scored.group_ids.unique_consecutive().tolist())
        return scored

    @contextmanager
    def syncing(self) -> Iterator[None]:
        if self._flow is not None:
            self._flow.updated()
        yield
        if self._flow is not None:
            self._flow.synced(self._stages.version)
            self._hand_on()

    def progress(self) -> Progress:
        return Progress(self._stages.num_drawn)

    def take_metrics(self) -> dict[str, float]:
        return {}

    def _start(self, numbers: Sequence[int]) -> None:
        """Groups of these prompts: those that the Flow does not know, and all before them."""
        if self._flow is None or not numbers:
            return
        while (missing := max(numbers) + 1 - self._next_number) > 0:
            asked = self._schedule.num_to_start(self._flow) if self._schedule is not None else 0
            self._next_number += len(self._flow.started(min(asked, missing) or missing))

    def _generated(self, numbers: Sequence[int]) -> None:
        assert self._flow is not None
        self._start(numbers)  # of a further batch, where groups are filtered
        for number in numbers:
            self._flow.generated(number, self._flow.version)

    def _take(self, numbers: Sequence[int]) -> None:
        """These groups are the batch; the others of the step had no signal, or were not needed."""
        flow = self._flow
        if flow is None:
            return
        self._start(numbers)  # the journal had them
        for group in flow.of(GroupStage.RUNNING):
            flow.generated(group.number, flow.version)
        for group in flow.of(GroupStage.GENERATED):
            flow.scored(group.number)
        for number in [number for number in flow.in_flight if number not in numbers]:
            flow.dropped(number, "no signal" if number < numbers[-1] else "tail")
        expected = self._schedule.batch(flow) if self._schedule is not None else None
        assert expected in (None, numbers), f"the schedule wants to train on groups {expected}, the step has {numbers}"
        flow.taken(numbers)
        if not flow.num_steps_left:
            flow.ended()

    def _hand_on(self) -> None:
        assert self._flow is not None
        self._on_events(self._flow.events)
        self._flow.events.clear()
