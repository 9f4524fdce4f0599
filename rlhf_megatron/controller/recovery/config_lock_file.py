"""The lock file of a run: its resolved settings, the versions of packages, digests of
what it reads.

`rlhf-megatron train config.lock.yaml` takes it as any configuration, and refuses to start where a
digest differs.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from rlhf_megatron.config.errors import ConfigError
from rlhf_megatron.config.hub import MODEL_FILES, MODELS, parse_cached_model_name
from rlhf_megatron.config.hub_data import format_hub_file_name
from rlhf_megatron.config.load import INPUTS, LOCK, LOCK_FILE, is_function_path_key
from rlhf_megatron.config.show import render_config_yaml
from rlhf_megatron.config.yaml_nodes import LoadedConfig
from rlhf_megatron.controller.observe.run_facts import read_package_versions
from rlhf_megatron.plugins import compute_plugin_digests as digests_of_plugins

PACKAGES = (
    *(
        "rlhf-megatron",
        "torch",
        "megatron-core",
        "transformers",
        "tokenizers",
        "safetensors",
        "numpy",
        "math-verify",
    ),
    *("transformer-engine", "triton", "ray"),
)
# bytes
_WHOLE = 64 << 20
_PIECE = 1 << 20
_READ = {key for key in INPUTS if key.startswith(("model.", "critic.", "reference.", "data."))}


def make_lock_yaml(resolved_yaml: str) -> str:
    """Return the text of the lock file of a run whose plugins are loaded. Read the files that the
    run reads, for their digests. `resolved_yaml`: all settings, as `render_config_yaml` writes
    them.

    A model of a hub, and each file of a data set, appears with its name and revision: another
    machine can fetch it.
    """
    tree = yaml.safe_load(resolved_yaml)
    lock = {"packages": read_package_versions(PACKAGES), "digests": digest_run_inputs(tree)}
    for key in MODELS:
        section, _, name = key.partition(".")
        copy = parse_cached_model_name(str(tree.get(section, {}).get(name)))
        if copy is not None:
            tree[section][name] = copy
    for files in (tree["data"], *tree["data"]["sources"]):
        for name in ("train_files", "val_files"):
            files[name] = [format_hub_file_name(file) for file in files[name]]
    head = (
        f"# What a run was made of. `rlhf-megatron {tree['job']} {LOCK_FILE}` makes it again, or"
        " says what changed.\n"
    )
    rest = yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)
    return head + yaml.safe_dump({LOCK: lock}, sort_keys=False, allow_unicode=True) + rest


def digest_run_inputs(config_tree: Mapping[str, Any]) -> dict[str, str]:
    """Return a digest (16 hexadecimal digits) of each file that a run reads, by its setting and,
    for a model, the file's name.

    Files that do not exist are left out. The digest of a file over 64 MiB covers one MiB in 64, the
    last MiB, and the size.
    """
    files = dict(_find_input_files("", config_tree))
    plugins = digests_of_plugins(config_tree["plugins"])
    return {name: _digest_sampled_file(path) for name, path in files.items()} | {
        f"plugins {Path(plugin).name}": digest for plugin, digest in plugins.items()
    }


def check_config_lock(
    loaded_config: LoadedConfig, allows_changes: bool, log_line: Callable[[str], object]
) -> None:
    """Compare the inputs of a configuration with the lock that its file has, if any.

    Log package versions that differ. Raise ConfigError with each digest that differs; where the run
    `allows_changes`, log them instead.
    """
    if loaded_config.lock_contents is None:
        return
    packages = _require_lock_section(loaded_config.lock_contents, "packages")
    locked = _require_lock_section(loaded_config.lock_contents, "digests")
    for name, now in read_package_versions(
        tuple(name for name in packages if name != "python")
    ).items():
        if packages.get(name) != now:
            log_line(
                f"note: {name} is {now}, and was {packages.get(name, 'not told')} when the"
                " run was locked"
            )
    found = digest_run_inputs(yaml.safe_load(render_config_yaml(loaded_config.config)))
    differing = [
        name for name in sorted(locked.keys() | found.keys()) if locked.get(name) != found.get(name)
    ]
    problems = [
        (
            f"{name} has digest {found.get(name, 'none: it is not there')}, and"
            f" {locked.get(name, 'none: the run did not read it')} when the run was locked: what a"
            " locked run reads must be the same; restore it, or go on with what is"
            " there: --allow-changes."
        )
        for name in differing
    ]
    if problems and not allows_changes:
        raise ConfigError(problems)
    for name in differing:
        log_line(f"note: {name} is not what it was when the run was locked")


def _require_lock_section(lock: Mapping[str, Any], section_name: str) -> Mapping[str, str]:
    """Return a section of the lock. Raise ConfigError where it is missing."""
    part = lock.get(section_name)
    if not isinstance(part, dict):
        raise ConfigError(
            [
                f"{LOCK} ({lock}) must have {section_name}, as a run writes it into {LOCK_FILE};"
                " take that file."
            ]
        )
    return part


def _find_input_files(key: str, node: Any) -> Iterator[tuple[str, Path]]:
    """Yield (name, path) of each file that a section names, such as "model.path config.json" or
    "data.train_files[0]".
    """
    if isinstance(node, dict):
        for name, item in node.items():
            yield from _find_input_files(f"{key}.{name}" if key else str(name), item)
    elif isinstance(node, list):
        for index, item in enumerate(node):
            yield from _find_input_files(f"{key}[{index}]", item)
    elif isinstance(node, str):
        setting = _drop_list_indices(key)
        if is_function_path_key(setting):
            path = Path(node.rpartition(":")[0])
        elif setting in _READ:
            path = Path(node)
        else:
            return
        if path.is_dir():
            names = sorted(
                {file for pattern in MODEL_FILES for file in path.glob(pattern) if file.is_file()}
            )
            yield from (
                (f"{key} {file.name}", file)
                for file in names
                if not file.name.startswith("LICENSE")
            )
        elif path.is_file():
            yield key, path


def _drop_list_indices(key: str) -> str:
    """Write a key as `INPUTS` has it: data.train_files[0] becomes data.train_files[]."""
    return re.sub(r"\[\d+\]", "[]", key)


def _digest_sampled_file(path: Path) -> str:
    """Return 16 hexadecimal digits of the SHA-256 of a file's size and content, or of samples of a
    large file.
    """
    size = path.stat().st_size
    found = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        for start in [*range(0, size, _PIECE if size <= _WHOLE else _WHOLE), max(0, size - _PIECE)]:
            file.seek(start)
            found.update(file.read(_PIECE))
    return found.hexdigest()[:16]
