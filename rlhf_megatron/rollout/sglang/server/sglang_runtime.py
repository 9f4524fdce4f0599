"""What this process knows of its place in the server.
All that is imported of SGLang stands here.
"""

from __future__ import annotations

from collections.abc import Sequence


def get_tp_rank_and_size() -> tuple[int, int]:
    """Return the tensor-parallel (rank, size) of this process inside its server."""
    from sglang.srt.distributed.parallel_state import (
        get_tensor_model_parallel_rank,
        get_tensor_model_parallel_world_size,
    )

    return get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()


def get_attention_dp_rank() -> int:
    """Return the number of the rank group, under DP attention, whose requests this process serves;
    0 without DP attention.
    """
    from sglang.srt.runtime_context import get_parallel

    return int(get_parallel().attn_dp_rank or 0)


def count_layer_experts(num_layer_slots: int) -> int:
    """Return the number of experts of a layer with `num_layer_slots` slots, without the copies that
    an expert balancer adds.
    """
    from sglang.srt.eplb.expert_location import get_global_expert_location_metadata

    locations = get_global_expert_location_metadata()
    return num_layer_slots if locations is None else int(locations.num_logical_experts)


def list_expert_slots(layer_id: int, expert: int) -> Sequence[int]:
    """Return the numbers, over all ranks, of the slots that hold an expert: one, or several where a
    balancer copies the expert.
    """
    from sglang.srt.eplb.expert_location import get_global_expert_location_metadata

    locations = get_global_expert_location_metadata()
    return (
        [expert]
        if locations is None
        else list(locations.logical_to_all_physical(layer_id, expert, False))
    )
