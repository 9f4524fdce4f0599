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
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import product
from string import ascii_letters, digits
from typing import Any, Protocol, runtime_checkable

from rlhf_megatron.registry import Registry, name_attributes

OK = "ok"
MALFORMED = "malformed"  # no answer could be read from the response; score 0
TIMEOUT = "timeout"  # the answer kept the verifier busy for too long; score 0
MASKED = "masked:"  # followed by why, e.g. "masked:aborted"
BAD_RESULT = "bad_result"  # why: what the reward returned is no score
OWN_PROCESS = "own_process"
# names that verl gives to fields of a sample
FIELDS_BY_VERL_NAME = {
    "solution_str": "response",
    "ground_truth": "label",
    "data_source": "source",
    "extra_info": "extra",
}
MAX_PART_CHARS = 200  # of a pattern, that are looked at for the name of a token
# each letter and digit to the next one
OTHER_LETTERS = str.maketrans(
    ascii_letters + digits, ascii_letters[1:] + ascii_letters[:1] + digits[1:] + digits[:1]
)
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
class PartialReadingParams(Protocol):
    """Params of a reward that reads only a part of some labels, and compares answers with that."""

    def describe_partial_reading(self, label: str) -> str:
        """Return how a label that is not read whole counts, as the end of a sentence that begins
        with the label, such as "counts as 5 only"; "" for a label that is read whole.

        A run reports such labels before it starts.
        """


@runtime_checkable
class ServerWaitingParams(Protocol):
    """Params of a reward that may ask a server."""

    waits_s: float | None  # seconds for one sample, over which it is masked; null: as other rewards


@runtime_checkable
class ResponseReadingParams(Protocol):
    """Params of a reward that may read more of a response than its decoded text; see
    `read_response`.
    """

    @property
    def skip_special_tokens(self) -> bool | None:
        """Return whether special tokens are left out: True for all of them, False for none, None
        for those that `response_pattern` does not name.
        """

    @property
    def response_pattern(self) -> str | None:
        """Return the regular expression that responses are searched for, or None."""

    @property
    def reads_response_prefix(self) -> bool:
        """Return whether the beginning of the answer that the prompt wrote is read, too."""


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
    # the end of the prompt that the answer begins with, such as "<think>\n"
    response_prefix: str = ""
    # (position in the response, name) of the special tokens that decoding left out
    special_tokens: tuple[tuple[int, str], ...] = ()


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


def read_response(sample: RewardSample, params: ResponseReadingParams) -> str:
    """Return the response as the reward reads it: with the special tokens that the params select,
    and behind the beginning that the prompt wrote of it, where the reward reads that.
    """
    text = show_special_tokens(sample, params)
    return sample.response_prefix + text if params.reads_response_prefix else text


def show_special_tokens(sample: RewardSample, params: ResponseReadingParams) -> str:
    """Return the response with the special tokens that the params select, at their places."""
    if not sample.special_tokens:
        return sample.response
    names = select_special_tokens(params, sorted({name for _, name in sample.special_tokens}))
    pieces = []
    begin = 0
    for position, name in sample.special_tokens:
        if name in names:
            pieces += [sample.response[begin:position], name]
            begin = position
    return "".join([*pieces, sample.response[begin:]])


def drop_stop_token(sample: RewardSample) -> RewardSample:
    """Return the sample without the special token that ended its response, where there is one."""
    has_stop_token = (
        sample.finish_reason == "stop"
        and bool(sample.special_tokens)
        and sample.special_tokens[-1][0] == len(sample.response)
    )
    if not has_stop_token:
        return sample
    return replace(sample, special_tokens=sample.special_tokens[:-1])


def select_special_tokens(params: ResponseReadingParams, token_names: Sequence[str]) -> list[str]:
    """Return those of the special tokens that the reward reads in a response."""
    if params.skip_special_tokens is None:
        return list_named_tokens(params, token_names)
    return [] if params.skip_special_tokens else list(token_names)


def list_named_tokens(params: ResponseReadingParams, token_names: Sequence[str]) -> list[str]:
    """Return those of the special tokens that the pattern of the params names."""
    pattern = params.response_pattern
    return [name for name in token_names if pattern is not None and does_name(pattern, name)]


@lru_cache(maxsize=4096)
def does_name(pattern: str, token: str) -> bool:
    r"""Return whether a regular expression names a special token: some part of the expression
    matches the token's text, and not a text of the same form with other letters.

    The expression </?(think|answer)>\\s names </think>; <.*> and <\\w+> name no token.
    """
    if token in pattern or re.escape(token) in pattern:
        return True
    other_text = token.translate(OTHER_LETTERS)
    return any(
        part.fullmatch(token) and not part.fullmatch(other_text)
        for part in _compile_pattern_parts(pattern, token[0], token[-1])
    )


@lru_cache(maxsize=64)
def _compile_pattern_parts(pattern: str, first: str, last: str) -> tuple[re.Pattern[str], ...]:
    """Return the parts of a regular expression that begin with one letter and end with another, and
    that are expressions themselves. A backslash may stand before the first letter.
    """
    flags = re.compile(pattern).flags
    begins = [i for i, letter in enumerate(pattern) if letter.lower() == first.lower()]
    begins += [i - 1 for i in begins if pattern[i - 1 : i] == "\\"]
    ends = [i + 1 for i, letter in enumerate(pattern) if letter.lower() == last.lower()]
    parts = []
    for begin, end in product(begins, ends):
        if 0 < end - begin <= MAX_PART_CHARS:
            with suppress(re.error):  # the part begins or ends within a group
                parts.append(re.compile(pattern[begin:end], flags))
    return tuple(parts)


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
        PartialReadingParams,
        ServerWaitingParams,
        ResponseReadingParams,
    ),
    call_arguments=("sample", "params"),
    attributes_by_name=name_attributes(RewardSample) | FIELDS_BY_VERL_NAME,
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
