"""Writes a directory in Hugging Face layout: sharded safetensors with index, config.json,
tokenizer files.

A safetensors file is written tensor by tensor in any order, since its header is known before the
first tensor is.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlhf_megatron.data.atomic_directory import write_directory_atomically
from rlhf_megatron.weights.hf_reader import DTYPES, FP8
from rlhf_megatron.weights.weight_sets import INDEX
from rlhf_megatron.write_errors import explain_write_errors, write_text_file

MAX_SHARD_BYTES = 2 << 30  # processes that write into files of their own do not wait for each other
_TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "chat_template*",
    "*.model",
    "*.jinja",
)
_COMPANIONS = (*_TOKENIZER_FILES, "generation_config.json", "*.py", "LICENSE*")

_FORMAT_NAMES = {**{name: code for code, name in DTYPES.items()}, "float8_e4m3fn": FP8}
_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}


def plan_weight_files(
    specs: Sequence[TensorSpec], max_shard_bytes: int = MAX_SHARD_BYTES
) -> dict[str, tuple[TensorSpec, ...]]:
    """Return the tensors of each file, by file name, filled in order up to `max_shard_bytes`. A
    tensor over the limit gets a file of its own.
    """
    shards: list[list[TensorSpec]] = []
    num_bytes = 0
    for spec in specs:
        if not shards or num_bytes + spec.num_bytes > max_shard_bytes:
            shards.append([])
            num_bytes = 0
        shards[-1].append(spec)
        num_bytes += spec.num_bytes
    if len(shards) == 1:
        return {"model.safetensors": tuple(shards[0])}
    return {
        f"model-{i:05d}-of-{len(shards):05d}.safetensors": tuple(s) for i, s in enumerate(shards, 1)
    }


class HFWriter:
    """Takes tensors by name, in any order. Made by `open_hf_directory_writer`."""

    def __init__(
        self, directory: Path, tensor_specs: Sequence[TensorSpec], max_shard_bytes: int
    ) -> None:
        """Plan the files of `tensor_specs`; each is opened when its first tensor arrives."""
        self._directory = directory
        self._planned_files = plan_weight_files(tensor_specs, max_shard_bytes)
        self._file_by_tensor = {
            spec.name: file for file, members in self._planned_files.items() for spec in members
        }
        self._unwritten_files = set(self._planned_files)
        self._writers: dict[str, SafetensorsWriter] = {}

    def write_tensor(self, name: str, tensor: Tensor, index: int | None = None) -> None:
        """Write one tensor, or entry `index` of it along the first axis, into its file. Close the
        file when all of its tensors are complete.
        """
        file = self._file_by_tensor[name]
        if file not in self._writers:
            self._writers[file] = SafetensorsWriter(
                self._directory / file, self._planned_files[file]
            )
        self._writers[file].write_tensor(name, tensor, index)
        if self._writers[file].is_complete:
            self._unwritten_files.discard(file)
            self._writers.pop(file).close()

    def write_index_if_sharded(self) -> None:
        """Write the index where there is more than one file. Assert that every tensor was
        written.
        """
        assert not self._unwritten_files, (
            f"tensors of {sorted(self._unwritten_files)} were never written"
        )
        if len(self._planned_files) > 1:
            write_weight_index(self._directory, self._planned_files)

    def close_after_error(self) -> None:
        """Close the open files, incomplete as they are, after an error."""
        for writer in self._writers.values():
            writer.close(is_complete=False)


@contextmanager
def open_hf_directory_writer(
    directory: Path,
    specs: Sequence[TensorSpec],
    hf_config: Mapping[str, Any],
    companions_directory: Path | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> Iterator[HFWriter]:
    """Yield a writer for the tensors `specs`; when the block ends, write index, config.json and
    copies, and make `directory` appear, complete. Raise ValueError when `directory` exists and is
    not empty.

    `companions_directory`: the directory whose tokenizer and licence files are copied. After an
    error nothing is left.
    """
    with write_directory_atomically(directory) as aside:
        writer = HFWriter(aside, specs, max_shard_bytes)
        try:
            yield writer
            writer.write_index_if_sharded()
        except BaseException:
            writer.close_after_error()
            raise
        write_config_and_tokenizer(
            aside, hf_config, {spec.dtype for spec in specs}, companions_directory
        )


def write_weight_index(directory: Path, files: Mapping[str, Sequence[TensorSpec]]) -> None:
    """Write the index, which maps tensors to files, into `directory`. `files`: the tensors of each
    file, by name.
    """
    index = {
        "metadata": {
            "total_size": sum(spec.num_bytes for specs in files.values() for spec in specs)
        },
        "weight_map": {spec.name: file for file, specs in files.items() for spec in specs},
    }
    write_text_file(directory / INDEX, json.dumps(index, indent=2) + "\n")


def write_config_and_tokenizer(
    directory: Path,
    hf_config: Mapping[str, Any],
    dtypes: set[str],
    companions_directory: Path | None,
    tokenizer_directory: Path | None = None,
) -> None:
    """Write config.json, with the weights' type where they share one (float32 buffers aside), and
    copy the tokenizer's files from `tokenizer_directory`, the other companion files from
    `companions_directory`. Without a `tokenizer_directory` all come from `companions_directory`.
    """
    config = dict(hf_config)
    weight_dtypes = dtypes - {"float32"} or dtypes
    if len(weight_dtypes) == 1:
        config["dtype" if "dtype" in config else "torch_dtype"] = next(iter(weight_dtypes))
    original_config = (
        companions_directory / "config.json" if companions_directory is not None else None
    )
    if (
        original_config is not None
        and original_config.is_file()
        and json.loads(original_config.read_bytes()) == config
    ):
        shutil.copyfile(original_config, directory / "config.json")
    else:
        write_text_file(directory / "config.json", json.dumps(config, indent=2) + "\n")
    companions = find_companion_files(companions_directory) if companions_directory else []
    if tokenizer_directory is not None:
        # No file of the other tokenizer stays: a vocabulary would not fit the new tokenizer.
        companions = [path for path in companions if not _is_tokenizer_file(path)]
        companions += filter(_is_tokenizer_file, find_companion_files(tokenizer_directory))
    for path in companions:
        shutil.copyfile(path, directory / path.name)


def _is_tokenizer_file(path: Path) -> bool:
    """Return whether a companion file belongs to the tokenizer or its chat template."""
    return any(path.match(pattern) for pattern in _TOKENIZER_FILES)


def find_companion_files(directory: Path) -> list[Path]:
    """Return the files of a model directory that are copied along with its weights: tokenizer, chat
    template, code and licence, but not config.json.
    """
    files = {
        path for pattern in _COMPANIONS for path in Path(directory).glob(pattern) if path.is_file()
    }
    return sorted(files)


@dataclass(frozen=True)
class TensorSpec:
    """A tensor that a file will hold."""

    name: str
    dtype: str  # "float32" | "bfloat16" | "float16" | "float8_e4m3fn"
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the tensor's data."""
        return prod(self.shape) * _DTYPE_BYTES[self.dtype]


def get_storable_dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a type: torch.bfloat16 gives "bfloat16". Raise ValueError for types in
    which weights are not stored.
    """
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES.values():
        raise ValueError(
            f"weights of type {name} are not written; use {', '.join(DTYPES.values())}."
        )
    return name


def build_safetensors_header(specs: Sequence[TensorSpec]) -> tuple[bytes, dict[str, int]]:
    """Return the bytes at the start of a safetensors file that holds `specs`, and the byte of the
    file at which each tensor begins.
    """
    # Wide types first keeps every tensor aligned to its own size, as readers that map
    # the file expect.
    ordered = sorted(specs, key=lambda spec: -_DTYPE_BYTES[spec.dtype])
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offsets = dict[str, int]()
    end = 0
    for spec in ordered:
        assert spec.name not in header, f"{spec.name} is planned twice"
        offsets[spec.name] = end
        end = end + spec.num_bytes
        dtype = _FORMAT_NAMES[spec.dtype]
        shape = list(spec.shape)
        header[spec.name] = {
            "dtype": dtype,
            "shape": shape,
            "data_offsets": [offsets[spec.name], end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    begin = len(text).to_bytes(8, "little") + text
    return begin, {name: len(begin) + offset for name, offset in offsets.items()}


class SafetensorsWriter:
    """Call `write_tensor` once for every spec, or for every entry of it along the first axis, then
    `close`. Memory: one tensor at a time.
    """

    def __init__(self, path: Path, specs: Sequence[TensorSpec]) -> None:
        """Create the file `path`, which must not exist, at full size, and write its header."""
        self.path = path
        begin, offsets = build_safetensors_header(specs)
        self._spec_and_offset = {spec.name: (spec, offsets[spec.name]) for spec in specs}
        # entries that have come
        self._unfinished_tensors = {spec.name: set[int]() for spec in specs}
        with explain_write_errors(path):
            self._file = open(path, "xb")  # noqa: SIM115 - closed by close()
            self._file.write(begin)
            self._file.truncate(len(begin) + sum(spec.num_bytes for spec in specs))

    @property
    def is_complete(self) -> bool:
        """Return whether all tensors were written."""
        return not self._unfinished_tensors

    def write_tensor(self, name: str, tensor: Tensor, index: int | None = None) -> None:
        """Write one tensor, or entry `index` of it along the first axis, into its place. Assert
        that type and shape are those of the spec.
        """
        spec, offset = self._spec_and_offset[name]
        shape = spec.shape if index is None else spec.shape[1:]
        assert get_storable_dtype_name(tensor.dtype) == spec.dtype, (
            f"{name} is {tensor.dtype}, planned was {spec.dtype}"
        )
        assert tuple(tensor.shape) == shape, (
            f"{name} has shape {tuple(tensor.shape)}, planned was {shape}"
        )
        if index is None:
            assert not self._unfinished_tensors.pop(name), f"entries of {name} have come already"
        else:
            come = self._unfinished_tensors[name]
            assert index not in come and 0 <= index < spec.shape[0], (
                f"entry {index} of {name} {spec.shape}"
            )
            come.add(index)
            offset += index * (spec.num_bytes // spec.shape[0])
            if len(come) == spec.shape[0]:
                del self._unfinished_tensors[name]
        data = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data
        with explain_write_errors(self.path):
            self._file.seek(offset)
            self._file.write(data)

    def close(self, is_complete: bool = True) -> None:
        """Close the file. Assert that all tensors were written, unless `is_complete` is False: then
        the caller removes the incomplete file.
        """
        with explain_write_errors(self.path):
            self._file.close()
        assert not is_complete or not self._unfinished_tensors, (
            f"{self.path.name} lacks {sorted(self._unfinished_tensors)[:8]}"
        )
