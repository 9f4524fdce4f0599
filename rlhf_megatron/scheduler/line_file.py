"""A file of JSON objects, one a line, that is whole up to its last line whenever the process ends."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class LineFile:
    """Appends. A line that a former process left unfinished is cut off first."""

    def __init__(self, path: Path) -> None:
        if path.exists():
            cut_after(path, path.read_bytes().rfind(b"\n") + 1)
        self._file = path.open("ab")

    def write(self, row: Mapping[str, Any]) -> None:
        """The line is with the operating system when this returns."""
        self._file.write(json.dumps(row).encode() + b"\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def cut_after(path: Path, num_bytes: int) -> None:
    """Keeps the first `num_bytes` of a file."""
    with path.open("r+b") as file:
        file.truncate(num_bytes)


def strict(value: Any) -> Any:
    """`value` with None for each number that JSON has no word for (NaN, infinities)."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: strict(item) for key, item in value.items()}
    return [strict(item) for item in value] if isinstance(value, list | tuple) else value
