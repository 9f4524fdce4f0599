"""Versions of what a run is made of, as its records tell them."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version


def versions(packages: Sequence[str]) -> dict[str, str]:
    """Of the interpreter and `packages`, by distribution name; "not installed" where one is not."""
    return {"python": platform.python_version(), **{name: _version(name) for name in packages}}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
