"""The imports of the package, read from its sources: nothing is imported."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from places import ROOT

PACKAGE = ROOT / "rlhf_megatron"


@dataclass(frozen=True)
class ImportedModule:
    """One import of a module, by its dotted name."""

    name: str
    is_in_function: bool  # loaded when the function runs
    is_for_types: bool  # below `if TYPE_CHECKING`: loaded by type checkers only


@cache
def list_modules() -> dict[str, Path]:
    """Dotted name -> file, of all modules of the package."""
    modules = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = list(path.relative_to(ROOT).with_suffix("").parts)
        if parts[-1] == "__init__":
            parts.pop()
        modules[".".join(parts)] = path
    return modules


@cache
def read_imports(module: str) -> tuple[ImportedModule, ...]:
    """What a module imports, other packages included. `from package import module` counts
    as that module.
    """
    tree = ast.parse(list_modules()[module].read_text())
    return tuple(_walk_imports(tree, is_in_function=False, is_for_types=False))


def _walk_imports(
    node: ast.AST, is_in_function: bool, is_for_types: bool
) -> Iterator[ImportedModule]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield ImportedModule(alias.name, is_in_function, is_for_types)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0 and child.module, "relative imports hide the wing"
            for alias in child.names:
                full_name = f"{child.module}.{alias.name}"
                name = full_name if full_name in list_modules() else child.module
                yield ImportedModule(name, is_in_function, is_for_types)
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            for statement in child.body:
                wrapped = ast.Module([statement], [])
                yield from _walk_imports(wrapped, is_in_function, True)
            for statement in child.orelse:
                wrapped = ast.Module([statement], [])
                yield from _walk_imports(wrapped, is_in_function, is_for_types)
        else:
            is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
            yield from _walk_imports(child, is_in_function or is_function, is_for_types)


def close_over_imports(entry: str, with_functions: bool) -> dict[str, str]:
    """Every module that `entry` loads -> the module that loads it first. With the packages
    that they lie in.

    `with_functions`: imports inside functions count, too.
    """
    loaded_by = {entry: ""}
    waiting = [entry]
    while waiting:
        module = waiting.pop()
        names = [
            imported.name
            for imported in read_imports(module)
            if not imported.is_for_types and (with_functions or not imported.is_in_function)
        ]
        parts = module.split(".")
        names += [".".join(parts[:length]) for length in range(1, len(parts))]
        for name in names:
            if name in list_modules() and name not in loaded_by:
                loaded_by[name] = module
                waiting.append(name)
    return loaded_by


def find_import_circles() -> list[list[str]]:
    """Groups of modules that import each other, through functions as well (Tarjan's algorithm)."""
    graph = {
        module: [
            imported.name
            for imported in read_imports(module)
            if imported.name in list_modules() and not imported.is_for_types
        ]
        for module in list_modules()
    }
    index: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    circles = []

    def visit(module: str) -> None:
        index[module] = lowest[module] = len(index)
        stack.append(module)
        for name in graph[module]:
            if name not in index:
                visit(name)
            if name in stack:
                lowest[module] = min(lowest[module], lowest[name])
        if lowest[module] == index[module]:
            start = stack.index(module)
            circle = sorted(stack[start:])
            del stack[start:]
            if len(circle) > 1:
                circles.append(circle)

    for module in graph:
        if module not in index:
            visit(module)
    return circles
