"""A thread that writes staged state while the rank's main thread goes on, and what all ranks make of it together.

The thread never communicates: process groups belong to the main thread. Whatever keeps a rank from writing (disk full,
directory read-only or gone) comes out as an error on all ranks alike, and no rank waits for one that failed.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist
from torch.distributed.checkpoint.storage import WriteResult

from rlhf_megatron import faults
from rlhf_megatron.checkpoint.manifest import FileRecord, SaveResult, record_of
from rlhf_megatron.checkpoint.staged import StagedState

logger = logging.getLogger(__name__)


class BackgroundSave:
    """Made on all ranks at once; writing begins right away. `directory` is made; its parent must exist.

    `where`: this rank's coordinates, for errors.
    """

    def __init__(self, staged: StagedState, directory: Path, where: str) -> None:
        self._staged = staged
        self._directory = directory
        self._where = where
        self._results: list[WriteResult] = []
        self._files: tuple[FileRecord, ...] = ()
        self._error: str | None = None
        self._thread = threading.Thread(target=self._write, name=f"save {directory.name}", daemon=True)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        """This rank has written its files, or failed to."""
        return not self._thread.is_alive()

    def finish(self, timeout_s: float) -> SaveResult:
        """Wait for this rank's files, then complete the checkpoint together. All ranks, on their main threads.

        A rank that is still writing after `timeout_s` has failed. What the files of a
        failed save came to is the caller's to remove.
        """
        self._thread.join(timeout_s)
        late = f"{self._where} is still writing to {self._directory}, though it had {timeout_s} s more to end"
        error = agreed_error(self._error if self.is_done else late)
        if error is not None:
            return SaveResult((), error)
        num_ranks, is_first = dist.get_world_size(), dist.get_rank() == 0
        results: list[list[WriteResult]] = [[] for _ in range(num_ranks)]
        dist.gather_object(self._results, results if is_first else None, dst=0)
        added: tuple[FileRecord, ...] = ()
        if is_first:
            added, error = attempt(self._where, lambda: self._records(self._staged.complete(self._directory, results)))
        error = agreed_error(error)
        return SaveResult((), error) if error is not None else SaveResult((*self._files, *added))

    def _write(self) -> None:
        def write() -> tuple[FileRecord, ...]:
            faults.reach("ckpt.before_data")
            self._directory.mkdir(exist_ok=True)
            self._results = self._staged.write(self._directory)
            return self._records(sorted({self._directory / r.storage_data.relative_path for r in self._results}))

        self._files, self._error = attempt(self._where, write)

    def _records(self, paths: list[Path]) -> tuple[FileRecord, ...]:
        return tuple(record_of(self._directory.parent, path) for path in paths)


def write_together(where: str, write: Callable[[], tuple[FileRecord, ...]]) -> SaveResult:
    """`write` on each rank of the pool, and what came of it on all of them."""
    files, error = attempt(where, write)
    error = agreed_error(error)
    return SaveResult(files) if error is None else SaveResult((), error)


def attempt(where: str, write: Callable[[], tuple[FileRecord, ...]]) -> tuple[tuple[FileRecord, ...], str | None]:
    """(what was written, None), or ((), what went wrong on this rank): its peers must be told before it goes on."""
    try:
        return write(), None
    except Exception as error:  # OSError; torch makes a RuntimeError of one that its writer meets
        logger.warning("%s could not write: %s", where, error, exc_info=not isinstance(error, OSError))
        return (), f"{where} could not write: {type(error).__name__}: {error}"


def agreed_error(error: str | None) -> str | None:
    """The first rank's error, the same on all ranks; None where no rank has one. All ranks of the pool."""
    errors: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, error)
    found = [text for text in errors if text is not None]
    if not found:
        return None
    more = f" (and {len(found) - 1} other ranks)" if len(found) > 1 else ""
    return found[0] + more
