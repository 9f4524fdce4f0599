"""The manifest of a checkpoint names every file with its size and digest. Pure files, no Megatron.

A directory is read only after it was compared with its manifest, so that a flipped bit, a missing
shard or a file that somebody slipped in is found before anything in it is parsed. The manifest
protects against accidents; whoever can write the directory can write a manifest that fits, which is
why nothing in a checkpoint is unpickled freely either.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from rlhf_megatron.data import codec

MANIFEST = "manifest.json"
FORMAT = "rlhf_megatron.checkpoint"  # in files: no module has this name
FORMAT_VERSION = 1
_LARGEST_MANIFEST = 256 << 20  # bytes; a hundred ranks' files take some 50 kB
_BLOCK = 4 << 20  # bytes
_NUM_READERS = 8
_SHOWN = 5


@codec.register("FileRecord")
@dataclass(frozen=True)
class FileRecord:
    """A file as the process that wrote it saw it."""

    path: str  # relative to the checkpoint, parts separated by "/"
    num_bytes: int
    sha256: str


@codec.register("SaveResult")
@dataclass(frozen=True)
class SaveResult:
    """The outcome of one rank's part of a checkpoint."""

    files: tuple[FileRecord, ...]  # those that this rank wrote; () where there is an error
    error: str | None = None  # the same on all ranks: which rank could not write, and why
    seconds: float = 0.0  # that this rank was writing


@dataclass(frozen=True)
class CheckpointManifest:
    """The contents of manifest.json."""

    step: int
    policy_version: int
    layouts: Mapping[str, str]  # pool -> its layout
    versions: Mapping[str, str]  # package -> version
    files: tuple[FileRecord, ...] = field(repr=False)

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all files together."""
        return sum(record.num_bytes for record in self.files)

    def serialise(self) -> str:
        """Return the text of manifest.json, always the same for the same manifest. Its last entry
        is the digest of the others.
        """
        content = {"format": FORMAT, "format_version": FORMAT_VERSION, **asdict(self)}
        content["files"] = [
            asdict(record) for record in sorted(self.files, key=lambda record: record.path)
        ]
        digest = hashlib.sha256(_encode_json(content).encode()).hexdigest()
        return _encode_json({**content, "sha256": digest}) + "\n"


def parse_checkpoint_manifest(text: str) -> CheckpointManifest:
    """Return the manifest that `text` holds. Raise ValueError for any text that `serialise` cannot
    have written.
    """
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is not JSON ({error})") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(f"it is no manifest of this format ({FORMAT})")
    if content.get("format_version") != FORMAT_VERSION:
        version = content.get("format_version")
        raise ValueError(f"its format_version is {version!r}, this version reads {FORMAT_VERSION}")
    try:
        manifest = CheckpointManifest(
            step=_require_whole_number(content["step"]),
            policy_version=_require_whole_number(content["policy_version"]),
            layouts=_require_text_mapping(content["layouts"]),
            versions=_require_text_mapping(content["versions"]),
            files=tuple(_parse_file_record(entry) for entry in content["files"]),
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"an entry is missing or has a wrong type ({error!r})") from error
    paths = [record.path for record in manifest.files]
    if len(set(paths)) != len(paths):
        raise ValueError(f"{next(path for path in paths if paths.count(path) > 1)} is named twice")
    if manifest.serialise() != text:
        raise ValueError(
            "it was changed after it was written (its own digest or spelling does not fit)"
        )
    return manifest


def verify_file_digests(directory: Path) -> CheckpointManifest:
    """Check every file of `directory` against its manifest, reading every byte, and return the
    manifest.

    Raise ValueError that names the files that are missing, not in the manifest, links, of another
    size or changed.
    """
    manifest = read_checkpoint_manifest(directory)
    problems = list(_find_size_problems(directory, manifest))
    if not problems:
        with ThreadPoolExecutor(_NUM_READERS) as threads:
            digests = threads.map(
                lambda record: _find_digest_problem(directory, record), manifest.files
            )
            problems = [problem for problem in digests if problem is not None]
    _raise_on_problems(problems)
    return manifest


def verify_file_sizes(directory: Path) -> CheckpointManifest:
    """Check that `directory` has exactly the files of its manifest with their sizes, without
    reading their contents, and return the manifest. Raise ValueError as `verify_file_digests` does.
    """
    manifest = read_checkpoint_manifest(directory)
    _raise_on_problems(list(_find_size_problems(directory, manifest)))
    return manifest


def read_checkpoint_manifest(directory: Path) -> CheckpointManifest:
    """Return the manifest of a checkpoint directory. Raise ValueError where it is missing or
    broken.
    """
    if directory.is_symlink() or not directory.is_dir():
        raise ValueError(f"{directory} is not a directory")
    path = directory / MANIFEST
    try:
        found = path.lstat()
        if not stat.S_ISREG(found.st_mode):
            raise ValueError(f"{MANIFEST} is not a plain file")
        if found.st_size > _LARGEST_MANIFEST:
            raise ValueError(f"{MANIFEST} has {found.st_size} bytes, which is no manifest")
        text = path.read_bytes().decode()
    except FileNotFoundError as error:
        raise ValueError(f"{MANIFEST} is missing") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{MANIFEST} cannot be read ({error})") from error
    try:
        return parse_checkpoint_manifest(text)
    except ValueError as error:
        raise ValueError(f"{MANIFEST}: {error}") from error


def make_file_record(checkpoint_directory: Path, path: Path) -> FileRecord:
    """Read a file that was just written and return its record: path relative to
    `checkpoint_directory`, size and digest.
    """
    return FileRecord(
        path.relative_to(checkpoint_directory).as_posix(),
        path.stat().st_size,
        compute_file_sha256(path),
    )


def make_file_records(directory: Path) -> tuple[FileRecord, ...]:
    """Return the records of all files below `directory`, which lies right in the checkpoint's
    directory.
    """
    return tuple(
        make_file_record(directory.parent, directory / path)
        for path, _ in sorted(walk_files(directory))
    )


def compute_file_sha256(path: Path) -> str:
    """Return the file's sha256 in hexadecimal digits. Other threads can run meanwhile."""
    digest = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        block = bytearray(_BLOCK)
        view = memoryview(block)
        while count := file.readinto(block):
            digest.update(view[:count])
    return digest.hexdigest()


def walk_files(directory: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Yield (relative path, lstat result) of everything below `directory` that is not a real
    directory. Links are reported, not followed.
    """
    pending = [directory]
    while pending:
        with os.scandir(pending.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    pending.append(Path(entry.path))
                else:
                    relative = Path(entry.path).relative_to(directory)
                    yield relative.as_posix(), entry.stat(follow_symlinks=False)


def _find_size_problems(directory: Path, manifest: CheckpointManifest) -> Iterator[str]:
    """Yield a message for each file that is not in the manifest, is not a plain file, has another
    size or is missing.
    """
    named = {record.path: record for record in manifest.files}
    found = dict(walk_files(directory))
    found.pop(MANIFEST, None)
    for path, status in sorted(found.items()):
        if path not in named:
            yield f"{path} is not named in {MANIFEST}"
        elif not stat.S_ISREG(status.st_mode):
            yield f"{path} is a link or no plain file"
        elif status.st_size != named[path].num_bytes:
            yield f"{path} has {status.st_size} bytes instead of {named[path].num_bytes}"
    for path in sorted(named.keys() - found.keys()):
        yield f"{path} is missing"


def _find_digest_problem(directory: Path, record: FileRecord) -> str | None:
    """Return a message if the file cannot be read or its digest is not the recorded one, else
    None.
    """
    try:
        digest = compute_file_sha256(directory / record.path)
    except OSError as error:
        return f"{record.path} cannot be read ({error})"
    return (
        None
        if digest == record.sha256
        else f"{record.path} was changed (its digest is not that of {MANIFEST})"
    )


def _raise_on_problems(problems: list[str]) -> None:
    """Raise ValueError with the first problems and the number of the rest; do nothing if there are
    none.
    """
    if problems:
        more = f" and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise ValueError("; ".join(problems[:_SHOWN]) + more)


def _parse_file_record(entry: Any) -> FileRecord:
    """Return the record of one file entry of the manifest. Raise ValueError for a malformed
    entry.
    """
    if entry.keys() != {"path", "num_bytes", "sha256"}:
        raise ValueError(
            f"a file has the entries {sorted(entry)} instead of path, num_bytes and sha256"
        )
    path = entry["path"]
    digest = entry["sha256"]
    if not isinstance(path, str) or not _is_plain_relative_path(path):
        raise ValueError(f"{path!r} is not a plain relative path inside the checkpoint")
    if not isinstance(digest, str):
        raise ValueError(f"the digest of {path} is not text")
    return FileRecord(path, _require_whole_number(entry["num_bytes"]), digest)


def _is_plain_relative_path(path: str) -> bool:
    """Return whether a path is relative, normalised, printable, inside the checkpoint, and not the
    manifest itself.
    """
    parts = PurePosixPath(path).parts
    is_normal = (
        bool(parts) and not path.startswith("/") and "/".join(parts) == path and ".." not in parts
    )
    return is_normal and "\\" not in path and path.isprintable() and path != MANIFEST


def _require_whole_number(value: Any) -> int:
    """Return the value if it is an int of 0 or more, else raise ValueError."""
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is not a whole number from 0")
    return value


def _require_text_mapping(value: Any) -> dict[str, str]:
    """Return the mapping as a dict. Raise ValueError where a value is not a string."""
    if not all(isinstance(text, str) for text in value.values()):
        raise ValueError(f"{value!r} does not map names to text")
    return dict(value)


def _encode_json(content: dict[str, Any]) -> str:
    """Return the JSON text of the manifest, ASCII, with one space of indent."""
    return json.dumps(content, indent=1, ensure_ascii=True)
