"""How a field of the schema is declared: its one-line description, its default and the range of a number."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Interval:
    """[low, high], or open at an end. Both ends None: any number."""

    low: float | None = 0
    high: float | None = None
    is_low_open: bool = False
    is_high_open: bool = False

    def __contains__(self, value: float) -> bool:
        if self.low is not None and (value <= self.low if self.is_low_open else value < self.low):
            return False
        return self.high is None or (value < self.high if self.is_high_open else value <= self.high)

    def __str__(self) -> str:
        low = f"{'above' if self.is_low_open else 'at least'} {self.low}" if self.low is not None else ""
        high = f"{'below' if self.is_high_open else 'at most'} {self.high}" if self.high is not None else ""
        return " and ".join(part for part in (low, high) if part)


NOT_NEGATIVE = Interval()
ANY = Interval(None)
COUNT = Interval(1)
POSITIVE = Interval(0, is_low_open=True)
SECONDS = Interval(0, math.inf, is_low_open=True, is_high_open=True)
AMOUNT = Interval(0, math.inf, is_high_open=True)
FRACTION = Interval(0, 1)
SHARE = Interval(0, 1, is_low_open=True)
BELOW_ONE = Interval(0, 1, is_high_open=True)


def doc(text: str, default: Any = ..., bounds: Interval = NOT_NEGATIVE, factory: Any = None) -> Any:
    """A dataclass field. `text` is shown by `config show` and `config reference`; every number must lie in `bounds`."""
    metadata = {"doc": text, "bounds": bounds}
    if factory is not None:
        return field(default_factory=factory, metadata=metadata)
    return field(metadata=metadata) if default is ... else field(default=default, metadata=metadata)
