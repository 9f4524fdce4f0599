"""Statistics of columns that come block by block: means, deviations, extremes and shares. Never a number that is not
finite; 0 where nothing came."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass
class Spread:
    """Of all entries added."""

    count: int = 0
    total: float = 0.0
    squares: float = 0.0
    largest: float = 0.0
    smallest: float = 0.0

    def add(self, entries: Tensor) -> None:
        """[any] float64."""
        if not entries.numel():
            return
        low, high = (bound.item() for bound in entries.aminmax())
        self.largest = high if self.count == 0 else max(self.largest, high)
        self.smallest = low if self.count == 0 else min(self.smallest, low)
        self.count += entries.numel()
        self.total += entries.sum().item()
        self.squares += entries.dot(entries).item()

    def add_sums(self, entries: Tensor, with_squares: bool = False) -> None:
        """Without the extremes, and the deviation where not wanted."""
        self.count += entries.numel()
        self.total += entries.sum().item()
        if with_squares:
            self.squares += entries.dot(entries).item()

    @property
    def mean(self) -> float:
        return self.total / max(self.count, 1)

    @property
    def mean_square(self) -> float:
        return self.squares / max(self.count, 1)

    @property
    def std(self) -> float:
        """Of the entries themselves, not of a population that they stand for."""
        return float(max(self.mean_square - self.mean**2, 0.0) ** 0.5)

    @property
    def effective_share(self) -> float:
        """Effective sample size as a share of all: (sum w)^2 / (n sum w^2)."""
        return self.total**2 / (self.count * self.squares) if self.squares > 0 else 0.0

    def metrics(self, name: str) -> dict[str, float]:
        """name_{mean,std,max,min}."""
        return {
            f"{name}_mean": self.mean,
            f"{name}_std": self.std,
            f"{name}_max": self.largest,
            f"{name}_min": self.smallest,
        }


class Tally:
    """Spreads and shares by name."""

    def __init__(self) -> None:
        self._spreads: dict[str, Spread] = {}

    def spread(self, name: str, entries: Tensor) -> None:
        self.of(name).add(entries)

    def share(self, name: str, is_hit: Tensor) -> None:
        """Of True among the entries."""
        self.hits(name, int(is_hit.count_nonzero()), is_hit.numel())

    def hits(self, name: str, num_hits: int, count: int) -> None:
        """A share as `num_hits` of `count`."""
        found = self.of(name)
        found.count += count
        found.total += num_hits

    def of(self, name: str) -> Spread:
        return self._spreads.setdefault(name, Spread())
