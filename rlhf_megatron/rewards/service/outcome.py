"""What came of calling a reward: nothing that it raises or returns may pass for a score."""

from __future__ import annotations

import traceback
from typing import Any

from rlhf_megatron.rewards.scorers.base import (
    BAD_RESULT,
    MALFORMED,
    TIMEOUT,
    BadResultError,
    Reward,
    RewardResult,
    RewardSample,
    masked,
)

TRACEBACK_LINES = 12


def outcome(reward: Reward, sample: RewardSample, params: Any) -> RewardResult:
    """The reward's result. What it raises, or returns in place of one, is masked, with the end of its traceback."""
    try:
        return checked(reward(sample, params))
    except BadResultError as error:
        return masked(BAD_RESULT, end_of_traceback(error))
    except (Exception, SystemExit) as error:  # somebody else's code: what it raises is told, counted and left out
        return masked(type(error).__name__, end_of_traceback(error))


def checked(result: object) -> RewardResult:
    """`result` where it is one. Raises BadResultError."""
    if not isinstance(result, RewardResult):
        raise BadResultError(f"a reward must return a RewardResult, not {type(result).__name__}.")
    if result.status in (MALFORMED, TIMEOUT) and result.score > 0:
        raise BadResultError(f"score ({result.score}) must be at most 0 when the status is {result.status}.")
    return result


def end_of_traceback(error: BaseException) -> str:
    """Its last lines."""
    lines = "".join(traceback.format_exception(error)).rstrip().splitlines()
    return "\n".join(lines[-TRACEBACK_LINES:])
