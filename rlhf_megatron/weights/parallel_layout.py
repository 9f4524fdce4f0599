"""The shape of a pool: how many ways each axis of the model is split, and which rank sits where.
Pure integers.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlhf_megatron.config.rules.pipeline_layout_text import parse_pipeline_layout
from rlhf_megatron.config.schema import MegatronConfig


@dataclass(frozen=True)
class GridCoordinates:
    """Place of a rank in the grid."""

    dp: int
    pp: int
    tp: int
    cp: int = 0

    def __str__(self) -> str:
        """Return "dp1 pp0 tp3", with cp where it is not 0: "dp1 pp0 cp1 tp3"."""
        return f"dp{self.dp} pp{self.pp}{f' cp{self.cp}' if self.cp else ''} tp{self.tp}"


@dataclass(frozen=True)
class ParallelLayout:
    """Megatron's rank order "tp-cp-ep-dp-pp": tp varies fastest, pp slowest.

    The experts of a stage lie on the same ranks in an order of their own, "etp-ep-edp", so their
    copies need not be replicas: at ep 2 two replicas may have half of the experts each.
    """

    world_size: int
    tp: int = 1
    pp: int = 1
    cp: int = 1
    vpp: int = 1  # model chunks of each pipeline rank
    sequence_parallel: bool = False  # tp ranks also split norms and residuals, by token
    ep: int = 1  # ranks that share the experts of a layer out
    # ranks that split each expert; 0: as many as split the other layers, and then it is that number
    etp: int = 0
    num_first_stage_layers: int = 0  # of the first pipeline stage; 0: as many as the others have
    num_last_stage_layers: int = 0  # of the last one
    # of every model chunk, in the order of the model; (): as the numbers above say
    layers_of_chunks: tuple[int, ...] = ()
    # a micro-batch has a prompt once for all its samples (data.shared_prompts)
    shares_prompts: bool = False

    def __post_init__(self) -> None:
        """Set etp to tp where it is 0. Raise ValueError for an impossible shape."""
        object.__setattr__(self, "etp", self.etp or self.tp)
        if self.world_size % self.replica_size != 0:
            raise ValueError(
                f"world size ({self.world_size}) must be a multiple of tensor x pipeline x context"
                f" parallel size ({self.tp} x {self.pp} x {self.cp} = {self.replica_size}); lower"
                " one of the three."
            )
        if self.vpp > 1 and self.pp == 1:
            raise ValueError(
                f"virtual pipeline size ({self.vpp}) needs pipeline stages; use pp 2 or"
                " more, or vpp 1."
            )
        if self.sequence_parallel and self.tp == 1:
            raise ValueError(
                "sequence parallelism splits over tensor-parallel ranks; use tp 2 or more, or"
                " turn it off."
            )
        if self.stage_size % (self.ep * self.etp) != 0:
            raise ValueError(
                f"the ranks of a pipeline stage ({self.stage_size}) must be a multiple of expert x"
                f" expert tensor parallel size ({self.ep} x {self.etp} = {self.ep * self.etp});"
                " lower one of the two, or take more ranks."
            )

    @property
    def replica_size(self) -> int:
        """Return the number of ranks that hold one copy of the model and share its samples."""
        return self.tp * self.pp * self.cp

    @property
    def dp(self) -> int:
        """Return the number of replicas."""
        return self.world_size // self.replica_size

    @property
    def stage_size(self) -> int:
        """Return the number of ranks of a pipeline stage, over all replicas."""
        return self.world_size // self.pp

    @property
    def edp(self) -> int:
        """Return the number of ranks that hold the same experts."""
        return self.stage_size // (self.ep * self.etp)

    @property
    def copy_size(self) -> int:
        """Return how many of the first ranks of a stage hold all of its tensors together: the size
        of a tp group, or that of all experts if larger.
        """
        return max(self.tp, self.ep * self.etp)

    @property
    def document_multiple(self) -> int:
        """Return m, where the tokens of a document are padded to a multiple of m: cp cuts each
        document into 2 cp chunks of one size.
        """
        return 2 * self.cp if self.cp > 1 else 1

    @property
    def packed_multiple(self) -> int:
        """Return m, where the tokens of a micro-batch are padded to a multiple of m, so that each
        rank's share divides by tp.
        """
        return self.document_multiple * (self.tp if self.sequence_parallel else 1)

    @property
    def micro_batch_multiple(self) -> int:
        """Return m, where a call must have a multiple of m micro-batches: the interleaved schedule
        runs them in rounds of pp.
        """
        return self.pp if self.vpp > 1 else 1

    def locate_rank(self, rank: int) -> GridCoordinates:
        """Return the coordinates of a rank in the grid."""
        tp = rank % self.tp
        cp = rank // self.tp % self.cp
        dp = rank // (self.tp * self.cp) % self.dp
        return GridCoordinates(dp=dp, pp=rank // (self.tp * self.cp * self.dp), tp=tp, cp=cp)

    def compute_rank(self, dp: int, pp: int, tp: int, cp: int = 0) -> int:
        """Return the rank at these coordinates: the inverse of `locate_rank`."""
        return ((pp * self.dp + dp) * self.cp + cp) * self.tp + tp

    def compute_stage_position(self, rank: int) -> int:
        """Return the number of a rank among the ranks of its stage."""
        return rank % self.stage_size

    def compute_ep_rank(self, rank: int) -> int:
        """Return the number of a rank in its expert-parallel group."""
        return self.compute_stage_position(rank) // self.etp % self.ep

    def compute_etp_rank(self, rank: int) -> int:
        """Return the number of a rank in its expert tensor-parallel group."""
        return self.compute_stage_position(rank) % self.etp

    def get_leader_rank(self, dp: int) -> int:
        """Return the rank of replica `dp` that receives the replica's shard and returns its
        results: last stage, cp 0, tp 0.
        """
        return self.compute_rank(dp, self.pp - 1, 0)

    def list_replica_ranks(self, dp: int) -> tuple[int, ...]:
        """Return all ranks of replica `dp`, in rank order."""
        return tuple(
            self.compute_rank(dp, pp, tp, cp)
            for pp in range(self.pp)
            for cp in range(self.cp)
            for tp in range(self.tp)
        )

    def __str__(self) -> str:
        """Return text such as "tp2 pp2 dp1"; vpp, cp, ep, etp and sequence parallelism are added
        where they are in use.
        """
        vpp = f" vpp{self.vpp}" if self.vpp > 1 else ""
        cp = f" cp{self.cp}" if self.cp > 1 else ""
        ep = f" ep{self.ep}" if self.ep > 1 else ""
        etp = f" etp{self.etp}" if self.etp != self.tp else ""
        sequence = " sequence" if self.sequence_parallel else ""
        return f"tp{self.tp}{sequence} pp{self.pp}{vpp}{cp}{ep}{etp} dp{self.dp}"

    def split_layers_into_chunks(self, num_layers: int) -> tuple[int, ...]:
        """Return the number of layers of each model chunk, in the order of the model; chunk c lies
        on stage c % pp.

        Raise ValueError for a number of layers that does not fit these sizes.
        """
        if self.layers_of_chunks:
            if sum(self.layers_of_chunks) != num_layers:
                raise ValueError(
                    f"pipeline_model_parallel_layout has {sum(self.layers_of_chunks)} layers (t),"
                    f" the model has {num_layers}; make them equal."
                )
            return self.layers_of_chunks
        depths = _split_layers_into_stages(
            num_layers, self.pp, self.num_first_stage_layers, self.num_last_stage_layers
        )
        if any(depth % self.vpp for depth in depths):
            raise ValueError(
                f"virtual pipeline size ({self.vpp}) must divide the layers of each stage,"
                f" {depths}; 1 does."
            )
        return tuple(depth // self.vpp for depth in depths) * self.vpp

    def map_layers_to_stages(self, num_layers: int) -> tuple[int, ...]:
        """Return the pipeline stage of every layer. Raise ValueError as `split_layers_into_chunks`
        does.
        """
        chunks = enumerate(self.split_layers_into_chunks(num_layers))
        return tuple(number % self.pp for number, depth in chunks for _ in range(depth))


def _split_layers_into_stages(
    num_layers: int, num_stages: int, num_first_stage_layers: int, num_last_stage_layers: int
) -> tuple[int, ...]:
    """Return the number of layers of each pipeline stage. `num_first_stage_layers` and
    `num_last_stage_layers` fix those of the first and the last stage where they are not 0; the
    other stages share the rest evenly. Raise ValueError where the rest does not divide.
    """
    inner = num_stages - bool(num_first_stage_layers) - bool(num_last_stage_layers)
    left = num_layers - num_first_stage_layers - num_last_stage_layers
    if inner < 0 or left < 0 or (left % inner if inner else left):
        if not num_first_stage_layers and not num_last_stage_layers:
            raise ValueError(
                f"the number of layers ({num_layers}) must be a multiple of the pipeline parallel"
                f" size ({num_stages}); set num_layers_in_first_pipeline_stage or"
                " num_layers_in_last_pipeline_stage so that the rest divides,"
                " or pipeline_model_parallel_layout."
            )
        raise ValueError(
            f"the number of layers ({num_layers}) less those of first and last stage"
            f" ({num_first_stage_layers} and {num_last_stage_layers}; 0: not set) must be a"
            f" multiple of the other stages ({inner}); change num_layers_in_first_pipeline_stage"
            " or num_layers_in_last_pipeline_stage."
        )
    each = left // max(inner, 1)
    return (
        *[num_first_stage_layers] * bool(num_first_stage_layers),
        *[each] * inner,
        *[num_last_stage_layers] * bool(num_last_stage_layers),
    )


def make_parallel_layout(megatron: MegatronConfig, world_size: int) -> ParallelLayout:
    """Return the layout of a configuration on `world_size` ranks. Raise ValueError for an
    impossible shape.
    """
    return ParallelLayout(
        world_size,
        tp=megatron.tensor_model_parallel_size,
        pp=megatron.pipeline_model_parallel_size,
        cp=megatron.context_parallel_size,
        vpp=megatron.virtual_pipeline_model_parallel_size or 1,
        sequence_parallel=megatron.sequence_parallel,
        ep=megatron.expert_model_parallel_size,
        etp=megatron.expert_tensor_parallel_size or 0,
        num_first_stage_layers=megatron.num_layers_in_first_pipeline_stage or 0,
        num_last_stage_layers=megatron.num_layers_in_last_pipeline_stage or 0,
        layers_of_chunks=parse_pipeline_layout(text)
        if (text := megatron.pipeline_model_parallel_layout)
        else (),
        shares_prompts=megatron.share_prompts,
    )
