"""A run in the foreground that keeps a Flow, so that its events can be compared, and asks the schedule each time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rlhf_megatron.data.batch import PromptBatch, RolloutBatch, ScoredBatch
from rlhf_megatron.scheduler.schedules.base import Schedule
from rlhf_megatron.scheduler.schedules.flow import Event, Flow, GroupStage
from rlhf_megatron.scheduler.supply.foreground import Foreground


class WatchedForeground(Foreground):
    """`stages.on_generated` is told of groups as soon as their samples have come."""

    def __init__(
        self, stages: Any, flow: Flow, schedule: Schedule, on_events: Callable[[Sequence[Event]], None]
    ) -> None:
        super().__init__(_Told(stages, self))  # type: ignore[arg-type]
        self._flow, self._schedule, self._on_events = flow, schedule, on_events
        self._next_number = stages.num_drawn
        stages.on_generated = self._generated

    @contextmanager
    def syncing(self) -> Iterator[None]:
        self._flow.updated()
        yield
        self._flow.synced(self._stages.version)
        self._on_events(self._flow.events)
        self._flow.events.clear()

    def begin(self, numbers: Sequence[int]) -> None:
        """Groups of these prompts: those that the Flow does not know, and all before them."""
        while (missing := max(numbers) + 1 - self._next_number) > 0:
            asked = self._schedule.num_to_start(self._flow)
            self._next_number += len(self._flow.started(min(asked, missing) or missing))

    def _generated(self, numbers: Sequence[int]) -> None:
        self.begin(numbers)  # of a further batch, where groups are filtered
        for number in numbers:
            self._flow.generated(number, self._flow.version)

    def end(self, numbers: list[int]) -> None:
        """These groups are the batch; the others of the step had no signal, or were not needed."""
        flow = self._flow
        for group in flow.of(GroupStage.GENERATED):
            flow.scored(group.number)
        for number in [number for number in flow.in_flight if number not in numbers]:
            flow.dropped(number, "no signal" if number < numbers[-1] else "tail")
        expected = self._schedule.batch(flow)
        assert expected in (None, numbers), f"the schedule wants to train on groups {expected}, the step has {numbers}"
        flow.taken(numbers)
        if not flow.num_steps_left:
            flow.ended()


class _Told:
    """The stages, and what `watched` makes of them."""

    def __init__(self, stages: Any, watched: WatchedForeground) -> None:
        self._stages, self._watched = stages, watched

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stages, name)

    def next_prompts(self, step: int) -> PromptBatch:
        prompts: PromptBatch = self._stages.next_prompts(step)
        self._watched.begin(prompts.group_ids)
        return prompts

    def score(self, step: int, rollout: RolloutBatch) -> ScoredBatch:
        scored: ScoredBatch = self._stages.score(step, rollout)
        self._watched.end(scored.group_ids.unique_consecutive().tolist())
        return scored
