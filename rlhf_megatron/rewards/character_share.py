"""The share of a response's characters that belong to a class. Graded: nearly every group has different rewards."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from rlhf_megatron.rewards.base import REWARDS, RewardResult, masked


@dataclass(frozen=True)
class CharacterShareParams:
    pattern: str = "[0-9]"  # regular expression of one character

    def __post_init__(self) -> None:
        try:
            re.compile(self.pattern)
        except re.error as error:
            raise ValueError(f"pattern ({self.pattern!r}) is not a regular expression: {error}.") from error


@REWARDS.register("character_share", CharacterShareParams)
def character_share(
    responses: Sequence[str], labels: Sequence[str], finish_reasons: Sequence[str], params: CharacterShareParams
) -> list[RewardResult]:
    """One result a response; an empty one scores 0. Labels are not read."""
    return [
        masked("aborted") if reason == "abort" else RewardResult(_share(response, params.pattern))
        for response, reason in zip(responses, finish_reasons, strict=True)
    ]


def _share(response: str, pattern: str) -> float:
    return sum(bool(re.fullmatch(pattern, character)) for character in response) / max(1, len(response))
