"""Memory that a rank gives up while others use its device: storages lose their bytes, a copy waits in host memory.

Tensors stay the objects that they are, and views stay views: a parameter, the flat buffer that it lies in, this rank's
shard of it and its gradient share a storage, and only that is emptied and filled again. The same on every device; on a
CPU the "device" is host memory too. A tensor without its bytes must not be touched: torch would read at address 0.
What works with a part calls `require` first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from rlhf_megatron.parallel.device import CopyQueue, empty_cache, host_buffer, memory, name_of, resident_bytes
from rlhf_megatron.workers.findings import MemoryReport

TrainerPart = Literal["gradients", "optimizer", "parameters"]
TRAINER_PARTS: tuple[TrainerPart, ...] = ("gradients", "optimizer", "parameters")

PIECE_BYTES = 64 << 20  # torch rounds page-locked memory up to a power of two: only the last piece wastes some
_ALIGNMENT = 64
Storage = Any  # torch.UntypedStorage
Tensors = Callable[[], Iterable[Tensor]]


class Offload:
    """The parts of one model on this rank. `tensors`: of each part, asked for whenever it is dropped.

    What several parts share belongs to the first of them in the order parameters, gradients, optimizer. Gradients are
    not kept: they come back as zeros. `what`: in messages.
    """

    def __init__(self, what: str, device: torch.device, tensors: Mapping[TrainerPart, Tensors]) -> None:
        self.what = what
        self._device = device
        self._tensors = tensors
        self._queue = CopyQueue(device)
        self._copies = {part: _HostCopy(device) for part in tensors if part != "gradients"}
        self._dropped: dict[TrainerPart, list[tuple[Storage, int]]] = {}  # part -> its storages, and their bytes
        self._ready: dict[TrainerPart, Any] = {}  # part -> when its bytes are there, where that is not sure yet
        self._unchanged: set[TrainerPart] = set()  # parts whose host copy is what stands on the device

    def drop(self, parts: Sequence[TrainerPart] = TRAINER_PARTS) -> None:
        """Empty these parts' storages; what is dropped already stays so. Returns when the memory is free."""
        going = {part: self._storages(part) for part in self._mine(parts) if part not in self._dropped}
        for part in going:
            self._wait(part)
        with self._queue.after_computation():
            for part, storages in going.items():
                if part in self._copies and part not in self._unchanged:
                    self._copies[part].take(storages)
        self._queue.synchronize()
        for part, storages in going.items():
            self._dropped[part] = storages
            self._unchanged.discard(part)
            for storage, _ in storages:
                storage.resize_(0)
        if going:
            empty_cache(self._device)

    def restore(self, parts: Sequence[TrainerPart] = TRAINER_PARTS, is_read_only: bool = False) -> None:
        """Undo `drop`. On an accelerator the bytes are on their way when this returns; `require` waits for them.

        `is_read_only`: they are dropped again as they are, which then needs no copy; `require(is_changed=True)` is for
        whoever changes them after all.
        """
        for part in self._mine(parts):
            if part not in self._dropped:
                continue
            storages = self._dropped.pop(part)
            for storage, num_bytes in storages:
                storage.resize_(num_bytes)
            if part in self._copies:
                with self._queue.after_computation():
                    self._copies[part].give(storages)
                    self._ready[part] = self._queue.mark()
                if is_read_only:
                    self._unchanged.add(part)
            else:
                for storage, _ in storages:
                    _as_bytes(storage).zero_()

    def require(self, *parts: TrainerPart, is_changed: bool = False) -> None:
        """Wait for parts. Call it before working with them; `is_changed`: before changing them.

        Raises RuntimeError where its bytes are not on the device.
        """
        missing = [part for part in parts if part in self._dropped]
        if missing:
            raise RuntimeError(
                f"{' and '.join(missing)} of the {self.what} are in host memory; restore them before they are used."
            )
        for part in parts:
            self._wait(part)
        if is_changed:
            self._unchanged.difference_update(parts)

    def is_dropped(self, part: TrainerPart) -> bool:
        return part in self._dropped

    @property
    def device_bytes(self) -> int:
        """The bytes of the storages that are on the device."""
        return sum(size for part in self._tensors if part not in self._dropped for _, size in self._storages(part))

    @property
    def host_bytes(self) -> int:
        """The bytes of the copies in host memory, which are kept to be used again."""
        return sum(copy.num_bytes for copy in self._copies.values())

    def report(self) -> MemoryReport:
        """Report what is held now."""
        stats = memory(self._device)
        return MemoryReport(
            held_bytes=self.device_bytes,
            copied_bytes=self.host_bytes,
            process_bytes=stats.allocated,
            used_bytes=stats.used,
            resident_bytes=resident_bytes(),
            peak_allocated_bytes=stats.peak_allocated,
            peak_reserved_bytes=stats.peak_reserved,
            device_name=name_of(self._device),
        )

    def _mine(self, parts: Sequence[TrainerPart]) -> Iterator[TrainerPart]:
        """Yield the parts in the order in which they are needed again."""
        return (part for part in ("parameters", "gradients", "optimizer") if part in parts and part in self._tensors)

    def _storages(self, wanted: TrainerPart) -> list[tuple[Storage, int]]:
        """Return each storage once, with its bytes, without those that an earlier part has. The part, and earlier
        ones, must not be dropped.
        """
        seen: set[int] = set()
        for part in self._mine(TRAINER_PARTS):
            found = []
            for tensor in self._tensors[part]():
                storage = tensor.untyped_storage()
                if storage._cdata not in seen:
                    seen.add(storage._cdata)
                    found.append((storage, storage.nbytes()))
            if part == wanted:
                return found
        raise AssertionError(f"the {self.what} has no {wanted}")

    def _wait(self, part: TrainerPart) -> None:
        mark = self._ready.pop(part, None)
        if mark is not None:
            self._queue.wait(mark)


class _HostCopy:
    """Bytes of a part in host memory: pieces that are allocated once and used again."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pieces: list[Tensor] = []

    @property
    def num_bytes(self) -> int:
        return sum(piece.numel() for piece in self._pieces)

    def take(self, storages: Sequence[tuple[Storage, int]]) -> None:
        """Copy them here."""
        self._make_room(sum(_aligned(size) for _, size in storages))
        for mine, theirs in self._pairs(storages):
            mine.copy_(theirs, non_blocking=True)

    def give(self, storages: Sequence[tuple[Storage, int]]) -> None:
        """Copy them back, in the order in which they were taken."""
        for mine, theirs in self._pairs(storages):
            theirs.copy_(mine, non_blocking=True)

    def _make_room(self, num_bytes: int) -> None:
        if self.num_bytes < num_bytes:
            self._pieces = []  # before the larger ones are allocated
            sizes = [PIECE_BYTES] * (num_bytes // PIECE_BYTES) + [num_bytes % PIECE_BYTES]
            self._pieces = [host_buffer(size, self._device) for size in sizes if size]

    def _pairs(self, storages: Sequence[tuple[Storage, int]]) -> Iterator[tuple[Tensor, Tensor]]:
        """(here, there): the storages one after the other, cut where a piece ends."""
        at = 0
        for storage, size in storages:
            data = _as_bytes(storage)
            done = 0
            while done < size:
                piece, start = divmod(at + done, PIECE_BYTES)
                count = min(size - done, PIECE_BYTES - start)
                yield self._pieces[piece][start : start + count], data[done : done + count]
                done += count
            at += _aligned(size)


def _as_bytes(storage: Storage) -> Tensor:
    """[bytes] uint8, a view."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
