"""The journal of a run: what is finished of the steps after its last checkpoint, so that none of it
is done again.

journal/
    step_000007.groups    of the step that is generated: samples as they come, appended
    step_000007.scored    all of them with their rewards; the groups are gone, but those whose
                          routes may get lost
    step_000007.train     what the models say of them; a column that the scored batch has
                          stands there alone
    group_00000042.samples    of the prompt at position 42 of the stream, where groups are made in
                              the background

A record is a length, a SHA-256 and `data.codec` bytes. One that does not fit its digest counts as
absent, with a warning; so does one that was written under other settings, and one whose files of
routes (data.expert_route_files) are gone.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from rlhf_megatron import faults
from rlhf_megatron.agents.episode_record import Episode
from rlhf_megatron.controller.recovery.resume_point import RunState
from rlhf_megatron.data import codec, direct_file_io
from rlhf_megatron.data.batch import AnnotatedBatch, ScoredBatch, iterate_columns
from rlhf_megatron.data.expert_route_files import has_intact_routes, split_route_handle
from rlhf_megatron.rollout.engine_interface import GeneratedSample
from rlhf_megatron.rollout.group_columns import GroupColumns
from rlhf_megatron.write_errors import explain_write_error

logger = logging.getLogger(__name__)

MAGIC = b"RLJ1"
_DIGEST_BYTES = 32
_LENGTH_BYTES = 8
_HEADER_BYTES = len(MAGIC) + _LENGTH_BYTES + _DIGEST_BYTES
_DIGEST = slice(_HEADER_BYTES - _DIGEST_BYTES, _HEADER_BYTES)
_GROUP = re.compile(r"group_(\d{8,})\.samples")
_NAME = re.compile(r"\.?step_(\d{6,})\.(groups|scored|train)")
GROUPS = "groups"
SCORED = "scored"
TRAIN = "train"


@codec.register("JournalledGroup")
@dataclass(frozen=True, kw_only=True)
class JournalledGroup(GroupColumns):
    """The samples of one prompt of a step."""

    LOG_PROB_DTYPE: ClassVar = np.float32  # which is what a batch makes of them

    settings: str  # see `StepJournal`
    index: int  # of the prompt in its step


@codec.register("JournalledEpisodes")
@dataclass(frozen=True)
class JournalledEpisodes:
    """The episodes of one prompt of a step."""

    settings: str  # see `StepJournal`
    index: int  # of the prompt in its step
    episodes: tuple[Episode, ...]


@codec.register("JournalledBatch")
@dataclass(frozen=True)
class JournalledBatch:
    """A step as far as it had come, with what the stages had said and changed until then."""

    settings: str
    batch: ScoredBatch  # an AnnotatedBatch when nothing is left to ask the models
    metrics: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0  # that the step had taken
    num_drawn: int | None = None  # prompts of the stream after this step; None: as its number says
    base: bytes = b""  # digest of the record of the scored batch, which has the columns `shared`
    shared: tuple[str, ...] = ()


class StepJournal:
    """`settings_digest`: digest of those that a step's batch depends on. Its steps are those after
    the last checkpoint.

    A disk that is full costs the journal, never the run: what could not be written is done
    again after a kill.

    Batches are written by a thread, beside what the ranks do with them. What a batch replaces stays
    until it is on disk, and every other call waits for it. Nothing is written that is made of the
    rest in no time: no advantages.
    """

    def __init__(
        self,
        directory: Path,
        settings_digest: str,
        report_regained_seconds: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        """Open the journal. `report_regained_seconds` is called with the seconds that a former
        process spent on a batch that is read back.
        """
        self.directory = directory
        self.settings_digest = settings_digest
        self.report_regained_seconds = report_regained_seconds
        self._intact_group_bytes = 0  # of the open file of groups that are good
        self._writer_thread = ThreadPoolExecutor(1, "journal")
        self._pending_write: Future[None] | None = None
        # Step, batch and digest of what is on disk, until it is annotated.
        self._last_scored_record: tuple[int, ScoredBatch, bytes] | None = None

    def wait_for_write(self) -> None:
        """Wait until the last batch is on disk."""
        pending = self._pending_write
        self._pending_write = None
        if pending is not None:
            pending.result()

    def read_groups(self, step: int) -> dict[int, list[GeneratedSample]]:
        """Return the samples of a step's groups that the journal has, by index. Cut off a damaged
        end of the file. Call it before `append_groups` of that step.
        """
        self.wait_for_write()
        path = self._get_step_path(step, GROUPS)
        records, self._intact_group_bytes = read_records(path)
        ours = [
            one
            for one in records
            if isinstance(one, JournalledGroup) and one.settings == self.settings_digest
        ]
        found = _drop_groups_without_routes(path, {one.index: [one] for one in ours})
        if path.exists() and path.stat().st_size > self._intact_group_bytes:
            logger.warning("%s: its last record is cut off or damaged and is left out", path)
            write_or_warn(path, lambda: os.truncate(path, self._intact_group_bytes))
        return {index: only.to_samples() for index, (only,) in found.items()}

    def read_episodes(self, step: int) -> dict[int, list[Episode]]:
        """Return the groups of episodes of a step that the journal has, by the index of their
        prompt. Cut off a damaged end of the file. Call it before `append_episodes` of that step.
        """
        self.wait_for_write()
        path = self._get_step_path(step, GROUPS)
        records, self._intact_group_bytes = read_records(path)
        if path.exists() and path.stat().st_size > self._intact_group_bytes:
            logger.warning("%s: its last record is cut off or damaged and is left out", path)
            write_or_warn(path, lambda: os.truncate(path, self._intact_group_bytes))
        return {
            record.index: list(record.episodes)
            for record in records
            if isinstance(record, JournalledEpisodes) and record.settings == self.settings_digest
        }

    def append_episodes(self, step: int, groups: Sequence[tuple[int, Sequence[Episode]]]) -> None:
        """Append whole groups of episodes, each with the index of its prompt, to the step's file.
        They are on disk when this returns; where the disk is full, log a warning and go on.
        """
        self._append_records(
            step,
            [
                JournalledEpisodes(self.settings_digest, index, tuple(episodes))
                for index, episodes in groups
            ],
        )

    def append_groups(
        self, step: int, first_index: int, groups: Sequence[Sequence[GeneratedSample]]
    ) -> None:
        """Append neighbouring groups, the first of index `first_index`, to the step's file. They
        are on disk when this returns; where the disk is full, log a warning and go on.
        """
        self._append_records(
            step,
            [
                JournalledGroup.from_samples(
                    samples, settings=self.settings_digest, index=first_index + i
                )
                for i, samples in enumerate(groups)
            ],
        )

    def _append_records(
        self, step: int, entries: Sequence[JournalledGroup | JournalledEpisodes]
    ) -> None:
        """Append records to the step's file of groups, and wait until they are on disk."""
        self.wait_for_write()
        path = self._get_step_path(step, GROUPS)
        data = [part for entry in entries for part in encode_record(entry)]

        def append_records() -> None:
            """Append the records to the file and sync it, after cutting off the rest of an append
            that failed.
            """
            faults.reach_fault_point("journal.before_write")
            self.directory.mkdir(parents=True, exist_ok=True)
            with open(path, "ab") as file:
                file.truncate(self._intact_group_bytes)  # what an append that failed has left
                file.writelines(data)
                file.flush()
                os.fsync(file.fileno())
            self._intact_group_bytes += sum(map(len, data))

        write_or_warn(path, append_records)

    def read_latest_batch(self, step: int) -> JournalledBatch | None:
        """Return the furthest state of a step that the journal has: annotated, or with rewards
        only; None where it has neither.

        Without an annotated batch, remove the files of later steps: their samples came from the
        policy that this step's update made, and will be made again.
        """
        self.wait_for_write()
        found = self._read_batch_record(step, TRAIN)
        if found is None:
            self._remove_steps(lambda other: other > step)
            found = self._read_batch_record(step, SCORED)
        return found

    def begin_batch_write(
        self,
        step: int,
        batch: ScoredBatch,
        metrics: Mapping[str, float],
        seconds: float,
        num_drawn: int | None = None,
    ) -> None:
        """Begin to write a scored or annotated batch on another thread. When the batch is on disk
        it replaces what the journal had of the step before; `wait_for_write` waits for that.
        """
        self.wait_for_write()
        entry = JournalledBatch(self.settings_digest, batch, dict(metrics), seconds, num_drawn)
        self._pending_write = self._writer_thread.submit(self._write_batch_record, step, entry)

    def _write_batch_record(self, step: int, entry: JournalledBatch) -> None:
        """Write the batch's record, on the writer thread. An annotated batch leaves out the columns
        that it shares with the scored batch on disk.
        """
        batch = entry.batch
        scored = self._last_scored_record
        self._last_scored_record = None
        kind, former = (TRAIN, SCORED) if isinstance(batch, AnnotatedBatch) else (SCORED, GROUPS)
        if kind == TRAIN and scored is not None and scored[0] == step:
            shared = [
                name
                for name, _, value in iterate_columns(batch)
                if value is getattr(scored[1], name, None)
            ]
            if shared:
                left_out: dict[str, Any] = dict.fromkeys(shared)
                entry = replace(
                    entry, batch=replace(batch, **left_out), base=scored[2], shared=tuple(shared)
                )
        path = self._get_step_path(step, kind)
        data = encode_record(entry)

        def write_and_remove_former() -> None:
            """Write the file, and remove the file of the step's former stage where nothing in it is
            still needed.
            """
            faults.reach_fault_point("journal.before_write")
            direct_file_io.write_large_file_atomically(path, data)
            if not entry.base and not (kind == SCORED and any(batch.routes or ())):
                self._get_step_path(step, former).unlink(missing_ok=True)
            if kind == SCORED:
                self._last_scored_record = (step, batch, bytes(data[0][_DIGEST]))

        write_or_warn(path, write_and_remove_former)

    def forget_through_step(self, step: int) -> None:
        """Remove the files of all steps up to this one: a checkpoint has them."""
        self.wait_for_write()
        self._remove_steps(lambda other: other <= step)

    def forget_saved(self, state: RunState) -> None:
        """Remove the files that a run does not need when it goes on from the checkpoint of
        `state`.
        """
        self.forget_through_step(state.step)

    def _read_batch_record(self, step: int, kind: str) -> JournalledBatch | None:
        """Read a record ("scored" or "train") of a step; None where it is missing, damaged, of
        other settings, or its route files are gone.
        """
        path = self._get_step_path(step, kind)
        if not path.exists():
            return None
        records, num_good = read_records(path)
        is_whole = len(records) == 1 and path.stat().st_size == num_good
        if not is_whole or not isinstance(records[0], JournalledBatch):
            logger.warning(
                "%s is cut off or damaged; that part of step %d is done again", path, step
            )
            return None
        if records[0].settings != self.settings_digest:
            return None
        if not has_intact_routes(records[0].batch.routes or ()):
            logger.warning(
                "%s: files of routes of its samples are gone; step %d is done again", path, step
            )
            return None
        return self._restore_shared_columns(step, records[0])

    def _restore_shared_columns(self, step: int, entry: JournalledBatch) -> JournalledBatch | None:
        """Return `entry` with the columns that it shares with its scored batch; None where that
        batch is missing or another one.
        """
        if not entry.base:
            return entry
        if (scored := self._read_batch_record(step, SCORED)) is not None:
            with open(self._get_step_path(step, SCORED), "rb") as file:
                if file.read(_HEADER_BYTES)[_DIGEST] == entry.base:
                    columns = {name: getattr(scored.batch, name) for name in entry.shared}
                    return replace(entry, batch=replace(entry.batch, **columns))
        logger.warning(
            "the scored batch of %s is lost or another one; it is made again",
            self._get_step_path(step, TRAIN),
        )
        return None

    def _remove_steps(self, is_removed: Callable[[int], bool]) -> None:
        """Remove the files of the steps for which `is_removed` returns True."""
        for step, paths in self._find_step_files().items():
            if is_removed(step):
                for path in paths:
                    path.unlink(missing_ok=True)

    def _find_step_files(self) -> dict[int, list[Path]]:
        """Return the files of the journal by step, unfinished ones too."""
        found: dict[int, list[Path]] = {}
        for path in self.directory.iterdir() if self.directory.is_dir() else ():
            if match := _NAME.match(path.name):  # also one that is being written
                found.setdefault(int(match[1]), []).append(path)
        return found

    def _get_step_path(self, step: int, kind: str) -> Path:
        """Return the file of a step and kind ("groups", "scored" or "train")."""
        return self.directory / f"step_{step:06d}.{kind}"


class GroupJournal:
    """Finished groups that have not been trained, or whose training no checkpoint has: a
    file for each.

    `settings`: digest of those that samples depend on; groups made under others count as absent.
    One thread appends, another one drops.
    """

    def __init__(self, directory: Path, settings_digest: str) -> None:
        """Open the journal; nothing is read yet. `settings_digest` is the digest of the settings
        that samples depend on; groups of other settings count as absent.
        """
        self.directory = directory
        self._settings_digest = settings_digest

    def write_prompt_groups(
        self, stream_position: int, samples_by_request: Sequence[Sequence[GeneratedSample]]
    ) -> None:
        """Write the samples of each request of the prompt at this stream position to a file of its
        own. They are on disk when this returns; where the disk is full, log a warning and go on.
        """
        path = self._get_group_path(stream_position)
        data = [
            part
            for one in samples_by_request
            for part in encode_record(
                JournalledGroup.from_samples(
                    one, settings=self._settings_digest, index=stream_position
                )
            )
        ]

        def write_records() -> None:
            """Write the file."""
            faults.reach_fault_point("journal.before_write")
            direct_file_io.write_large_file_atomically(path, data)

        write_or_warn(path, write_records)

    def read_prompt_groups(self) -> dict[int, list[list[GeneratedSample]]]:
        """Return the samples of each request, by stream position, of all intact files of these
        settings. Remove files that a killed process was writing.
        """
        for path in self.directory.glob(".group_*.part"):
            path.unlink(missing_ok=True)
        found: dict[int, list[JournalledGroup]] = {}
        for number, path in self._find_group_files():
            records, num_good = read_records(path)
            is_whole = records and path.stat().st_size == num_good
            ours = [
                one
                for one in records
                if isinstance(one, JournalledGroup) and one.settings == self._settings_digest
            ]
            if is_whole and len(ours) == len(records):
                found[number] = ours
        found = _drop_groups_without_routes(self.directory, found)
        return {number: [one.to_samples() for one in ours] for number, ours in found.items()}

    def forget_saved(self, state: RunState) -> None:
        """Remove the files of prompts that were trained or dropped before the checkpoint of
        `state`.
        """
        if state.cursor is not None:
            untrained = {*state.untrained}
            num_drawn = state.cursor.num_drawn
            self._remove_groups(lambda number: number < num_drawn and number not in untrained)

    def keep_only_positions(self, stream_positions: Collection[int]) -> None:
        """Remove the files of all other stream positions, also damaged files and files of other
        settings: they belong to another history of the run, which may come back to their settings.
        """
        self._remove_groups(lambda number: number not in stream_positions)

    def _remove_groups(self, is_removed: Callable[[int], bool]) -> None:
        """Remove the files of the positions for which `is_removed` returns True."""
        for number, path in self._find_group_files():
            if is_removed(number):
                path.unlink(missing_ok=True)

    def _find_group_files(self) -> list[tuple[int, Path]]:
        """Return (stream position, path) of all files, ascending."""
        paths = self.directory.iterdir() if self.directory.is_dir() else ()
        return sorted(
            (int(match[1]), path) for path in paths if (match := _GROUP.fullmatch(path.name))
        )

    def _get_group_path(self, stream_position: int) -> Path:
        """Return the file of a stream position."""
        return self.directory / f"group_{stream_position:08d}.samples"


def _drop_groups_without_routes(
    journal_path: Path, groups: dict[int, list[JournalledGroup]]
) -> dict[int, list[JournalledGroup]]:
    """Return the groups whose route files exist, and log a warning that counts the others."""
    names = {
        number: [name for one in records for name in one.routes]
        for number, records in groups.items()
    }
    found = {
        number: records for number, records in groups.items() if has_intact_routes(names[number])
    }
    if len(found) < len(groups):
        lost = {
            split_route_handle(name)[0] or "this machine"
            for number in groups.keys() - found
            for name in names[number]
        }
        logger.warning(
            "%s: %d of %d groups are generated again: their files of routes, at %s, are gone",
            *(journal_path, len(groups) - len(found), len(groups), ", ".join(sorted(lost))),
        )
    return found


def find_journalled_routes(directory: Path) -> set[str]:
    """Return the route files that any record of a journal names, of whatever step or settings."""
    records = (
        one for path in directory.glob("*") if path.is_file() for one in read_records(path)[0]
    )
    return {
        name
        for one in records
        if isinstance(one, JournalledGroup | JournalledBatch)
        for name in (one.routes if isinstance(one, JournalledGroup) else one.batch.routes or ())
        if name
    }


# directories of which a message was written since the last success
_warned_directories: set[Path] = set()


def write_or_warn(
    path: Path,
    write_file: Callable[[], None],
    consequence: str = "after a kill this part of the step is done again",
) -> None:
    """Call `write_file`. Where it raises OSError, log a warning that the run goes on and what the
    `consequence` is; of several failures in a directory only the first is logged.
    """
    try:
        write_file()
        _warned_directories.discard(path.parent)
    except OSError as error:
        if path.parent not in _warned_directories:
            logger.warning(
                "%s The run goes on; %s.", explain_write_error(path, error).strerror, consequence
            )
        _warned_directories.add(path.parent)


def encode_record(value: Any) -> list[codec.Buffer]:
    """Return the pieces of a record, to be written one after the other; columns are not copied."""
    parts = codec.encode_message_pieces(value)
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    length = sum(map(len, parts))
    return [MAGIC + length.to_bytes(_LENGTH_BYTES, "little") + digest.digest(), *parts]


def read_records(path: Path) -> tuple[list[Any], int]:
    """Return (the records up to the first that is cut off or damaged, the number of their bytes);
    ([], 0) where the file does not exist.
    """
    if not path.exists():
        return [], 0
    data = path.read_bytes()
    records: list[Any] = []
    position = 0
    while position + _HEADER_BYTES <= len(data) and data.startswith(MAGIC, position):
        length_at = position + len(MAGIC)
        digest_at = length_at + _LENGTH_BYTES
        begin = position + _HEADER_BYTES
        end = begin + int.from_bytes(data[length_at:digest_at], "little")
        payload = data[begin:end]
        if end > len(data) or hashlib.sha256(payload).digest() != data[digest_at:begin]:
            break
        try:
            records.append(codec.decode_message(payload))
        except ValueError as error:  # a whole record of another version of this package
            logger.warning("%s: a record that cannot be read is left out: %s", path, error)
            break
        position = end
    return records, position
