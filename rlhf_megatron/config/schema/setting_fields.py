"""How a field of the schema is declared: its one-line description, its default and the
range of a number.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Interval:
    """The numbers from `low` to `high`, without an end that is open. `low_reason` and `high_reason`
    say in messages why an end is no rule of mathematics.
    """

    low: float = 0
    high: float = 10**9
    high_reason: str = ""  # not above high
    low_reason: str = ""
    is_low_open: bool = False
    is_high_open: bool = False

    def __contains__(self, value: float) -> bool:
        """Return whether the value is in the interval; NaN is not."""
        return not self._is_below(value) and (
            value < self.high if self.is_high_open else value <= self.high
        )

    def __str__(self) -> str:
        """Return the interval in words, such as "at least 0 and at most 1"; the number alone if
        there is only one.
        """
        return str(self.low) if self.low == self.high else f"{self._low_text} and {self._high_text}"

    def violation_message(self, value: float) -> str:
        """Return the rule that a value outside of the interval breaks, with its reason where there
        is one.
        """
        if not self.high_reason:
            return str(self)
        end, why = (
            (self._low_text, self.low_reason)
            if self._is_below(value)
            else (self._high_text, self.high_reason)
        )
        return f"{self if self.low == self.high else end}{': ' if why else ''}{why}"

    def _is_below(self, value: float) -> bool:
        """Return whether the value is below the interval; True for NaN."""
        return not (value > self.low if self.is_low_open else value >= self.low)

    @property
    def _low_text(self) -> str:
        """Return the lower end in words: "at least LOW", or "above LOW" if the end is open."""
        return f"{'above' if self.is_low_open else 'at least'} {self.low}"

    @property
    def _high_text(self) -> str:
        """Return the upper end in words: "at most HIGH", or "below HIGH" if the end is open."""
        return f"{'below' if self.is_high_open else 'at most'} {self.high}"


NOT_NEGATIVE = Interval(high_reason="a run counts to a billion at most")
COUNT = Interval(1, high_reason=NOT_NEGATIVE.high_reason)
RANKS = Interval(1, 65_536, "no job has more processes")
SAMPLES = Interval(1, 10_000_000, "the controller holds all samples of a step")
EPOCHS = Interval(1, 1000, "more passes only fit the noise of the samples")
TOKENS = Interval(1, 100_000_000, "no model reads longer texts")
MEBIBYTES = Interval(1, 1 << 20, "1 TiB, more than a device has")
PROCESSES = Interval(1, 4096, "each is a process of one machine")
RETRIES = Interval(0, 10_000, "what fails more often is broken")
SEED = Interval(0, 2**63 - 1, "generators take 64 bits")
SECONDS = Interval(0.001, 31_536_000, "nobody waits longer than a year", "clocks are not finer")
WEIGHT = Interval(
    -1e6,
    1e6,
    "it would drown everything else in float32",
    "it would drown everything else in float32",
)
FACTOR = Interval(0, 1e6, WEIGHT.high_reason)
POSITIVE = Interval(
    1e-12,
    1e12,
    "float32 has no room beyond",
    "0 and less mean nothing, and float32 has no room below",
)
NATS = Interval(
    1e-9, 1e4, "log-probs never differ so much", "float32 log-probs always differ by more"
)
FRACTION = Interval(0, 1)
SHARE = Interval(1e-30, 1, "it is a share", "it is 0 in float32")
BELOW_ONE = Interval(0, 1, is_high_open=True)


def make_exact_interval(value: float, reason: str) -> Interval:
    """Return the interval that contains only `value`, with a reason for messages."""
    return Interval(value, value, reason, reason)


def declare_setting(
    description: str, default: Any = ..., bounds: Interval = NOT_NEGATIVE, factory: Any = None
) -> Any:
    """Return a dataclass field for a setting: required without a default or a factory. `config
    show` and `config reference` print the description; every number in the setting must lie in
    `bounds`.
    """
    metadata = {"doc": description, "bounds": bounds}
    if factory is not None:
        return field(default_factory=factory, metadata=metadata)
    return field(metadata=metadata) if default is ... else field(default=default, metadata=metadata)
