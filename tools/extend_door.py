"""Write what follows from the table of `rlhf_megatron.extend` and from docs/dev: `python -m
tools.extend_door`.

It writes the imports for type checkers in rlhf_megatron/extend/__init__.py, the tables of names in
docs/extending.md, and two packaged tables of former names: former_names.tsv (modules, classes,
functions and constants that were moved or renamed) and former_hooks.tsv (methods and attributes of
base classes that were renamed). Run `make format` after it.
"""

from __future__ import annotations

import ast
import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from rlhf_megatron.extend.door_names import BASE_CLASSES, DOOR_NAMES, NAMES_BY_KIND
from rlhf_megatron.part_hooks import list_hooks

ROOT = Path(__file__).resolve().parents[1]
EXTEND = ROOT / "rlhf_megatron" / "extend"
PAGE = ROOT / "docs" / "extending.md"
MOVES = ROOT / "docs" / "dev" / "moves.tsv"
RENAMES = ROOT / "docs" / "dev" / "renames.tsv"
TABLES_START = "<!-- names: begin -->\n"
TABLES_END = "<!-- names: end -->\n"
FORMER_NAMES_HEADER = "former module\tformer name\tmodule\tname\tname in rlhf_megatron.extend"
FORMER_HOOKS_HEADER = "module\tclass\tformer hook\thook"


def render_type_checking_imports() -> str:
    """Return the imports of all names: `from module import Name as Name` is a re-export."""
    lines = {
        f"    from {entry.module} import {entry.attribute} as {name}"
        for name, entry in DOOR_NAMES.items()
    }
    return "\n".join(sorted(lines))


def render_name_tables() -> str:
    """Return a Markdown table for each kind of part."""
    tables = []
    for kind, names in NAMES_BY_KIND.items():
        rows = [f"| `{name}` | {entry.summary} |" for name, entry in sorted(names.items())]
        tables.append("\n".join([f"### {kind}", "", "| name | |", "|---|---|", *rows, ""]))
    return "\n".join(tables) + "\n"


def render_former_names() -> str:
    """Return the table of former modules and public module-level names.

    A name of the door has a row also where only its module was moved. Raises ValueError for a new
    name that no module has.
    """
    moves = _read_module_moves()
    renames = _read_renames()
    module_names = _list_names_by_module()
    rows = {(former, "", new, "", "") for former, new in moves.items()}
    missing = [f"{former} is not {new}" for former, new in moves.items() if new not in module_names]
    for former_module, former_name, name in renames:
        if "." in former_name or "(" in former_name or former_name.startswith("_"):
            continue
        module = _find_module(moves.get(former_module, former_module), name, module_names)
        if module is None:
            missing.append(f"{former_module} {former_name} is nowhere {name}")
            continue
        rows.add((former_module, former_name, module, name, _find_door_name(module, name)))
    former_modules = {new: former for former, new in moves.items()}
    rows_by_new_name = {(module, name) for _, _, module, name, _ in rows}
    for door_name, entry in DOOR_NAMES.items():
        is_renamed = (entry.module, entry.attribute) in rows_by_new_name
        if entry.module in former_modules and not is_renamed:
            former_module = former_modules[entry.module]
            rows.add((former_module, entry.attribute, entry.module, entry.attribute, door_name))
    if missing:
        raise ValueError("docs/dev has rows without a target; correct them:\n" + "\n".join(missing))
    return "\n".join([FORMER_NAMES_HEADER, *("\t".join(row) for row in sorted(rows))]) + "\n"


def render_former_hooks() -> str:
    """Return the table of former names of the hooks of all base classes."""
    moves = _read_module_moves()
    renames = _read_renames()
    former_modules = {new: former for former, new in moves.items()}
    former_classes = {(module, new): former for module, former, new in renames if "." not in former}
    rows = set()
    for base_name in BASE_CLASSES:
        entry = DOOR_NAMES[base_name]
        base = getattr(importlib.import_module(entry.module), entry.attribute)
        hooks = list_hooks(base)
        former_module = former_modules.get(entry.module, entry.module)
        former_class = former_classes.get((former_module, base.__name__), base.__name__)
        for module, former, new in renames:
            owner, _, former_hook = former.partition(".")
            is_public = re.fullmatch(r"[a-z]\w*", former_hook) is not None
            is_of_base = (module, owner) == (former_module, former_class)
            # A former name may be the name of another hook today.
            is_free = former_hook not in hooks
            if is_of_base and is_public and is_free and new in hooks:
                rows.add((entry.module, base.__qualname__, former_hook, new))
    return "\n".join([FORMER_HOOKS_HEADER, *("\t".join(row) for row in sorted(rows))]) + "\n"


def replace_door_names(source: str) -> str:
    """Return `source` of the door with the imports and the `__all__` of the table."""
    before, rest = source.split("if TYPE_CHECKING:\n", 1)
    after = rest[rest.index("\ndef __getattr__") :]
    all_names = "".join(f"    {name!r},\n" for name in sorted(DOOR_NAMES))
    imports = render_type_checking_imports()
    return f"{before}if TYPE_CHECKING:\n{imports}\n\n__all__ = [\n{all_names}]\n\n{after}"


def replace_name_tables(page: str) -> str:
    """Return the page with the tables of names between its two marks."""
    before, rest = page.split(TABLES_START, 1)
    _, after = rest.split(TABLES_END, 1)
    return before + TABLES_START + render_name_tables() + TABLES_END + after


def _read_module_moves() -> dict[str, str]:
    """Return former module -> module, dotted. A module that was moved twice leads to where it is
    now."""
    paths = {row[0]: row[1] for row in _read_rows(MOVES, 2)}
    moves = {}
    for former, new in paths.items():
        while new in paths and paths[new] != new:
            new = paths[new]
        if former.endswith(".py") and new.endswith(".py") and former.startswith("rlhf_megatron/"):
            moves[_name_module(former)] = _name_module(new)
    return {former: new for former, new in moves.items() if former != new}


def _read_renames() -> list[tuple[str, str, str]]:
    """Return (former module, former qualified name, new bare name) of each renamed definition of
    the package."""
    rows = [(_name_module(path), former, new) for path, former, new in _read_rows(RENAMES, 3)]
    return [row for row in rows if row[0].split(".")[0] == "rlhf_megatron"]


def _read_rows(path: Path, num_columns: int) -> Iterator[tuple[str, ...]]:
    for line in path.read_text().splitlines()[1:]:
        columns = tuple(line.split("\t"))
        assert len(columns) == num_columns, f"{path}: {line!r}"
        yield columns


def _name_module(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _find_door_name(module: str, name: str) -> str:
    """Return the name that the door has for a definition; "" where the door has none."""
    matching = [
        door_name
        for door_name, entry in DOOR_NAMES.items()
        if (entry.module, entry.attribute) == (module, name)
    ]
    return matching[0] if matching else ""


def _list_names_by_module() -> dict[str, set[str]]:
    """Return module of the package -> the names that it defines at its top."""
    paths = sorted((ROOT / "rlhf_megatron").rglob("*.py"))
    return {
        _name_module(path.relative_to(ROOT).as_posix()): _list_module_names(path) for path in paths
    }


def _find_module(module: str, name: str, module_names: dict[str, set[str]]) -> str | None:
    """Return `module` where it has the name, else the only module that defines it, else None."""
    if name in module_names.get(module, ()):
        return module
    owners = [other for other, names in module_names.items() if name in names]
    return owners[0] if len(owners) == 1 else None


def _list_module_names(path: Path) -> set[str]:
    """Return the names that a module defines, also within an if or a try; no imports."""
    names: set[str] = set()
    nodes: list[ast.AST] = list(ast.parse(path.read_text()).body)
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        else:
            nodes += ast.iter_child_nodes(node)
    return names


def main() -> None:
    door = EXTEND / "__init__.py"
    door.write_text(replace_door_names(door.read_text()))
    PAGE.write_text(replace_name_tables(PAGE.read_text()))
    (EXTEND / "former_names.tsv").write_text(render_former_names())
    (EXTEND / "former_hooks.tsv").write_text(render_former_hooks())
    sys.stdout.write("Written. Run `make format`.\n")


if __name__ == "__main__":
    main()
