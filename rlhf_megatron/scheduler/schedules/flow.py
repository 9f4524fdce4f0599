"""Where the groups of a run are, and what has happened: the ledger that schedules decide by.

A group is a prompt with its samples. It goes

    started -> generated -> scored -> taken into a step's batch -> (updated, synced)

or leaves on the way: dropped. The run and the simulator both keep a Flow and tell it what happens, in that order; a
schedule reads it and changes nothing. Nothing here knows time, tokens or threads. What schedules ask at
every event costs no walk over the groups: a run may have ten thousand in flight.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

EventKind = Literal["started", "generated", "scored", "annotated", "dropped", "taken", "updated", "synced"]
DropReason = Literal["lag", "no signal", "tail", "end"]


class GroupStage(enum.Enum):
    RUNNING = "is generated"
    GENERATED = "waits for its rewards"
    SCORED = "can train"


@dataclass
class Group:
    """One that is in flight: neither taken nor dropped."""

    number: int  # order in which groups were started, from 0 on; one that is generated anew keeps its number
    oldest_version: int  # of its tokens; while it runs, the version that was served when it was started
    stage: GroupStage = GroupStage.RUNNING
    is_annotated: bool = False  # it has the log-probs of the policy that trains next


@dataclass(frozen=True)
class Event:
    """One line of the ledger. `subject`: the group's number, or the step of taken, updated and synced."""

    kind: EventKind
    subject: int
    reason: str = ""

    def __str__(self) -> str:
        what = "step" if self.kind in ("taken", "updated", "synced") else "group"
        return f"{self.kind} {what} {self.subject}" + (f" ({self.reason})" if self.reason else "")


class Flow:
    """`batch_size`: groups of a step. `version`: of the weights that engines serve. `steps_done`: before this run."""

    def __init__(
        self, batch_size: int, last_step: int, version: int, steps_done: int = 0, next_number: int = 0
    ) -> None:
        assert batch_size >= 1, "a step needs a group"
        self.batch_size = batch_size
        self.last_step = last_step
        self.version = version
        self.step = steps_done  # the last that was taken: it is trained, or done
        self.is_training = False  # a batch was taken and its weights are not yet served
        self.is_updated = False  # of that batch: the update is done, the sync is not
        self.in_flight: dict[int, Group] = {}  # by number, in the order in which they were started
        self.scored_order: list[int] = []  # numbers of those that can train, in the order in which they were scored
        self.events: list[Event] = []  # who keeps the ledger may empty it
        self._next_number = next_number
        self._num_running = 0
        self._of_version: Counter[int] = Counter()  # groups in flight by their oldest version; no zeros
        self._scored_of_version: Counter[int] = Counter()  # those of them that can train
        self._bare: dict[int, None] = {}  # numbers of those that can train and lack log-probs, in their order

    # What schedules read

    def of(self, *stages: GroupStage) -> list[Group]:
        return [group for group in self.in_flight.values() if group.stage in stages]

    @property
    def num_running(self) -> int:
        return self._num_running

    @property
    def num_of_version(self) -> dict[int, int]:
        """Groups in flight by the oldest version of their tokens, the oldest first."""
        return dict(sorted(self._of_version.items()))

    def num_scored(self, oldest_version: int) -> int:
        """Groups that can train whose oldest tokens are of this version."""
        return self._scored_of_version[oldest_version]

    @property
    def not_annotated(self) -> list[int]:
        """Groups that can train and lack log-probs, in the order in which they were scored."""
        return list(self._bare)

    @property
    def num_steps_left(self) -> int:
        """Steps whose batch is still to be taken."""
        return max(0, self.last_step - self.step)

    @property
    def ready(self) -> list[Group]:
        """Groups that can train, in the order in which they were scored."""
        return [self.in_flight[number] for number in self.scored_order]

    @property
    def training_version(self) -> int:
        """The version of the policy that trains the next batch: one more than is served while a step is trained."""
        return self.version + (1 if self.is_training else 0)

    def lag(self, group: Group) -> int:
        """Return the lag of a group if it were trained next: that policy's version less the oldest of its tokens."""
        return self.training_version - group.oldest_version

    @property
    def num_wanted(self) -> int:
        """Groups that the steps still to be taken need beside those in flight. No schedule starts more, unless it
        counts on losing some."""
        return max(0, self.num_steps_left * self.batch_size - len(self.in_flight))

    # What happens

    def started(self, count: int) -> list[int]:
        """Numbers of the groups that are started now, from the weights that are served."""
        numbers = list(range(self._next_number, self._next_number + count))
        self._next_number += count
        for number in numbers:
            self._put(Group(number, self.version))
            self._log("started", number)
        return numbers

    def started_again(self, number: int) -> None:
        """A group in flight is generated anew from the weights that are served. What its former samples still bring
        (they finish, are scored) is not told any more."""
        self._put(Group(number, self.version))
        self._log("started", number, "again")

    def known(self, number: int, oldest_version: int) -> None:
        """A group that a former process has generated."""
        self._put(Group(number, oldest_version, GroupStage.GENERATED))
        self._next_number = max(self._next_number, number + 1)

    def generated(self, number: int, oldest_version: int) -> None:
        group = self.in_flight[number]
        assert group.stage is GroupStage.RUNNING, f"group {number} {group.stage.value}"
        self._put(Group(number, oldest_version, GroupStage.GENERATED))
        self._log("generated", number)

    def scored(self, number: int) -> None:
        group = self.in_flight[number]
        assert group.stage is GroupStage.GENERATED, f"group {number} {group.stage.value}"
        group.stage = GroupStage.SCORED
        self.scored_order.append(number)
        self._scored_of_version[group.oldest_version] += 1
        self._bare[number] = None
        self._log("scored", number)

    def annotated(self, numbers: Iterable[int]) -> None:
        """These have their log-probs; the next sync makes them old."""
        for number in numbers:
            self.in_flight[number].is_annotated = True
            self._bare.pop(number, None)
            self._log("annotated", number)

    def dropped(self, number: int, reason: DropReason) -> None:
        """Note that a group will not train. Another may be started in its place."""
        self._remove(number)
        self._log("dropped", number, reason)

    def taken(self, numbers: Sequence[int]) -> int:
        """These are the batch of the next step; returns that step."""
        assert not self.is_training, f"step {self.step} is not done"
        for number in numbers:
            assert self.in_flight[number].stage is GroupStage.SCORED, f"group {number} cannot train yet"
            self._remove(number)
        self.step += 1
        self.is_training, self.is_updated = True, False
        self._log("taken", self.step)
        return self.step

    def ended(self) -> list[int]:
        """The last batch was taken: what is in flight is dropped. Returns its numbers."""
        assert self.num_steps_left == 0, f"{self.num_steps_left} steps are still to be taken"
        numbers = list(self.in_flight)
        for number in numbers:
            self.dropped(number, "end")
        return numbers

    def updated(self) -> None:
        assert self.is_training and not self.is_updated
        self.is_updated = True
        self._log("updated", self.step)

    def synced(self, version: int) -> None:
        """The engines serve what the step has made. `version`: the same as before where that step left the policy."""
        assert self.is_updated and version >= self.version
        for group in self.in_flight.values():  # also then: a critic may have learnt alone
            group.is_annotated = False
        self._bare = dict.fromkeys(self.scored_order)
        self.version, self.is_training, self.is_updated = version, False, False
        self._log("synced", self.step)

    def _put(self, group: Group) -> None:
        """Put a group in the place of the one of its number, if there is one."""
        if group.number in self.in_flight:
            self._uncount(self.in_flight[group.number])
        self.in_flight[group.number] = group
        self._of_version[group.oldest_version] += 1
        self._num_running += group.stage is GroupStage.RUNNING

    def _remove(self, number: int) -> None:
        self._uncount(self.in_flight.pop(number))

    def _uncount(self, group: Group) -> None:
        self._num_running -= group.stage is GroupStage.RUNNING
        self._of_version[group.oldest_version] -= 1
        if self._of_version[group.oldest_version] == 0:
            del self._of_version[group.oldest_version]
        if group.stage is GroupStage.SCORED:
            self.scored_order.remove(group.number)
            self._scored_of_version[group.oldest_version] -= 1
            self._bare.pop(group.number, None)

    def _log(self, kind: EventKind, subject: int, reason: str = "") -> None:
        self.events.append(Event(kind, subject, reason))
