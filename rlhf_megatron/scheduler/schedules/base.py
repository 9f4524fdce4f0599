"""What a schedule decides: which groups are started when, which make a step's batch, what a weight sync does to others.

The loop and the simulator ask the same objects, whose answers depend on the Flow alone. A schedule with parameters is a
frozen dataclass whose fields are `schedule.params`; a new one is a new file here.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Protocol

from rlhf_megatron.registry import Registry
from rlhf_megatron.scheduler.schedules.common import past_lag
from rlhf_megatron.scheduler.schedules.flow import Flow


class OnSync(enum.Enum):
    """The fate of groups that are generated when new weights are to come."""

    WAIT = "the sync waits until none is generated"
    CONTINUE = "they go on from the new weights; each token knows its version"


class OnStale(enum.Enum):
    """The fate of a group whose lag is past the bound."""

    DROP = "it is dropped, and its prompt with it"
    AGAIN = "its prompt is generated anew"


class Schedule(Protocol):
    """Asked again after every event, in this order:

     1. `stale`: these are dropped (reason "lag") or started again, as `on_stale` says;
     2. `batch`, while no step is trained. Is there one, it is taken; then `leftover` is dropped (reason "tail"), and
        all that is in flight where it was the last step's (`Flow.ended`);
     3. `num_to_start`: so many are started;
     4. `to_annotate`, where no step is trained.

    A weight sync is an event, and may begin where `on_sync` is CONTINUE or no group is generated.

    One that derives from this class says only where it differs. It may have `takes_turns = True`: a step's groups are
    generated, then it trains, and the run asks nothing else of it; and `needs_filter`, whether groups that it starts
    beyond a batch train only where the filter takes some.
    """

    @property
    def max_lag(self) -> int:
        """The largest lag of a sample that trains: policy version at training less the oldest version of its tokens."""

    @property
    def on_sync(self) -> OnSync:
        return OnSync.WAIT

    @property
    def on_stale(self) -> OnStale:
        return OnStale.DROP

    @property
    def annotates_early(self) -> bool:
        """Finished groups get their log-probs while the batch is still awaited. Else they get them with the batch."""
        return False

    def num_to_start(self, flow: Flow) -> int:
        """Groups to start now; 0 at most times."""

    def to_annotate(self, flow: Flow) -> Sequence[int]:
        """Numbers of scored groups whose log-probs may be computed now; empty while a step is trained, and where
        `annotates_early` is False."""
        return ()

    def batch(self, flow: Flow) -> Sequence[int] | None:
        """Numbers of the groups that the next step trains on, ascending; None: not yet. All of them are SCORED and
        within `max_lag`."""

    def leftover(self, flow: Flow) -> Sequence[int]:
        """Asked when a batch was taken: groups in flight that are given up then."""
        return ()

    def stale(self, flow: Flow) -> Sequence[int]:
        """Groups in flight that can be trained within `max_lag` no more."""
        return past_lag(flow, self.max_lag)


SCHEDULES: Registry[type[Schedule]] = Registry("schedule")
"""A schedule with parameters is registered with itself as their dataclass; one without is built from nothing."""
