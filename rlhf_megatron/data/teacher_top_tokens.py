"""What a teacher told of a row's answers, from the row itself: the likeliest tokens of each
place that trains.
"""

# N tokens that train, in the order of the conversation; K likeliest tokens of each place

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlhf_megatron.data.data_rows import look_up_key

IDS_KEY = "ids"
LOG_PROBS_KEY = "log_probs"
PROBABILITY_TOLERANCE = 1e-3  # of a probability, for files that were written in half precision


@dataclass(frozen=True)
class TeacherTopTokens:
    """N x K ids and log-probs, row by row; a place's likeliest token first."""

    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    top_k: int  # K

    def __len__(self) -> int:
        """Return the number of places, N."""
        return len(self.token_ids) // self.top_k

    def select_positions(self, begin: int, end: int) -> TeacherTopTokens:
        """Return the places begin .. end - 1."""
        places = slice(begin * self.top_k, end * self.top_k)
        return TeacherTopTokens(self.token_ids[places], self.log_probs[places], self.top_k)


def parse_teacher_top_tokens(
    row: Mapping[str, Any], key: str, num_trained: int, top_k: int, vocab_size: int
) -> TeacherTopTokens:
    """Return the teacher's `top_k` likeliest tokens of each place that trains. `row[key]` is
    {"ids": N lists of K or more, "log_probs": likewise}, N = `num_trained`.

    Raise ValueError for another number of places, for too few tokens, and for values that are not
    ids or log-probs.
    """
    value = look_up_key(row, key, "sft.teacher_key")
    columns = [
        value.get(name) if isinstance(value, Mapping) else None for name in (IDS_KEY, LOG_PROBS_KEY)
    ]
    if not all(
        isinstance(column, list) and all(isinstance(one, list) for one in column)
        for column in columns
    ):
        raise ValueError(
            f'{key!r} must be {{"{IDS_KEY}": [[...], ...], "{LOG_PROBS_KEY}": [[...], ...]}}'
        )
    ids, log_probs = columns
    assert ids is not None and log_probs is not None, "they are lists"
    if len(ids) != num_trained or len(log_probs) != num_trained:
        raise ValueError(
            f"{key!r} has {len(ids)} ids and {len(log_probs)} log_probs, one for each place, but"
            f" {num_trained} tokens of the row train (rlhf-megatron data show prints them); write"
            " it with this chat template and tokenizer"
        )
    places = [
        _parse_position(
            position_ids, position_log_probs, top_k, vocab_size, f"place {n} of {key!r}"
        )
        for n, (position_ids, position_log_probs) in enumerate(zip(ids, log_probs, strict=True))
    ]
    return TeacherTopTokens(
        tuple(i for place in places for i in place[0]),
        tuple(p for place in places for p in place[1]),
        top_k,
    )


def _parse_position(
    ids: list[Any], log_probs: list[Any], top_k: int, vocab_size: int, position_name: str
) -> tuple[list[int], list[float]]:
    """Return the ids and log-probs of one place's `top_k` likeliest tokens, the likeliest first.
    Raise ValueError for malformed values and for probabilities that sum to more than 1.
    """
    if len(ids) != len(log_probs) or len(ids) < top_k:
        raise ValueError(
            f"{position_name} has {len(ids)} ids and {len(log_probs)} log_probs, but"
            f" sft.params.top_k is {top_k}; lower that"
        )
    for log_prob in log_probs:
        if (
            isinstance(log_prob, bool)
            or not isinstance(log_prob, int | float)
            or math.isnan(log_prob)
        ):
            raise ValueError(f"{position_name} has {log_prob!r}, which is no log-prob")
    pairs = sorted(zip(log_probs, ids, strict=True), key=lambda pair: -pair[0])[:top_k]
    for log_prob, token_id in pairs:
        if (
            isinstance(token_id, bool)
            or not isinstance(token_id, int)
            or not 0 <= token_id < vocab_size
        ):
            raise ValueError(f"{position_name} has {token_id!r}, which is no id below {vocab_size}")
        if math.isinf(log_prob):
            raise ValueError(f"{position_name} has {log_prob!r}, which is no log-prob")
    if (
        len({token_id for _, token_id in pairs}) < top_k
        or sum(math.exp(p) for p, _ in pairs) > 1 + PROBABILITY_TOLERANCE
    ):
        raise ValueError(
            f"{position_name} must have different tokens whose probabilities are at most 1 together"
        )
    return [token_id for _, token_id in pairs], [float(log_prob) for log_prob, _ in pairs]
