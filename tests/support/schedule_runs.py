"""A run of a schedule without time: a ledger, and somebody who decides which of the possible
events comes next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from rlhf_megatron.controller.scheduler.schedules import Schedule
from rlhf_megatron.controller.scheduler.schedules.group_flow import GroupFlow, GroupStage
from rlhf_megatron.controller.scheduler.schedules.schedule_protocol import StalePolicy, SyncPolicy

EventName = Literal["generate", "score", "lose", "update", "sync"]
Possible = tuple[EventName, int]  # what may happen next; the group's number, or the step


@dataclass
class Run:
    """`choose` picks the next event. `can_lose`:
    rewards of a group may tell that it has no signal.
    """

    schedule: Schedule
    flow: GroupFlow
    choose: Callable[[Sequence[Possible]], Possible]
    can_lose: int = 0  # as many groups, at most
    # a step whose sync brings no new version
    leaves_policy: Callable[[int], bool] = lambda step: False
    lags: list[list[int]] = field(default_factory=list)  # per step, of its groups
    batches: list[list[int]] = field(default_factory=list)
    num_started: int = 0
    num_lost: int = 0  # for want of signal
    num_stale: int = 0

    def go(self, max_events: int = 100_000) -> Run:
        """To the end. A state in which nothing more can happen is a dead-lock."""
        self.ask()
        for _ in range(max_events):
            possible = self.possible()
            if not possible:
                assert self.flow.num_steps_left == 0 and not self.flow.is_training, (
                    f"nothing can happen: {self.state()}"
                )
                return self
            self.happen(*self.choose(possible))
        raise AssertionError(f"no end after {max_events} events: {self.state()}")

    def possible(self) -> list[Possible]:
        flow = self.flow
        found: list[Possible] = []
        for group in flow.groups_in_flight.values():
            if group.stage is GroupStage.RUNNING:
                found.append(("generate", group.number))
            elif group.stage is GroupStage.GENERATED:
                found.append(("score", group.number))
                if self.num_lost < self.can_lose:
                    found.append(("lose", group.number))
        if flow.is_training and not flow.is_update_done:
            found.append(("update", flow.last_taken_step))
        if flow.is_update_done and (
            self.schedule.sync_policy is SyncPolicy.CONTINUE or not flow.num_running
        ):
            found.append(("sync", flow.last_taken_step))
        return found

    def happen(self, name: EventName, subject: int) -> None:
        flow = self.flow
        if name == "generate":
            flow.record_generated(subject, flow.groups_in_flight[subject].oldest_version)
        elif name == "score":
            flow.record_scored(subject)
        elif name == "lose":
            flow.record_dropped(subject, "no signal")
            self.num_lost += 1
        elif name == "update":
            flow.record_update()
        else:
            flow.record_sync(
                flow.served_version + (0 if self.leaves_policy(flow.last_taken_step) else 1)
            )
        self.ask()

    def ask(self) -> None:
        """As `Schedule` says."""
        flow = self.flow
        schedule = self.schedule
        self._drop_stale()
        if not flow.is_training and (numbers := schedule.select_batch(flow)) is not None:
            self._take(numbers)
        count = schedule.count_groups_to_start(flow)
        assert (
            not count or not flow.is_update_done or schedule.sync_policy is SyncPolicy.CONTINUE
        ), "the sync would wait for these"
        self.num_started += count
        flow.start_groups(count)
        assert schedule.count_groups_to_start(flow) == 0, "it starts what it said, once"
        early = schedule.select_groups_to_annotate(flow)
        assert schedule.annotates_early or not early
        flow.record_annotated(early)
        assert not schedule.select_groups_to_annotate(flow)

    def _drop_stale(self) -> None:
        flow = self.flow
        schedule = self.schedule
        for number in schedule.find_stale_groups(flow):
            assert flow.compute_lag(flow.groups_in_flight[number]) > schedule.max_lag
            self.num_stale += 1
            if schedule.stale_policy is StalePolicy.DROP:
                flow.record_dropped(number, "lag")
            else:
                flow.restart_group(number)
        assert not schedule.find_stale_groups(flow), "stale at once"

    def _take(self, numbers: Sequence[int]) -> None:
        flow = self.flow
        groups = [flow.groups_in_flight[number] for number in numbers]
        assert list(numbers) == sorted(set(numbers)) and len(numbers) == flow.batch_size
        assert all(group.stage is GroupStage.SCORED for group in groups)
        self.lags.append([flow.compute_lag(group) for group in groups])
        assert max(self.lags[-1]) <= self.schedule.max_lag, "the bound"
        assert flow.record_batch_taken(numbers) == flow.last_taken_step
        self.batches.append(list(numbers))
        for number in self.schedule.select_groups_to_give_up(flow):
            flow.record_dropped(number, "tail")
        if flow.num_steps_left == 0:
            flow.drop_remaining_groups()
        self._drop_stale()

    def state(self) -> str:
        return f"{self.schedule} {vars(self.flow)}"


def reasons(flow: GroupFlow) -> list[str]:
    """Why groups were dropped, in order."""
    return [event.reason for event in flow.events if event.kind == "dropped"]


def texts(flow: GroupFlow) -> list[str]:
    return [str(event) for event in flow.events]


def scripted(*script: str) -> Callable[[Sequence[Possible]], Possible]:
    """Events as "generate 0"; "done 0" is its generation and its rewards."""
    events: list[Possible] = []
    for line in script:
        name, subject = line.split()
        names = ("generate", "score") if name == "done" else (name,)
        events += [(one, int(subject)) for one in names]  # type: ignore[misc]

    def choose(possible: Sequence[Possible]) -> Possible:
        event = events.pop(0)
        assert event in possible, f"{event} is not among {possible}"
        return event

    return choose
