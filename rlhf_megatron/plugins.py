"""Modules and files of the user's own that register parts (`plugins`). Each process that uses parts
runs them."""

from __future__ import annotations

import errno
import hashlib
import importlib
import importlib.util
import logging
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from rlhf_megatron.config.errors import ConfigError, ConfigProblem
from rlhf_megatron.import_folders import add_import_folder, add_working_directory
from rlhf_megatron.moved_imports import find_moved_imports
from rlhf_megatron.part_hooks import find_subclass_problems, list_user_subclasses
from rlhf_megatron.registry import PACKAGES, Registry, load_registry

logger = logging.getLogger(__name__)
# As the configuration names them -> what was run, in this process.
_loaded_plugins: dict[str, ModuleType] = {}
# Likewise, of plugins whose classes have wrong hooks: they are refused whenever they are named.
_hook_problems: dict[str, list[str]] = {}


def load_plugins(plugins: Sequence[str], location: str = "") -> None:
    """Run each plugin once a process, in their order.

    `location`: where they are named, for messages. Raises ConfigError for all that cannot be run,
    and for all whose classes have a hook under its former name.
    """
    problems = []
    for plugin in find_unloaded_plugins(plugins):
        for kind in PACKAGES:  # ours have their names before anybody else takes one
            load_registry(kind)
        before = _count_registered_parts()
        former_subclasses = list_user_subclasses()
        try:
            _loaded_plugins[plugin] = (
                _import_plugin_file(plugin)
                if is_python_file(plugin)
                else _import_plugin_module(plugin)
            )
        except (Exception, SystemExit) as error:
            texts = _describe_plugin_error(plugin, error)
            problems += [_make_problem(plugin, text, location) for text in texts]
            continue
        if hook_problems := find_subclass_problems(former_subclasses):
            _hook_problems[plugin] = hook_problems
        if _count_registered_parts() == before:
            logger.warning(
                "plugins: %s registers nothing; remove it, or register a part in it.", plugin
            )
    for plugin in plugins:
        texts = _hook_problems.get(plugin, [])
        problems += [_make_problem(plugin, text, location) for text in texts]
    if problems:
        raise ConfigError(problems)


def _make_problem(plugin: str, text: str, location: str) -> ConfigProblem:
    return ConfigProblem(f"plugins: {plugin} {text}", ("plugins",), location)


def list_loaded_plugins() -> list[str]:
    """Return the plugins that this process has run. Processes that it starts for parts of theirs
    run them too."""
    return list(_loaded_plugins)


def find_unloaded_plugins(plugins: Sequence[str]) -> list[str]:
    """Return the plugins that this process has not run."""
    return [plugin for plugin in plugins if plugin not in _loaded_plugins]


def is_python_file(name: str) -> bool:
    return name.endswith(".py")


def compute_plugin_digests(plugins: Sequence[str]) -> dict[str, str]:
    """Plugin -> 16 hexadecimal digits of its source; "" of one without a source at hand. All were
    run."""
    found = {}
    for plugin in plugins:
        path = getattr(_loaded_plugins[plugin], "__file__", None)
        found[plugin] = hashlib.sha256(Path(path).read_bytes()).hexdigest()[:16] if path else ""
    return found


def _count_registered_parts() -> int:
    return sum(len(list(registry)) for registry in Registry.registries_by_kind.values())


def _import_plugin_module(module_name: str) -> ModuleType:
    add_working_directory()
    return importlib.import_module(module_name)


def _import_plugin_file(file: str) -> ModuleType:
    """Import a file under a name of its own, so that it cannot clash with a module of the same
    name."""
    path = Path(file).resolve(strict=True)
    if not path.is_file():  # a pipe would be waited for
        raise FileNotFoundError(errno.ENOENT, "it is not a file", file)
    add_import_folder(str(path.parent))  # the file may import its neighbours
    name = f"plugin_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _describe_plugin_error(plugin: str, error: BaseException) -> list[str]:
    """Return what is wrong with a plugin, a sentence each: all its moved imports, and the error
    where they do not explain it."""
    moved_imports = find_moved_imports(error)
    texts = [str(moved) for moved in moved_imports]
    missing_name = getattr(error, "name", None) or ""
    if not any(missing_name in moved.former for moved in moved_imports):
        texts.append(_describe_other_error(plugin, error))
    return texts


def _describe_other_error(plugin: str, error: BaseException) -> str:
    if isinstance(error, FileNotFoundError) and error.filename == str(Path(plugin)):
        return "is not a file; correct the path, which counts from the file that names it."
    if (
        isinstance(error, ModuleNotFoundError)
        and error.name is not None
        and f"{plugin}.".startswith(f"{error.name}.")
    ):
        return (
            f"is no module in {os.getcwd()} or among the installed packages; correct it, or name a"
            " file (x.py)."
        )
    lines = [
        f
        for f in traceback.extract_tb(error.__traceback__)
        if Path(f.filename).stem == _get_plugin_stem(plugin)
    ]
    where = f" in {lines[-1].filename}:{lines[-1].lineno}" if lines else ""
    return f"cannot be run: {type(error).__name__}{where}: {error}"


def _get_plugin_stem(plugin: str) -> str:
    return Path(plugin).stem if is_python_file(plugin) else plugin.rpartition(".")[2]
