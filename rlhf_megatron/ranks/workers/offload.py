"""Memory that a rank gives up while others use its device: storages lose their bytes, a copy waits
in host memory.

Tensors stay the objects that they are, and views stay views: a parameter, the flat buffer that it
lies in, this rank's shard of it and its gradient share a storage, and only that is emptied and
filled again. The same on every device; on a CPU the "device" is host memory too. A tensor without
its bytes must not be touched: torch would read at address 0. What works with a part calls
`require_parts` first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from rlhf_megatron.device import (
    CopyQueue,
    allocate_host_buffer,
    empty_device_cache,
    get_device_name,
    measure_device_memory,
    read_own_resident_bytes,
)
from rlhf_megatron.ranks.workers.rank_reports import MemoryReport

TrainerPart = Literal["gradients", "optimizer", "parameters"]
TRAINER_PARTS: tuple[TrainerPart, ...] = ("gradients", "optimizer", "parameters")

# torch rounds page-locked memory up to a power of two: only the last piece wastes some
PIECE_BYTES = 64 << 20
_ALIGNMENT = 64
Storage = Any  # torch.UntypedStorage
Tensors = Callable[[], Iterable[Tensor]]


class OffloadableMemory:
    """The parts of one model on this rank. `tensor_getters` returns the tensors of each part, and
    is called whenever the part is dropped.

    A storage that several parts share belongs to the first of them in the order parameters,
    gradients, optimizer. Gradients are not kept: they come back as zeros. `role` appears in
    messages.
    """

    def __init__(
        self, role: str, device: torch.device, tensor_getters: Mapping[TrainerPart, Tensors]
    ) -> None:
        self.role = role
        self._device = device
        self._tensor_getters = tensor_getters
        self._queue = CopyQueue(device)
        self._host_copies = {
            part: _HostCopy(device) for part in tensor_getters if part != "gradients"
        }
        # part -> its storages, and their bytes
        self._dropped_storages: dict[TrainerPart, list[tuple[Storage, int]]] = {}
        # part -> when its bytes are there, where that is not sure yet
        self._restore_marks: dict[TrainerPart, Any] = {}
        # parts whose host copy is what stands on the device
        self._unchanged_parts: set[TrainerPart] = set()

    def drop_parts(self, parts: Sequence[TrainerPart] = TRAINER_PARTS) -> None:
        """Free the device memory of these parts, after copying their bytes to host memory
        (gradients are not copied, and unchanged parts not again); parts that are dropped already
        stay dropped. The memory is free on return.
        """
        going = {
            part: self._collect_storages(part)
            for part in self._order_own_parts(parts)
            if part not in self._dropped_storages
        }
        for part in going:
            self._wait_for_restore(part)
        with self._queue.copy_after_computation():
            for part, storages in going.items():
                if part in self._host_copies and part not in self._unchanged_parts:
                    self._host_copies[part].copy_from_device(storages)
        self._queue.wait_for_copies()
        for part, storages in going.items():
            self._dropped_storages[part] = storages
            self._unchanged_parts.discard(part)
            for storage, _ in storages:
                storage.resize_(0)
        if going:
            empty_device_cache(self._device)

    def restore_parts(
        self, parts: Sequence[TrainerPart] = TRAINER_PARTS, is_read_only: bool = False
    ) -> None:
        """Give these parts their memory back, with their bytes (gradients: zeros). On an
        accelerator the bytes are still on their way on return; `require_parts` waits for them.

        With `is_read_only` the next drop of these parts needs no copy, because nothing changes
        them; a caller that does change them calls `require_parts(will_change=True)` first.
        """
        for part in self._order_own_parts(parts):
            if part not in self._dropped_storages:
                continue
            storages = self._dropped_storages.pop(part)
            for storage, num_bytes in storages:
                storage.resize_(num_bytes)
            if part in self._host_copies:
                with self._queue.copy_after_computation():
                    self._host_copies[part].copy_to_device(storages)
                    self._restore_marks[part] = self._queue.record_mark()
                if is_read_only:
                    self._unchanged_parts.add(part)
            else:
                for storage, _ in storages:
                    _view_as_bytes(storage).zero_()

    def require_parts(self, parts: Sequence[TrainerPart], will_change: bool = False) -> None:
        """Wait until these parts are on the device. Call it before working with them, with
        `will_change` before changing them.

        Raise RuntimeError where a part is dropped.
        """
        missing = [part for part in parts if part in self._dropped_storages]
        if missing:
            raise RuntimeError(
                f"{' and '.join(missing)} of the {self.role} are in host memory; restore them"
                " before they are used."
            )
        for part in parts:
            self._wait_for_restore(part)
        if will_change:
            self._unchanged_parts.difference_update(parts)

    def is_dropped(self, part: TrainerPart) -> bool:
        """Return whether the part's bytes are off the device."""
        return part in self._dropped_storages

    @property
    def device_bytes(self) -> int:
        """Return the bytes of the storages that are on the device."""
        return sum(
            size
            for part in self._tensor_getters
            if part not in self._dropped_storages
            for _, size in self._collect_storages(part)
        )

    @property
    def host_bytes(self) -> int:
        """Return the bytes of the host copies, which stay allocated for reuse."""
        return sum(copy.num_bytes for copy in self._host_copies.values())

    def make_report(self) -> MemoryReport:
        """Report the memory that is held now."""
        stats = measure_device_memory(self._device)
        return MemoryReport(
            held_bytes=self.device_bytes,
            copied_bytes=self.host_bytes,
            process_bytes=stats.allocated_bytes,
            used_bytes=stats.used_bytes,
            resident_bytes=read_own_resident_bytes(),
            peak_allocated_bytes=stats.peak_allocated_bytes,
            peak_reserved_bytes=stats.peak_reserved_bytes,
            device_name=get_device_name(self._device),
        )

    def _order_own_parts(self, parts: Sequence[TrainerPart]) -> Iterator[TrainerPart]:
        """Yield these parts, as far as the model has them, in the order parameters, gradients,
        optimizer.
        """
        return (
            part
            for part in ("parameters", "gradients", "optimizer")
            if part in parts and part in self._tensor_getters
        )

    def _collect_storages(self, requested_part: TrainerPart) -> list[tuple[Storage, int]]:
        """Return each storage of the part once, with its bytes, without storages that an earlier
        part has. The part, and earlier ones, must not be dropped.
        """
        seen: set[int] = set()
        for part in self._order_own_parts(TRAINER_PARTS):
            found = []
            for tensor in self._tensor_getters[part]():
                storage = tensor.untyped_storage()
                if storage._cdata not in seen:
                    seen.add(storage._cdata)
                    found.append((storage, storage.nbytes()))
            if part == requested_part:
                return found
        raise AssertionError(f"the {self.role} has no {requested_part}")

    def _wait_for_restore(self, part: TrainerPart) -> None:
        """Wait until a restored part's bytes are on the device."""
        mark = self._restore_marks.pop(part, None)
        if mark is not None:
            self._queue.wait_for_mark(mark)


class _HostCopy:
    """The bytes of a part in host memory, in pieces that are allocated once and reused."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pieces: list[Tensor] = []

    @property
    def num_bytes(self) -> int:
        """Return the allocated bytes."""
        return sum(piece.numel() for piece in self._pieces)

    def copy_from_device(self, storages: Sequence[tuple[Storage, int]]) -> None:
        """Begin to copy the storages to host memory, and allocate more of it where needed."""
        self._allocate_pieces(sum(_round_up_to_alignment(size) for _, size in storages))
        for mine, theirs in self._pair_with_storages(storages):
            mine.copy_(theirs, non_blocking=True)

    def copy_to_device(self, storages: Sequence[tuple[Storage, int]]) -> None:
        """Begin to copy the bytes back to the storages, which must come in the order of
        `copy_from_device`.
        """
        for mine, theirs in self._pair_with_storages(storages):
            theirs.copy_(mine, non_blocking=True)

    def _allocate_pieces(self, num_bytes: int) -> None:
        """Allocate host memory in pieces where the present pieces are smaller than `num_bytes`
        together.
        """
        if self.num_bytes < num_bytes:
            self._pieces = []  # before the larger ones are allocated
            sizes = [PIECE_BYTES] * (num_bytes // PIECE_BYTES) + [num_bytes % PIECE_BYTES]
            self._pieces = [allocate_host_buffer(size, self._device) for size in sizes if size]

    def _pair_with_storages(
        self, storages: Sequence[tuple[Storage, int]]
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (host bytes, storage bytes) of equal size: the storages one after the other, cut
        where a piece ends.
        """
        at = 0
        for storage, size in storages:
            data = _view_as_bytes(storage)
            done = 0
            while done < size:
                piece, start = divmod(at + done, PIECE_BYTES)
                count = min(size - done, PIECE_BYTES - start)
                yield self._pieces[piece][start : start + count], data[done : done + count]
                done += count
            at += _round_up_to_alignment(size)


def _view_as_bytes(storage: Storage) -> Tensor:
    """Return a [bytes] uint8 view of a storage."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _round_up_to_alignment(num_bytes: int) -> int:
    """Return the bytes rounded up to a multiple of _ALIGNMENT."""
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
