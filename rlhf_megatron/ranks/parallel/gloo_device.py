"""One network thread a process for all gloo groups: torch starts one a group, and each wakes 100
times a second.

A rank of megatron-core has some twenty groups, so on CPUs the idle threads took a quarter of all
time. A torch whose gloo groups take no such options keeps a thread a group.
"""

from __future__ import annotations

import os
from datetime import timedelta
from functools import cache
from typing import Any

from torch.distributed import ProcessGroupGloo

_torch_init = ProcessGroupGloo.__init__


def share_gloo_device() -> None:
    """Make the gloo groups that this process creates from now on share their network threads. Do
    nothing where torch lacks the options; calling it again is safe.
    """
    if hasattr(ProcessGroupGloo, "_Options"):
        ProcessGroupGloo.__init__ = (  # type: ignore[method-assign]
            _init_with_shared_device  # type: ignore[assignment]
        )


def _init_with_shared_device(
    group: ProcessGroupGloo, store: Any, rank: int, size: int, *args: Any, **named: Any
) -> None:
    """Initialise a gloo group with the shared devices. Takes the place of ProcessGroupGloo's own
    constructor, which is called unchanged where the caller passes options instead of a timeout.
    """
    timeout = named.get("timeout", args[0] if args else None)
    if not isinstance(timeout, timedelta):  # the caller has options of its own
        _torch_init(group, store, rank, size, *args, **named)
        return
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timeout
    options._devices = _get_shared_devices(os.getpid(), os.environ.get("GLOO_SOCKET_IFNAME", ""))
    options._threads = 2 * len(options._devices)  # as torch has it
    _torch_init(group, store, rank, size, options)


@cache
def _get_shared_devices(process_id: int, interface_names: str) -> list[Any]:
    """Return the gloo devices of this process, one for each interface name, or the default device.
    `process_id` makes a forked child create its own, because a child has none of its parent's
    threads; `interface_names` is a comma-separated list.
    """
    names = [name for name in interface_names.split(",") if name]
    return [ProcessGroupGloo.create_device(interface=name) for name in names] or [
        ProcessGroupGloo.create_default_device()
    ]
