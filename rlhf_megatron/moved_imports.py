"""What a plugin imports of this package under a former name, and where that is now.

The data is `former_names.tsv` of `rlhf_megatron.extend`, which `tools/extend_door.py` makes of
docs/dev. All former names of a file are told at once: the source is read, since Python itself stops
at the first import that fails.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

PACKAGE = __name__.split(".")[0]
PACKAGE_DIR = Path(__file__).parent
FORMER_NAMES_FILE = PACKAGE_DIR / "extend" / "former_names.tsv"


@dataclass(frozen=True)
class CurrentName:
    """Where something is that had another module or name."""

    module: str
    name: str  # "" for a module as a whole
    door_name: str  # its name in rlhf_megatron.extend; "": it has none there

    def __str__(self) -> str:
        place = f"{self.module}.{self.name}" if self.name else self.module
        if not self.door_name:
            return place
        return f"{place}; write: from {PACKAGE}.extend import {self.door_name}"


@dataclass(frozen=True)
class MovedImport:
    """A name of this package that a file uses and that is elsewhere now."""

    path: Path
    line: int
    former: str  # dotted
    # several where a package had the name of several modules
    current_names: tuple[CurrentName, ...]

    def __str__(self) -> str:
        current = " or ".join(map(str, self.current_names))
        return f"uses {self.former} in {self.path}:{self.line}, which is now {current}."


def find_moved_imports(error: BaseException) -> list[MovedImport]:
    """Return the former names in all files that the error came through, files of this package
    aside.

    Empty unless the error says that an import or an attribute of this package is missing.
    """
    is_about_names = isinstance(error, ImportError | AttributeError)
    if not is_about_names or PACKAGE not in str(error):
        return []
    frames = traceback.extract_tb(error.__traceback__)
    paths = dict.fromkeys(Path(frame.filename) for frame in frames)
    return [
        moved
        for path in paths
        if path.is_file() and not path.is_relative_to(PACKAGE_DIR)
        for moved in read_moved_imports(path)
    ]


def read_moved_imports(path: Path) -> list[MovedImport]:
    """Return the former names that a source file uses, in the order of its lines; none where it
    cannot be parsed."""
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return []
    uses = sorted({*_iterate_imports(tree), *_iterate_module_attributes(tree)})
    moved_imports = []
    for line, module, name in uses:
        current_names = find_current_names(module, name)
        if current_names and not _is_still_there(module, name):
            former = f"{module}.{name}" if name else module
            moved_imports.append(MovedImport(path, line, former, current_names))
    return moved_imports


def find_current_names(module: str, name: str) -> tuple[CurrentName, ...]:
    """Return where `name` of `module` is now; () where nothing is known of another place.

    `name`: "" for the module as a whole.
    """
    table = _read_former_names()
    if not name:
        return table.get((module, ""), ())
    if exact := table.get((module, name), ()) or table.get((f"{module}.{name}", ""), ()):
        return exact
    names_below = [  # a package may have had the name of a module below it
        current
        for (former_module, former_name), current_names in table.items()
        if former_name == name and former_module.startswith(f"{module}.")
        for current in current_names
    ]
    if in_door := [current for current in names_below if current.door_name]:
        return tuple(in_door)
    if moved := table.get((module, ""), ()):  # the module was moved, and the name is as it was
        return tuple(CurrentName(place.module, name, "") for place in moved)
    return tuple(names_below)


def _iterate_imports(tree: ast.Module) -> Iterator[tuple[int, str, str]]:
    """(line, module, name) of each import of this package; a name of "": the module as a whole."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and _is_of_package(node.module):
            for alias in node.names:
                yield node.lineno, node.module, alias.name
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if _is_of_package(alias.name):
                    yield node.lineno, alias.name, ""


def _iterate_module_attributes(tree: ast.Module) -> Iterator[tuple[int, str, str]]:
    """(line, module, attribute) of what is read of modules of this package: `dense.family` after
    their import."""
    modules = dict(_iterate_module_aliases(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            owner = ast.unparse(node.value)
            if owner in modules:
                yield node.lineno, modules[owner], node.attr


def _iterate_module_aliases(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """(expression in the file, module) of each import that may be one of a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and _is_of_package(node.module):
            for alias in node.names:
                yield alias.asname or alias.name, f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if _is_of_package(alias.name):
                    yield alias.asname or alias.name, alias.name


def _is_still_there(module: str, name: str) -> bool:
    """Tell whether an import works today: a package may still have what a module of it lost."""
    try:
        loaded = importlib.import_module(module)
    except ImportError:
        return False
    if not name or hasattr(loaded, name):
        return True
    is_package = hasattr(loaded, "__path__")
    return is_package and importlib.util.find_spec(f"{module}.{name}") is not None


def _is_of_package(module: str) -> bool:
    return module.split(".")[0] == PACKAGE


@lru_cache(maxsize=1)
def _read_former_names() -> dict[tuple[str, str], tuple[CurrentName, ...]]:
    """Return (former module, former name) -> where that is now; a name of "": the module as a
    whole."""
    text = FORMER_NAMES_FILE.read_text(encoding="utf-8")
    return _parse_former_names(text.splitlines()[1:])


def _parse_former_names(lines: Iterable[str]) -> dict[tuple[str, str], tuple[CurrentName, ...]]:
    table: dict[tuple[str, str], tuple[CurrentName, ...]] = {}
    for line in lines:
        former_module, former_name, module, name, door_name = line.split("\t")
        key = (former_module, former_name)
        table[key] = (*table.get(key, ()), CurrentName(module, name, door_name))
    return table
