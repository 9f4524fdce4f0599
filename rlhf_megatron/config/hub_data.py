"""Data sets named as on a hub (owner/name:split, owner/name:subset:split, or owner/name:FILE of one file): the files in
huggingface_hub's cache. No package but that one is needed: the files are JSONL or parquet."""

from __future__ import annotations

import glob
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import yaml

from rlhf_megatron.config.errors import ConfigError
from rlhf_megatron.config.hub import asked, download, is_hub_name
from rlhf_megatron.config.schema import DataConfig

SPLITS = ({"train", "training"}, {"validation", "valid", "val", "dev"}, {"test", "testing", "eval", "evaluation"})
SUFFIXES = (".parquet", ".jsonl")
CARD = "README.md"
_NUMBERED = re.compile(r"(.*)-(\d+)-of-(\d+)(\.\w+)")
_NAME = re.compile(r"([^:]+)(?::([\w.-]+))?:([\w.-]+|[^:]+\.(?:parquet|jsonl))")
_COPY = re.compile(r".*/datasets--(.+?)--(.+)/snapshots/([^/]+)/(.+)")


@dataclass(frozen=True)
class Split:
    """owner/name[@revision][:subset]:split"""

    repository: str  # with the revision
    subset: str | None
    split: str  # or one file of the repository

    @staticmethod
    def of(text: str) -> Split | None:
        """Read a name; None where the text is no name of a split."""
        found = _NAME.fullmatch(text)
        return Split(*found.groups()) if found is not None and is_hub_name(found[1]) else None

    def __str__(self) -> str:
        return ":".join(part for part in (self.repository, self.subset, self.split) if part is not None)


def name_of_file(path: str | Path) -> str | None:
    """owner/name of the data set that a file in huggingface_hub's cache belongs to; None of another file."""
    found = _COPY.fullmatch(str(path))
    return None if found is None else f"{found[1]}/{found[2]}"


def file_on_hub(path: str) -> str:
    """owner/name@revision:FILE of a file in huggingface_hub's cache, as any machine finds it; another file's path."""
    found = _COPY.fullmatch(path)
    name = path if found is None else f"{found[1]}/{found[2]}@{found[3]}:{found[4]}"
    return path if Split.of(name) is None else name


def local_files(split: Split) -> list[str]:
    """The files of a split in huggingface_hub's cache, at a fixed revision; [] where they, or some of them, are not
    there. The network is not asked."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    repository, _, revision = split.repository.partition("@")
    try:
        found = snapshot_download(repository, repo_type="dataset", revision=revision or None, local_files_only=True)
    except LocalEntryNotFoundError as error:
        found = getattr(error, "snapshot_path", "")  # newer versions know that the repository has more files
        if not found:
            return []
    folder = Path(found)
    there = [str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()]
    try:
        names = files_of(split, there, _card(folder))
    except ValueError:
        return []
    if names == [split.split]:
        return [str(folder / split.split)]
    whole = _fetched(folder, split)
    if whole.is_file():
        names = json.loads(whole.read_text(encoding="utf-8"))
        return [str(folder / name) for name in names] if set(names) <= set(there) else []
    return [str(folder / name) for name in names] if _are_all(names) else []


def fetch(split: Split) -> None:
    """Bring the files of a split to huggingface_hub's cache. Raises ValueError."""
    from huggingface_hub import HfApi

    repository, _, revision = split.repository.partition("@")
    api = HfApi(endpoint=os.environ.get("HF_ENDPOINT"))
    there = asked(str(split), lambda: api.list_repo_files(repository, repo_type="dataset", revision=revision or None))
    folder = Path(download(split.repository, files=[CARD], is_data=True)) if CARD in there else None
    names = files_of(split, there, "" if folder is None else _card(folder))
    folder = Path(download(split.repository, files=[glob.escape(name) for name in names], is_data=True))
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise ValueError(f"{split}: {missing[0]} did not come from the hub; try again.")
    if names == [split.split]:
        return
    whole = _fetched(folder, split)
    whole.parent.mkdir(exist_ok=True)
    aside = whole.with_suffix(f".{os.getpid()}")
    aside.write_text(json.dumps(names), encoding="utf-8")
    aside.replace(whole)


def fetch_data(data: DataConfig, say: Callable[[str], None]) -> None:
    """Download the splits that a configuration names, of which no copy is here. Raises ConfigError."""
    problems = []
    names = [*data.train_files, *data.val_files]  # a copy stands there as paths
    names += [name for source in data.sources for name in (*source.train_files, *source.val_files)]
    for split in filter(None, map(Split.of, names)):
        say(f"{split} is fetched from the hub")
        try:
            fetch(split)
        except ValueError as error:
            problems.append(str(error))
    if problems:
        raise ConfigError(problems)


def files_of(split: Split, there: Sequence[str], card: str) -> list[str]:
    """Return the files of a split of a repository: those that its card names, else those whose names say so.

    Raises ValueError, with what there is, where none or more than one subset is meant.
    """
    readable = sorted(name for name in there if name.endswith(SUFFIXES))
    if split.split in readable:
        return [split.split]
    subsets = _subsets(card)
    found = _by_card(split, subsets, readable) if subsets else _by_name(split, readable)
    if not found:
        names = ", ".join(readable[:8]) or "none"
        raise ValueError(
            f"{split} has no parquet or JSONL files (such files there: {names}); name another split, or the hub's own"
            f" parquet copy: {split.repository.partition('@')[0]}@refs/convert/parquet:SUBSET:{split.split}."
        )
    return found


def _by_card(split: Split, subsets: Mapping[str, Mapping[str, Any]], readable: Sequence[str]) -> list[str]:
    name = split.subset
    if name is None:
        marked = [name for name, subset in subsets.items() if subset.get("default")]
        name = next(iter(marked or (subsets if len(subsets) == 1 else [])), "default")
    if name not in subsets:
        raise ValueError(
            f"{split} must name one of its subsets ({', '.join(subsets)}): {split.repository}:SUBSET:{split.split}."
        )
    given = subsets[name].get("data_files")
    if given is None:
        folder = str(subsets[name].get("data_dir", "")).strip("/") + "/"
        inside = readable if folder == "/" else [one for one in readable if one.startswith(folder)]
        return _by_name(Split(split.repository, None, split.split), inside)
    parts = given if isinstance(given, list) and given and isinstance(given[0], dict) else [{"path": given}]
    patterns: list[str] = []
    for part in parts:
        if part.get("split", "train") == split.split:
            path = part.get("path", [])
            patterns += [path] if isinstance(path, str) else path
    return [one for one in readable if any(fnmatch(one, pattern.removeprefix("./")) for pattern in patterns)]


def _by_name(split: Split, readable: Sequence[str]) -> list[str]:
    """Files of which a word of the path is the split's name or a usual one for it; of nothing but "train": all."""
    names = next((group for group in SPLITS if split.split in group), {split.split})
    known = names.union(*SPLITS)
    words = {one: set(re.split(r"[/._ -]", one.lower())) for one in readable}
    if split.subset is not None:
        words = {one: found for one, found in words.items() if split.subset in one.split("/")[:-1]}
    found = [one for one in words if words[one] & names]
    if not found and "train" in names and not any(one & known for one in words.values()):
        found = list(words)
    folders = {tuple(part for part in one.split("/")[:-1] if part not in names) for one in found}
    if len(folders) > 1:
        subsets = ", ".join(sorted("/".join(folder) for folder in folders)[:8])
        raise ValueError(
            f"{split} has files in several folders ({subsets}); name one: {split.repository}:FOLDER:{split.split}."
        )
    return found


def _subsets(card: str) -> dict[str, Mapping[str, Any]]:
    """Name -> what the metadata of a card says of each subset; {} where it says nothing."""
    found = re.match(r"---\s*\n(.*?)\n---", card, re.DOTALL)
    try:
        metadata = yaml.safe_load(found[1]) if found else None
    except yaml.YAMLError:
        return {}
    configs = metadata.get("configs") if isinstance(metadata, dict) else None
    return {str(one.get("config_name", "default")): one for one in configs or () if isinstance(one, dict)}


def _card(folder: Path) -> str:
    file = folder / CARD
    return file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""


def _fetched(folder: Path, split: Split) -> Path:
    """The list of a split's files at a revision, written when all of them were there."""
    name = f"{folder.name}.{split.subset or ''}.{split.split}.json"
    return folder.parent.parent / "rlhf_megatron" / name


def _are_all(names: Sequence[str]) -> bool:
    """Whether what is there can only be the whole split: one file, or as many as the numbers in their names say."""
    numbered = [_NUMBERED.fullmatch(name) for name in names]
    if len(names) == 1 and numbered[0] is None:
        return True
    groups = Counter((found[1], found[3], found[4]) for found in numbered if found is not None)
    return None not in numbered and all(count == int(total) for (_, total, _), count in groups.items())
