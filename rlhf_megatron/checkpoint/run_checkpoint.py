"""The checkpoints of a run on disk: one directory a step, which is there complete or not at all. Pure files.

checkpoints/
    step_000010/          named when all of it was on disk; manifest.json lists what is in it
    .step_000020.partial/ being written; of no use if the run ends now
    latest                name of the last one committed, for people and scripts; nothing here relies on it
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
from rlhf_megatron.checkpoint.manifest import (
    MANIFEST,
    CheckpointManifest,
    FileRecord,
    verify_directory,
    verify_sizes,
)
from rlhf_megatron.data.direct import fsync, write_whole

logger = logging.getLogger(__name__)

LATEST = "latest"
_NAME = re.compile(r"step_(\d{6,})")
_UNFINISHED = re.compile(r"\.step_\d{6,}\.(partial|removed)")
_LONGEST_LATEST = 100  # characters


@dataclass(frozen=True)
class Found:
    """A checkpoint that was verified."""

    path: Path
    manifest: CheckpointManifest


class CheckpointStore:
    """`directory`: "checkpoints" of a run. One process writes at a time (`run.lock`); any may read.

    `settle_s`: how long files that other machines have written may take to be seen on this one (NFS caches
    directories).
    """

    def __init__(self, directory: Path, settle_s: float = 0.0) -> None:
        self.directory = directory
        self._settle_s = settle_s
        self._good: set[str] = set()  # names of those that were written or verified here

    def steps(self) -> list[int]:
        """Return the steps of all checkpoints that have their name, intact or not, newest first."""
        if not self.directory.is_dir():
            return []
        matches = [_NAME.fullmatch(entry.name) for entry in self.directory.iterdir()]
        return sorted((int(match[1]) for match in matches if match), reverse=True)

    def path_of(self, step: int) -> Path:
        return self.directory / f"step_{step:06d}"

    def begin(self, step: int) -> Path:
        """An empty directory to be filled and committed.

        A good checkpoint of that step is never overwritten (ValueError); a broken one is moved aside. Raises OSError.
        """
        final = self.path_of(step)
        if os.path.lexists(final):
            self._move_aside_if_broken(final)
        partial = self._hidden(step, "partial")
        if partial.exists():
            shutil.rmtree(partial)
        partial.mkdir(parents=True)
        return partial

    def commit(
        self,
        step: int,
        policy_version: int,
        layouts: Mapping[str, str],
        versions: Mapping[str, str],
        files: Sequence[FileRecord],
    ) -> Found:
        """Give the directory of `begin` its manifest and its name. All `files` must be on disk (fsync) already.

        Raises OSError or ValueError before it has its name, and then it is not committed.
        """
        partial, final = self._hidden(step, "partial"), self.path_of(step)
        manifest = CheckpointManifest(step, policy_version, dict(layouts), dict(versions), tuple(files))
        write_whole(partial / MANIFEST, [manifest.to_text().encode()])
        self._wait_for_files(partial)
        for directory in _directories(partial):
            fsync(directory)
        faults.reach("ckpt.before_commit")
        os.rename(partial, final)
        self._good.add(final.name)
        try:  # from here on it is a checkpoint, whatever happens
            fsync(self.directory)
            faults.reach("ckpt.after_rename")
            write_whole(self.directory / LATEST, [f"{final.name}\n".encode()])
        except OSError as error:
            logger.warning("%s is complete, but %s was not updated: %s", final, LATEST, error)
        faults.reach("ckpt.after_commit")
        return Found(final, manifest)

    def abandon(self, step: int) -> None:
        """Remove what `begin` made. Safe when it is gone."""
        _remove(self._hidden(step, "partial"))

    def newest(self) -> Found | None:
        """The newest checkpoint that verifies; a WARNING for each newer one. None where there is no checkpoint.

        Raises ValueError when there are some and none verifies.
        """
        problems = []
        for step in self.steps():
            path = self.path_of(step)
            try:
                found = self.verify(path)
            except ValueError as error:
                logger.warning("%s", error)
                problems.append(str(error))
                continue
            self._compare_latest(path.name)
            return found
        if problems:
            listed = "\n  ".join(problems)
            raise ValueError(
                f"{self.directory} has {len(problems)} checkpoints and none of them is good; move the directory away to"
                f" start anew:\n  {listed}"
            )
        return None

    def verify(self, path: Path) -> Found:
        """Compare a checkpoint with its manifest. Raises ValueError naming the files that differ, and how."""
        try:
            manifest = verify_directory(path)
        except (ValueError, OSError) as error:
            raise ValueError(f"checkpoint {path} is not good: {error}.") from error
        match = _NAME.fullmatch(path.name)
        if match and int(match[1]) != manifest.step:
            raise ValueError(f"checkpoint {path} is not good: its manifest is of step {manifest.step}.")
        self._good.add(path.name)
        return Found(path, manifest)

    def prune(self, keep: int, best: int | None = None) -> list[int]:
        """Remove the steps before the `keep` newest good checkpoints (0: none), and return them.

        Broken ones do not count, so the newest good one always stays; and so does that of step `best`.
        """
        removed = []
        num_good = 0
        for step in self.steps():
            if keep == 0 or num_good < keep:
                num_good += self._is_good(self.path_of(step))
                continue
            if step == best:
                continue
            doomed = self._hidden(step, "removed")  # so that what a kill leaves behind has no checkpoint's name
            try:
                _remove(doomed)
                os.rename(self.path_of(step), doomed)
            except OSError as error:
                logger.warning("%s cannot be removed: %s", self.path_of(step), error)
                continue
            _remove(doomed)
            removed.append(step)
        return removed

    def clean(self) -> list[Path]:
        """Remove what a killed run left half written or half removed, and return it. By the one who holds the lock."""
        if not self.directory.is_dir():
            return []
        left = [entry for entry in self.directory.iterdir() if _UNFINISHED.fullmatch(entry.name)]
        for path in left:
            _remove(path)
        return left

    def _wait_for_files(self, partial: Path) -> None:
        deadline = time.monotonic() + self._settle_s
        while True:
            try:
                verify_sizes(partial)
                return
            except ValueError:
                if time.monotonic() >= deadline or not partial.exists():
                    raise
            time.sleep(1.0)

    def _hidden(self, step: int, kind: str) -> Path:
        return self.directory / f".{self.path_of(step).name}.{kind}"

    def _is_good(self, path: Path) -> bool:
        """Verify a checkpoint; sizes are enough for one that this process has read or written."""
        try:
            if path.name in self._good:
                verify_sizes(path)
            else:
                self.verify(path)
        except (ValueError, OSError) as error:
            logger.warning("checkpoint %s does not count among those to keep: %s", path, error)
            return False
        return True

    def _move_aside_if_broken(self, final: Path) -> None:
        try:
            self.verify(final)
        except ValueError as error:
            number = 1
            while os.path.lexists(aside := final.with_name(f"broken_{final.name}.{number}")):
                number += 1
            os.rename(final, aside)
            logger.warning("%s It was moved to %s.", error, aside.name)
            return
        raise ValueError(f"{final} exists already and is good; a checkpoint is never overwritten.")

    def _compare_latest(self, name: str) -> None:
        path = self.directory / LATEST
        try:
            with open(path, encoding="utf-8", errors="backslashreplace") as file:
                named = file.read(_LONGEST_LATEST).strip()
        except OSError:
            named = "nothing"
        if named != name:
            logger.warning("%s names %r; the newest good checkpoint is %s", path, named, name)


def _directories(root: Path) -> list[Path]:
    """`root` and all below it, those inside before those around them."""
    return [Path(path) for path, _, _ in os.walk(root, topdown=False)]


def _remove(path: Path) -> None:
    """Remove a directory of ours. What cannot be removed is reported and left."""
    if not os.path.lexists(path):
        return
    try:
        shutil.rmtree(path)
    except OSError as error:
        logger.warning("%s cannot be removed: %s", path, error)
