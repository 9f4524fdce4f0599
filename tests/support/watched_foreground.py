"""A run in the foreground that keeps a Flow, so that its events can be compared, and asks the
schedule each time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rlhf_megatron.controller.scheduler.schedules.group_flow import FlowEvent, GroupFlow, GroupStage
from rlhf_megatron.controller.scheduler.schedules.schedule_protocol import Schedule
from rlhf_megatron.controller.scheduler.supply.foreground_supply import ForegroundSupply
from rlhf_megatron.data.batch import PromptBatch, RolloutBatch, ScoredBatch


class WatchedForeground(ForegroundSupply):
    """`stages.on_generated` is told of groups as soon as their samples have come."""

    def __init__(
        self,
        stages: Any,
        flow: GroupFlow,
        schedule: Schedule,
        on_events: Callable[[Sequence[FlowEvent]], None],
    ) -> None:
        super().__init__(_Told(stages, self))  # type: ignore[arg-type]
        self._flow = flow
        self._schedule = schedule
        self._on_events = on_events
        self._next_number = stages.num_prompts_drawn
        stages.on_generated = self._generated

    @contextmanager
    def sync_window(self) -> Iterator[None]:
        self._flow.record_update()
        yield
        self._flow.record_sync(self._stages.policy_version)
        self._on_events(self._flow.events)
        self._flow.events.clear()

    def begin(self, numbers: Sequence[int]) -> None:
        """Groups of these prompts: those that the Flow does not know, and all before them."""
        while (missing := max(numbers) + 1 - self._next_number) > 0:
            asked = self._schedule.count_groups_to_start(self._flow)
            self._next_number += len(self._flow.start_groups(min(asked, missing) or missing))

    def _generated(self, numbers: Sequence[int]) -> None:
        self.begin(numbers)  # of a further batch, where groups are filtered
        for number in numbers:
            self._flow.record_generated(number, self._flow.served_version)

    def end(self, numbers: list[int]) -> None:
        """These groups are the batch; the others of the step had no signal, or were not needed."""
        flow = self._flow
        for group in flow.list_groups_in(GroupStage.GENERATED):
            flow.record_scored(group.number)
        for number in [number for number in flow.groups_in_flight if number not in numbers]:
            flow.record_dropped(number, "no signal" if number < numbers[-1] else "tail")
        expected = self._schedule.select_batch(flow)
        assert expected in (None, numbers), (
            f"the schedule wants to train on groups {expected}, the step has {numbers}"
        )
        flow.record_batch_taken(numbers)
        if not flow.num_steps_left:
            flow.drop_remaining_groups()


class _Told:
    """The stages, and what `watched` makes of them."""

    def __init__(self, stages: Any, watched: WatchedForeground) -> None:
        self._stages = stages
        self._watched = watched

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stages, name)

    def draw_prompts(self, step: int) -> PromptBatch:
        prompts: PromptBatch = self._stages.draw_prompts(step)
        self._watched.begin(prompts.group_ids)
        return prompts

    def score_rollout(self, step: int, rollout: RolloutBatch) -> ScoredBatch:
        scored: ScoredBatch = self._stages.score_rollout(step, rollout)
        self._watched.end(scored.group_ids.unique_consecutive().tolist())
        return scored
