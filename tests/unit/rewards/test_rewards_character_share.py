"""The reward that grades a response by its characters."""

from __future__ import annotations

import pytest

from rlhf_megatron.rewards.scorers import REWARDS, RewardSample
from rlhf_megatron.rewards.scorers.character_share import CharacterShareParams


def test_shares() -> None:
    """By hand; the label is not read."""
    reward = REWARDS.get("character_share")
    samples = [
        RewardSample("", response, "x", "test", "stop", 3)
        for response in ("12+4", "", "abc", "banana")
    ]
    results = [reward.build(sample, reward.params()) for sample in samples]
    assert [(r.score, r.status) for r in results] == [
        (0.75, "ok"),
        (0.0, "ok"),
        (0.0, "ok"),
        (0.0, "ok"),
    ]
    assert reward.build(samples[3], CharacterShareParams("[aeiou]")).score == 0.5


def test_a_pattern_that_is_none() -> None:
    with pytest.raises(ValueError, match=r"pattern \('\['\) is not a regular expression"):
        CharacterShareParams("[")
