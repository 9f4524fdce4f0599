"""How a user installs what an optional part needs: the one place that writes these commands."""

from __future__ import annotations

import shlex
from pathlib import Path

DISTRIBUTION = "rlhf-megatron"
_PACKAGE_PARENT = Path(__file__).resolve().parents[1]


def format_install_command(extra: str) -> str:
    """Return the command that installs an extra of setup.py: into a working tree where this package
    is one, else beside the installed package. The command is right in any folder.
    """
    return _format_command(extra, _PACKAGE_PARENT, Path.cwd())


def format_sglang_cpu_hint() -> str:
    """Return the command that makes .venv-sglang, with stock SGLang for a machine without a GPU,
    and where it runs: its files are in a working tree only.
    """
    return _format_make_target("sglang-cpu", _PACKAGE_PARENT, Path.cwd())


def _format_make_target(target: str, package_parent: Path, working_directory: Path) -> str:
    """Return the command of a target of the Makefile, and the folder where that is not the working
    directory.
    """
    if package_parent == working_directory.resolve() and _is_working_tree(package_parent):
        return f"`make {target}`"
    folder = (
        str(package_parent) if _is_working_tree(package_parent) else "a clone of the repository"
    )
    return f"`make {target}` in {folder}"


def _is_working_tree(package_parent: Path) -> bool:
    """Return whether the folder around this package is a working tree."""
    return (package_parent / "setup.py").is_file()


def _format_command(extra: str, package_parent: Path, working_directory: Path) -> str:
    """Return the command for a package in the folder `package_parent`, which is a working tree
    where it has a setup.py.
    """
    if not _is_working_tree(package_parent):
        return f"pip install {shlex.quote(f'{DISTRIBUTION}[{extra}]')}"
    tree = "." if package_parent == working_directory.resolve() else str(package_parent)
    return f"pip install -e {shlex.quote(f'{tree}[{extra}]')}"
