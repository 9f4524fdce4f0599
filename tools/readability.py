"""How a Python tree reads, in figures that a reader feels: names, joined statements, long lines.

    python -m tools.readability [DIR, default rlhf_megatron] [--list N]

`--list N` prints N places of each kind. The figures point at places to look and are no aim in
themselves: a name that is long and says nothing is no better than a short one.
"""

from __future__ import annotations

import argparse
import ast
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

VAGUE_NAMES = frozenset(
    {
        *("told", "given", "found", "asked", "own", "kept", "taken", "taught", "made", "left"),
        *("known", "wanted", "picked", "weighed", "alike", "reached"),
    }
)
"""Participles and the like, which say nothing where they stand alone."""
VARIADIC_CALLS = frozenset(
    {
        *("zip", "print", "Path", "max", "min", "chain", "product", "join", "cat", "stack"),
        *("union", "map", "format", "cls"),
    }
)
"""Calls for which `*values` is the usual way."""
SHARED_NAMES = frozenset({"main", "register", "logger"})
"""Names that stand in several modules on purpose."""
LONGEST_LINE = 100

VAGUE = "vague names"
JOINED = "statements joined by a tuple"
HIDDEN = "calls that hide their arguments (*local)"
NESTED = "nested conditional expressions"
LONG = f"lines over {LONGEST_LINE} characters"
CLASSES_TWICE = "class names used twice"
PUBLIC_TWICE = "public functions and classes named in several modules"
KINDS = (VAGUE, JOINED, HIDDEN, NESTED, LONG, CLASSES_TWICE, PUBLIC_TWICE)


@dataclass
class Readability:
    """What was counted in a tree: `places` has "file:line name" of each finding, by kind."""

    num_lines: int = 0  # that are not blank
    num_functions: int = 0
    num_classes: int = 0
    sum_function_name_lengths: int = 0
    places: dict[str, list[str]] = field(default_factory=lambda: {kind: [] for kind in KINDS})

    def count(self, kind: str) -> int:
        return len(self.places[kind])

    def count_per_1000_lines(self, kind: str) -> float:
        return self.count(kind) / self.num_lines * 1000

    @property
    def mean_function_name_length(self) -> float:
        return self.sum_function_name_lengths / self.num_functions


def is_vague_name(name: str) -> bool:
    """Whether a name is a participle that stands alone, or behind an underscore."""
    return name.strip("_").lower() in VAGUE_NAMES


def measure_tree(directory: Path) -> Readability:
    """Read every Python file below `directory`. Raises SyntaxError for one that does not parse."""
    readability = Readability()
    class_places: dict[str, list[str]] = defaultdict(list)
    public_places: dict[str, set[str]] = defaultdict(set)
    for path in sorted(directory.rglob("*.py")):
        text = path.read_text()
        for number, line in enumerate(text.splitlines(), start=1):
            readability.num_lines += bool(line.strip())
            if len(line) > LONGEST_LINE:
                readability.places[LONG].append(f"{path}:{number}")
        tree = ast.parse(text)
        for name in list_public_names(tree):
            public_places[name].add(str(path))
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                class_places[node.name.strip("_")].append(f"{path}:{node.lineno}")
            for kind, what in find_in_node(node):
                place = f"{path}:{getattr(node, 'lineno', 0)}"
                readability.places[kind].append(f"{place} {what}".rstrip())
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                readability.num_functions += 1
                readability.sum_function_name_lengths += len(node.name.strip("_"))
    readability.num_classes = len(class_places)
    for name, places in sorted(class_places.items()):
        if len(places) > 1:
            readability.places[CLASSES_TWICE].append(f"{name}: {', '.join(places)}")
    for name, modules in sorted(public_places.items()):
        if len(modules) > 1:
            readability.places[PUBLIC_TWICE].append(f"{name}: {', '.join(sorted(modules))}")
    return readability


def list_public_names(tree: ast.Module) -> list[str]:
    """Names of the public functions and classes of a module, but for those that modules share."""
    return [
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        and not node.name.startswith("_")
        and node.name not in SHARED_NAMES
    ]


def find_in_node(node: ast.AST) -> Iterator[tuple[str, str]]:
    """What one node of a tree has: (kind, name or text)."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        if is_vague_name(node.name):
            yield VAGUE, node.name
    elif isinstance(node, ast.arg):
        if is_vague_name(node.arg):
            yield VAGUE, f"parameter {node.arg}"
    elif isinstance(node, ast.Assign):
        if is_joined_assignment(node):
            yield JOINED, ""
    elif isinstance(node, ast.IfExp):
        if isinstance(node.body, ast.IfExp) or isinstance(node.orelse, ast.IfExp):
            yield NESTED, ""
    elif isinstance(node, ast.Call):
        for name in list_hidden_arguments(node):
            yield HIDDEN, f"*{name}"


def is_joined_assignment(node: ast.Assign) -> bool:
    """Whether `a, b = x, y` joins two statements. A swap is one thought."""
    target = node.targets[0]
    if not isinstance(target, ast.Tuple) or not isinstance(node.value, ast.Tuple):
        return False
    names = {ast.unparse(element) for element in target.elts}
    values = {ast.unparse(element) for element in node.value.elts}
    return names != values


def list_hidden_arguments(node: ast.Call) -> list[str]:
    """Local names that a call spreads with a star, where the reader cannot see what they hold."""
    called = node.func.attr if isinstance(node.func, ast.Attribute) else ""
    if isinstance(node.func, ast.Name):
        called = node.func.id
    if called in VARIADIC_CALLS:
        return []
    return [
        argument.value.id
        for argument in node.args
        if isinstance(argument, ast.Starred)
        and isinstance(argument.value, ast.Name)
        and argument.value.id not in ("args", "arguments")
    ]


def format_readability(readability: Readability, num_places: int) -> list[str]:
    """Lines for a person: a figure each, then `num_places` places of each kind."""
    lines = [
        f"lines {readability.num_lines}, functions {readability.num_functions},"
        f" classes {readability.num_classes}",
        f"mean length of a function's name: {readability.mean_function_name_length:.1f}",
    ]
    for kind in KINDS:
        ratio = readability.count_per_1000_lines(kind)
        lines.append(f"{kind}: {readability.count(kind)} ({ratio:.2f} in 1,000 lines)")
    for kind, places in readability.places.items():
        lines += [f"  {kind}: {place}" for place in places[:num_places]]
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the figures of a tree."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("directory", nargs="?", type=Path, default=Path("rlhf_megatron"))
    parser.add_argument("--list", type=int, default=0, help="print N places of each kind")
    options = parser.parse_args(arguments)
    print("\n".join(format_readability(measure_tree(options.directory), options.list)))


if __name__ == "__main__":
    main()
