"""Where the groups of a run are, and what has happened: the ledger that schedules decide by.

A group is a prompt with its samples. It goes

    started -> generated -> scored -> taken into a step's batch -> (updated, synced)

or leaves on the way: dropped. The run and the simulator both keep a Flow and tell it what happens,
in that order; a schedule reads it and changes nothing. Nothing here knows time, tokens or threads.
What schedules ask at every event costs no walk over the groups: a run may have ten
thousand in flight.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

EventKind = Literal[
    "started", "generated", "scored", "annotated", "dropped", "taken", "updated", "synced"
]
DropReason = Literal["lag", "no signal", "tail", "end"]


class GroupStage(enum.Enum):
    RUNNING = "is generated"
    GENERATED = "waits for its rewards"
    SCORED = "can train"


@dataclass
class FlowGroup:
    """One that is in flight: neither taken nor dropped."""

    # order in which groups were started, from 0 on; one that is generated anew keeps its number
    number: int
    # of its tokens; while it runs, the version that was served when it was started
    oldest_version: int
    stage: GroupStage = GroupStage.RUNNING
    is_annotated: bool = False  # it has the log-probs of the policy that trains next


@dataclass(frozen=True)
class FlowEvent:
    """One line of the ledger. `subject_number`: the group's number, or the step of taken,
    updated and synced.
    """

    kind: EventKind
    subject_number: int
    reason: str = ""

    def __str__(self) -> str:
        """Return the event as text, such as "dropped group 7 (lag)"."""
        what = "step" if self.kind in ("taken", "updated", "synced") else "group"
        return f"{self.kind} {what} {self.subject_number}" + (
            f" ({self.reason})" if self.reason else ""
        )


class GroupFlow:
    """`batch_size`: groups of a step. `served_version`: of the weights that engines serve.
    `num_steps_done`: before this run.
    """

    def __init__(
        self,
        batch_size: int,
        last_step: int,
        served_version: int,
        num_steps_done: int = 0,
        next_group_number: int = 0,
    ) -> None:
        """Begin without groups in flight. `batch_size`: groups of a step; `served_version`: version
        of the weights that the engines serve; `num_steps_done`: steps before this process.
        """
        assert batch_size >= 1, "a step needs a group"
        self.batch_size = batch_size
        self.last_step = last_step
        self.served_version = served_version
        self.last_taken_step = num_steps_done  # the last that was taken: it is trained, or done
        self.is_training = False  # a batch was taken and its weights are not yet served
        self.is_update_done = False  # of that batch: the update is done, the sync is not
        # by number, in the order in which they were started
        self.groups_in_flight: dict[int, FlowGroup] = {}
        # numbers of those that can train, in the order in which they were scored
        self.scored_order: list[int] = []
        self.events: list[FlowEvent] = []  # who keeps the ledger may empty it
        self._next_group_number = next_group_number
        self._num_running = 0
        # groups in flight by their oldest version; no zeros
        self._num_by_version: Counter[int] = Counter()
        self._num_scored_by_version: Counter[int] = Counter()  # those of them that can train
        # numbers of those that can train and lack log-probs, in their order
        self._unannotated_numbers: dict[int, None] = {}

    # What schedules read

    def list_groups_in(self, *stages: GroupStage) -> list[FlowGroup]:
        """Return the groups in flight that are in one of these stages, in the order in which they
        were started.
        """
        return [group for group in self.groups_in_flight.values() if group.stage in stages]

    @property
    def num_running(self) -> int:
        """Return the number of groups that are being generated."""
        return self._num_running

    @property
    def num_by_oldest_version(self) -> dict[int, int]:
        """Return the number of groups in flight by the oldest version of their tokens, the oldest
        version first.
        """
        return dict(sorted(self._num_by_version.items()))

    def count_scored(self, oldest_version: int) -> int:
        """Return the number of scored groups whose oldest tokens are of this version."""
        return self._num_scored_by_version[oldest_version]

    @property
    def unannotated_numbers(self) -> list[int]:
        """Return the numbers of the scored groups that lack log-probs, in the order in which they
        were scored.
        """
        return list(self._unannotated_numbers)

    @property
    def num_steps_left(self) -> int:
        """Return the number of steps whose batch has not been taken yet."""
        return max(0, self.last_step - self.last_taken_step)

    @property
    def scored_groups(self) -> list[FlowGroup]:
        """Return the groups that can train, in the order in which they were scored."""
        return [self.groups_in_flight[number] for number in self.scored_order]

    @property
    def training_version(self) -> int:
        """Return the version of the policy that trains the next batch: the served version, or one
        more while a step is trained.
        """
        return self.served_version + (1 if self.is_training else 0)

    def compute_lag(self, group: FlowGroup) -> int:
        """Return the lag of a group if it were trained next: the version of the policy that trains
        the next batch, less the oldest version of the group's tokens.
        """
        return self.training_version - group.oldest_version

    @property
    def num_groups_needed(self) -> int:
        """Return the number of groups that the steps left need beside the groups in flight. No
        schedule starts more, unless it counts on losing some.
        """
        return max(0, self.num_steps_left * self.batch_size - len(self.groups_in_flight))

    # What happens

    def start_groups(self, num_groups: int) -> list[int]:
        """Start this many new groups, from the weights that are served, and return their
        numbers.
        """
        numbers = list(range(self._next_group_number, self._next_group_number + num_groups))
        self._next_group_number += num_groups
        for number in numbers:
            self._put_group(FlowGroup(number, self.served_version))
            self._append_event("started", number)
        return numbers

    def restart_group(self, group_number: int) -> None:
        """Record that a group in flight is generated anew from the weights that are served. Do not
        record later events of its former samples (generated, scored).
        """
        self._put_group(FlowGroup(group_number, self.served_version))
        self._append_event("started", group_number, "again")

    def add_generated_group(self, group_number: int, oldest_version: int) -> None:
        """Add a group that a former process has generated. No event is recorded."""
        self._put_group(FlowGroup(group_number, oldest_version, GroupStage.GENERATED))
        self._next_group_number = max(self._next_group_number, group_number + 1)

    def record_generated(self, group_number: int, oldest_version: int) -> None:
        """Record that a running group is generated. `oldest_version` is the oldest version of its
        tokens.
        """
        group = self.groups_in_flight[group_number]
        assert group.stage is GroupStage.RUNNING, f"group {group_number} {group.stage.value}"
        self._put_group(FlowGroup(group_number, oldest_version, GroupStage.GENERATED))
        self._append_event("generated", group_number)

    def record_scored(self, group_number: int) -> None:
        """Record that a generated group has its rewards, and can train."""
        group = self.groups_in_flight[group_number]
        assert group.stage is GroupStage.GENERATED, f"group {group_number} {group.stage.value}"
        group.stage = GroupStage.SCORED
        self.scored_order.append(group_number)
        self._num_scored_by_version[group.oldest_version] += 1
        self._unannotated_numbers[group_number] = None
        self._append_event("scored", group_number)

    def record_annotated(self, group_numbers: Iterable[int]) -> None:
        """Record that these groups have log-probs, which hold until the next sync."""
        for number in group_numbers:
            self.groups_in_flight[number].is_annotated = True
            self._unannotated_numbers.pop(number, None)
            self._append_event("annotated", number)

    def record_dropped(self, group_number: int, reason: DropReason) -> None:
        """Record that a group will not train, and remove it from the groups in flight. Another may
        be started in its place.
        """
        self._remove_group(group_number)
        self._append_event("dropped", group_number, reason)

    def record_batch_taken(self, group_numbers: Sequence[int]) -> int:
        """Take these scored groups as the batch of the next step, and return the number of that
        step. The step before must be synced.
        """
        assert not self.is_training, f"step {self.last_taken_step} is not done"
        for number in group_numbers:
            assert self.groups_in_flight[number].stage is GroupStage.SCORED, (
                f"group {number} cannot train yet"
            )
            self._remove_group(number)
        self.last_taken_step += 1
        self.is_training = True
        self.is_update_done = False
        self._append_event("taken", self.last_taken_step)
        return self.last_taken_step

    def drop_remaining_groups(self) -> list[int]:
        """Drop all groups in flight after the last batch was taken, and return their numbers."""
        assert self.num_steps_left == 0, f"{self.num_steps_left} steps are still to be taken"
        numbers = list(self.groups_in_flight)
        for number in numbers:
            self.record_dropped(number, "end")
        return numbers

    def record_update(self) -> None:
        """Record that the update of the step in training is done; its sync is still to come."""
        assert self.is_training and not self.is_update_done
        self.is_update_done = True
        self._append_event("updated", self.last_taken_step)

    def record_sync(self, new_version: int) -> None:
        """Record that the engines serve the weights after the step's update, which ends the step
        and makes the groups' log-probs out of date. `new_version` is the same as before where the
        step left the policy unchanged.
        """
        assert self.is_update_done and new_version >= self.served_version
        for group in self.groups_in_flight.values():  # also then: a critic may have learnt alone
            group.is_annotated = False
        self._unannotated_numbers = dict.fromkeys(self.scored_order)
        self.served_version = new_version
        self.is_training = False
        self.is_update_done = False
        self._append_event("synced", self.last_taken_step)

    def _put_group(self, group: FlowGroup) -> None:
        """Add a group, in place of the group with the same number, if there is one."""
        if group.number in self.groups_in_flight:
            self._remove_from_counts(self.groups_in_flight[group.number])
        self.groups_in_flight[group.number] = group
        self._num_by_version[group.oldest_version] += 1
        self._num_running += group.stage is GroupStage.RUNNING

    def _remove_group(self, group_number: int) -> None:
        """Remove a group from the groups in flight and from all counts."""
        self._remove_from_counts(self.groups_in_flight.pop(group_number))

    def _remove_from_counts(self, group: FlowGroup) -> None:
        """Remove a group from the counts and the lists of scored groups, but not from the groups in
        flight.
        """
        self._num_running -= group.stage is GroupStage.RUNNING
        self._num_by_version[group.oldest_version] -= 1
        if self._num_by_version[group.oldest_version] == 0:
            del self._num_by_version[group.oldest_version]
        if group.stage is GroupStage.SCORED:
            self.scored_order.remove(group.number)
            self._num_scored_by_version[group.oldest_version] -= 1
            self._unannotated_numbers.pop(group.number, None)

    def _append_event(self, kind: EventKind, subject_number: int, reason: str = "") -> None:
        """Append an event to the log; `subject_number` is a group or a step."""
        self.events.append(FlowEvent(kind, subject_number, reason))
