"""Soft over-long punishment (DAPO, arXiv 2503.14476, equation 13): 0, then linear down to -factor, then -factor.

Tokens of the response:      0 ..... max_len - buffer ..... max_len .....
Penalty:                     0 ..... 0 ................... -factor ..... -factor
"""

from __future__ import annotations


def overlong_penalty(num_tokens: int, max_len: int, buffer: int, factor: float = 1.0) -> float:
    """min(-(num_tokens - (max_len - buffer)) / buffer * factor, 0), and not below -factor.

    Args:
        num_tokens: of the response.
        max_len: tokens from which a response gets -factor.
        buffer: tokens before that over which the penalty grows.

    Raises ValueError for a buffer outside of 1 .. max_len.
    """
    if not 1 <= buffer <= max_len:
        raise ValueError(f"buffer ({buffer} tokens) must be from 1 to max_len ({max_len}).")
    return -factor * min(1.0, max(0.0, (num_tokens - (max_len - buffer)) / buffer))
