"""The note of a run whose policy differs from its reference before the first update."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlhf_megatron.controller.observe.metrics.first_reference_kl import FirstReferenceKLCheck


def batch_of(policy: list[float] | None, reference: list[float] | None) -> Any:
    """Two prompt tokens, whose log-probs mean nothing, and two response tokens."""
    return SimpleNamespace(
        old_log_probs=None if policy is None else torch.tensor([0.0, 0.0, *policy]),
        ref_log_probs=None if reference is None else torch.tensor([9.0, 9.0, *reference]),
        response_mask=torch.tensor([False, False, True, True]),
    )


@pytest.mark.parametrize(
    ("replays_routes", "reason"),
    [(False, "compare the notes on the head"), (True, "actor.router_replay")],
)
def test_a_difference_is_told_with_its_reason(replays_routes: bool, reason: str) -> None:
    """Differences of 0.25 and -0.75: at most 0.75, and -0.25 on average."""
    notes: list[str] = []
    check = FirstReferenceKLCheck(None, replays_routes, notes.append)
    check(1, batch_of([-1.0, -2.0], [-1.25, -1.25]))
    (note,) = notes
    assert "log-probs by at most 7.50e-01" in note and "KL is -2.50e-01 nats a token" in note
    assert reason in note


def test_nothing_is_told_of_equal_models_of_another_model_and_of_later_steps() -> None:
    notes: list[str] = []
    check = FirstReferenceKLCheck(None, False, notes.append)
    check(1, batch_of([-1.0, -2.0], [-1.0, -2.0]))
    check(1, batch_of(None, [-1.0, -2.0]))
    check(1, batch_of([-1.0, -2.0], None))
    check(2, batch_of([-1.0, -2.0], [-1.0, -2.5]))
    FirstReferenceKLCheck("models/teacher", False, notes.append)(
        1, batch_of([-1.0, -2.0], [-2.0, -2.0])
    )
    assert notes == []
