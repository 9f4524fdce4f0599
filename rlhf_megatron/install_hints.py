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


def _format_command(extra: str, package_parent: Path, working_directory: Path) -> str:
    """Return the command for a package in the folder `package_parent`, which is a working tree
    where it has a setup.py.
    """
    if not (package_parent / "setup.py").is_file():
        return f"pip install {shlex.quote(f'{DISTRIBUTION}[{extra}]')}"
    tree = "." if package_parent == working_directory.resolve() else str(package_parent)
    return f"pip install -e {shlex.quote(f'{tree}[{extra}]')}"
