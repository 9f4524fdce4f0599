"""A game of a few turns: guess a number between 1 and `highest`. The label of a row is the secret
number; to each guess the environment answers whether the secret is higher or lower.

With three turns binary search always finds a number of 1 to 7, and a player that guesses without
reading the answers finds it in three of seven games.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rlhf_megatron.agents.environment import (
    ENVIRONMENTS,
    Observation,
    Task,
    Turn,
    TurnEnvironment,
)

MAX_DIGITS = 18


@dataclass(frozen=True)
class GuessNumberParams:
    """The words of the game. The defaults are single characters, which a tokenizer of characters
    can spell.
    """

    highest: int = 7  # the secret is one of 1 .. highest
    num_digits: int = 2  # that a guess is written with, as in "04"
    higher: str = "+"  # the answer to a guess below the secret
    lower: str = "-"  # the answer to a guess above the secret
    no_number: str = "*"  # the answer to any other text

    def __post_init__(self) -> None:
        """Raise ValueError where a number does not fit its digits."""
        if not 1 <= self.num_digits <= MAX_DIGITS:
            raise ValueError(f"num_digits ({self.num_digits}) must be between 1 and {MAX_DIGITS}.")
        if not 1 <= self.highest < 10**self.num_digits:
            raise ValueError(
                f"highest ({self.highest}) must be between 1 and {10**self.num_digits - 1}, the"
                f" largest number of num_digits ({self.num_digits}) digits."
            )


@ENVIRONMENTS.register("guess_number", params=GuessNumberParams)
class GuessNumber(TurnEnvironment):
    """One game. The reward of a right guess is 1; a game without one gets 0."""

    is_deterministic: ClassVar[bool] = True

    def __init__(self, params: GuessNumberParams) -> None:
        """Take the words of the game; `reset` brings the secret."""
        self.params = params
        self.secret = 0

    def reset(self, task: Task) -> Observation:
        """Begin a game for the number that the row's label names. Raise ValueError for a label that
        is no such number.
        """
        self.secret = int(task.label)
        if not 1 <= self.secret <= self.params.highest:
            raise ValueError(
                f"the label ({task.label}) must be a number of 1 to {self.params.highest}."
            )
        return Observation()

    def step(self, turn: Turn) -> Observation:
        """Answer a guess."""
        params = self.params
        is_number = turn.text.isascii() and turn.text.isdigit()
        if turn.finish_reason != "stop" or not is_number or len(turn.text) != params.num_digits:
            return Observation(params.no_number)
        guess = int(turn.text)
        if guess == self.secret:
            return Observation(reward=1.0, is_done=True)
        return Observation(params.higher if guess < self.secret else params.lower)
