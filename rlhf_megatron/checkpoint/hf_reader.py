"""Streaming reader of a directory in Hugging Face layout: memory-mapped safetensors, checked against the table."""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rlhf_megatron.checkpoint.quantised import BLOCKS, SCALE, SCALES, from_fp8, from_mxfp4
from rlhf_megatron.checkpoint.source import one_dtype
from rlhf_megatron.models.families.base import family_for, kept_prefixes
from rlhf_megatron.models.table import Entry, HFTensor, Rule

logger = logging.getLogger(__name__)

INDEX = "model.safetensors.index.json"
DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
"""Types that weights may have in a file, by their safetensors name."""
FP8 = "F8_E4M3"
_BYTES = "U8"
_MAX_LISTED = 8  # problems named in one message


def read_hf_config(directory: Path) -> dict[str, Any]:
    """config.json of a model directory. Raises ValueError when it is missing, no JSON, or of an unknown family."""
    path = Path(directory) / "config.json"
    if not path.is_file():
        raise ValueError(f"{path} does not exist; model.path must be a directory in Hugging Face layout.")
    config = read_json(path)
    family_for(config)
    return config


class HFReader:
    """Implements `WeightSource`. Files are opened when a tensor of theirs is first asked for, and mapped, not read."""

    def __init__(self, directory: Path, block: tuple[int, int] | None = None, only: str | None = None) -> None:
        """`block`: quantised tensors (checkpoint.quantised) are read as bfloat16, with FP8 in blocks of that size.
        `only`: a file of the directory, the others are left alone.

        Raises ValueError when the directory has no safetensors or its index is broken.
        """
        self.directory = Path(directory)
        self._block = block
        self._open_files: dict[str, Any] = {}
        self._file_of = self._find_tensors() if only is None else dict.fromkeys(self._file(only).keys(), only)

    @property
    def names(self) -> tuple[str, ...]:
        """All tensors of the directory, a quantised one once."""
        if self._block is None:
            return tuple(self._file_of)
        names = (name.removesuffix(BLOCKS) if name.endswith(BLOCKS) else name for name in self._file_of)
        return tuple(name for name in names if not name.endswith((SCALE, SCALES)))

    def stored_as(self, name: str) -> tuple[tuple[int, ...], str]:
        """Shape and type of a tensor as it is read; nothing is read but the header of its file. Raises ValueError."""
        problem = self._problem(HFTensor(name, shape := self.shape_of(name)))
        if problem is not None:
            raise ValueError(f"{self.directory}: {problem}. Fetch the directory again.")
        return shape, DTYPES[self._slice(name)[1]]

    def check(self, table: Sequence[Rule], strict: bool = False, ignored: Collection[str] = ()) -> None:
        """Raises one ValueError that lists the missing and mis-shaped tensors, and broken files.

        Tensors that neither the table nor `ignored` knows are a warning, or an error when `strict`.
        """
        wanted = [hf for rule in table for hf in rule.hf]
        problems = [problem for hf in wanted if (problem := self._problem(hf)) is not None]
        unexpected = sorted(set(self.names) - {hf.stored_name for hf in wanted} - set(ignored))
        config = self.directory / "config.json"
        prefixes = kept_prefixes(read_json(config)) if config.is_file() else ()
        if any(name.startswith(prefixes) for name in unexpected):
            logger.warning(
                "%s: %s are frozen: they are not trained, and exports have them as they are; engines that guess tokens"
                " with them guess worse as the policy learns",
                self.directory,
                ", ".join(f"{prefix}*" for prefix in prefixes),
            )
        unexpected = [name for name in unexpected if not name.startswith(prefixes)]
        if unexpected and strict:
            problems.append(f"not part of this model: {_listing(unexpected)}")
        elif unexpected:
            logger.warning(
                "%s: tensors that this model does not have are ignored: %s", self.directory, _listing(unexpected)
            )
        if problems:
            raise ValueError(
                f"{self.directory} does not fit its config.json: {_listing(problems, '; ')}."
                " Fetch the directory again, or correct config.json."
            )

    def file_of(self, name: str) -> str:
        """Name of the file that has a tensor of `names`."""
        return self._file_of[name]

    def shape_of(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor of `names`; nothing is read but the header of its file. Raises ValueError."""
        return self._slice(name)[0]

    def dtype_of(self, rule: Rule) -> str:
        """Return the type of a rule's tensors by reading the headers of their files alone. Raises ValueError."""
        for hf in rule.hf:
            self._raise_problem(hf)
        return one_dtype(rule, {DTYPES[self._slice(hf.stored_name)[1]] for hf in rule.hf})

    def hf_tensors(self, rule: Rule) -> tuple[Tensor, ...]:
        """Views of the mapped file. Raises ValueError naming file, tensor and shapes."""
        for hf in rule.hf:
            self._raise_problem(hf)
        return tuple(self._tensor(hf.stored_name, hf.entry) for hf in rule.hf)

    def _tensor(self, name: str, entry: Entry | None) -> Tensor:
        if self._block is not None and f"{name}{BLOCKS}" in self._file_of:
            blocks, scales = (self._stored(f"{name}{kind}", entry) for kind in (BLOCKS, SCALES))
            return from_mxfp4(blocks, scales, torch.bfloat16)
        stored = self._stored(name, entry)
        if self._block is None or stored.dtype != torch.float8_e4m3fn:
            return stored
        try:
            return from_fp8(stored, self._stored(f"{name}{SCALE}"), self._block, torch.bfloat16)
        except ValueError as error:
            raise ValueError(f"{self.directory}: {name}{SCALE}: {error}. Fetch the directory again.") from error

    def _stored(self, name: str, entry: Entry | None = None) -> Tensor:
        """A tensor of a file, or one entry of it, which alone is read then."""
        file = self._file(self._file_of[name])
        found: Tensor = file.get_tensor(name) if entry is None else file.get_slice(name)[entry.index]
        return found

    def _find_tensors(self) -> dict[str, str]:
        """Tensor name -> file name."""
        index = self.directory / INDEX
        if index.is_file():
            weight_map = read_json(index).get("weight_map")
            if not isinstance(weight_map, dict) or not weight_map:
                raise ValueError(f"{index} has no weight_map; fetch it again.")
            for file in weight_map.values():
                if not isinstance(file, str) or PurePosixPath(file).name != file or file == "..":
                    raise ValueError(f"{index} names the file {file!r}; it must be a plain name in the same directory.")
            return weight_map
        files = sorted(path.name for path in self.directory.glob("*.safetensors"))
        if not files:
            raise ValueError(
                f"{self.directory} has no *.safetensors; other weight formats are not read. Save the model with"
                " transformers' save_pretrained(safe_serialization=True)."
            )
        if len(files) > 1 and "model.safetensors" not in files:
            raise ValueError(f"{self.directory} has {len(files)} safetensors files but no {INDEX}; fetch the index.")
        file = "model.safetensors" if "model.safetensors" in files else files[0]
        return dict.fromkeys(self._file(file).keys(), file)

    def _file(self, name: str) -> Any:
        if name not in self._open_files:
            path = self.directory / name
            if not path.is_file():
                raise ValueError(f"{path} is missing, though {INDEX} names it; fetch the directory again.")
            try:
                self._open_files[name] = safe_open(str(path), framework="pt")
            except (SafetensorError, OSError) as error:
                raise ValueError(
                    f"{path} ({path.stat().st_size} bytes) is truncated or corrupt: {error}. Fetch it again."
                ) from error
        return self._open_files[name]

    def _slice(self, name: str) -> tuple[tuple[int, ...], str]:
        """Shape and safetensors type name from the header, of a quantised tensor those that it is read as. Raises
        ValueError."""
        if self._block is not None and f"{name}{BLOCKS}" in self._file_of:
            shape, dtype = self._header(f"{name}{BLOCKS}")
            if dtype == _BYTES and len(shape) > 2 and f"{name}{SCALES}" in self._file_of:
                return (*shape[:-3], shape[-2] * shape[-1] * 2, shape[-3]), "BF16"
            return shape, dtype
        shape, dtype = self._header(name)
        if self._block is not None and dtype == FP8 and len(shape) == 2:
            if f"{name}{SCALE}" not in self._file_of:
                raise ValueError(f"tensor {name}{SCALE} is missing, the scales of {name} in FP8")
            return shape, "BF16"
        return shape, dtype

    def _header(self, name: str) -> tuple[tuple[int, ...], str]:
        file = self._file_of[name]
        try:
            view = self._file(file).get_slice(name)
        except SafetensorError as error:
            raise ValueError(f"{name} is not in {file}, though {INDEX} says so") from error
        return tuple(view.get_shape()), view.get_dtype()

    def _raise_problem(self, hf: HFTensor) -> None:
        problem = self._problem(hf)
        if problem is not None:
            raise ValueError(f"{self.directory}: {problem}. Fetch the directory again, or correct config.json.")

    def _problem(self, hf: HFTensor) -> str | None:
        """Return what is wrong with a tensor, or None."""
        name, expected = hf.stored_name, hf.stored_shape
        file = self._file_of.get(name) or (self._file_of.get(f"{name}{BLOCKS}") if self._block else None)
        if file is None:
            return f"tensor {name} {expected} is missing"
        try:
            shape, dtype = self._slice(name)
        except ValueError as error:
            return str(error).rstrip(".")
        if shape != expected:
            return f"tensor {name} in {file} has shape {shape}, expected {expected}"
        if dtype not in DTYPES:
            return f"tensor {name} in {file} has type {dtype}, supported are {', '.join(DTYPES)} (not quantised)"
        return None


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises ValueError naming the file."""
    try:
        value = json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}. Fetch it again.") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object.")
    return value


def _listing(items: Iterable[str], separator: str = ", ") -> str:
    unique = list(dict.fromkeys(items))
    more = f"{separator}and {len(unique) - _MAX_LISTED} more" if len(unique) > _MAX_LISTED else ""
    return separator.join(unique[:_MAX_LISTED]) + more
