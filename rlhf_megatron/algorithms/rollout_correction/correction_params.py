"""What a correction does, as numbers. The mismatch ratio is r = trainer's / engine's probability of
a sampled token.

A filter's name is a level and an estimate, e.g. "seq_mean_k3": k1 looks at the ratio itself and has
two bounds, which are bounds of the ratio (of the product of a sequence's ratios under seq_sum, of
their geometric mean under seq_mean); k2 = log(r)^2 / 2 and k3 = r - 1 - log r are distances from
r = 1 and have an upper bound only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

IMPORTANCE_LEVELS = ("token", "sequence")
REJECTION_FILTERS = (
    *("token_k1", "token_k2", "token_k3"),
    *("seq_sum_k1", "seq_sum_k2", "seq_sum_k3"),
    *("seq_mean_k1", "seq_mean_k2", "seq_mean_k3"),
    *("seq_max_k2", "seq_max_k3"),
)


@dataclass(frozen=True)
class ImportanceWeightParams:
    """Importance weights. `low` None: cut at `high` (truncation); else 0 outside of [low,
    high] (IcePop).
    """

    level: Literal["token", "sequence"]
    high: float = 2.0
    low: float | None = None

    def __post_init__(self) -> None:
        """Raise ValueError for an unknown level or bounds out of range."""
        if self.level not in IMPORTANCE_LEVELS:
            raise ValueError(
                f"level ({self.level!r}) of importance weights must be one"
                f" of {', '.join(IMPORTANCE_LEVELS)}."
            )
        if not 0 < self.high < float("inf"):
            raise ValueError(
                f"upper bound ({self.high}) of importance weights must be a number above 0;"
                " 2 is usual."
            )
        if self.low is not None and not 0 < self.low < self.high:
            raise ValueError(
                f"lower bound ({self.low}) must be between 0 and the upper bound ({self.high})."
            )


@dataclass(frozen=True)
class RejectionFilter:
    """Rejects tokens, or whole sequences, outside of [low, high]; the bounds themselves pass."""

    name: str  # one of REJECTION_FILTERS
    high: float
    low: float | None = None  # of k1

    def __post_init__(self) -> None:
        """Raise ValueError for an unknown filter, bounds out of range, a missing lower bound (k1)
        or a superfluous one.
        """
        if self.name not in REJECTION_FILTERS:
            raise ValueError(
                f"unknown rejection filter {self.name!r}; known: {', '.join(REJECTION_FILTERS)}."
            )
        if not 0 < self.high < float("inf"):
            raise ValueError(
                f"upper bound ({self.high:g}) of {self.name} must be a finite number above 0."
            )
        if self.low is None and self.estimate == "k1":
            raise ValueError(
                f"{self.name} needs a lower bound beside the upper one ({self.high:g})."
            )
        if self.low is not None and self.estimate != "k1":
            raise ValueError(f"{self.name} has no lower bound ({self.low:g}); remove it.")
        if self.low is not None and not 0 < self.low < self.high:
            raise ValueError(
                f"lower bound ({self.low}) of {self.name} must be between 0 and {self.high}."
            )

    @property
    def level(self) -> str:
        """Return "token", "seq_sum", "seq_mean" or "seq_max"."""
        return self.name.rpartition("_")[0]

    @property
    def estimate(self) -> str:
        """Return "k1", "k2" or "k3"."""
        return self.name.rpartition("_")[2]


@dataclass(frozen=True)
class CorrectionParams:
    importance: ImportanceWeightParams | None = None
    use_batch_norm: bool = False  # divide the weights by their mean over the step
    filters: tuple[RejectionFilter, ...] = ()  # all must pass
    veto: float | None = None  # a token with r below it drops its sequence

    def __post_init__(self) -> None:
        """Raise ValueError for repeated filters, a veto out of range, and batch normalisation
        without weights.
        """
        names = [one.name for one in self.filters]
        if len(set(names)) != len(names):
            raise ValueError(f"rejection filters ({', '.join(names)}) must differ; name each once.")
        if self.veto is not None and not 0 < self.veto < 1:
            raise ValueError(
                f"veto threshold ({self.veto}) must be above 0 and below 1; 1e-4 is usual."
            )
        if self.use_batch_norm and self.importance is None:
            raise ValueError("batch normalisation (true) needs importance weights to normalise.")

    @property
    def has_rejection(self) -> bool:
        """Return whether a filter or a veto can reject tokens."""
        return bool(self.filters) or self.veto is not None
