"""An environment that does not declare to be deterministic, under a name of its own."""

from __future__ import annotations

from typing import Any

import pytest

from rlhf_megatron.agents.environment import ENVIRONMENTS, Observation, TurnEnvironment
from rlhf_megatron.registry import load_registry

GAME_OF_CHANCE = "a_game_of_chance"


class GameOfChance(TurnEnvironment):
    def reset(self, task: Any) -> Observation:
        return Observation()

    def step(self, turn: Any) -> Observation:
        return Observation(is_done=True)


def register_game_of_chance(monkeypatch: pytest.MonkeyPatch) -> None:
    """Register the game for one test."""
    load_registry("environment")
    monkeypatch.setattr(ENVIRONMENTS, "_entries", dict(ENVIRONMENTS._entries))
    ENVIRONMENTS.register(GAME_OF_CHANCE)(GameOfChance)
