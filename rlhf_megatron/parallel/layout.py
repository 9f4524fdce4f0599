"""The shape of a pool: how many ways each axis of the model is split, and which rank sits where. Pure integers."""

from __future__ import annotations

from dataclasses import dataclass

from rlhf_megatron.config.schema import MegatronConfig


@dataclass(frozen=True)
class Coordinates:
    """Place of a rank in the grid."""

    dp: int
    pp: int
    tp: int
    cp: int = 0

    def __str__(self) -> str:
        """ "dp1 pp0 tp3"; cp is named where it is not 0: "dp1 pp0 cp1 tp3"."""
        return f"dp{self.dp} pp{self.pp}{f' cp{self.cp}' if self.cp else ''} tp{self.tp}"


@dataclass(frozen=True)
class Layout:
    """Megatron's rank order "tp-cp-ep-dp-pp": tp varies fastest, pp slowest."""

    world_size: int
    tp: int = 1
    pp: int = 1
    cp: int = 1
    vpp: int = 1  # model chunks of each pipeline rank
    sequence_parallel: bool = False  # tp ranks also split norms and residuals, by token

    def __post_init__(self) -> None:
        """Raises ValueError for a shape that cannot be."""
        if self.world_size % self.replica_size != 0:
            raise ValueError(
                f"world size ({self.world_size}) must be a multiple of tensor x pipeline x context parallel size"
                f" ({self.tp} x {self.pp} x {self.cp} = {self.replica_size})."
            )
        if self.vpp > 1 and self.pp == 1:
            raise ValueError(f"virtual pipeline size ({self.vpp}) needs pipeline stages; use pp 2 or more, or vpp 1.")
        if self.sequence_parallel and self.tp == 1:
            raise ValueError(
                "sequence parallelism splits over tensor-parallel ranks; use tp 2 or more, or turn it off."
            )

    @property
    def replica_size(self) -> int:
        """Ranks that hold one copy of the model and share its samples."""
        return self.tp * self.pp * self.cp

    @property
    def dp(self) -> int:
        return self.world_size // self.replica_size

    @property
    def document_multiple(self) -> int:
        """Tokens of a document are padded to a multiple of this: cp cuts each into 2 cp chunks of one size."""
        return 2 * self.cp if self.cp > 1 else 1

    @property
    def packed_multiple(self) -> int:
        """Tokens of a micro-batch are padded to a multiple of this: each rank's share divides by tp."""
        return self.document_multiple * (self.tp if self.sequence_parallel else 1)

    @property
    def micro_batch_multiple(self) -> int:
        """A call has a multiple of so many micro-batches: the interleaved schedule runs them in rounds of pp."""
        return self.pp if self.vpp > 1 else 1

    def coordinates(self, rank: int) -> Coordinates:
        tp = rank % self.tp
        cp = rank // self.tp % self.cp
        dp = rank // (self.tp * self.cp) % self.dp
        return Coordinates(dp=dp, pp=rank // (self.tp * self.cp * self.dp), tp=tp, cp=cp)

    def rank(self, dp: int, pp: int, tp: int, cp: int = 0) -> int:
        return ((pp * self.dp + dp) * self.cp + cp) * self.tp + tp

    def leader(self, dp: int) -> int:
        """The rank of replica `dp` that receives its shard and returns its results: last stage, cp 0, tp 0."""
        return self.rank(dp, self.pp - 1, 0)

    def replica(self, dp: int) -> tuple[int, ...]:
        """All ranks that hold one copy of the model, in rank order."""
        return tuple(
            self.rank(dp, pp, tp, cp) for pp in range(self.pp) for cp in range(self.cp) for tp in range(self.tp)
        )

    def __str__(self) -> str:
        """ "tp2 pp2 dp1"; vpp, cp and sequence parallelism are named where they are in use."""
        vpp = f" vpp{self.vpp}" if self.vpp > 1 else ""
        cp = f" cp{self.cp}" if self.cp > 1 else ""
        return f"tp{self.tp}{' sequence' if self.sequence_parallel else ''} pp{self.pp}{vpp}{cp} dp{self.dp}"


def layout_of(megatron: MegatronConfig, world_size: int) -> Layout:
    """The layout that a configuration asks for on `world_size` ranks. Raises ValueError for one that cannot be."""
    return Layout(
        world_size,
        tp=megatron.tensor_model_parallel_size,
        pp=megatron.pipeline_model_parallel_size,
        cp=megatron.context_parallel_size,
        vpp=megatron.virtual_pipeline_model_parallel_size or 1,
        sequence_parallel=megatron.sequence_parallel,
    )
