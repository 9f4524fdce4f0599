"""Decisions that several schedules share."""

from __future__ import annotations

from collections.abc import Sequence

from rlhf_megatron.scheduler.schedules.flow import Flow


def past_lag(flow: Flow, max_lag: int) -> list[int]:
    """Groups in flight that have a larger lag already: it only grows."""
    return [group.number for group in flow.in_flight.values() if flow.lag(group) > max_lag]


def first_scored(flow: Flow) -> Sequence[int] | None:
    """A batch of those that were scored first, in ascending order; None where there are too few."""
    numbers = flow.scored_order[: flow.batch_size]
    return sorted(numbers) if len(numbers) == flow.batch_size else None
