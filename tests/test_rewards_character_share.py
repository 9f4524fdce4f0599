"""The reward that grades a response by its characters."""

from __future__ import annotations

import pytest

from rlhf_megatron.rewards import REWARDS
from rlhf_megatron.rewards.character_share import CharacterShareParams


def test_shares() -> None:
    """By hand; a label is not read, and an aborted sample is nobody's fault."""
    reward = REWARDS.get("character_share")
    results = reward.build(["12+4", "", "abc", "0"], ["x"] * 4, ["stop", "length", "stop", "abort"], reward.params())
    assert [(r.score, r.status) for r in results] == [(0.75, "ok"), (0.0, "ok"), (0.0, "ok"), (0.0, "masked:aborted")]
    (vowels,) = reward.build(["banana"], [""], ["stop"], CharacterShareParams("[aeiou]"))
    assert vowels.score == 0.5


def test_a_pattern_that_is_none() -> None:
    with pytest.raises(ValueError, match=r"pattern \('\['\) is not a regular expression"):
        CharacterShareParams("[")
