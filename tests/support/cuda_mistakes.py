"""Mistakes on device cuda, made on purpose under the rehearsal: prints by name what each was
answered with.

cuda_mistakes.py numbers | checks | spill | rank FILE 0 or 1 [VARIABLE]
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn


class LeavesTheDevice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, device="cuda")

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.cpu())


def packed_attention(dtype: torch.dtype) -> Tensor:
    q, k, v = torch.randn(3, 6, 2, 16, device="cuda", dtype=dtype)
    starts = torch.tensor([0, 6], device="cuda", dtype=torch.int32)
    return torch.ops.aten._flash_attention_forward(q, k, v, starts, starts, 6, 6, 0.0, True, False)[
        0
    ]


def half_by_float() -> Tensor:
    return torch.ones(4, 4, device="cuda", dtype=torch.bfloat16) @ torch.ones(4, 4, device="cuda")


def no_deterministic_form() -> Tensor:
    torch.use_deterministic_algorithms(True)
    return torch.histc(torch.ones(8, device="cuda"))


def reads_a_number() -> float:
    torch.cuda.set_sync_debug_mode("error")
    return torch.ones(3, device="cuda").sum().item()


def reads_a_size() -> Tensor:
    torch.cuda.set_sync_debug_mode("error")
    return torch.ones(3, device="cuda").nonzero()


def copies_and_waits() -> Tensor:
    torch.cuda.set_sync_debug_mode("error")
    return torch.ones(3, device="cuda").cpu()


def with_copies(has_end: bool = True, has_begin: bool = True) -> None:
    """A computation before a copy to the host and one after it, in a queue of the package, under
    torch's sanitizer of streams. `has_begin`, `has_end`: whether the copy waits for the first, and
    the last for the copy.
    """
    from torch.cuda import _sanitizer

    from rlhf_megatron.device import CopyQueue, allocate_host_buffer

    _sanitizer.enable_cuda_sanitizer()
    try:
        queue = CopyQueue(torch.device("cuda:0"))
        host = allocate_host_buffer(4000, torch.device("cuda:0"))
        values = torch.ones(1000, device="cuda").add_(1)
        with queue.copy_after_computation() if has_begin else torch.cuda.stream(queue._stream):
            host.view(torch.float32).copy_(values, non_blocking=True)
        if has_end:
            queue.wait_for_mark(queue.record_mark())
        values.add_(1)
    finally:
        _sanitizer.cuda_sanitizer.disable()


def spilling(capability: int) -> list[str]:
    """What is wrong with a kernel that keeps 64 KiB in the registers of one warp."""
    import spilling_kernel

    from tools.cuda_rehearsal.alone.kernels import usage_of

    return [
        word
        for usage in usage_of(capability, spilling_kernel.launch)
        for word in usage.problems(capability)
    ]


NUMBERS: dict[str, Callable[[], object]] = {
    "cpu in a forward pass": lambda: LeavesTheDevice()(torch.ones(2, 4, device="cuda")),
    "another device": lambda: torch.ones(3, device="cuda:0") + torch.ones(3, device="cuda:1"),
    "two types": half_by_float,
    "a kernel that nobody computes": lambda: torch.cuda._sleep(10),
    "a rank too many": lambda: torch.cuda.set_device(2),
    "the host waits for a number": reads_a_number,
    "the host waits for a size": reads_a_size,
    "the host waits for a copy": copies_and_waits,
}
CHECKS: dict[str, Callable[[], object]] = {
    "attention in float32": lambda: packed_attention(torch.float32),
    "no deterministic form": no_deterministic_form,
    "the host waits": reads_a_number,
    "a copy that is waited for": with_copies,  # no mistake
    "nobody waits for the copy": lambda: with_copies(has_end=False),
    "the copy waits for nobody": lambda: with_copies(has_begin=False),
}


def answers(mistakes: dict[str, Callable[[], object]]) -> dict[str, str]:
    found = {}
    for name, make in mistakes.items():
        try:
            make()
            found[name] = "nothing"
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def differ(file: str, rank: int, lacks: str = "") -> None:
    """Two ranks of a group: one adds up, the other sends to all. `lacks`: a variable that only
    one of them has.
    """
    torch.cuda.set_device(rank)
    if lacks:
        os.environ.update({lacks: "0"} if rank else {})
    store = dist.FileStore(file, 2)
    dist.init_process_group(
        "nccl", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    total = torch.full((10,), rank + 1.0, device="cuda")
    if lacks:
        print(json.dumps(answers({"lacks": lambda: dist.all_reduce(total)})), flush=True)
        return
    dist.all_reduce(total)
    print(json.dumps({"sum": total.tolist()[0]}), flush=True)
    call = (lambda: dist.all_reduce(total)) if rank == 0 else (lambda: dist.broadcast(total, src=0))
    print(json.dumps(answers({"differ": call})), flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "rank":
        differ(sys.argv[2], int(sys.argv[3]), *sys.argv[4:])
    elif sys.argv[1] == "spill":
        print(json.dumps({"spill": spilling(90)}), flush=True)
    else:
        print(json.dumps(answers(NUMBERS if sys.argv[1] == "numbers" else CHECKS)), flush=True)
