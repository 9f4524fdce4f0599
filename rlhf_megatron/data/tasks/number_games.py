"""Games of the environment `guess_number`: whole games, and positions within a game.

A position is a prompt that begins with guesses and their answers, "?02<eos>+06<eos>-", and its
label is a number that these answers allow. A supervised warm-up on positions makes a player that
knows the rules: it draws any number that is still possible. Whole games, "?", are held out.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from rlhf_megatron.data.data_rows import PromptRow, TaskRows
from rlhf_megatron.data.tasks import TASKS

START = "?"


@dataclass(frozen=True)
class GuessNumberTaskParams:
    highest: int = 7  # the secret is one of 1 .. highest
    num_digits: int = 2  # that a number is written with
    num_train: int = 2000  # rows to train on
    num_val: int = 112  # whole games that are held out: each secret as often as any other
    game_share: float = 0.5  # of these, whole games; the others are positions
    max_guesses: int = 2  # in a position
    end_of_turn: str = "<eos>"  # text of the token that ends a guess
    higher: str = "+"  # the answers of the environment
    lower: str = "-"
    seed: int = 123

    def __post_init__(self) -> None:
        """Raise ValueError for a value out of range."""
        if not 1 <= self.highest < 10**self.num_digits:
            raise ValueError(
                f"highest ({self.highest}) must be between 1 and {10**self.num_digits - 1}, the"
                f" largest number of num_digits ({self.num_digits}) digits."
            )
        if not 0 <= self.game_share <= 1:
            raise ValueError(f"game_share ({self.game_share}) must be between 0 and 1.")


@TASKS.register("guess_number", GuessNumberTaskParams)
def generate_guess_number_rows(params: GuessNumberTaskParams) -> TaskRows:
    """Return games and positions for training, and whole games that are held out."""
    chance = random.Random(params.seed)
    rows = []
    for number in range(params.num_train):
        secret = chance.randint(1, params.highest)
        is_game = chance.random() < params.game_share
        num_guesses = 0 if is_game else chance.randint(0, params.max_guesses)
        prompt = _write_position(params, secret, num_guesses, chance)
        rows.append(
            PromptRow(prompt, _write_number(params, secret), "guess_number", f"game {number}")
        )
    held_out = tuple(
        PromptRow(
            START,
            _write_number(params, 1 + number % params.highest),
            "guess_number",
            f"held-out game {number}",
        )
        for number in range(params.num_val)
    )
    return TaskRows(tuple(rows), held_out)


def _write_position(
    params: GuessNumberTaskParams, secret: int, num_guesses: int, chance: random.Random
) -> str:
    """Return a game up to the answer to its last guess; each guess is possible and wrong."""
    text = START
    lowest = 1
    highest = params.highest
    for _ in range(num_guesses):
        wrong = [number for number in range(lowest, highest + 1) if number != secret]
        if not wrong:
            break
        guess = chance.choice(wrong)
        answer = params.higher if guess < secret else params.lower
        text += f"{_write_number(params, guess)}{params.end_of_turn}{answer}"
        if guess < secret:
            lowest = guess + 1
        else:
            highest = guess - 1
    return text


def _write_number(params: GuessNumberTaskParams, number: int) -> str:
    """Return the number with leading zeros."""
    return f"{number:0{params.num_digits}d}"
