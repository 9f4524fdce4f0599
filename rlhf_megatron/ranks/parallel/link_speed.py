"""How fast ranks exchange data: an all-reduce and a message, timed and checked. All ranks of the
group call them.
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from rlhf_megatron.device import synchronize_device

NUM_TIMES = 5  # after one that makes the connections; the fastest counts


def measure_all_reduce_speed(group: ProcessGroup, device: torch.device, num_bytes: int) -> float:
    """Return the bus bandwidth of an all-reduce of `num_bytes` in bytes a second: 2 (n - 1) / n
    times the buffer, divided by the time of the fastest call, as NCCL's own tests count it. Raise
    RuntimeError where the sum is wrong. All ranks of the group must call it.
    """
    size = group.size()
    values = torch.empty(num_bytes // 4, device=device)
    fastest = float("inf")
    for _ in range(1 + NUM_TIMES):
        values.fill_(group.rank() + 1.0)
        synchronize_device(device)
        start = time.perf_counter()
        dist.all_reduce(values, group=group)
        synchronize_device(device)
        fastest = min(fastest, time.perf_counter() - start)
    lowest = float(values.min())
    highest = float(values.max())
    expected = size * (size + 1) / 2
    if lowest != expected or highest != expected:
        raise RuntimeError(
            f"the sum over {size} ranks has numbers from {lowest} to {highest}, not {expected}"
        )
    return 2 * (size - 1) / size * num_bytes / fastest


def measure_message_speed(
    source_rank: int, target_rank: int, device: torch.device, num_bytes: int
) -> float:
    """Return the bytes a second of the fastest message between two ranks of the default group, on
    these two ranks; return 0.0 at once on all others. Raise RuntimeError where something else
    arrives.
    """
    if dist.get_rank() not in (source_rank, target_rank):
        return 0.0
    is_source = dist.get_rank() == source_rank
    values = torch.full((num_bytes // 4,), 1.0 if is_source else 0.0, device=device)
    answer = torch.zeros(1, device=device)
    fastest = float("inf")
    for _ in range(1 + NUM_TIMES):
        synchronize_device(device)
        start = time.perf_counter()
        if is_source:  # the answer says that all of it has arrived
            dist.send(values, target_rank)
            dist.recv(answer, target_rank)
        else:
            dist.recv(values, source_rank)
            dist.send(answer, source_rank)
        synchronize_device(device)
        fastest = min(fastest, time.perf_counter() - start)
    if float(values.min()) != 1.0:
        raise RuntimeError(f"rank {target_rank} did not get what rank {source_rank} has sent")
    return num_bytes / fastest
