"""Decisions that several schedules share."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from rlhf_megatron.controller.scheduler.schedules.group_flow import FlowGroup, GroupFlow


def check_oversampling(oversampling: float) -> None:
    if not 1 <= oversampling < math.inf:
        raise ValueError(
            f"oversampling ({oversampling}) must be at least 1: it is the number of groups in"
            " flight for each that is needed; 1.25 is usual."
        )


def scale_by_oversampling(num_groups: int, oversampling: float) -> int:
    """Groups to start where `num_groups` are needed: `oversampling` times as many, rounded down."""
    return math.floor(num_groups * oversampling + 1e-9)  # 1.1 x 10 is 11


def find_groups_past_lag(flow: GroupFlow, max_lag: int) -> list[int]:
    """Groups in flight that have a larger lag already: it only grows."""
    oldest = flow.training_version - max_lag
    if min(flow.num_by_oldest_version, default=oldest) >= oldest:
        return []
    return [
        group.number for group in flow.groups_in_flight.values() if group.oldest_version < oldest
    ]


def select_first_scored(flow: GroupFlow) -> Sequence[int] | None:
    """A batch of those that were scored first, in ascending order; None where there are too few."""
    return sorted(flow.scored_order[: flow.batch_size]) if _has_full_batch(flow) else None


def select_first_started(flow: GroupFlow) -> Sequence[int] | None:
    """A batch of those that were started first; None where any of them cannot train yet. No group
    is preferred for being done early.
    """
    if not _has_full_batch(flow):
        return None
    first = sorted(flow.groups_in_flight)[: flow.batch_size]
    return first if set(first) <= set(flow.scored_order) else None


def sorted_group_numbers(groups: Iterable[FlowGroup]) -> list[int]:
    return sorted(group.number for group in groups)


def list_oldest_scored(flow: GroupFlow) -> list[FlowGroup]:
    """Return a step's groups of those that can train: the oldest tokens first, then those
    started first.
    """
    return sorted(flow.scored_groups, key=_age_sort_key)[: flow.batch_size]


def select_oldest(flow: GroupFlow) -> Sequence[int] | None:
    """A batch of those with the oldest tokens; None where there are too few that can train."""
    return sorted_group_numbers(list_oldest_scored(flow)) if _has_full_batch(flow) else None


def select_oldest_within_lag(flow: GroupFlow, max_lag: int) -> Sequence[int] | None:
    """The same, but None also while the batch would leave groups behind that can no more
    train in time.

    A group whose oldest tokens are of version v can train as long as the policy's is at most v +
    max_lag, and a step trains batch_size of them: for every such deadline the steps up to it must
    have room for all that are due by then. A batch is awaited while a better one is possible, which
    has the groups that are still generated; where that one would leave groups behind, too (they are
    more than all steps in time can train), as good a one is enough. So a run never waits for a
    batch that cannot be.
    """
    if not _has_full_batch(flow):
        return None
    due = 0
    num_chosen = 0
    is_next = flow.training_version - max_lag
    for version, count in flow.num_by_oldest_version.items():
        due += count
        num_chosen = min(num_chosen + flow.count_scored(version), flow.batch_size)
        room_later = flow.batch_size * (
            version - is_next
        )  # in the steps after this one, until these are due
        must = min(due - room_later, due, flow.batch_size)
        if num_chosen < must:
            return None
    return sorted_group_numbers(list_oldest_scored(flow))


def find_groups_to_annotate(flow: GroupFlow) -> Sequence[int]:
    """Groups that can train and lack log-probs, as long as all that can train make the next batch;
    none while a step is trained. Where a full batch is held back for others, few change places, and
    get their log-probs with the batch.
    """
    if flow.is_training or len(flow.scored_order) > flow.batch_size:
        return ()
    return flow.unannotated_numbers


def _has_full_batch(flow: GroupFlow) -> bool:
    return len(flow.scored_order) >= flow.batch_size and flow.num_steps_left > 0


def _age_sort_key(group: FlowGroup) -> tuple[int, int]:
    return group.oldest_version, group.number
