"""What an error of writing says: the file, and for a full disk what helps. The system names the
file when it is opened; a disk that is full shows later, when a file is flushed, closed or renamed,
and then no error of Python's names it.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FULL_DISK_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_TORCH_WRITE_FAILED = re.compile(r"PytorchStreamWriter failed writing|iostream error")
_NATIVE_ERRNO = re.compile(r"\(os error (\d+)\)")  # in messages of libraries written in Rust


def explain_write_error(path: Path, error: OSError) -> OSError:
    """Return an OSError of the same number, whose message names the file and, for a full disk, says
    what helps. An error that was explained before is returned unchanged.
    """
    text = error.strerror or str(error)
    if _CANNOT_BE_WRITTEN in text:
        return error
    text = f"{path} {_CANNOT_BE_WRITTEN}: {text}."
    if error.errno in FULL_DISK_ERRNOS:
        place = next(place for place in path.absolute().parents if place.exists())
        free = shutil.disk_usage(place).free / 1e6
        text += (
            f" {free:.0f} MB are free there. Make room: `du -sh {path.parent}/*` shows what is"
            " large (record/, superseded/, checkpoints, of which trainer.max_ckpt_to_keep keeps"
            " fewer), or raise the quota."
        )
    return OSError(error.errno, text)


_CANNOT_BE_WRITTEN = "cannot be written"


@contextmanager
def explain_write_errors(path: Path) -> Iterator[None]:
    """Raise an OSError that names the file (see `explain_write_error`) in place of an error of the
    block, which writes the file. The errors of safetensors and of torch's own writer, which are no
    OSErrors, become such.
    """
    try:
        yield
    except OSError as error:
        raise explain_write_error(path, error) from error
    except Exception as error:
        number = _find_native_errno(error)
        if number is None:
            raise
        raise explain_write_error(path, OSError(number, os.strerror(number))) from error


def _find_native_errno(error: Exception) -> int | None:
    """Return the number of the system's error that a library's own error stands for; None for any
    other error.
    """
    context = error.__cause__ or error.__context__
    if isinstance(error, RuntimeError) and isinstance(context, OSError):
        return context.errno
    native = _NATIVE_ERRNO.search(str(error))
    if type(error).__name__ == "SafetensorError" and native is not None:
        return int(native[1])
    # torch's writer of archives does not say why a write failed.
    if isinstance(error, RuntimeError) and _TORCH_WRITE_FAILED.search(str(error)):
        return errno.EIO
    return None


def write_text_file(path: Path, text: str) -> None:
    """Write the text to a file as UTF-8. Raise OSError that names the file, also where the disk is
    full.
    """
    with explain_write_errors(path):
        path.write_text(text, encoding="utf-8")
