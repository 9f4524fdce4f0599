"""What a schedule decides: which groups are started when, which make a step's batch, what a weight
sync does to others.

The loop and the simulator ask the same objects, whose answers depend on the Flow alone. A schedule
with parameters is a frozen dataclass whose fields are `schedule.params`; a new one is a
new file here.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Protocol

from rlhf_megatron.controller.scheduler.schedules.group_flow import GroupFlow
from rlhf_megatron.controller.scheduler.schedules.group_selection import find_groups_past_lag
from rlhf_megatron.part_hooks import required_hook
from rlhf_megatron.registry import Registry


class SyncPolicy(enum.Enum):
    """The fate of groups that are generated when new weights are to come."""

    WAIT = "the sync waits until none is generated"
    CONTINUE = "they go on from the new weights; each token knows its version"


class StalePolicy(enum.Enum):
    """The fate of a group whose lag is past the bound."""

    DROP = "it is dropped, and its prompt with it"
    REGENERATE = "its prompt is generated anew"


class Schedule(Protocol):
    """Asked again after every event, in this order:

     1. `find_stale_groups`: these are dropped (reason "lag") or started again, as
        `stale_policy` says;
     2. `select_batch`, while no step is trained. Is there one, it is taken; then
        `select_groups_to_give_up` is dropped (reason "tail"), and all that is in flight where it
        was the last step's (`GroupFlow.ended`);
     3. `count_groups_to_start`: so many are started;
     4. `select_groups_to_annotate`, where no step is trained.

    A weight sync is an event, and may begin where `sync_policy` is CONTINUE or no
    group is generated.

    One that derives from this class says only where it differs. It may have `takes_turns = True`: a
    step's groups are generated, then it trains, and the run asks nothing else of it; and
    `needs_filter`, whether groups that it starts beyond a batch train only where the
    filter takes some.
    """

    @property
    @required_hook
    def max_lag(self) -> int:
        """Return the largest lag of a sample that trains: policy version at training less the
        oldest version of its tokens.
        """

    @property
    def sync_policy(self) -> SyncPolicy:
        """Return what a weight sync does with groups that are being generated."""
        return SyncPolicy.WAIT

    @property
    def stale_policy(self) -> StalePolicy:
        """Return what happens to a group whose lag is past the bound."""
        return StalePolicy.DROP

    @property
    def annotates_early(self) -> bool:
        """Return whether finished groups get their log-probs while the batch is still awaited. Else
        they get log-probs with the batch.
        """
        return False

    @required_hook
    def count_groups_to_start(self, flow: GroupFlow) -> int:
        """Return the number of groups to start now; 0 at most times."""

    def select_groups_to_annotate(self, flow: GroupFlow) -> Sequence[int]:
        """Return the numbers of scored groups whose log-probs may be computed now; none while a
        step is trained, and where `annotates_early` is False.
        """
        return ()

    @required_hook
    def select_batch(self, flow: GroupFlow) -> Sequence[int] | None:
        """Return the numbers of the groups that the next step trains on, ascending, or None for not
        yet. All of them must be SCORED and within `max_lag`.
        """

    def select_groups_to_give_up(self, flow: GroupFlow) -> Sequence[int]:
        """Return the numbers of the groups in flight to drop when a batch was taken."""
        return ()

    def find_stale_groups(self, flow: GroupFlow) -> Sequence[int]:
        """Return the numbers of the groups in flight that can no longer train within `max_lag`."""
        return find_groups_past_lag(flow, self.max_lag)


SCHEDULES: Registry[type[Schedule]] = Registry("schedule", Schedule, call_arguments=())
"""A schedule with parameters is registered with itself as their dataclass; one without is
built from nothing.
"""
