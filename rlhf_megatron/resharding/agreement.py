"""Ranks that are about to enter a collective together first say whether they can. So none waits for one that failed."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup


class SyncAbortedError(RuntimeError):
    """Another rank of the group failed; its own error says why."""


def agree(failure: BaseException | None, group: ProcessGroup, device: torch.device, plan: int = 0) -> None:
    """Collective over `group`. Raises `failure` where there is one, and SyncAbortedError on the other ranks.

    `plan`: a number in [0, 2^48) that must be the same on all ranks. Raises ValueError on all of them otherwise.
    """
    if group.size() == 1:
        if failure is not None:
            raise failure
        return
    state = torch.tensor([int(failure is not None), plan, -plan], dtype=torch.int64, device=device)
    dist.all_reduce(state, op=dist.ReduceOp.MAX, group=group)
    failed, highest, negated_lowest = state.tolist()
    if failure is not None:
        raise failure
    if failed:
        raise SyncAbortedError(
            "given up because another rank that sends weights together with this one failed; see its error."
        )
    if highest != -negated_lowest:
        raise ValueError(
            "the tensor parallel ranks of this stage planned different weight buckets; bucket size, engine type and"
            " config.json must be the same on all of them."
        )
