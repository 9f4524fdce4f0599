"""The directory of a run. A former run of the same name is moved aside, never overwritten."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def fresh_run_dir(parent: str, name: str) -> tuple[Path, Path | None]:
    """(the new empty directory, where a former one was moved to). `runs/x` becomes `runs/x.1`, `runs/x.2` ..."""
    path = Path(parent) / name
    moved: Path | None = None
    if path.is_file() or (path.is_dir() and any(path.iterdir())):
        number = 1
        while path.with_name(f"{name}.{number}").exists():
            number += 1
        moved = path.with_name(f"{name}.{number}")
        path.rename(moved)
    (path / "logs").mkdir(parents=True, exist_ok=True)
    return path, moved


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Appears by rename when complete."""
    aside = path.with_suffix(path.suffix + ".tmp")
    with aside.open("w") as file:
        json.dump(value, file, indent=2)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    aside.rename(path)
