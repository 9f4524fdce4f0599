"""Models named as on a hub (owner/name, or owner/name@revision): the copies that huggingface_hub keeps of them."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from rlhf_megatron.config.errors import ConfigError
from rlhf_megatron.config.keys import value_of
from rlhf_megatron.config.schema import RunConfig

TOKENIZER = "model.tokenizer_path"
MODELS = ("model.path", TOKENIZER, "critic.path", "reference.path", "reward_model.path")
"""Settings that take the name of a model."""

MODEL_FILES = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt", "LICENSE*"]  # no weights of other formats
TOKENIZER_FILES = MODEL_FILES[1:]
Answer = TypeVar("Answer")
_PART = r"(?![^/@]*(?:--|\.\.))[A-Za-z0-9](?:[\w.-]{0,94}\w)?"  # what huggingface_hub takes, and no more
_NAME = re.compile(rf"{_PART}/(?![^@]*\.git(?:@|$)){_PART}(@[\w./-]+)?", re.ASCII)


def is_hub_name(text: str) -> bool:
    """Whether a text can name a model of a hub; a path of two parts looks alike, and is meant where it exists."""
    return _NAME.fullmatch(text) is not None


def name_of_copy(path: str) -> str | None:
    """owner/name@revision of a directory in huggingface_hub's cache; None of another one."""
    found = re.fullmatch(r".*/models--(.+?)--(.+)/snapshots/([^/]+)/?", path)
    return None if found is None else f"{found[1]}/{found[2]}@{found[3]}"


def local_copy(name: str, key: str = "model.path") -> str | None:
    """Return the directory of a copy in huggingface_hub's cache, at a fixed revision; None where there is none.

    A copy has what the setting `key` needs: a model its weights, a tokenizer its own files. The network is not asked.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    repository, _, revision = name.partition("@")
    try:
        found = snapshot_download(
            repository, revision=revision or None, allow_patterns=_files_of(key), local_files_only=True
        )
    except LocalEntryNotFoundError:
        return None
    return found if _has_files(Path(found), key) else None


def download(name: str, out: Path | None = None, files: Sequence[str] = MODEL_FILES, is_data: bool = False) -> str:
    """Bring a model, or a data set, to huggingface_hub's cache or into the folder `out`; return its directory.

    With a progress bar. What is there already is not downloaded again, and a download that was cut off goes on.
    HF_ENDPOINT, HF_HOME and HF_TOKEN are huggingface_hub's. Raises ValueError with the cause and what else can be done.
    """
    from huggingface_hub import snapshot_download

    repository, _, revision = name.partition("@")
    return asked(
        name,
        lambda: snapshot_download(
            repository,
            revision=revision or None,
            repo_type="dataset" if is_data else "model",
            allow_patterns=list(files),
            local_dir=out,
            endpoint=os.environ.get("HF_ENDPOINT"),
        ),
    )


def asked(name: str, ask: Callable[[], Answer]) -> Answer:
    """Return the hub's answer about `name`. Raises ValueError with the cause and what else can be done."""
    try:
        return ask()
    except Exception as error:  # the library's own, those of its HTTP library, of the disk
        cause = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        raise ValueError(f"{name} cannot be fetched from the hub ({cause}). {_advice()}") from error


def fetch_models(config: RunConfig, say: Callable[[str], None]) -> None:
    """Download the models that a configuration names as on a hub, where no copy is here. Raises ConfigError."""
    problems = []
    # A copy, or a folder of that name, stands there as an absolute path.
    # What a model and its tokenizer share comes as a model's: later keys win.
    keys = {str(value_of(config, key)): key for key in (TOKENIZER, *MODELS)}
    for name, key in keys.items():
        if is_hub_name(name):
            say(f"{name} is fetched from the hub")
            try:
                found = Path(download(name, files=_files_of(key)))
            except ValueError as error:
                problems.append(str(error))
            else:
                if not _has_files(found, key):
                    what = "tokenizer.json" if key == TOKENIZER else "*.safetensors"
                    problems.append(f"{key} ({name}): it has no {what} on the hub, which is needed; name another.")
    if problems:
        raise ConfigError(problems)


def _files_of(key: str) -> list[str]:
    return TOKENIZER_FILES if key == TOKENIZER else MODEL_FILES


def _has_files(directory: Path, key: str) -> bool:
    if key == TOKENIZER:
        return any((directory / name).is_file() for name in ("tokenizer.json", "tokenizer.model"))
    index = directory / "model.safetensors.index.json"
    if not index.is_file():
        return next(directory.glob("*.safetensors"), None) is not None
    names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    return all((directory / name).is_file() for name in names)


def _advice() -> str:
    by_hand = "copy its directory here from elsewhere, and name the path"
    if os.environ.get("HF_HUB_OFFLINE", "0").upper() in ("1", "TRUE", "YES", "ON"):
        return f"HF_HUB_OFFLINE is set: unset it, or {by_hand}."
    return f"See that the name is right, that this machine reaches the hub (HF_ENDPOINT, HF_TOKEN), or {by_hand}."
