"""Decisions that several schedules share."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from rlhf_megatron.controller.scheduler.schedules.group_flow import FlowGroup, GroupFlow


def check_oversampling(oversampling: float) -> None:
    """Raise ValueError unless `oversampling` is finite and at least 1."""
    if not 1 <= oversampling < math.inf:
        raise ValueError(
            f"oversampling ({oversampling}) must be at least 1: it is the number of groups in"
            " flight for each that is needed; 1.25 is usual."
        )


def scale_by_oversampling(num_groups: int, oversampling: float) -> int:
    """Return the number of groups to start where `num_groups` are needed: `oversampling` times as
    many, rounded down.
    """
    return math.floor(num_groups * oversampling + 1e-9)  # 1.1 x 10 is 11


def find_groups_past_lag(flow: GroupFlow, max_lag: int) -> list[int]:
    """Return the numbers of the groups in flight whose lag is above `max_lag` already; a lag only
    grows.
    """
    oldest = flow.training_version - max_lag
    if min(flow.num_by_oldest_version, default=oldest) >= oldest:
        return []
    return [
        group.number for group in flow.groups_in_flight.values() if group.oldest_version < oldest
    ]


def select_first_scored(flow: GroupFlow) -> Sequence[int] | None:
    """Return the numbers of the groups that were scored first, a batch of them in ascending order;
    None where too few are scored or no step is left.
    """
    return sorted(flow.scored_order[: flow.batch_size]) if _has_full_batch(flow) else None


def select_first_started(flow: GroupFlow) -> Sequence[int] | None:
    """Return the numbers of the groups that were started first, a batch of them in ascending order;
    None while any of these cannot train yet. No group is preferred for being done early.
    """
    if not _has_full_batch(flow):
        return None
    first = sorted(flow.groups_in_flight)[: flow.batch_size]
    return first if set(first) <= set(flow.scored_order) else None


def sorted_group_numbers(groups: Iterable[FlowGroup]) -> list[int]:
    """Return the numbers of the groups, ascending."""
    return sorted(group.number for group in groups)


def list_oldest_scored(flow: GroupFlow) -> list[FlowGroup]:
    """Return a batch of scored groups, or fewer where there are fewer: groups with the oldest
    tokens first, then groups that were started first.
    """
    return sorted(flow.scored_groups, key=_age_sort_key)[: flow.batch_size]


def select_oldest(flow: GroupFlow) -> Sequence[int] | None:
    """Return the numbers of the scored groups with the oldest tokens, a batch of them in ascending
    order; None where too few are scored or no step is left.
    """
    return sorted_group_numbers(list_oldest_scored(flow)) if _has_full_batch(flow) else None


def select_oldest_within_lag(flow: GroupFlow, max_lag: int) -> Sequence[int] | None:
    """Return the batch of `select_oldest`, but None also while this batch would leave groups behind
    that could then no longer train within `max_lag`.

    A group whose oldest tokens are of version v can train as long as the policy's version is at
    most v + max_lag, and a step trains batch_size groups: for every such deadline the steps up to
    it must have room for all groups that are due by then. The schedule waits while a better batch
    is possible, which has groups that are still being generated; where even that batch would leave
    groups behind (they are more than all steps in time can train), a batch that leaves no more
    behind is enough. So a run never waits for a batch that cannot be.
    """
    if not _has_full_batch(flow):
        return None
    due = 0
    num_chosen = 0
    is_next = flow.training_version - max_lag
    for version, count in flow.num_by_oldest_version.items():
        due += count
        num_chosen = min(num_chosen + flow.count_scored(version), flow.batch_size)
        # in the steps after this one, until these are due
        room_later = flow.batch_size * (version - is_next)
        must = min(due - room_later, due, flow.batch_size)
        if num_chosen < must:
            return None
    return sorted_group_numbers(list_oldest_scored(flow))


def find_groups_to_annotate(flow: GroupFlow) -> Sequence[int]:
    """Return the numbers of the scored groups that lack log-probs, as long as all scored groups fit
    into the next batch; return none while a step is trained or where more groups are scored. Where
    a full batch is held back for others, few change places, and get their log-probs with the batch.
    """
    if flow.is_training or len(flow.scored_order) > flow.batch_size:
        return ()
    return flow.unannotated_numbers


def _has_full_batch(flow: GroupFlow) -> bool:
    """Return whether enough groups are scored for a batch and a step is left to train it."""
    return len(flow.scored_order) >= flow.batch_size and flow.num_steps_left > 0


def _age_sort_key(group: FlowGroup) -> tuple[int, int]:
    """Return the key that sorts groups by their oldest tokens first, then by the order of their
    start.
    """
    return group.oldest_version, group.number
