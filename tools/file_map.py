"""Print every module of the package with the first sentence of its docstring: `make map`."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "rlhf_megatron"
WIDTH = 44  # of the column of names


def file_map() -> list[str]:
    """Return a line for each folder and each module below it, modules of a folder
    before its folders.
    """
    return [_line(PACKAGE / "__init__.py", PACKAGE.name, 0), *_lines(PACKAGE, 1)]


def _lines(folder: Path, depth: int) -> list[str]:
    modules = [path for path in sorted(folder.glob("*.py")) if path.name != "__init__.py"]
    found = [_line(path, path.name, depth) for path in modules]
    for inner in sorted(path for path in folder.iterdir() if any(path.rglob("*.py"))):
        found += [_line(inner / "__init__.py", f"{inner.name}/", depth), *_lines(inner, depth + 1)]
    return found


def _line(path: Path, name: str, depth: int) -> str:
    docstring = (ast.get_docstring(ast.parse(path.read_text())) or "") if path.exists() else ""
    purpose = " ".join(docstring.split("\n\n")[0].split()).partition(". ")[0].rstrip(".")
    return f"{'  ' * depth + name:<{WIDTH}}{purpose}".rstrip()


if __name__ == "__main__":
    sys.stdout.write("\n".join(file_map()) + "\n")
