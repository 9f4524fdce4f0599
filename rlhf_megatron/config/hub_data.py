"""Data sets named as on a hub (owner/name:split, owner/name:subset:split, or owner/name:FILE of one
file): the files in huggingface_hub's cache. No package but that one is needed: the files are
JSONL, JSON or parquet.
"""

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
from rlhf_megatron.config.hub import download_from_hub, is_hub_name, query_hub
from rlhf_megatron.config.schema import DataConfig
from rlhf_megatron.write_errors import write_text_file

SPLITS = (
    {"train", "training"},
    {"validation", "valid", "val", "dev"},
    {"test", "testing", "eval", "evaluation"},
)
ROW_SUFFIXES = (".parquet", ".jsonl")  # of files that can only be rows
SUFFIXES = (*ROW_SUFFIXES, ".json")
CARD = "README.md"
_NUMBERED = re.compile(r"(.*)-(\d+)-of-(\d+)(\.\w+)")
_NAME = re.compile(r"([^:]+)(?::([\w.-]+))?:([\w.-]+|[^:]+\.(?:parquet|jsonl|json))")
_COPY = re.compile(r".*/datasets--(.+?)--(.+)/snapshots/([^/]+)/(.+)")


@dataclass(frozen=True)
class DatasetSplit:
    """owner/name[@revision][:subset]:split"""

    repository: str  # with the revision
    subset: str | None
    split: str  # or one file of the repository

    @staticmethod
    def from_name(text: str) -> DatasetSplit | None:
        """Return the split that a text names, or None where the text is no name of a hub's split or
        file.
        """
        found = _NAME.fullmatch(text)
        return (
            DatasetSplit(*found.groups()) if found is not None and is_hub_name(found[1]) else None
        )

    def __str__(self) -> str:
        """Return the split's name as users write it: owner/name[@revision][:subset]:split."""
        return ":".join(
            part for part in (self.repository, self.subset, self.split) if part is not None
        )


def parse_cached_dataset_name(path: str | Path) -> str | None:
    """Return owner/name of the data set that a file in huggingface_hub's cache belongs to; None for
    a file elsewhere.
    """
    found = _COPY.fullmatch(str(path))
    return None if found is None else f"{found[1]}/{found[2]}"


def format_hub_file_name(path: str) -> str:
    """Return owner/name@revision:FILE for a file in huggingface_hub's cache, a name that every
    machine can resolve; return the path of any other file unchanged.
    """
    found = _COPY.fullmatch(path)
    name = path if found is None else f"{found[1]}/{found[2]}@{found[3]}:{found[4]}"
    return path if DatasetSplit.from_name(name) is None else name


def find_local_split_files(split: DatasetSplit) -> list[str]:
    """Return the paths of a split's files in huggingface_hub's cache, at a fixed revision; [] where
    some of them are missing or it is not certain that the split is whole. The network is not asked.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    repository, _, revision = split.repository.partition("@")
    try:
        found = snapshot_download(
            repository, repo_type="dataset", revision=revision or None, local_files_only=True
        )
    except LocalEntryNotFoundError as error:
        # newer versions know that the repository has more files
        found = getattr(error, "snapshot_path", "")
        if not found:
            return []
    folder = Path(found)
    there = [str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()]
    try:
        names = select_split_files(split, there, _read_card(folder))
    except ValueError:
        return []
    if names == [split.split]:
        return [str(folder / split.split)]
    whole = _get_split_index_path(folder, split)
    if whole.is_file():
        names = json.loads(whole.read_text(encoding="utf-8"))
        return [str(folder / name) for name in names] if set(names) <= set(there) else []
    return [str(folder / name) for name in names] if _is_complete_file_set(names) else []


def fetch_split(split: DatasetSplit) -> None:
    """Download the files of a split into huggingface_hub's cache, and record their list there.
    Raise ValueError where the hub cannot be reached, has no such files, or a file did not arrive.
    """
    from huggingface_hub import HfApi

    repository, _, revision = split.repository.partition("@")
    api = HfApi(endpoint=os.environ.get("HF_ENDPOINT"))
    there = query_hub(
        str(split),
        lambda: api.list_repo_files(repository, repo_type="dataset", revision=revision or None),
    )
    folder = (
        Path(download_from_hub(split.repository, file_patterns=[CARD], is_dataset=True))
        if CARD in there
        else None
    )
    names = select_split_files(split, there, "" if folder is None else _read_card(folder))
    folder = Path(
        download_from_hub(
            split.repository, file_patterns=[glob.escape(name) for name in names], is_dataset=True
        )
    )
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise ValueError(f"{split}: {missing[0]} did not come from the hub; try again.")
    if names == [split.split]:
        return
    whole = _get_split_index_path(folder, split)
    whole.parent.mkdir(exist_ok=True)
    aside = whole.with_suffix(f".{os.getpid()}")
    write_text_file(aside, json.dumps(names))
    aside.replace(whole)


def fetch_data_splits(data: DataConfig, log_line: Callable[[str], None]) -> None:
    """Download the hub's splits that the configuration names and that have no local copy, and log a
    line for each. Raise ConfigError with all downloads that failed.
    """
    problems = []
    names = [*data.train_files, *data.val_files]  # a copy stands there as paths
    names += [name for source in data.sources for name in (*source.train_files, *source.val_files)]
    for split in filter(None, map(DatasetSplit.from_name, names)):
        log_line(f"{split} is fetched from the hub")
        try:
            fetch_split(split)
        except ValueError as error:
            problems.append(str(error))
    if problems:
        raise ConfigError(problems)


def select_split_files(
    split: DatasetSplit, repository_files: Sequence[str], card: str
) -> list[str]:
    """Return the files of a split among the files of its repository: those that the repository's
    card lists, else those whose names contain the split's name. Only parquet, JSONL and JSON files
    count, and JSON files, which may hold anything, only where the card or their names say so.

    Raise ValueError, with the files or subsets that there are, where no file fits or more than one
    subset does.
    """
    readable = sorted(name for name in repository_files if name.endswith(SUFFIXES))
    if split.split in readable:
        return [split.split]
    subsets = _parse_card_subsets(card)
    selected = (
        _select_files_by_card(split, subsets, readable)
        if subsets
        else _select_files_by_name(split, readable)
    )
    if not selected:
        names = ", ".join(readable[:8]) or "none"
        raise ValueError(
            f"{split} has no parquet, JSONL or JSON files (such files there: {names}); name another"
            " split, or the hub's own parquet"
            " copy:"
            f" {split.repository.partition('@')[0]}@refs/convert/parquet:SUBSET:{split.split}."
        )
    return selected


def _select_files_by_card(
    split: DatasetSplit, subsets: Mapping[str, Mapping[str, Any]], readable_files: Sequence[str]
) -> list[str]:
    """Return the readable files that the card's metadata lists for the split; may be empty. Without
    a subset in the name, the default or only subset is used. Raise ValueError where the subset is
    unknown or must be named.
    """
    name = split.subset
    if name is None:
        marked = [name for name, subset in subsets.items() if subset.get("default")]
        name = next(iter(marked or (subsets if len(subsets) == 1 else [])), "default")
    if name not in subsets:
        raise ValueError(
            f"{split} must name one of its subsets"
            f" ({', '.join(subsets)}): {split.repository}:SUBSET:{split.split}."
        )
    data_files = subsets[name].get("data_files")
    if data_files is None:
        folder = str(subsets[name].get("data_dir", "")).strip("/") + "/"
        inside = [file for file in readable_files if folder == "/" or file.startswith(folder)]
        return _select_files_by_name(DatasetSplit(split.repository, None, split.split), inside)
    has_splits = isinstance(data_files, list) and data_files and isinstance(data_files[0], dict)
    parts = data_files if has_splits else [{"path": data_files}]
    patterns: list[str] = []
    for part in parts:
        if part.get("split", "train") == split.split:
            path = part.get("path", [])
            patterns += [path] if isinstance(path, str) else path
    return [
        file
        for file in readable_files
        if any(
            fnmatch(file, pattern.removeprefix("./"))
            for pattern in patterns
            if file.endswith(ROW_SUFFIXES) or pattern.endswith(".json")
        )
    ]


def _select_files_by_name(split: DatasetSplit, readable_files: Sequence[str]) -> list[str]:
    """Return the files whose path contains the split's name as a word, or a usual synonym ("val"
    for "validation"). For "train", return all files if no path contains any split's name. JSON
    files count where no other file does, and their paths contain the split's name. Raise ValueError
    where files of several folders fit.
    """
    names = next((group for group in SPLITS if split.split in group), {split.split})
    words = {file: set(re.split(r"[/._ -]", file.lower())) for file in readable_files}
    if split.subset is not None:
        words = {
            file: words[file] for file in readable_files if split.subset in file.split("/")[:-1]
        }
    row_files = [file for file in words if file.endswith(ROW_SUFFIXES)]
    selected = [file for file in row_files if words[file] & names]
    all_names = names.union(*SPLITS)
    if not selected and "train" in names and not any(words[file] & all_names for file in row_files):
        selected = row_files
    if not selected:
        selected = [file for file in words if words[file] & names]
    folders = {
        tuple(part for part in file.split("/")[:-1] if part not in names) for file in selected
    }
    if len(folders) > 1:
        subsets = ", ".join(sorted("/".join(folder) for folder in folders)[:8])
        raise ValueError(
            f"{split} has files in several folders ({subsets}); name"
            f" one: {split.repository}:FOLDER:{split.split}."
        )
    return selected


def _parse_card_subsets(card: str) -> dict[str, Mapping[str, Any]]:
    """Return subset name -> its entry in the metadata of a repository's card; {} where the card has
    no such metadata.
    """
    found = re.match(r"---\s*\n(.*?)\n---", card, re.DOTALL)
    try:
        metadata = yaml.safe_load(found[1]) if found else None
    except yaml.YAMLError:
        return {}
    configs = metadata.get("configs") if isinstance(metadata, dict) else None
    return {
        str(one.get("config_name", "default")): one
        for one in configs or ()
        if isinstance(one, dict)
    }


def _read_card(folder: Path) -> str:
    """Return the text of the repository's card in this folder, or "" without a card."""
    file = folder / CARD
    return file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""


def _get_split_index_path(folder: Path, split: DatasetSplit) -> Path:
    """Return the path of the file that lists a split's files at a revision. `fetch_split` writes
    that file after all files have arrived.
    """
    name = f"{folder.name}.{split.subset or ''}.{split.split}.json"
    return folder.parent.parent / "rlhf_megatron" / name


def _is_complete_file_set(names: Sequence[str]) -> bool:
    """Return whether these files can only be the whole split, judged by their names: one file
    without a number, or as many numbered files as the names say ("-00001-of-00003").
    """
    numbered = [_NUMBERED.fullmatch(name) for name in names]
    if len(names) == 1 and numbered[0] is None:
        return True
    groups = Counter((found[1], found[3], found[4]) for found in numbered if found is not None)
    return None not in numbered and all(
        count == int(total) for (_, total, _), count in groups.items()
    )
