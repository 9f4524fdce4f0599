"""What a reward is: a function of one sample. A new reward is one new file in this package.

    @REWARDS.register("exact_match", ExactMatchParams)
    def exact_match(sample: RewardSample, params: ExactMatchParams) -> RewardResult: ...

Aborted samples are masked before a reward sees them. A reward that may be slow, or that runs a user's code, is
registered with `needs=(OWN_PROCESS,)` and is called in a worker process that is killed when it takes too long.

A status says who is to blame for a missing score. What the policy can have caused scores 0 and trains; what it cannot
have caused is masked: the sample is left out of its group's statistics and trains nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rlhf_megatron.registry import Registry

OK = "ok"
MALFORMED = "malformed"  # no answer could be read from the response; score 0
TIMEOUT = "timeout"  # the answer kept the verifier busy for too long; score 0
MASKED = "masked:"  # followed by why, e.g. "masked:aborted"
OWN_PROCESS = "own_process"


@dataclass(frozen=True)
class RewardSample:
    """What a reward reads."""

    prompt: str  # as text, after templates
    response: str  # decoded, without special tokens
    label: str  # the reference answer of the prompt's row
    source: str  # name of the data source
    finish_reason: str  # "stop" | "length" | "abort"
    num_tokens: int  # of the response
    extra: str = ""  # JSON object of the row's other keys, or ""


@dataclass(frozen=True)
class RewardResult:
    """Of one sample."""

    score: float  # finite; not read when the status is masked
    status: str = OK
    parts: dict[str, float] = field(default_factory=dict)  # components of the score, for metrics

    def __post_init__(self) -> None:
        policy_caused = self.status in (MALFORMED, TIMEOUT)
        masked = self.status.startswith(MASKED) and len(self.status) > len(MASKED)
        if not (self.status == OK or policy_caused or masked):
            raise ValueError(f"status ({self.status!r}) must be {OK}, {MALFORMED}, {TIMEOUT} or {MASKED}<why>.")
        if not abs(self.score) < float("inf"):
            raise ValueError(f"score ({self.score}) must be finite.")
        if policy_caused and self.score != 0:
            raise ValueError(f"score ({self.score}) must be 0 when the status is {self.status}.")


Reward = Callable[[RewardSample, Any], RewardResult]  # (sample, params)
REWARDS: Registry[Reward] = Registry("reward")


def is_masked(status: str) -> bool:
    """True for a sample that is left out."""
    return status.startswith(MASKED)


def masked(why: str) -> RewardResult:
    """The result of a sample that failed through no fault of the policy. `why`: a word for metrics."""
    return RewardResult(0.0, MASKED + why)
