"""Writes safetensors files with the mode that other new files have. The library writes a temporary
file that only its owner can read, and renames it; others could not read a checkpoint or an adapter.
"""

from __future__ import annotations

import stat
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from rlhf_megatron.write_errors import explain_write_errors


def write_tensor_file(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]
) -> None:
    """Write the tensors and the metadata to a safetensors file, whose mode is that of a former file
    at the path, or else what the umask leaves. Raise OSError that names the file.
    """
    with explain_write_errors(path):
        path.touch()  # a new file of Python's has the mode that the umask leaves
        mode = stat.S_IMODE(path.stat().st_mode)
        save_file(dict(tensors), path, dict(metadata))
        path.chmod(mode)
