"""The lock file of a run: its resolved settings, the versions of packages, digests of what it reads.

`rlhf-megatron train config.lock.yaml` takes it as any configuration, and refuses to start where a digest differs.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from rlhf_megatron.config.errors import ConfigError
from rlhf_megatron.config.hub import MODEL_FILES, MODELS, name_of_copy
from rlhf_megatron.config.hub_data import file_on_hub
from rlhf_megatron.config.load import INPUTS, LOCK, LOCK_FILE, is_path_of_function
from rlhf_megatron.config.show import as_yaml
from rlhf_megatron.config.source import Loaded
from rlhf_megatron.observe.run_facts import versions
from rlhf_megatron.plugins import digests as digests_of_plugins

PACKAGES = (
    *("rlhf-megatron", "torch", "megatron-core", "transformers", "tokenizers", "safetensors", "numpy", "math-verify"),
    *("transformer-engine", "triton", "ray"),
)
_WHOLE, _PIECE = 64 << 20, 1 << 20  # bytes
_READ = {key for key in INPUTS if key.startswith(("model.", "critic.", "reference.", "data."))}


def locked_yaml(resolved: str) -> str:
    """Return the text of the lock file of a run whose plugins are loaded. It reads what the run reads. `resolved`: all
    settings, as `as_yaml` writes them.

    A model of a hub, and each file of a data set, has its name and revision there: another machine can fetch it.
    """
    tree = yaml.safe_load(resolved)
    lock = {"packages": versions(PACKAGES), "digests": digests_of(tree)}
    for key in MODELS:
        section, _, name = key.partition(".")
        copy = name_of_copy(str(tree.get(section, {}).get(name)))
        if copy is not None:
            tree[section][name] = copy
    for files in (tree["data"], *tree["data"]["sources"]):
        for name in ("train_files", "val_files"):
            files[name] = [file_on_hub(file) for file in files[name]]
    head = (
        f"# What a run was made of. `rlhf-megatron {tree['job']} {LOCK_FILE}` makes it again, or says what changed.\n"
    )
    rest = yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)
    return head + yaml.safe_dump({LOCK: lock}, sort_keys=False, allow_unicode=True) + rest


def digests_of(tree: Mapping[str, Any]) -> dict[str, str]:
    """Return 16 hexadecimal digits of each file that a run reads, by its setting and, of a model, its name.

    Files that are not there are left out. Of a file over 64 MiB one MiB in 64 counts, the last one, and its size.
    """
    files = dict(_files("", tree))
    plugins = digests_of_plugins(tree["plugins"])
    return {name: _digest(path) for name, path in files.items()} | {
        f"plugins {Path(plugin).name}": digest for plugin, digest in plugins.items()
    }


def check_lock(loaded: Loaded, is_free: bool, say: Callable[[str], object]) -> None:
    """Compare what a configuration reads with the lock that its file has, if any.

    Versions of packages that differ are said; so are digests where the run `is_free` to differ. Otherwise it raises
    ConfigError with each digest that differs.
    """
    if loaded.lock is None:
        return
    packages, locked = _part(loaded.lock, "packages"), _part(loaded.lock, "digests")
    for name, now in versions(tuple(name for name in packages if name != "python")).items():
        if packages.get(name) != now:
            say(f"note: {name} is {now}, and was {packages.get(name, 'not told')} when the run was locked")
    found = digests_of(yaml.safe_load(as_yaml(loaded.config)))
    differing = [name for name in sorted(locked.keys() | found.keys()) if locked.get(name) != found.get(name)]
    problems = [
        f"{name} has digest {found.get(name, 'none: it is not there')}, and"
        f" {locked.get(name, 'none: the run did not read it')} when the run was locked: what a locked run reads must"
        " be the same; restore it, or go on with what is there: --allow-changes."
        for name in differing
    ]
    if problems and not is_free:
        raise ConfigError(problems)
    for name in differing:
        say(f"note: {name} is not what it was when the run was locked")


def _part(lock: Mapping[str, Any], name: str) -> Mapping[str, str]:
    part = lock.get(name)
    if not isinstance(part, dict):
        raise ConfigError([f"{LOCK} ({lock}) must have {name}, as a run writes it into {LOCK_FILE}; take that file."])
    return part


def _files(key: str, node: Any) -> Iterator[tuple[str, Path]]:
    """The files below a section: "model.path config.json", "data.train_files[0]"."""
    if isinstance(node, dict):
        for name, item in node.items():
            yield from _files(f"{key}.{name}" if key else str(name), item)
    elif isinstance(node, list):
        for index, item in enumerate(node):
            yield from _files(f"{key}[{index}]", item)
    elif isinstance(node, str) and (_plain(key) in _READ or is_path_of_function(key)):
        path = Path(node.rpartition(":")[0] if is_path_of_function(key) else node)
        if path.is_dir():
            names = sorted({file for pattern in MODEL_FILES for file in path.glob(pattern) if file.is_file()})
            yield from ((f"{key} {file.name}", file) for file in names if not file.name.startswith("LICENSE"))
        elif path.is_file():
            yield key, path


def _plain(key: str) -> str:
    """Write a key as `INPUTS` has it: data.train_files[0] is data.train_files[]."""
    return re.sub(r"\[\d+\]", "[]", key)


def _digest(path: Path) -> str:
    size = path.stat().st_size
    found = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        for start in [*range(0, size, _PIECE if size <= _WHOLE else _WHOLE), max(0, size - _PIECE)]:
            file.seek(start)
            found.update(file.read(_PIECE))
    return found.hexdigest()[:16]
