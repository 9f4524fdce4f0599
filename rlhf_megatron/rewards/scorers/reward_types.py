"""What a reward is: a function of one sample. A new reward is one new file in this package.

    @REWARDS.register("exact_match", ExactMatchParams)
    def exact_match(sample: RewardSample, params: ExactMatchParams) -> RewardResult: ...

Aborted samples are masked before a reward sees them. A reward that may be slow, or that runs a
user's code, is registered with `needs=(OWN_PROCESS,)` and is called in a worker process that is
killed when it takes too long. Params with a method `prepare()` have it called once in that process,
before anything is scored. Params of a term that acts on long responses only may have `acts_from`,
in tokens: a run whose responses are all shorter is refused. Params with `needs_s` refuse a
`reward.timeout_s` of fewer seconds.

A status says who is to blame for a missing score. What the policy can have caused scores 0 and
trains; what it cannot have caused is masked: the sample is left out of its group's statistics and
trains nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from rlhf_megatron.registry import Registry

OK = "ok"
MALFORMED = "malformed"  # no answer could be read from the response; score 0
TIMEOUT = "timeout"  # the answer kept the verifier busy for too long; score 0
MASKED = "masked:"  # followed by why, e.g. "masked:aborted"
BAD_RESULT = "bad_result"  # why: what the reward returned is no score
OWN_PROCESS = "own_process"
MAX_SCORE = 1e6  # a larger one is a mistake, and would drown all others of its step


class BadResultError(ValueError):
    """A reward returned, or tried to return, something that is not a score."""


@runtime_checkable
class PreparedParams(Protocol):
    """Params that import or load something before the first sample."""

    def prepare(self) -> str | None:
        """Import or load what the reward needs, in the process that scores. Return a note to print,
        or None. Raise ValueError for what a user can fix.
        """


@runtime_checkable
class MemoryLimitedParams(Protocol):
    """Params that limit the memory of a worker process, in GiB."""

    max_memory_gib: float


@runtime_checkable
class PatternSearchingParams(Protocol):
    """Params of a reward that may search the response for a user's regular expression, which can
    take for ever.
    """

    needs_process: bool  # as OWN_PROCESS says of all params


@runtime_checkable
class ResultKeyParams(Protocol):
    """Params of a reward that depends on less than the whole sample."""

    def make_result_key(self, sample: RewardSample) -> str:
        """Return a key of the sample. Samples of one key have the same result, which is computed
        once a call.
        """


@runtime_checkable
class LabelCheckingParams(Protocol):
    """Params of a reward that can tell from a label alone that no answer scores with it, whatever
    the policy writes.
    """

    def find_label_problem(self, label: str, is_json: bool = False) -> str:
        """Return what is wrong with a label, and the fix; "" where nothing is. `is_json`: the row
        has a list or an object as the label.

        Such rows are refused before a run starts; a sample with such a label is masked.
        """


@runtime_checkable
class ServerWaitingParams(Protocol):
    """Params of a reward that may ask a server."""

    waits_s: float | None  # seconds for one sample, over which it is masked; null: as other rewards


@dataclass(frozen=True)
class RewardSample:
    """The fields of a sample that a reward reads."""

    prompt: str  # as text, after templates
    response: str  # decoded, without special tokens
    label: str  # the reference answer of the prompt's row
    source: str  # name of the data source
    finish_reason: str  # "stop" | "length" | "abort"
    num_tokens: int  # of the response
    extra: str = ""  # JSON object of the row's other keys, or ""


@dataclass(frozen=True)
class RewardResult:
    """The score of one sample: the value that one reward returns, or the combined value of all
    rewards.
    """

    score: float  # at most MAX_SCORE in size; not read when the status is masked
    status: str = OK
    parts: dict[str, float] = field(default_factory=dict)  # components of the score, for metrics
    # of a masked result: the end of the traceback; of another: a hint for the user, or ""
    error: str = ""

    def __post_init__(self) -> None:
        """Raise BadResultError for an unknown status, or a score or part that is no number or too
        large.
        """
        has_why = self.status.startswith(MASKED) and len(self.status) > len(MASKED)
        if self.status not in (OK, MALFORMED, TIMEOUT) and not has_why:
            raise BadResultError(
                f"status ({self.status!r}) must be {OK}, {MALFORMED}, {TIMEOUT} or {MASKED}<why>."
            )
        for name, value in (("score", self.score), *self.parts.items()):
            if not isinstance(value, int | float) or not abs(value) <= MAX_SCORE:
                raise BadResultError(
                    f"{name} ({_format_value(value)}) must be a number from {-MAX_SCORE:g}"
                    f" to {MAX_SCORE:g}."
                )


def check_pattern(pattern: str, num_groups: int = 0) -> None:
    """Raise ValueError for text that is no regular expression, or has fewer than `num_groups`
    groups.
    """
    try:
        found = re.compile(pattern).groups
    except re.error as error:
        raise ValueError(f"pattern ({pattern!r}) is not a regular expression: {error}.") from error
    if found < num_groups:
        raise ValueError(f"pattern ({pattern!r}) needs a group; put parentheses around the answer.")


def _format_value(value: object) -> str:
    """Return the value for a message; an integer of many digits as its number of bits, since Python
    refuses to write thousands of digits.
    """
    return (
        f"{value.bit_length()} bits"
        if isinstance(value, int) and value.bit_length() > 256
        else repr(value)[:80]
    )


Reward = Callable[[RewardSample, Any], RewardResult]  # (sample, params)
REWARDS: Registry[Reward] = Registry(
    "reward",
    params_protocols=(
        PreparedParams,
        MemoryLimitedParams,
        PatternSearchingParams,
        ResultKeyParams,
        LabelCheckingParams,
        ServerWaitingParams,
    ),
)


def is_masked(status: str) -> bool:
    """Return whether the status leaves the sample out of the group and the loss."""
    return status.startswith(MASKED)


def make_bad_label_result(label: str, problem: str) -> RewardResult:
    """Return the masked result of a sample whose label no answer could score with. `problem`
    continues the sentence "The label ...".
    """
    return make_masked_result("bad_label", f"The label {label!r:.80} {problem}.")


def make_masked_result(reason: str, error: str = "") -> RewardResult:
    """Return the masked result of a sample that failed through no fault of the policy. `reason` is
    a word for metrics, `error` the text for the log.
    """
    return RewardResult(0.0, MASKED + reason, error=error)
