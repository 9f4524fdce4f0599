"""The weights of a capsule, as they stood when an optimizer step was skipped: sharded, without
the optimizer.

Beside them the random states of every rank. Written at once, before a later update can change
what stands there.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch.distributed import ReduceOp, all_reduce

from rlhf_megatron.ranks.checkpoint.rng_state import save_rng_states
from rlhf_megatron.ranks.checkpoint.sharded_checkpoint import StagedState, save_staged_state
from rlhf_megatron.ranks.parallel.world import World
from rlhf_megatron.ranks.workers.rank_reports import RNG, WEIGHTS


def write_capsule_weights(
    directory: Path, stage_weights: Callable[[], StagedState], world: World
) -> str:
    """Write the weights that `stage_weights` copies to `directory`/weights, and each rank's random
    states beside them. Return "" or the reason why they could not be written. All ranks of the pool
    must call it.

    A failing disk raises no exception here, because it must not end a run.
    """
    error = _write_rng_states(directory, world)
    is_refused = torch.tensor([bool(error)], dtype=torch.int32, device=world.device)
    for group in (world.model_parallel_group, world.dp_cp_group):
        all_reduce(is_refused, ReduceOp.MAX, group=group)
    if is_refused.item():
        return error or "another rank could not write"
    try:
        save_staged_state(directory / WEIGHTS, stage_weights())
    except OSError as problem:  # of any rank: all raise it
        return str(problem)
    return ""


def _write_rng_states(directory: Path, world: World) -> str:
    """Write this rank's random states; return "" or the error."""
    try:
        (directory / RNG).mkdir(parents=True, exist_ok=True)
        save_rng_states(directory / RNG / f"rank{world.rank}.safetensors", world.device)
    except OSError as error:
        return f"{directory}: {error.strerror or error}"
    return ""
