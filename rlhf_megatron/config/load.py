"""A run's YAML file, the files that it extends and the overrides of the command line, as one
typed configuration.

Also: `a.b.c=value` arguments of the command line, as nodes. The value is YAML: `[1, 2]`, `{a: 1}`,
`null`, `1e-4`.
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
from rlhf_megatron.config.errors import ConfigError, ConfigProblem
from rlhf_megatron.config.former_defaults import add_implied_nodes
from rlhf_megatron.config.key_paths import join_key_path
from rlhf_megatron.config.rules import PreflightCheck
from rlhf_megatron.config.rules.validate import find_config_problems, list_file_problems
from rlhf_megatron.config.schema import RunConfig
from rlhf_megatron.config.secrets import find_secret_keys
from rlhf_megatron.config.type_conversion import BROKEN, ConfigConverter
from rlhf_megatron.config.untranslated_settings import UNTRANSLATED, find_untranslated_problems
from rlhf_megatron.config.verl_names import has_known_subkeys, suggest_setting
from rlhf_megatron.config.yaml_nodes import (
    MAX_CHARACTERS,
    LoadedConfig,
    MappingNode,
    Node,
    ScalarNode,
    SequenceNode,
    ValueOrigin,
    convert_to_plain,
    merge_nodes,
    parse_yaml,
)
from rlhf_megatron.plugins import is_python_file, load_plugins

SOURCE = "command line"
_KEY = re.compile(r"[A-Za-z_][\w-]*(\.[A-Za-z_][\w-]*)*\Z")

EXTENDS = "extends"
LOCK = "lock"
LOCK_FILE = "config.lock.yaml"  # in a run's directory (controller/recovery/config_lock_file.py)
RESOLVED_FILE = "config.yaml"  # in directories that a run writes, which have one of:
_RUN_WRITTEN_FILES = ("run.lock", "attempts.jsonl", "manifest.json", "capsule.json")

INPUTS = {
    *("model.path", "model.tokenizer_path", "critic.path", "reference.path", "reward_model.path"),
    *("trainer.resume_from_path", "plugins[]"),
    *(
        "data.train_files[]",
        "data.val_files[]",
        "data.sources[].train_files[]",
        "data.sources[].val_files[]",
    ),
    *("rollout.sglang.python", "rollout.sglang.api_key_file", "rollout.sglang.admin_api_key_file"),
    *("rollout.transfer_dir", "reward_model.served.python"),
}
"""Settings that name what is there before a run. A relative path counts from the folder of the file
it stands in, or from the working directory on the command line; a model that is not there may be
one of a hub (config/hub.py), and so may data files (config/hub_data.py).
"""


def parse_overrides(overrides: Sequence[str], layer: int) -> list[MappingNode]:
    """Return one tree of nodes for each override "section.key=value", to be merged in this order at
    `layer`. Raise ConfigError with all overrides that are malformed or contain a secret, which a
    command line would show to every user.
    """
    origin = ValueOrigin(SOURCE, layer=layer)
    trees: list[MappingNode] = []
    problems: list[ConfigProblem] = []
    for override in overrides:
        key, equals, text = override.partition("=")
        key = key.strip()
        if not equals or not _KEY.match(key):
            hint = " Keys need no '+' or '--' in front." if re.match(r"\+|--|~", key) else ""
            problems.append(
                ConfigProblem(
                    f"override {override!r} must have the form section.key=value.{hint}",
                    location=SOURCE,
                )
            )
            continue
        try:
            node = parse_yaml(text, SOURCE, layer, with_lines=False)
        except ConfigError as error:
            problems += [
                ConfigProblem(f"override {override!r}: {problem}") for problem in error.problems
            ]
            continue
        if secrets := find_secret_keys(convert_to_plain(node), key):
            what = (
                f"override {secrets[0]}: every user of the machine can read a command line; set it"
                " in the file."
            )
            problems.append(ConfigProblem(what, location=SOURCE))
            continue
        *sections, name = key.split(".")
        tree = MappingNode({name: node}, origin)
        for section in reversed(sections):
            tree = MappingNode({section: tree}, origin)
        trees.append(tree)
    if problems:
        raise ConfigError(problems)
    return trees


def load_run_config(
    path: str | Path,
    overrides: Sequence[str] = (),
    with_files: bool = True,
    with_plugins: bool = True,
    checks: Sequence[PreflightCheck] = (),
    log_text: Callable[[str], object] = lambda text: None,
    adjust_loaded: Callable[[LoadedConfig], LoadedConfig] = lambda loaded: loaded,
) -> LoadedConfig:
    """Return the fully checked configuration of a run. Import the plugins that the configuration
    names; otherwise only read files.

    `with_files`: also check the model, tokenizer and data that the configuration points to.
    Without, the configuration may name a model that is made later. `with_plugins`: without, plugins
    are not imported, and parts that they may register are not checked. `checks`: further checks,
    which see the configuration with the default in place of each value that cannot be read.
    `log_text` gets a line with the plugins before they run. `adjust_loaded` returns the
    configuration that the rules and the checks see, for a run that keeps settings of its checkpoint
    (config/former_defaults.py).

    Raise ConfigError with every problem: syntax, unknown keys, types, contradictions, the model,
    and the problems that `checks` find.
    """
    loaded, problems, broken = _read_config_files(path, overrides)
    loaded = adjust_loaded(loaded)
    if with_plugins and loaded.config.plugins:
        log_text(f"runs {', '.join(loaded.config.plugins)}\n")
        try:
            load_plugins(loaded.config.plugins, str(loaded.find_origin("plugins")))
        except ConfigError as error:
            problems += [ConfigProblem(text) for text in error.problems]
    rules = find_config_problems(loaded) + (list_file_problems(loaded) if with_files else [])
    # A rule that looks at a value which could not be read would only repeat the first message
    # in other words.
    rules = [
        p for p in rules if not any(_do_keys_overlap(key, b) for key in p.keys for b in broken)
    ]
    told = {str(problem): None for problem in (*problems, *rules)}
    wrong = {*broken, *(key for problem in rules for key in problem.keys[:1])}
    for text in chain.from_iterable(
        run_preflight_check(check, loaded.config, wrong) for check in checks
    ):
        told.setdefault(text)
    if told:
        raise ConfigError(list(told))
    return loaded


def run_preflight_check(
    check: PreflightCheck | None, config: RunConfig, wrong_keys: Collection[str]
) -> list[str]:
    """Run a check on the configuration and return its problems as texts; [] where there are none.
    Where a setting that the check requires is among `wrong_keys`, the settings with known problems,
    run the check's fallback instead, or nothing.
    """
    while check is not None and any(
        _do_keys_overlap(key, setting) for key in wrong_keys for setting in check.required_keys
    ):
        check = check.fallback
    try:
        if check is not None:
            check.run(config)
    except ConfigError as error:
        return error.problems
    except (ValueError, OSError) as error:
        return [str(error)]
    return []


def read_run_config(path: str | Path, overrides: Sequence[str] = ()) -> LoadedConfig:
    """Return the configuration of a run from its files and overrides, with checked keys and types
    but without the rules between settings. Raise ConfigError with all problems.
    """
    loaded, problems, _ = _read_config_files(path, overrides)
    if problems:
        raise ConfigError(problems)
    return loaded


def _do_keys_overlap(key: str, other_key: str) -> bool:
    """Return whether two key paths are the same, or one is the section that contains the other."""
    return key == other_key or key.startswith(other_key + ".") or other_key.startswith(key + ".")


def _read_config_files(
    path: str | Path, overrides: Sequence[str]
) -> tuple[LoadedConfig, list[ConfigProblem], set[str]]:
    """Return the configuration of a file with its bases and overrides, the problems of keys and
    types, and the keys without a reliable value. Raise ConfigError where a file or an override
    cannot be read, since no rule could be trusted then.
    """
    files = _ConfigFiles()
    files.read(Path(path), None)
    try:
        trees = parse_overrides(overrides, layer=files.num_layers)
    except ConfigError as error:
        trees = []
        files.problems += [ConfigProblem(text) for text in error.problems]
    tree = files.tree
    for override in trees:
        tree = merge_nodes(tree, _resolve_paths(override, "", Path()))
    converter = ConfigConverter(suggest_setting, has_known_subkeys)
    config = converter.convert_section(RunConfig, tree, "", RunConfig())
    assert config is not BROKEN
    if files.problems:  # what an unreadable file would have set is unknown: no rule can be trusted
        raise ConfigError([*files.problems, *files.refusals, *converter.problems])
    if files.lock is not None and not isinstance(files.lock, dict):
        raise ConfigError(
            [
                f"{LOCK} ({files.lock}) must be as a run writes it into config.lock.yaml;"
                " take that file."
            ]
        )
    return (
        LoadedConfig(config, converter.provenance, files.lock),
        [*files.refusals, *converter.problems],
        converter.broken_keys,
    )


class _ConfigFiles:
    """Merges configuration files over the files that they extend, each read once, and collects the
    problems of reading them.
    """

    def __init__(self) -> None:
        """Begin without files: an empty tree, no lock, and no problems."""
        self.tree: Node = MappingNode({}, LoadedConfig.from_defaults().find_origin(""))
        self.lock: Any = None
        self.num_layers = 0
        self.problems: list[ConfigProblem] = []
        self.refusals: list[ConfigProblem] = []  # lines of the section `untranslated`
        self._merged_paths: set[Path] = set()
        self._open_paths: list[Path] = []

    def read(self, path: Path, extends_location: str | None) -> None:
        """Read a file after the files that it extends, and merge it into `tree` as the next layer;
        add problems to `problems`. Do nothing for a file that is merged already. `extends_location`
        is file:line of the `extends` that names the file, or None for the run's own file.
        """
        real = path.resolve()
        if real in self._open_paths:
            chain = " -> ".join(
                p.name for p in [*self._open_paths[self._open_paths.index(real) :], real]
            )
            self.problems.append(
                ConfigProblem(
                    f"extends goes in a circle ({chain}); remove one of them.",
                    location=extends_location or "",
                )
            )
            return
        if real in self._merged_paths:
            return
        node = self._parse_file(path, extends_location)
        if node is None:
            return
        self._open_paths.append(real)
        for base, base_where in self._find_bases(node, path):
            self.read(base, base_where)
        self._open_paths.pop()
        self._merged_paths.add(real)
        resolved = add_implied_nodes(node) if _is_resolved_config(path, node) else node
        items = {
            key: _move_to_layer(item, self.num_layers)
            for key, item in resolved.items.items()
            if key not in (EXTENDS, LOCK, UNTRANSLATED)
        }
        if UNTRANSLATED in node.items:
            self.refusals += find_untranslated_problems(node.items[UNTRANSLATED])
        self.lock = convert_to_plain(node.items[LOCK]) if LOCK in node.items else self.lock
        # The file of a run holds full paths; runs of older versions wrote paths that count from
        # the working directory.
        is_of_run = path.name == "config.yaml" and (path.parent / "run.lock").exists()
        folder = Path() if is_of_run else path.parent
        items = {key: _resolve_paths(item, key, folder) for key, item in items.items()}
        if items:
            self.tree = merge_nodes(
                self.tree, MappingNode(items, replace(node.origin, layer=self.num_layers))
            )
        self.num_layers += 1

    def _parse_file(self, path: Path, extends_location: str | None) -> MappingNode | None:
        """Return the root mapping of a configuration file, empty for an empty file. Where the file
        cannot be read or is no mapping, add problems to `problems` and return None.
        """
        source = format_relative_path(path)
        try:
            node = parse_yaml(read_config_text(path), source, 0)
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
            self.problems.append(
                ConfigProblem(
                    f"cannot read {source}: {reason}; correct the path.",
                    location=extends_location or "",
                )
            )
        except ConfigError as error:
            self.problems += [ConfigProblem(text) for text in error.problems]
        else:
            if isinstance(node, MappingNode):
                return node
            if isinstance(node, ScalarNode) and node.value is None:
                return MappingNode({}, node.origin)
            self.problems.append(
                ConfigProblem(f"{source} must be a mapping of sections (model:, data:, ...).")
            )
        return None

    def _find_bases(self, node: MappingNode, path: Path) -> list[tuple[Path, str]]:
        """Return (path, file:line of the `extends`) for each file that this root mapping extends;
        paths count from the folder of `path`. Add a problem for each name that is no text.
        """
        extends = node.items.get(EXTENDS)
        if extends is None:
            return []
        names = extends.items if isinstance(extends, SequenceNode) else (extends,)
        bases = []
        for name in names:
            if isinstance(name, ScalarNode) and isinstance(name.value, str) and name.value:
                bases.append((path.parent / name.value, str(name.origin)))
            else:
                text = "extends must be a file name, relative to this file, or a list of them."
                self.problems.append(ConfigProblem(text, location=str(extends.origin)))
        return bases


def _is_resolved_config(path: Path, root: MappingNode) -> bool:
    """Return whether a run wrote this file with all of its settings: a lock file, or the
    configuration in the directory of a run, a checkpoint or a capsule.
    """
    is_in_run = path.name == RESOLVED_FILE and any(
        (path.parent / name).exists() for name in _RUN_WRITTEN_FILES
    )
    return is_in_run or LOCK in root.items


def read_config_text(path: Path) -> str:
    """Return the text of a configuration file; read little more of a large file than the longest
    configuration. Raise OSError, also for a pipe, or UnicodeDecodeError.
    """
    if path.is_fifo():
        raise OSError(errno.ESPIPE, "it is a pipe, which may never end", str(path))
    with path.open("rb") as file:
        return file.read(4 * MAX_CHARACTERS + 4).decode()


def _move_to_layer(node: Node, layer: int) -> Node:
    """Return a copy of the tree in which all origins are in `layer`."""
    origin = replace(node.origin, layer=layer)
    if isinstance(node, MappingNode):
        return MappingNode(
            {key: _move_to_layer(item, layer) for key, item in node.items.items()}, origin
        )
    if isinstance(node, SequenceNode):
        return SequenceNode(tuple(_move_to_layer(item, layer) for item in node.items), origin)
    return replace(node, origin=origin)


def _resolve_paths(node: Node, key: str, folder: Path) -> Node:
    """Return a copy of the tree in which settings that name files hold absolute paths, counted from
    `folder`. Names of a hub become the paths of their local copies, or are kept where there is no
    copy; names of data splits become their files.
    """
    if isinstance(node, MappingNode):
        return replace(
            node,
            items={
                n: _resolve_paths(item, join_key_path(key, n), folder)
                for n, item in node.items.items()
            },
        )
    if isinstance(node, SequenceNode):
        items = [
            one for item in node.items for one in (_expand_hub_split(item, key, folder) or [item])
        ]
        return replace(
            node, items=tuple(_resolve_paths(item, f"{key}[]", folder) for item in items)
        )
    is_function = is_function_path_key(key)
    if not isinstance(node.value, str) or not node.value or not (key in INPUTS or is_function):
        return node
    file, colon, name = node.value.rpartition(":") if is_function else (node.value, "", "")
    is_program = key.endswith(".python") and "/" not in file
    if (
        is_program
        or file.startswith("~")
        or ((is_function or key == "plugins[]") and not is_python_file(file))
    ):
        return node
    text = os.path.abspath(folder / file) + colon + name
    if (
        key.endswith("_files[]")
        and hub_data.DatasetSplit.from_name(file) is not None
        and not os.path.exists(text)
    ):
        return node  # of a hub, and not here yet
    if key in hub.MODELS and hub.is_hub_name(file) and not os.path.exists(text):
        text = hub.find_local_model_copy(file, key) or file
    return replace(node, value=text, text=text)


def _expand_hub_split(node: Node, key: str, folder: Path) -> list[Node]:
    """Return a node for each file of a hub's split that is on this machine; [] where the node names
    no such split or `key` is no list of data files.
    """
    if (
        not key.endswith("_files")
        or not isinstance(node, ScalarNode)
        or not isinstance(node.value, str)
    ):
        return []
    split = (
        None if os.path.exists(folder / node.value) else hub_data.DatasetSplit.from_name(node.value)
    )
    return [
        replace(node, value=file, text=file)
        for file in (hub_data.find_local_split_files(split) if split else ())
    ]


def is_function_path_key(key: str) -> bool:
    """Return whether a setting names a function in a file, as FILE.py:NAME."""
    is_of_reward = key.startswith("reward.") and key.endswith("params.path")
    return is_of_reward or key == "rollout.environment.params.functions[]"


def format_relative_path(path: Path) -> str:
    """Return the path relative to the working directory if it lies below that, else unchanged."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative
