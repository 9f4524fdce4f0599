"""The checkpoints of a run on disk: one directory a step, which is there complete or not at
all. Pure files.

checkpoints/
    step_000010/          named when all of it was on disk; manifest.json lists what is in it
    .step_000020.partial/ being written; of no use if the run ends now
    latest                name of the last one committed, for people and scripts; nothing
                          here relies on it
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlhf_megatron import faults
from rlhf_megatron.data.direct_file_io import fsync_path, write_large_file_atomically
from rlhf_megatron.weights.checkpoint_manifest import (
    MANIFEST,
    CheckpointManifest,
    FileRecord,
    verify_file_digests,
    verify_file_sizes,
)

logger = logging.getLogger(__name__)

LATEST = "latest"
_NAME = re.compile(r"step_(\d{6,})")
_UNFINISHED = re.compile(r"\.step_\d{6,}\.(partial|removed)")
_LONGEST_LATEST = 100  # characters


@dataclass(frozen=True)
class VerifiedCheckpoint:
    """A checkpoint that was verified."""

    path: Path
    manifest: CheckpointManifest


class CheckpointStore:
    """`directory`: "checkpoints" of a run. One process writes at a time (`run.lock`); any may read.

    `settle_s`: how long files that other machines have written may take to be seen on this one (NFS
    caches directories).
    """

    def __init__(self, directory: Path, settle_s: float = 0.0) -> None:
        """Open the store; nothing is read yet. `directory` is "checkpoints" of a run. `settle_s`:
        seconds that files of other machines may take to appear on this one (NFS caches
        directories).
        """
        self.directory = directory
        self._settle_s = settle_s
        self._verified_names: set[str] = set()  # names of those that were written or verified here

    def list_steps(self) -> list[int]:
        """Return the steps of all checkpoints that have their final name, intact or not, newest
        first.
        """
        if not self.directory.is_dir():
            return []
        matches = [_NAME.fullmatch(entry.name) for entry in self.directory.iterdir()]
        return sorted((int(match[1]) for match in matches if match), reverse=True)

    def get_checkpoint_path(self, step: int) -> Path:
        """Return the directory of the checkpoint of this step, whether it exists or not."""
        return self.directory / f"step_{step:06d}"

    def begin_checkpoint(self, step: int) -> Path:
        """Return a new empty directory to be filled and committed.

        Raise ValueError where the step has a good checkpoint, which is never overwritten; move a
        broken one aside. Raise OSError where the disk fails.
        """
        final = self.get_checkpoint_path(step)
        if os.path.lexists(final):
            self._move_aside_if_broken(final)
        partial = self._get_hidden_path(step, "partial")
        if partial.exists():
            shutil.rmtree(partial)
        partial.mkdir(parents=True)
        return partial

    def commit_checkpoint(
        self,
        step: int,
        policy_version: int,
        layouts: Mapping[str, str],
        versions: Mapping[str, str],
        files: Sequence[FileRecord],
    ) -> VerifiedCheckpoint:
        """Write the manifest into the directory of `begin_checkpoint`, and give it its final name.
        All `files` must be on disk (fsync) already.

        Raise OSError or ValueError before the directory has its name; then it is not committed.
        """
        partial = self._get_hidden_path(step, "partial")
        final = self.get_checkpoint_path(step)
        manifest = CheckpointManifest(
            step, policy_version, dict(layouts), dict(versions), tuple(files)
        )
        write_large_file_atomically(partial / MANIFEST, [manifest.serialise().encode()])
        self._wait_until_sizes_fit(partial)
        for directory in _list_directories_bottom_up(partial):
            fsync_path(directory)
        faults.reach_fault_point("ckpt.before_commit")
        os.rename(partial, final)
        self._verified_names.add(final.name)
        try:  # from here on it is a checkpoint, whatever happens
            fsync_path(self.directory)
            faults.reach_fault_point("ckpt.after_rename")
            write_large_file_atomically(self.directory / LATEST, [f"{final.name}\n".encode()])
        except OSError as error:
            logger.warning("%s is complete, but %s was not updated: %s", final, LATEST, error)
        faults.reach_fault_point("ckpt.after_commit")
        return VerifiedCheckpoint(final, manifest)

    def abandon_checkpoint(self, step: int) -> None:
        """Remove the directory of `begin_checkpoint`. Do nothing where it is gone."""
        _remove_directory(self._get_hidden_path(step, "partial"))

    def find_newest(self) -> VerifiedCheckpoint | None:
        """Return the newest checkpoint that verifies, after a WARNING for each newer one. Return
        None where there is no checkpoint.

        Raise ValueError when there are checkpoints and none verifies.
        """
        problems = []
        for step in self.list_steps():
            path = self.get_checkpoint_path(step)
            try:
                found = self.verify_checkpoint(path)
            except ValueError as error:
                logger.warning("%s", error)
                problems.append(str(error))
                continue
            self._warn_if_latest_differs(path.name)
            return found
        if problems:
            listed = "\n  ".join(problems)
            raise ValueError(
                f"{self.directory} has {len(problems)} checkpoints and none of them is good; move"
                f" the directory away to start anew:\n  {listed}"
            )
        return None

    def verify_checkpoint(self, path: Path) -> VerifiedCheckpoint:
        """Compare the files of a checkpoint with its manifest. Raise ValueError naming the files
        that differ, and how.
        """
        try:
            manifest = verify_file_digests(path)
        except (ValueError, OSError) as error:
            raise ValueError(f"checkpoint {path} is not good: {error}.") from error
        match = _NAME.fullmatch(path.name)
        if match and int(match[1]) != manifest.step:
            raise ValueError(
                f"checkpoint {path} is not good: its manifest is of step {manifest.step}."
            )
        self._verified_names.add(path.name)
        return VerifiedCheckpoint(path, manifest)

    def prune_old_checkpoints(self, num_kept: int, best_step: int | None = None) -> list[int]:
        """Remove the checkpoints before the `num_kept` newest good ones (0: remove none), and
        return the steps removed.

        Broken checkpoints do not count, so the newest good one always stays; so does the checkpoint
        of `best_step`.
        """
        removed = []
        num_good = 0
        for step in self.list_steps():
            if num_kept == 0 or num_good < num_kept:
                num_good += self._is_good(self.get_checkpoint_path(step))
                continue
            if step == best_step:
                continue
            # so that what a kill leaves behind has no checkpoint's name
            doomed = self._get_hidden_path(step, "removed")
            try:
                _remove_directory(doomed)
                os.rename(self.get_checkpoint_path(step), doomed)
            except OSError as error:
                logger.warning("%s cannot be removed: %s", self.get_checkpoint_path(step), error)
                continue
            _remove_directory(doomed)
            removed.append(step)
        return removed

    def remove_unfinished(self) -> list[Path]:
        """Remove the directories that a killed run left half written or half removed, and return
        their paths. Call it only with the run's lock.
        """
        if not self.directory.is_dir():
            return []
        left = [entry for entry in self.directory.iterdir() if _UNFINISHED.fullmatch(entry.name)]
        for path in left:
            _remove_directory(path)
        return left

    def _wait_until_sizes_fit(self, partial_directory: Path) -> None:
        """Wait up to `settle_s` until all files have the sizes of the manifest. Raise
        ValueError.
        """
        deadline = time.monotonic() + self._settle_s
        while True:
            try:
                verify_file_sizes(partial_directory)
                return
            except ValueError:
                if time.monotonic() >= deadline or not partial_directory.exists():
                    raise
            time.sleep(1.0)

    def _get_hidden_path(self, step: int, suffix: str) -> Path:
        """Return the path of a checkpoint that is being written (suffix "partial") or removed
        ("removed").
        """
        return self.directory / f".{self.get_checkpoint_path(step).name}.{suffix}"

    def _is_good(self, path: Path) -> bool:
        """Verify a checkpoint and return whether it is good, with a WARNING where it is not. Sizes
        are enough for a checkpoint that this process has read or written.
        """
        try:
            if path.name in self._verified_names:
                verify_file_sizes(path)
            else:
                self.verify_checkpoint(path)
        except (ValueError, OSError) as error:
            logger.warning("checkpoint %s does not count among those to keep: %s", path, error)
            return False
        return True

    def _move_aside_if_broken(self, final_path: Path) -> None:
        """Rename a broken checkpoint to broken_<name>.<number>. Raise ValueError where it is
        good.
        """
        try:
            self.verify_checkpoint(final_path)
        except ValueError as error:
            number = 1
            while os.path.lexists(
                aside := final_path.with_name(f"broken_{final_path.name}.{number}")
            ):
                number += 1
            os.rename(final_path, aside)
            logger.warning("%s It was moved to %s.", error, aside.name)
            return
        raise ValueError(
            f"{final_path} exists already and is good; a checkpoint is never overwritten."
        )

    def _warn_if_latest_differs(self, name: str) -> None:
        """Log a WARNING where the file "latest" does not name this checkpoint."""
        path = self.directory / LATEST
        try:
            with open(path, encoding="utf-8", errors="backslashreplace") as file:
                named = file.read(_LONGEST_LATEST).strip()
        except OSError:
            named = "nothing"
        if named != name:
            logger.warning("%s names %r; the newest good checkpoint is %s", path, named, name)


def _list_directories_bottom_up(root: Path) -> list[Path]:
    """Return `root` and all directories below it, each after the directories inside it."""
    return [Path(path) for path, _, _ in os.walk(root, topdown=False)]


def _remove_directory(path: Path) -> None:
    """Remove a directory of ours, if it exists. Log a WARNING where it cannot be removed, and leave
    the rest.
    """
    if not os.path.lexists(path):
        return
    try:
        shutil.rmtree(path)
    except OSError as error:
        logger.warning("%s cannot be removed: %s", path, error)
