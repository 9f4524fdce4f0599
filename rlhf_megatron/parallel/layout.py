"""The shape of a pool: how many ways each axis of the model is split, and which rank sits where. Pure integers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Coordinates:
    """Place of a rank in the grid."""

    dp: int
    pp: int
    tp: int

    def __str__(self) -> str:
        return f"dp{self.dp} pp{self.pp} tp{self.tp}"


@dataclass(frozen=True)
class Layout:
    """Megatron's rank order "tp-cp-ep-dp-pp": tp varies fastest, pp slowest."""

    world_size: int
    tp: int = 1
    pp: int = 1

    def __post_init__(self) -> None:
        if self.world_size % (self.tp * self.pp) != 0:
            raise ValueError(
                f"world size ({self.world_size}) must be a multiple of tensor x pipeline parallel size"
                f" ({self.tp} x {self.pp} = {self.tp * self.pp})."
            )

    @property
    def dp(self) -> int:
        return self.world_size // (self.tp * self.pp)

    def coordinates(self, rank: int) -> Coordinates:
        tp = rank % self.tp
        dp = rank // self.tp % self.dp
        return Coordinates(dp=dp, pp=rank // (self.tp * self.dp), tp=tp)

    def rank(self, dp: int, pp: int, tp: int) -> int:
        return (pp * self.dp + dp) * self.tp + tp

    def leader(self, dp: int) -> int:
        """The rank of replica `dp` that receives its shard and returns its results: last stage, tp 0."""
        return self.rank(dp, self.pp - 1, 0)

    def replica(self, dp: int) -> tuple[int, ...]:
        """All ranks that hold one copy of the model, in rank order."""
        return tuple(self.rank(dp, pp, tp) for pp in range(self.pp) for tp in range(self.tp))

    def __str__(self) -> str:
        return f"tp{self.tp} pp{self.pp} dp{self.dp}"
