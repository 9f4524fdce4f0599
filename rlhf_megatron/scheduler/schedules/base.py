"""What a schedule decides: which groups are started when, which make a step's batch, what a weight sync does to others.

The loop and the simulator ask the same objects. A schedule is a frozen dataclass (its fields are `schedule.params`)
whose answers depend on the Flow alone; a new one is a new file here.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Protocol

from rlhf_megatron.registry import Registry
from rlhf_megatron.scheduler.schedules.flow import Flow


class OnSync(enum.Enum):
    """What becomes of groups that are generated when new weights are to come."""

    WAIT = "the sync waits until none is generated"
    CONTINUE = "they go on from the new weights; each token knows its version"


class OnStale(enum.Enum):
    """What becomes of a group whose lag is past the bound."""

    DROP = "it is dropped, and its prompt with it"
    AGAIN = "its prompt is generated anew"


class Schedule(Protocol):
    """Asked again after every event, in this order: `stale`, `batch` (while no step is trained), `num_to_start`."""

    @property
    def max_lag(self) -> int:
        """No sample trains with a larger lag: policy version at training less the oldest version of its tokens."""

    @property
    def on_sync(self) -> OnSync: ...

    @property
    def on_stale(self) -> OnStale: ...

    @property
    def annotates_early(self) -> bool:
        """Finished groups get their log-probs while the batch is still awaited. Else they get them with the batch."""

    def num_to_start(self, flow: Flow) -> int:
        """Groups to start now; 0 at most times."""

    def batch(self, flow: Flow) -> Sequence[int] | None:
        """Numbers of the groups that the next step trains on, ascending; None: not yet. All of them are SCORED and
        within `max_lag`."""

    def leftover(self, flow: Flow) -> Sequence[int]:
        """Asked when a batch was taken: groups in flight that are given up then."""

    def stale(self, flow: Flow) -> Sequence[int]:
        """Groups in flight that can be trained within `max_lag` no more."""


SCHEDULES: Registry[type[Schedule]] = Registry("schedule")
"""`build` makes the schedule from its parameters: the class itself, which is registered with itself as params."""
