"""The only file that names a kind of accelerator. Everything else takes a `torch.device`
and asks here.

The functions at the end share device memory with another process of the same machine (CUDA IPC).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.multiprocessing import reductions


@dataclass(frozen=True)
class DeviceMemoryStats:
    """Bytes on one device. Zeros on the CPU, where nothing is counted."""

    allocated_bytes: int = 0
    reserved_bytes: int = 0
    peak_allocated_bytes: int = 0
    total_bytes: int = 0
    used_bytes: int = 0  # by all processes
    peak_reserved_bytes: int = 0


def has_accelerator() -> bool:
    """Return whether CUDA can be used."""
    return torch.cuda.is_available()


def count_devices() -> int:
    """Return the number of devices that this process sees; 0 without CUDA."""
    return torch.cuda.device_count() if has_accelerator() else 0


def list_visible_devices() -> list[str]:
    """Return the names of the visible devices in CUDA_VISIBLE_DEVICES, or their numbers where that
    is not set; [] without CUDA.
    """
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    num = count_devices()
    names = (
        [str(number) for number in range(num)]
        if given is None
        else [name.strip() for name in given.split(",")]
    )
    return names[:num]


def select_rank_device(
    device_kind: Literal["auto", "cpu", "cuda"], local_rank: int = 0
) -> torch.device:
    """Return the device of a rank, made current where it is a GPU. "auto": CUDA where available,
    else the CPU. Raise ValueError where the rank has no CUDA device.
    """
    if device_kind == "cpu" or (device_kind == "auto" and not has_accelerator()):
        return torch.device("cpu")
    if not has_accelerator():
        raise ValueError(
            "device is 'cuda' but torch finds no CUDA device; set trainer.device to cpu or auto."
        )
    if local_rank >= torch.cuda.device_count():
        raise ValueError(
            f"local rank {local_rank} has no device: this machine shows"
            f" {torch.cuda.device_count()}; start at most one rank a"
            " device (trainer.n_gpus_per_node)."
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def read_local_rank() -> int:
    """Return this process's number on its machine, which the launcher sets in LOCAL_RANK; 0 without
    a launcher.
    """
    return int(os.environ.get("LOCAL_RANK", "0"))


def choose_distributed_backend(device: torch.device) -> str:
    """Return the name of the torch.distributed backend for tensors on `device`."""
    return "nccl" if device.type == "cuda" else "gloo"


def make_deterministic(warn_only: bool = False) -> None:
    """Make an operation that torch cannot repeat bit for bit raise a RuntimeError that names it or,
    with `warn_only`, warn. Changes torch's settings for the whole process.
    """
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    # Filling is for programs that read what they never wrote.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False


def synchronize_device(device: torch.device) -> None:
    """Wait for all work queued on `device`."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def empty_device_cache(device: torch.device) -> None:
    """Give memory that torch keeps in reserve back to the device."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def measure_device_memory(device: torch.device) -> DeviceMemoryStats:
    """Return the bytes that torch holds on `device` now, its peak so far, and the use by all
    processes; zeros on a CPU.
    """
    if device.type != "cuda":
        return DeviceMemoryStats()
    free, total = torch.cuda.mem_get_info(device)
    return DeviceMemoryStats(
        allocated_bytes=torch.cuda.memory_allocated(device),
        reserved_bytes=torch.cuda.memory_reserved(device),
        peak_allocated_bytes=torch.cuda.max_memory_allocated(device),
        total_bytes=torch.cuda.get_device_properties(device).total_memory,
        used_bytes=total - free,
        peak_reserved_bytes=torch.cuda.max_memory_reserved(device),
    )


def get_device_name(device: torch.device) -> str:
    """Return the vendor's name of a device; "" for a CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else ""


def read_own_resident_bytes() -> int:
    """Return the host memory of this process in bytes, as the kernel counts it; 0 where the kernel
    does not say.
    """
    path = Path("/proc/self/statm")
    return int(path.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if path.exists() else 0


def allocate_host_buffer(num_bytes: int, device: torch.device) -> Tensor:
    """Return [num_bytes] uint8 in host memory, page-locked where that makes copies from and to
    `device` faster.
    """
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")


def page_lock_memory(host_memory: Tensor, device: torch.device) -> bool:
    """Page-lock host memory that was allocated elsewhere, for copies from `device` at full speed.
    Return False where the memory is not locked, so that copies are merely slower. Undo it with
    `page_unlock_memory` before the memory is freed.
    """
    if device.type != "cuda" or host_memory.device.type != "cpu":
        return False
    if not host_memory.nbytes:
        return False
    is_locked = (
        int(torch.cuda.cudart().cudaHostRegister(host_memory.data_ptr(), host_memory.nbytes, 0))
        == 0
    )
    if not is_locked:
        _clear_cuda_error(device)
    return is_locked


def _clear_cuda_error(device: torch.device) -> None:
    """Clear the error of a CUDA call that failed. CUDA keeps the error, and torch raises it at the
    next kernel, whichever that is: a dummy kernel takes it here. An error that also ends later
    kernels is raised by them.
    """
    with suppress(RuntimeError):
        torch.zeros(1, device=device).add_(1)


def page_unlock_memory(host_memory: Tensor) -> None:
    """Undo `page_lock_memory`."""
    torch.cuda.cudart().cudaHostUnregister(host_memory.data_ptr())


def copy_tensors_to_device(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Return copies on `device` of small host tensors, made in one transfer without waiting for it.
    On a CPU return the tensors themselves.
    """
    if device.type == "cpu":
        return list(tensors)
    staging = allocate_host_buffer(
        sum(_round_up_to_alignment(tensor.nbytes) for tensor in tensors), device
    )
    for place, tensor in zip(_split_into_views(staging, tensors), tensors, strict=True):
        place.copy_(tensor)
    return _split_into_views(staging.to(device, non_blocking=True), tensors)


def _split_into_views(buffer: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return views of `buffer` (bytes), one after the other, in the shapes and types of
    `tensors`.
    """
    found = []
    start = 0
    for tensor in tensors:
        found.append(buffer[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape))
        start += _round_up_to_alignment(tensor.nbytes)
    return found


def _round_up_to_alignment(num_bytes: int) -> int:
    """Return the bytes rounded up to a multiple of 16."""
    return -(-num_bytes // 16) * 16  # every type of a column divides it


class CopyQueue:
    """Copies between a device and host memory, beside its computation. On a CPU each
    is made at once.
    """

    def __init__(self, device: torch.device) -> None:
        """Make a queue for copies to and from `device`."""
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @property
    def is_asynchronous(self) -> bool:
        """Return whether copies run beside the computation."""
        return self._stream is not None

    @contextmanager
    def copy_after_computation(self) -> Iterator[None]:
        """Within the block, queue copies beside the computation, but behind all work that is queued
        on the device so far.
        """
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield

    def record_mark(self) -> Any:
        """Return a mark at the end of the copies so far, for `wait_for_mark`; None on a device that
        copies at once.
        """
        return None if self._stream is None else self._stream.record_event()

    def wait_for_mark(self, mark: Any) -> None:
        """Make everything that is computed from now on wait for the copies before `mark`. The host
        does not wait. Only for a device with asynchronous copies.
        """
        torch.cuda.current_stream(self._device).wait_event(mark)

    def wait_for_copies(self) -> None:
        """Wait on the host until all copies are made."""
        if self._stream is not None:
            self._stream.synchronize()


def list_device_ids() -> list[str]:
    """Return the identities of the devices that this process can use, the same in every process; []
    without CUDA.
    """
    if not torch.cuda.is_available():
        return []
    return [
        get_device_id(torch.device("cuda", index)) for index in range(torch.cuda.device_count())
    ]


def get_device_id(device: torch.device) -> str:
    """Return the identity of a device (its UUID), the same in every process; "" for a CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


def can_share_device_memory(device: torch.device) -> bool:
    """Return whether other processes can open memory of `device`. False with expandable segments:
    they need rights that containers rarely give.
    """
    if device.type != "cuda" or torch.cuda.get_allocator_backend() != "native":
        return False
    return not torch.cuda.memory._snapshot()["allocator_settings"].get("expandable_segments", False)


def get_shareable_device_id(device: torch.device) -> str:
    """Return the identity of a device whose memory other processes can open; "" where they
    cannot.
    """
    return get_device_id(device) if can_share_device_memory(device) else ""


@dataclass(frozen=True)
class SharedDeviceMemory:
    """A flat tensor of bytes on a device, as a reference that other processes of this machine can
    open. One reference for one reader: each counts what it has open.
    """

    device_id: str  # `get_device_id`
    offset: int  # bytes in the storage
    num_bytes: int
    handle: bytes  # of the allocation
    storage_bytes: int
    storage_offset: int  # bytes in the allocation
    counter_handle: bytes
    counter_offset: int
    event_handle: bytes
    waits_for_event: bool


def share_device_memory(bucket: Tensor) -> SharedDeviceMemory:
    """Return a reference to `bucket` that another process can open. `bucket`: [bytes] uint8,
    contiguous, on a device that `can_share_device_memory`. It must live until the reader has closed
    it.
    """
    assert bucket.dtype == torch.uint8 and bucket.is_contiguous(), (
        f"{bucket.dtype} of strides {bucket.stride()}"
    )
    _, arguments = reductions.reduce_tensor(bucket)
    handle, storage_bytes, storage_offset = arguments[7:10]
    counter_handle, counter_offset, event_handle, waits_for_event = arguments[11:]
    return SharedDeviceMemory(
        device_id=get_device_id(bucket.device),
        offset=int(bucket.storage_offset()),
        num_bytes=bucket.numel(),
        handle=handle,
        storage_bytes=storage_bytes,
        storage_offset=storage_offset,
        counter_handle=counter_handle,
        counter_offset=counter_offset,
        event_handle=event_handle,
        waits_for_event=waits_for_event,
    )


def open_shared_memory(shared_memory: SharedDeviceMemory) -> Tensor:
    """Return the memory that another process shares, [bytes] uint8. Raise ValueError where this
    process does not see the device, or the memory is gone.
    """
    if shared_memory.device_id not in list_device_ids():
        raise ValueError(
            f"the memory lies on device {shared_memory.device_id}; this process"
            f" sees {list_device_ids() or 'none'}."
        )
    device_index = list_device_ids().index(shared_memory.device_id)
    try:
        tensor: Tensor = reductions.rebuild_cuda_tensor(
            Tensor,
            (shared_memory.num_bytes,),  # shape
            (1,),  # strides
            shared_memory.offset,
            torch.storage.TypedStorage,
            torch.uint8,
            device_index,
            shared_memory.handle,
            shared_memory.storage_bytes,
            shared_memory.storage_offset,
            False,  # requires no gradient
            shared_memory.counter_handle,
            shared_memory.counter_offset,
            shared_memory.event_handle,
            shared_memory.waits_for_event,
        )
    except RuntimeError as error:
        first = str(error).splitlines()[0].rstrip(".")
        raise ValueError(
            f"memory that another process shares cannot be opened: {first}."
        ) from error
    return tensor


def release_unopened_memory(shared_memory: SharedDeviceMemory) -> None:
    """Count a reference that its reader will never open as closed; otherwise the memory would stay
    allocated for it.
    """
    torch.UntypedStorage._release_ipc_counter_cuda(
        shared_memory.counter_handle, shared_memory.counter_offset
    )
