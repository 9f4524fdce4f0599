"""Finished groups that have not been trained, or whose training no checkpoint has: a file for each.

journal/
    group_00000042.samples    of the prompt at position 42 of the stream: a record for each of its requests

A later process goes on with those that its checkpoint has not trained and whose policy it has.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from pathlib import Path

from rlhf_megatron import faults
from rlhf_megatron.data import codec
from rlhf_megatron.recovery.checkpointer import RunState
from rlhf_megatron.recovery.journal import JournalledGroup, guarded, read_records, record
from rlhf_megatron.rollout.engine import GeneratedSample
from rlhf_megatron.scheduler.supply.base import Finished

_NAME = re.compile(r"group_(\d{8,})\.samples")


class GroupJournal:
    """`settings`: digest of those that samples depend on; groups made under others count as absent.

    One thread appends, another one drops.
    """

    def __init__(self, directory: Path, settings: str) -> None:
        self.directory = directory
        self._settings = settings

    def append(self, finished: Finished) -> None:
        """It is on disk when this returns; a disk that is full costs the group's file, never the run."""
        path = self._path(finished.number)
        data = [record(JournalledGroup.of(self._settings, finished.number, one)) for one in finished.samples]

        def write() -> None:
            faults.reach("journal.before_write")
            codec.write_whole(path, data)

        guarded(path, write)

    def groups(self) -> dict[int, list[list[GeneratedSample]]]:
        """By position: the samples of each request. What a process that was killed was writing is removed."""
        for path in self.directory.glob(".group_*.part"):
            path.unlink(missing_ok=True)
        found = {}
        for number, path in self._files():
            records, num_good = read_records(path)
            is_whole = records and path.stat().st_size == num_good
            if is_whole and all(isinstance(one, JournalledGroup) and one.settings == self._settings for one in records):
                found[number] = [one.samples() for one in records]
        return found

    def saved(self, state: RunState) -> None:
        """A checkpoint has what was trained or dropped before it."""
        if state.cursor is not None:
            untrained, num_drawn = {*state.untrained}, state.cursor.num_drawn
            self.forget([n for n, _ in self._files() if n < num_drawn and n not in untrained])

    def keep(self, numbers: Collection[int]) -> None:
        """Forget all others, also damaged ones and those of other settings: they are of another history of the run,
        which may come back to their settings."""
        self.forget([number for number, _ in self._files() if number not in numbers])

    def forget(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self._path(number).unlink(missing_ok=True)

    def clear(self) -> None:
        for _, path in self._files():
            path.unlink(missing_ok=True)

    def _files(self) -> list[tuple[int, Path]]:
        paths = self.directory.iterdir() if self.directory.is_dir() else ()
        return sorted((int(match[1]), path) for path in paths if (match := _NAME.fullmatch(path.name)))

    def _path(self, number: int) -> Path:
        return self.directory / f"group_{number:08d}.samples"
