"""One Megatron world: the process groups of a layout. Nothing outside parallel/ reads
a global group.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from rlhf_megatron.device import choose_distributed_backend, measure_device_memory
from rlhf_megatron.ranks.parallel.megatron_setup import prepare_megatron
from rlhf_megatron.weights.parallel_layout import GridCoordinates, ParallelLayout


@dataclass(frozen=True)
class World:
    """The place of a rank in a layout, and the process groups in which it communicates."""

    layout: ParallelLayout
    rank: int
    coordinates: GridCoordinates
    device: torch.device
    tp_group: ProcessGroup  # ranks that split each layer
    pp_group: ProcessGroup  # ranks that split the stack, in stage order
    cp_group: ProcessGroup  # ranks that split each sample and hold the same shard
    dp_group: ProcessGroup  # ranks that hold the same shard, one a replica
    dp_cp_group: ProcessGroup  # all ranks that hold the same shard: gradients are summed over them
    model_parallel_group: ProcessGroup  # tp x pp: the ranks that hold one copy of the model
    # ranks that hold the same experts: their gradients are summed over them
    expert_dp_group: ProcessGroup
    # ranks of this stage that hold its tensors once together, or more of them alike
    copy_group: ProcessGroup
    leader_rank: int  # rank of this replica's leader
    pg_collection: Any  # megatron's ProcessGroupCollection, to be handed to its functions
    is_in_pieces: bool = False  # FSDP2's shards end anywhere in a tensor's rows

    @property
    def is_first_copy(self) -> bool:
        """Return whether this rank's `copy_group` is the group that sends the weights of its stage;
        the group's rank 0 sends.
        """
        return self.layout.compute_stage_position(self.rank) < self.layout.copy_size

    @property
    def is_leader(self) -> bool:
        """Return whether this rank receives and returns its replica's data (each replica has one
        leader).
        """
        return self.rank == self.leader_rank

    @property
    def is_first_stage(self) -> bool:
        """Return whether this rank is on the first pipeline stage."""
        return self.coordinates.pp == 0

    @property
    def is_last_stage(self) -> bool:
        """Return whether this rank is on the last pipeline stage."""
        return self.coordinates.pp == self.layout.pp - 1

    def __str__(self) -> str:
        return str(self.coordinates)


def create_world(
    layout: ParallelLayout, device: torch.device, seed: int = 1, timeout_s: float = 1800.0
) -> World:
    """Make all process groups of `layout` and return this rank's World. Call it on every rank; a
    process has one world at a time.

    Use torch's default process group; where there is none, make the default group from the
    launcher's environment (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT), or in memory for a layout
    of one rank. `seed` is the seed of megatron's random states, `timeout_s` the deadline of a
    collective in seconds.

    Raise ValueError when the number of processes differs from the layout's or a world exists
    already.
    """
    prepare_megatron()
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.process_groups_config import ProcessGroupCollection

    if parallel_state.model_parallel_is_initialized():
        raise ValueError(
            "this process has a world already; call destroy_world() before making another."
        )
    if not dist.is_initialized():
        _init_default_process_group(layout, device, timeout_s)
    if dist.get_world_size() != layout.world_size:
        raise ValueError(
            f"layout {layout} is for {layout.world_size} ranks but {dist.get_world_size()}"
            f" processes run; start {layout.world_size}, or change the parallel sizes."
        )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
        create_gloo_process_groups=False,
        distributed_timeout_minutes=max(1, round(timeout_s / 60)),
    )
    tensor_parallel.model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
    rank = dist.get_rank()
    coordinates = layout.locate_rank(rank)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    return World(
        layout=layout,
        rank=rank,
        coordinates=coordinates,
        device=device,
        tp_group=groups.tp,
        pp_group=groups.pp,
        cp_group=groups.cp,
        dp_group=groups.dp,
        dp_cp_group=groups.dp_cp,
        model_parallel_group=groups.mp,
        expert_dp_group=groups.expt_dp,
        copy_group=groups.tp if layout.copy_size == layout.tp else groups.tp_ep,
        leader_rank=layout.get_leader_rank(coordinates.dp),
        pg_collection=groups,
    )


def destroy_world(is_default_group_ended: bool = True) -> None:
    """End the world of this process, so that another layout can follow. Call it on every rank; it
    is safe without a world.

    With `is_default_group_ended` False, keep torch's default process group for a next world of as
    many ranks.
    """
    from megatron.core import parallel_state

    groups = [
        group for group in parallel_state._global_process_group_list or [] if group is not None
    ]
    parallel_state.destroy_model_parallel()
    if not dist.is_initialized():
        return
    if is_default_group_ended:
        dist.destroy_process_group()
        return
    for group in groups:
        dist.destroy_process_group(group)


def find_smallest_device_memory(world: World) -> int:
    """Return the total bytes of the smallest GPU of the world's ranks; 0 on CPUs. All ranks must
    call it.
    """
    total = torch.tensor(
        measure_device_memory(world.device).total_bytes, dtype=torch.int64, device=world.device
    )
    if world.device.type != "cpu" and world.layout.world_size > 1:
        dist.all_reduce(total, dist.ReduceOp.MIN)
    return int(total)


def free_scratch_buffers() -> None:
    """Free the scratch buffers that megatron's layers keep from one pass to the next."""
    from megatron.core import parallel_state

    parallel_state.get_global_memory_buffer().buffer.clear()


def _init_default_process_group(
    layout: ParallelLayout, device: torch.device, timeout_s: float
) -> None:
    """Make torch's default process group from RANK and WORLD_SIZE, or in memory for a layout of one
    rank. Raise ValueError for several ranks without those variables.
    """
    timeout = timedelta(seconds=timeout_s)
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        dist.init_process_group(choose_distributed_backend(device), timeout=timeout)
    elif layout.world_size == 1:
        dist.init_process_group(
            choose_distributed_backend(device),
            store=dist.HashStore(),
            rank=0,
            world_size=1,
            timeout=timeout,
        )
    else:
        raise ValueError(
            f"layout {layout} needs {layout.world_size} processes but RANK and WORLD_SIZE are not"
            " set; start it with trainer.runtime torchrun, or use one rank."
        )
