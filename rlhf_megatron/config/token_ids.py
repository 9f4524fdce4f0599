"""Ids of tokens in config.json and generation_config.json, and how messages show such values."""

from __future__ import annotations

from typing import Any

LARGEST_COUNT = 1 << 30  # of tokens, experts and the like, in a model that some machine can hold
MAX_SHOWN_CHARACTERS = 60


def is_count(value: Any) -> bool:
    """Return whether a value is a whole number that can count something."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= LARGEST_COUNT


def describe_token_id_problem(token_id: Any, vocab_size: Any) -> str | None:
    """Return what is wrong with an end-of-sequence id, as the end of a sentence; None for a token
    of the vocabulary, and for null, which names none. Where `vocab_size` is no count, only negative
    ids and other types are wrong.
    """
    if token_id is None:
        return None
    is_size_known = is_count(vocab_size) and vocab_size > 0
    if is_count(token_id) and (not is_size_known or token_id < vocab_size):
        return None
    tokens = f"a token, 0 to {vocab_size - 1}" if is_size_known else "a token, 0 or more"
    return (
        f"must be {tokens}, or a list of such: no response would end; write the id of the token"
        " that ends one."
    )


def shorten_value(value: Any) -> str:
    """Return a value as a message shows it, cut off where it is long."""
    try:
        text = repr(value)
    except RecursionError:
        return f"a {type(value).__name__} that is nested too deep"
    if len(text) <= MAX_SHOWN_CHARACTERS:
        return text
    return f"{text[:MAX_SHOWN_CHARACTERS]}..."
