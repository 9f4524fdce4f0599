"""The only file that names a kind of accelerator. Everything else takes a `torch.device` and asks here.

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
class MemoryStats:
    """Bytes on one device. Zeros on the CPU, where nothing is counted."""

    allocated: int = 0
    reserved: int = 0
    peak_allocated: int = 0
    total: int = 0
    used: int = 0  # by all processes
    peak_reserved: int = 0


def has_accelerator() -> bool:
    """Return True where CUDA can be used."""
    return torch.cuda.is_available()


def num_devices() -> int:
    """Devices that this process sees; 0 without CUDA."""
    return torch.cuda.device_count() if has_accelerator() else 0


def visible_devices() -> list[str]:
    """Return their names in CUDA_VISIBLE_DEVICES, or their numbers without it; none without CUDA."""
    given, num = os.environ.get("CUDA_VISIBLE_DEVICES"), num_devices()
    names = [str(number) for number in range(num)] if given is None else [name.strip() for name in given.split(",")]
    return names[:num]


def device_for(kind: Literal["auto", "cpu", "cuda"], local_rank: int = 0) -> torch.device:
    """Return the device of a rank, made current. "auto": CUDA where available. Raises ValueError for none."""
    if kind == "cpu" or (kind == "auto" and not has_accelerator()):
        return torch.device("cpu")
    if not has_accelerator():
        raise ValueError("device is 'cuda' but torch finds no CUDA device; set trainer.device to cpu or auto.")
    if local_rank >= torch.cuda.device_count():
        raise ValueError(
            f"local rank {local_rank} has no device: this machine shows {torch.cuda.device_count()};"
            " start at most one rank a device (trainer.n_gpus_per_node)."
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def local_rank() -> int:
    """This process's number on its machine, as the launcher says in LOCAL_RANK; 0 without a launcher."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def backend(device: torch.device) -> str:
    """Return the name of the torch.distributed backend for tensors on `device`."""
    return "nccl" if device.type == "cuda" else "gloo"


def make_deterministic(warn_only: bool = False) -> None:
    """Make an operation that torch cannot repeat bit for bit raise a RuntimeError that names it, or warn."""
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    # Filling is for programs that read what they never wrote.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False


def synchronize(device: torch.device) -> None:
    """Wait for all work queued on `device`."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def empty_cache(device: torch.device) -> None:
    """Give memory that torch keeps in reserve back to the device."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def memory(device: torch.device) -> MemoryStats:
    """Return what torch holds on `device` now, and its peak so far."""
    if device.type != "cuda":
        return MemoryStats()
    free, total = torch.cuda.mem_get_info(device)
    return MemoryStats(
        allocated=torch.cuda.memory_allocated(device),
        reserved=torch.cuda.memory_reserved(device),
        peak_allocated=torch.cuda.max_memory_allocated(device),
        total=torch.cuda.get_device_properties(device).total_memory,
        used=total - free,
        peak_reserved=torch.cuda.max_memory_reserved(device),
    )


def name_of(device: torch.device) -> str:
    """Return the vendor's name of a device; "" for a CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else ""


def resident_bytes() -> int:
    """Host memory of this process, as the kernel counts it; 0 where it does not say."""
    path = Path("/proc/self/statm")
    return int(path.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if path.exists() else 0


def host_buffer(num_bytes: int, device: torch.device) -> Tensor:
    """Return [num_bytes] uint8 in host memory, page-locked where that makes copies from and to `device` faster."""
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")


def page_lock(memory: Tensor, device: torch.device) -> bool:
    """Page-lock host memory that others allocated, for copies from `device` at full speed. False: it is not, which is
    slower and nothing else. Undo it with `page_unlock` before the memory goes."""
    if device.type != "cuda" or memory.device.type != "cpu":
        return False
    if not memory.nbytes:
        return False
    is_locked = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)) == 0
    if not is_locked:
        _forget_error(device)
    return is_locked


def _forget_error(device: torch.device) -> None:
    """CUDA keeps the error of a call that failed, and torch raises it at the next kernel, whichever that is: this one.
    What also ends later kernels is raised by them."""
    with suppress(RuntimeError):
        torch.zeros(1, device=device).add_(1)


def page_unlock(memory: Tensor) -> None:
    """Undo `page_lock`."""
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())


def moved(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Copies on `device` of small tensors of the host: all in one transfer, which nobody waits for. On a CPU they
    themselves."""
    if device.type == "cpu":
        return list(tensors)
    staging = host_buffer(sum(_aligned(tensor.nbytes) for tensor in tensors), device)
    for place, tensor in zip(_places(staging, tensors), tensors, strict=True):
        place.copy_(tensor)
    return _places(staging.to(device, non_blocking=True), tensors)


def _places(buffer: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Views of `buffer` (bytes), one after the other, in the shapes and types of `tensors`."""
    found, start = [], 0
    for tensor in tensors:
        found.append(buffer[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape))
        start += _aligned(tensor.nbytes)
    return found


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // 16) * 16  # every type of a column divides it


class CopyQueue:
    """Copies between a device and host memory, beside its computation. On a CPU each is made at once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @property
    def is_beside(self) -> bool:
        """Whether copies are made beside the computation."""
        return self._stream is not None

    @contextmanager
    def after_computation(self) -> Iterator[None]:
        """Copies made in here come after what the device was told to compute before."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield

    def mark(self) -> Any:
        """Mark the end of the copies so far, for `wait`. None on a device that copies at once."""
        return None if self._stream is None else self._stream.record_event()

    def wait(self, mark: Any) -> None:
        """Let what is computed from now on wait for the copies before `mark`."""
        torch.cuda.current_stream(self._device).wait_event(mark)

    def synchronize(self) -> None:
        """Returns when all copies are made."""
        if self._stream is not None:
            self._stream.synchronize()


def device_ids() -> list[str]:
    """Identities of the devices that this process can use, the same in every process; none on a CPU."""
    if not torch.cuda.is_available():
        return []
    return [device_id(torch.device("cuda", index)) for index in range(torch.cuda.device_count())]


def device_id(device: torch.device) -> str:
    """Identity of one device; "" for a CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


def can_share(device: torch.device) -> bool:
    """Whether memory of `device` can be opened by other processes. Expandable segments need rights that containers
    rarely give, so they count as no."""
    if device.type != "cuda" or torch.cuda.get_allocator_backend() != "native":
        return False
    return not torch.cuda.memory._snapshot()["allocator_settings"].get("expandable_segments", False)


def shareable_id(device: torch.device) -> str:
    """Identity of a device whose memory other processes can open; "" where they cannot."""
    return device_id(device) if can_share(device) else ""


@dataclass(frozen=True)
class SharedMemory:
    """A flat tensor of bytes on a device, as a reference that other processes of this machine can open. One reference
    for one reader: each counts what it has open."""

    device: str  # `device_id`
    offset: int  # bytes in the storage
    num_bytes: int
    handle: bytes  # of the allocation
    storage_bytes: int
    storage_offset: int  # bytes in the allocation
    counter_handle: bytes
    counter_offset: int
    event_handle: bytes
    waits_for_event: bool


def share(bucket: Tensor) -> SharedMemory:
    """`bucket`: [bytes] uint8, contiguous, on a device that `can_share`. It must live until the reader closed it."""
    assert bucket.dtype == torch.uint8 and bucket.is_contiguous(), f"{bucket.dtype} of strides {bucket.stride()}"
    _, arguments = reductions.reduce_tensor(bucket)
    place = (device_id(bucket.device), int(bucket.storage_offset()), bucket.numel())
    return SharedMemory(*place, *arguments[7:10], *arguments[11:])


def open_shared(memory: SharedMemory) -> Tensor:
    """Returns what another process shares. Raises ValueError where this process does not see its device, or the memory
    is gone."""
    if memory.device not in device_ids():
        raise ValueError(f"the memory lies on device {memory.device}; this process sees {device_ids() or 'none'}.")
    shape, kind = ((memory.num_bytes,), (1,), memory.offset), (torch.storage.TypedStorage, torch.uint8)
    where = (device_ids().index(memory.device), memory.handle, memory.storage_bytes, memory.storage_offset)
    counted = (memory.counter_handle, memory.counter_offset, memory.event_handle, memory.waits_for_event)
    try:
        tensor: Tensor = reductions.rebuild_cuda_tensor(Tensor, *shape, *kind, *where, False, *counted)
    except RuntimeError as error:
        first = str(error).splitlines()[0].rstrip(".")
        raise ValueError(f"memory that another process shares cannot be opened: {first}.") from error
    return tensor


def decline(memory: SharedMemory) -> None:
    """Take a reference for closed that its reader will never open: the memory would stay for it else."""
    torch.UntypedStorage._release_ipc_counter_cuda(memory.counter_handle, memory.counter_offset)
