"""Models named as on a hub (owner/name, or owner/name@revision): the copies that huggingface_hub
keeps of them.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from rlhf_megatron.config.errors import ConfigError
from rlhf_megatron.config.key_paths import get_config_value
from rlhf_megatron.config.schema import RunConfig

TOKENIZER = "model.tokenizer_path"
MODELS = ("model.path", TOKENIZER, "critic.path", "reference.path", "reward_model.path")
"""Settings that take the name of a model."""

MODEL_FILES = [
    "*.safetensors",
    "*.json",
    "*.jinja",
    "*.model",
    "*.txt",
    "LICENSE*",
]  # no weights of other formats
TOKENIZER_FILES = MODEL_FILES[1:]
Answer = TypeVar("Answer")
# what huggingface_hub takes, and no more
_PART = r"(?![^/@]*(?:--|\.\.))[A-Za-z0-9](?:[\w.-]{0,94}\w)?"
_NAME = re.compile(rf"{_PART}/(?![^@]*\.git(?:@|$)){_PART}(@[\w./-]+)?", re.ASCII)


def is_hub_name(text: str) -> bool:
    """Return whether a text has the form of a hub's model name, owner/name or owner/name@revision.
    A path of two parts has the same form; callers take the text for a path where such a path
    exists.
    """
    return _NAME.fullmatch(text) is not None


def parse_cached_model_name(path: str) -> str | None:
    """Return the name owner/name@revision of a directory in huggingface_hub's cache; None for any
    other directory.
    """
    found = re.fullmatch(r".*/models--(.+?)--(.+)/snapshots/([^/]+)/?", path)
    return None if found is None else f"{found[1]}/{found[2]}@{found[3]}"


def find_local_model_copy(name: str, key: str = "model.path") -> str | None:
    """Return the directory of the copy of a hub's model in huggingface_hub's cache, or None where
    the copy is missing or incomplete.

    The copy must have what the setting `key` needs: weights for a model, a tokenizer's files for a
    tokenizer. The network is not asked.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    repository, _, revision = name.partition("@")
    try:
        found = snapshot_download(
            repository,
            revision=revision or None,
            allow_patterns=_select_file_patterns(key),
            local_files_only=True,
        )
    except LocalEntryNotFoundError:
        return None
    return found if _has_required_files(Path(found), key) else None


def download_from_hub(
    name: str,
    out: Path | None = None,
    file_patterns: Sequence[str] = MODEL_FILES,
    is_dataset: bool = False,
) -> str:
    """Download a model or a data set into huggingface_hub's cache, or into the folder `out`, and
    return its directory.

    A progress bar is shown. Files that are present are not downloaded again, and an interrupted
    download continues. HF_ENDPOINT, HF_HOME and HF_TOKEN are huggingface_hub's. Raise ValueError
    with the cause and advice on what else can be done.
    """
    from huggingface_hub import snapshot_download

    repository, _, revision = name.partition("@")
    return query_hub(
        name,
        lambda: snapshot_download(
            repository,
            revision=revision or None,
            repo_type="dataset" if is_dataset else "model",
            allow_patterns=list(file_patterns),
            local_dir=out,
            endpoint=os.environ.get("HF_ENDPOINT"),
        ),
    )


def query_hub(name: str, query: Callable[[], Answer]) -> Answer:
    """Call `query` and return its answer. Turn any exception into a ValueError with the cause and
    advice, in which `name` is the thing that was asked for.
    """
    try:
        return query()
    except Exception as error:  # the library's own, those of its HTTP library, of the disk
        cause = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        raise ValueError(
            f"{name} cannot be fetched from the hub ({cause}). {_advise_on_failed_fetch()}"
        ) from error


def fetch_models(config: RunConfig, log_line: Callable[[str], None]) -> None:
    """Download the models that the configuration names as on a hub and that have no local copy, and
    log a line for each. Raise ConfigError with all downloads that failed or lack required files.
    """
    problems = []
    # A copy, or a folder of that name, stands there as an absolute path.
    # What a model and its tokenizer share comes as a model's: later keys win.
    keys = {str(get_config_value(config, key)): key for key in (TOKENIZER, *MODELS)}
    for name, key in keys.items():
        if is_hub_name(name):
            log_line(f"{name} is fetched from the hub")
            try:
                found = Path(download_from_hub(name, file_patterns=_select_file_patterns(key)))
            except ValueError as error:
                problems.append(str(error))
            else:
                if not _has_required_files(found, key):
                    what = "tokenizer.json" if key == TOKENIZER else "*.safetensors"
                    problems.append(
                        f"{key} ({name}): it has no {what} on the hub, which is needed;"
                        " name another."
                    )
    if problems:
        raise ConfigError(problems)


def _select_file_patterns(key: str) -> list[str]:
    """Return the patterns of the files to download for the setting `key`: without weights for a
    tokenizer.
    """
    return TOKENIZER_FILES if key == TOKENIZER else MODEL_FILES


def _has_required_files(directory: Path, key: str) -> bool:
    """Return whether a directory has a tokenizer's file, if `key` is the tokenizer's setting, or
    else all weight files that its index names.
    """
    if key == TOKENIZER:
        return any((directory / name).is_file() for name in ("tokenizer.json", "tokenizer.model"))
    index = directory / "model.safetensors.index.json"
    if not index.is_file():
        return next(directory.glob("*.safetensors"), None) is not None
    names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    return all((directory / name).is_file() for name in names)


def _advise_on_failed_fetch() -> str:
    """Return a sentence on what to do after a failed download; it names HF_HUB_OFFLINE if that is
    set.
    """
    by_hand = "copy its directory here from elsewhere, and name the path"
    if os.environ.get("HF_HUB_OFFLINE", "0").upper() in ("1", "TRUE", "YES", "ON"):
        return f"HF_HUB_OFFLINE is set: unset it, or {by_hand}."
    return (
        "See that the name is right, that this machine reaches the hub (HF_ENDPOINT, HF_TOKEN),"
        f" or {by_hand}."
    )
