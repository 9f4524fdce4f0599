"""A run's YAML file, the files that it extends and the overrides of the command line, as one typed configuration.

Also: `a.b.c=value` arguments of the command line, as nodes. The value is YAML: `[1, 2]`, `{a: 1}`, `null`, `1e-4`.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from rlhf_megatron.config import hub, hub_data
from rlhf_megatron.config.errors import ConfigError, Problem
from rlhf_megatron.config.keys import join
from rlhf_megatron.config.rules import Check
from rlhf_megatron.config.rules.validate import problems_of, problems_of_files
from rlhf_megatron.config.schema import RunConfig
from rlhf_megatron.config.secrets import secrets_in
from rlhf_megatron.config.source import (
    MAX_CHARACTERS,
    Loaded,
    MappingNode,
    Node,
    Origin,
    Scalar,
    SequenceNode,
    merge,
    parse,
    plain,
)
from rlhf_megatron.config.typed import BROKEN, Converter
from rlhf_megatron.config.verl_names import has_known_below, suggest
from rlhf_megatron.plugins import is_file, load_plugins

SOURCE = "command line"
_KEY = re.compile(r"[A-Za-z_][\w-]*(\.[A-Za-z_][\w-]*)*\Z")


def parse_overrides(overrides: Sequence[str], layer: int) -> list[MappingNode]:
    """One tree an override, to be merged in this order. Raises ConfigError with all that are malformed."""
    origin = Origin(SOURCE, layer=layer)
    trees: list[MappingNode] = []
    problems: list[Problem] = []
    for override in overrides:
        key, equals, text = override.partition("=")
        key = key.strip()
        if not equals or not _KEY.match(key):
            hint = " Keys need no '+' or '--' in front." if re.match(r"\+|--|~", key) else ""
            problems.append(Problem(f"override {override!r} must have the form section.key=value.{hint}", where=SOURCE))
            continue
        try:
            node = parse(text, SOURCE, layer, with_lines=False)
        except ConfigError as error:
            problems += [Problem(f"override {override!r}: {problem}") for problem in error.problems]
            continue
        if secrets := secrets_in(plain(node), key):
            what = f"override {secrets[0]}: every user of the machine can read a command line; set it in the file."
            problems.append(Problem(what, where=SOURCE))
            continue
        *sections, name = key.split(".")
        tree = MappingNode({name: node}, origin)
        for section in reversed(sections):
            tree = MappingNode({section: tree}, origin)
        trees.append(tree)
    if problems:
        raise ConfigError(problems)
    return trees


EXTENDS, LOCK = "extends", "lock"
LOCK_FILE = "config.lock.yaml"  # in a run's directory (recovery/lock_file.py)


def load_run_config(
    path: str | Path,
    overrides: Sequence[str] = (),
    with_files: bool = True,
    with_plugins: bool = True,
    checks: Sequence[Check] = (),
    tell: Callable[[str], object] = lambda text: None,
) -> Loaded:
    """The configuration of a run, fully checked; nothing but files is touched, and its plugins are run.

    `with_files`: also check what the configuration points to (model, tokenizer, data). Without, a file may name a model
    that is made later. `with_plugins`: without, what plugins may have is not checked. `checks`: further ones, which see
    the configuration with the default in place of what cannot be read; `tell` is told which plugins are run, before.
    Raises ConfigError with every problem: syntax, unknown keys, types, contradictions, the model, what `checks` find.
    """
    loaded, problems, broken = _read(path, overrides)
    if with_plugins and loaded.config.plugins:
        tell(f"runs {', '.join(loaded.config.plugins)}\n")
        try:
            load_plugins(loaded.config.plugins, str(loaded.origin("plugins")))
        except ConfigError as error:
            problems += [Problem(text) for text in error.problems]
    rules = problems_of(loaded) + (problems_of_files(loaded) if with_files else [])
    # A rule that looks at a value which could not be read would only repeat the first message in other words.
    rules = [p for p in rules if not any(_overlap(key, b) for key in p.keys for b in broken)]
    told = {str(problem): None for problem in (*problems, *rules)}
    wrong = {*broken, *(key for problem in rules for key in problem.keys[:1])}
    for text in chain.from_iterable(found_by(check, loaded.config, wrong) for check in checks):
        told.setdefault(text)
    if told:
        raise ConfigError(list(told))
    return loaded


def found_by(check: Check | None, config: RunConfig, wrong: Collection[str]) -> list[str]:
    """`wrong`: settings that are known to be."""
    while check is not None and any(_overlap(key, setting) for key in wrong for setting in check.reads):
        check = check.instead
    try:
        if check is not None:
            check.run(config)
    except ConfigError as error:
        return error.problems
    except (ValueError, OSError) as error:
        return [str(error)]
    return []


def read_run_config(path: str | Path, overrides: Sequence[str] = ()) -> Loaded:
    """The configuration of a run, typed but without the rules between settings. Raises ConfigError."""
    loaded, problems, _ = _read(path, overrides)
    if problems:
        raise ConfigError(problems)
    return loaded


def _overlap(key: str, other: str) -> bool:
    return key == other or key.startswith(other + ".") or other.startswith(key + ".")


def _read(path: str | Path, overrides: Sequence[str]) -> tuple[Loaded, list[Problem], set[str]]:
    files = _Files()
    files.read(Path(path), None)
    try:
        trees = parse_overrides(overrides, layer=files.num_layers)
    except ConfigError as error:
        trees = []
        files.problems += [Problem(text) for text in error.problems]
    tree = files.tree
    for override in trees:
        tree = merge(tree, _from_folder(override, "", Path()))
    converter = Converter(suggest, has_known_below)
    config = converter.section(RunConfig, tree, "", RunConfig())
    assert config is not BROKEN
    if files.problems:  # what an unreadable file would have set is unknown: no rule can be trusted
        raise ConfigError([*files.problems, *converter.problems])
    if files.lock is not None and not isinstance(files.lock, dict):
        raise ConfigError([f"{LOCK} ({files.lock}) must be as a run writes it into config.lock.yaml; take that file."])
    return Loaded(config, converter.provenance, files.lock), converter.problems, converter.broken


class _Files:
    """Merges a file over the files that it extends, each read once."""

    def __init__(self) -> None:
        self.tree: Node = MappingNode({}, Loaded.of_nothing().origin(""))
        self.lock: Any = None
        self.num_layers = 0
        self.problems: list[Problem] = []
        self._done: set[Path] = set()
        self._open: list[Path] = []

    def read(self, path: Path, where: str | None) -> None:
        """`where`: file:line of the `extends` that names it, None for the run's own file."""
        real = path.resolve()
        if real in self._open:
            chain = " -> ".join(p.name for p in [*self._open[self._open.index(real) :], real])
            self.problems.append(Problem(f"extends goes in a circle ({chain}); remove one of them.", where=where or ""))
            return
        if real in self._done:
            return
        node = self._parse(path, where)
        if node is None:
            return
        self._open.append(real)
        for base, base_where in self._bases(node, path):
            self.read(base, base_where)
        self._open.pop()
        self._done.add(real)
        items = {
            key: _in_layer(item, self.num_layers) for key, item in node.items.items() if key not in (EXTENDS, LOCK)
        }
        self.lock = plain(node.items[LOCK]) if LOCK in node.items else self.lock
        # What a run has written holds paths in full; those of older versions counted from the working directory.
        is_of_run = path.name == "config.yaml" and (path.parent / "run.lock").exists()
        folder = Path() if is_of_run else path.parent
        items = {key: _from_folder(item, key, folder) for key, item in items.items()}
        if items:
            self.tree = merge(self.tree, MappingNode(items, replace(node.origin, layer=self.num_layers)))
        self.num_layers += 1

    def _parse(self, path: Path, where: str | None) -> MappingNode | None:
        source = display(path)
        try:
            node = parse(read_text(path), source, 0)
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
            self.problems.append(Problem(f"cannot read {source}: {reason}; correct the path.", where=where or ""))
        except ConfigError as error:
            self.problems += [Problem(text) for text in error.problems]
        else:
            if isinstance(node, MappingNode):
                return node
            if isinstance(node, Scalar) and node.value is None:
                return MappingNode({}, node.origin)
            self.problems.append(Problem(f"{source} must be a mapping of sections (model:, data:, ...)."))
        return None

    def _bases(self, node: MappingNode, path: Path) -> list[tuple[Path, str]]:
        extends = node.items.get(EXTENDS)
        if extends is None:
            return []
        names = extends.items if isinstance(extends, SequenceNode) else (extends,)
        bases = []
        for name in names:
            if isinstance(name, Scalar) and isinstance(name.value, str) and name.value:
                bases.append((path.parent / name.value, str(name.origin)))
            else:
                text = "extends must be a file name, relative to this file, or a list of them."
                self.problems.append(Problem(text, where=str(extends.origin)))
        return bases


def read_text(path: Path) -> str:
    """Read a file that can be a configuration, and never much more of it than a configuration has. Raises OSError,
    UnicodeDecodeError.
    """
    if path.is_fifo():
        raise OSError(errno.ESPIPE, "it is a pipe, which may never end", str(path))
    with path.open("rb") as file:
        return file.read(4 * MAX_CHARACTERS + 4).decode()


def _in_layer(node: Node, layer: int) -> Node:
    """The same tree, with all origins in `layer`."""
    origin = replace(node.origin, layer=layer)
    if isinstance(node, MappingNode):
        return MappingNode({key: _in_layer(item, layer) for key, item in node.items.items()}, origin)
    if isinstance(node, SequenceNode):
        return SequenceNode(tuple(_in_layer(item, layer) for item in node.items), origin)
    return replace(node, origin=origin)


INPUTS = {
    *("model.path", "model.tokenizer_path", "critic.path", "reference.path", "reward_model.path"),
    *("trainer.resume_from_path", "plugins[]"),
    *("data.train_files[]", "data.val_files[]", "data.sources[].train_files[]", "data.sources[].val_files[]"),
    *("rollout.sglang.python", "rollout.sglang.api_key_file", "rollout.sglang.admin_api_key_file"),
    *("rollout.transfer_dir", "reward_model.served.python"),
}
"""Settings that name what is there before a run. A relative path counts from the folder of the file it stands in, or
from the working directory on the command line; a model that is not there may be one of a hub (config/hub.py), and so
may data files (config/hub_data.py)."""


def _from_folder(node: Node, key: str, folder: Path) -> Node:
    """The same tree, with absolute paths where it names files."""
    if isinstance(node, MappingNode):
        return replace(node, items={n: _from_folder(item, join(key, n), folder) for n, item in node.items.items()})
    if isinstance(node, SequenceNode):
        items = [one for item in node.items for one in (_of_hub(item, key, folder) or [item])]
        return replace(node, items=tuple(_from_folder(item, f"{key}[]", folder) for item in items))
    is_function = is_path_of_function(key)
    if not isinstance(node.value, str) or not node.value or not (key in INPUTS or is_function):
        return node
    file, colon, name = node.value.rpartition(":") if is_function else (node.value, "", "")
    is_program = key.endswith(".python") and "/" not in file
    if is_program or file.startswith("~") or ((is_function or key == "plugins[]") and not is_file(file)):
        return node
    text = os.path.abspath(folder / file) + colon + name
    if key.endswith("_files[]") and hub_data.Split.of(file) is not None and not os.path.exists(text):
        return node  # of a hub, and not here yet
    if key in hub.MODELS and hub.is_hub_name(file) and not os.path.exists(text):
        text = hub.local_copy(file, key) or file
    return replace(node, value=text, text=text)


def _of_hub(node: Node, key: str, folder: Path) -> list[Node]:
    """The files of a split of a hub's data set that is here, in place of its name; [] for anything else."""
    if not key.endswith("_files") or not isinstance(node, Scalar) or not isinstance(node.value, str):
        return []
    split = None if os.path.exists(folder / node.value) else hub_data.Split.of(node.value)
    return [replace(node, value=file, text=file) for file in (hub_data.local_files(split) if split else ())]


def is_path_of_function(key: str) -> bool:
    """Whether a setting names a function of a file: FILE.py:NAME."""
    return key.startswith("reward.") and key.endswith("params.path")


def display(path: Path) -> str:
    """The path relative to the working directory where it lies below it."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative
