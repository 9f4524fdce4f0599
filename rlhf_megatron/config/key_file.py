"""Keys lie in files that one user can read, never in a configuration."""

from __future__ import annotations

import os
import stat


def read_key(path: str | None, setting: str) -> str:
    """The key in that file; "" without one. `setting`: for messages. Raises ValueError: no such file, readable by
    others, or not one line."""
    if path is None:
        return ""
    try:
        with open(path, encoding="utf-8") as file:
            info = os.fstat(file.fileno())
            if stat.S_IMODE(info.st_mode) & 0o077 or info.st_uid != os.getuid():
                raise ValueError(f"{setting} ({path}) must belong to you and have mode 0600; run chmod 600 {path}.")
            key = file.read(4096).strip()
    except OSError as error:
        raise ValueError(f"{setting} ({path}) cannot be read: {error.strerror}; correct the path.") from error
    except UnicodeDecodeError:
        key = ""
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise ValueError(f"{setting} ({path}) must hold the key, one line of it, and nothing else.")
    return key
