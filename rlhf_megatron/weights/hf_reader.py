"""Streaming reader of a directory in Hugging Face layout: memory-mapped safetensors, checked
against the table.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rlhf_megatron.weights.families.family_lookup import find_model_family
from rlhf_megatron.weights.families.model_family import find_mtp_prefixes
from rlhf_megatron.weights.quantised_weights import (
    BLOCKS,
    SCALE,
    SCALES,
    dequantise_fp8,
    dequantise_mxfp4,
)
from rlhf_megatron.weights.unread_tensors import (
    DroppableTensors,
    find_different_row,
    find_droppable_kind,
    format_dropped_tensors,
    format_other_head,
    format_unread_tensors,
    is_tied_head,
    join_first_names,
    list_possible_embeddings,
)
from rlhf_megatron.weights.weight_sets import INDEX, SINGLE_FILE, check_weight_sets
from rlhf_megatron.weights.weight_source import require_single_dtype
from rlhf_megatron.weights.weight_table import HeadKind, HFTensor, StackedEntry, WeightRule

logger = logging.getLogger(__name__)

DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
"""Types that weights may have in a file, by their safetensors name."""
FP8 = "F8_E4M3"
_BYTES = "U8"


def read_hf_config(directory: Path) -> dict[str, Any]:
    """Return the config.json of a model directory. Raise ValueError where it is missing, not JSON,
    or of an unknown family.
    """
    path = Path(directory) / "config.json"
    if not path.is_file():
        raise ValueError(
            f"{path} does not exist; model.path must be a directory in Hugging Face layout."
        )
    config = read_json_object(path)
    find_model_family(config)
    return config


class HFReader:
    """Implements `WeightSource`. Files are opened when a tensor of theirs is first asked for, and
    mapped, not read.
    """

    def __init__(
        self,
        directory: Path,
        fp8_block: tuple[int, int] | None = None,
        single_file: str | None = None,
    ) -> None:
        """Find the files of the directory; tensors are read later. `fp8_block`: read quantised
        tensors (weights.quantised_weights) as bfloat16, with FP8 in blocks of this size; None: read
        tensors as they are stored. `single_file`: read this file of the directory only.

        Raise ValueError when the directory has no safetensors or its index is broken.
        """
        self.directory = Path(directory)
        self._fp8_block = fp8_block
        self._open_files: dict[str, Any] = {}
        self._unindexed_files: dict[str, str] = {}
        self._file_by_tensor = (
            self._map_tensors_to_files()
            if single_file is None
            else dict.fromkeys(self._open_file(single_file).keys(), single_file)
        )

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of all tensors of the directory; a quantised tensor with its scales
        counts as one.
        """
        if self._fp8_block is None:
            return tuple(self._file_by_tensor)
        names = (
            name.removesuffix(BLOCKS) if name.endswith(BLOCKS) else name
            for name in self._file_by_tensor
        )
        return tuple(name for name in names if not name.endswith((SCALE, SCALES)))

    def read_shape_and_dtype(self, name: str) -> tuple[tuple[int, ...], str]:
        """Return the shape and type ("bfloat16") that a tensor has when read, from the header of
        its file. Raise ValueError for a tensor of an unsupported type.
        """
        problem = self._find_problem(HFTensor(name, shape := self.read_shape(name)))
        if problem is not None:
            raise ValueError(f"{self.directory}: {problem}. Fetch the directory again.")
        return shape, DTYPES[self._read_dequantised_header(name)[1]]

    def check_against_table(
        self,
        table: Sequence[WeightRule],
        is_strict: bool = False,
        head: HeadKind = "vocabulary",
    ) -> None:
        """Check that the files have all tensors of `table` with the right shapes, and that nothing
        of the model is left out. Raise one ValueError that lists missing, mis-shaped and unread
        tensors and broken files. `head` is that of the model of `table`.

        Tensors that the table does not have may be left out if that changes no number
        (weights.unread_tensors), as an output layer may that equals the embedding to which
        config.json ties it; with `is_strict` they are an error, too. Multi-token prediction tensors
        are only logged.
        """
        wanted = [hf for rule in table for hf in rule.hf_tensors]
        problems = [problem for hf in wanted if (problem := self._find_problem(hf)) is not None]
        read_names = {hf.stored_name for hf in wanted}
        unread = sorted((set(self.names) | set(self._list_unindexed_names())) - read_names)
        config = self.directory / "config.json"
        prefixes = find_mtp_prefixes(read_json_object(config)) if config.is_file() else ()
        if any(name.startswith(prefixes) for name in unread):
            logger.warning(
                (
                    "%s: %s are frozen: they are not trained, and exports have them as they are;"
                    " engines that guess tokens with them guess worse as the policy learns"
                ),
                self.directory,
                ", ".join(f"{prefix}*" for prefix in prefixes),
            )
        unread = [name for name in unread if not name.startswith(prefixes)]
        if unread and is_strict:
            problems.append(f"not part of this model: {join_first_names(unread)}")
            unread = []
        # problems of unread tensors say themselves what to do
        remedy = " Fetch the directory again, or correct config.json." if problems else ""
        problems += self._find_unread_problems(unread, table, head)
        if problems:
            raise ValueError(
                f"{self.directory} does not fit its config.json:"
                f" {join_first_names(problems, '; ')}.{remedy}"
            )

    def _find_unread_problems(
        self, unread_names: Sequence[str], table: Sequence[WeightRule], head: HeadKind
    ) -> list[str]:
        """Return the problems of tensors that the table does not have, and log those that are left
        out where a user must know.
        """
        problems = []
        lost = []
        dropped: dict[DroppableTensors, list[str]] = {}
        for name in unread_names:
            try:
                shape = tuple(self._get_slice(name).get_shape())
            except ValueError as error:
                problems.append(str(error).rstrip("."))
                continue
            kind = find_droppable_kind(name, shape, head)
            if kind is not None:
                dropped.setdefault(kind, []).append(name)
            elif is_tied_head(name, table):
                problem = self._compare_tied_head(name, table)
                problems += [] if problem is None else [problem]
            else:
                lost.append(name)
        for kind, names in dropped.items():
            if kind.is_reported:
                logger.warning("%s: %s", self.directory, format_dropped_tensors(kind, names))
        return [*problems, format_unread_tensors(lost, table, head)] if lost else problems

    def _compare_tied_head(self, head_name: str, table: Sequence[WeightRule]) -> str | None:
        """Return None where an output layer equals the embedding to which the model's own is tied;
        else a message. Only these two tensors are read, some rows at a time.
        """
        head = self._get_slice(head_name)
        matrices = [hf.name for hf in list_possible_embeddings(table) if hf.name in self.names]
        if not matrices:
            return None  # the message about the missing embedding says enough
        differences = [_describe_difference(head, self._get_slice(name)) for name in matrices]
        if None in differences:
            return None
        return format_other_head(head_name, matrices[0], str(differences[0]))

    def _list_unindexed_names(self) -> list[str]:
        """Return the tensors that lie in files of the index, but that the index does not name."""
        names = []
        for file in set(self._file_by_tensor.values()):
            try:
                stored = self._open_file(file).keys()
            except ValueError:
                continue  # the check of the file's tensors says what is wrong with the file
            for name in set(stored) - self._file_by_tensor.keys():
                self._unindexed_files[name] = file
                names.append(name)
        return names

    def _get_slice(self, name: str) -> Any:
        """Return the safetensors slice of a stored tensor, whether the index names it or not. Raise
        ValueError where its file is broken or does not have the tensor.
        """
        is_blocks = self._fp8_block is not None and f"{name}{BLOCKS}" in self._file_by_tensor
        stored = f"{name}{BLOCKS}" if is_blocks else name
        file = self._file_by_tensor.get(stored) or self._unindexed_files[stored]
        try:
            return self._open_file(file).get_slice(stored)
        except SafetensorError as error:
            raise ValueError(f"{stored} is not in {file}, though {INDEX} says so") from error

    def get_file_name(self, tensor_name: str) -> str:
        """Return the name of the file that holds a tensor."""
        return self._file_by_tensor[tensor_name]

    def read_shape(self, tensor_name: str) -> tuple[int, ...]:
        """Return the shape of a tensor, from the header of its file. Raise ValueError for a broken
        file.
        """
        return self._read_dequantised_header(tensor_name)[0]

    def get_dtype_name(self, rule: WeightRule) -> str:
        """Return the type ("bfloat16") of a rule's tensors, from the headers of their files. Raise
        ValueError where a tensor is missing, has another shape, or the types differ.
        """
        for hf in rule.hf_tensors:
            self._raise_if_unfit(hf)
        return require_single_dtype(
            rule,
            {DTYPES[self._read_dequantised_header(hf.stored_name)[1]] for hf in rule.hf_tensors},
        )

    def read_hf_tensors(self, rule: WeightRule) -> tuple[Tensor, ...]:
        """Return the tensors of a rule: views of the mapped files, or dequantised copies. Raise
        ValueError that names file, tensor and shapes.
        """
        for hf in rule.hf_tensors:
            self._raise_if_unfit(hf)
        return tuple(self._read_tensor(hf.stored_name, hf.entry) for hf in rule.hf_tensors)

    def _read_tensor(self, name: str, entry: StackedEntry | None) -> Tensor:
        """Return a stored tensor, or one entry of it, dequantised to bfloat16 if the reader
        dequantises and the tensor is quantised.
        """
        if self._fp8_block is not None and f"{name}{BLOCKS}" in self._file_by_tensor:
            blocks, scales = (
                self._read_stored_tensor(f"{name}{kind}", entry) for kind in (BLOCKS, SCALES)
            )
            return dequantise_mxfp4(blocks, scales, torch.bfloat16)
        stored = self._read_stored_tensor(name, entry)
        if self._fp8_block is None or stored.dtype != torch.float8_e4m3fn:
            return stored
        try:
            return dequantise_fp8(
                stored, self._read_stored_tensor(f"{name}{SCALE}"), self._fp8_block, torch.bfloat16
            )
        except ValueError as error:
            raise ValueError(
                f"{self.directory}: {name}{SCALE}: {error}. Fetch the directory again."
            ) from error

    def _read_stored_tensor(self, name: str, entry: StackedEntry | None = None) -> Tensor:
        """Return a tensor as it is stored or, with `entry`, only that entry of it; the rest is not
        read.
        """
        file = self._open_file(self._file_by_tensor[name])
        found: Tensor = (
            file.get_tensor(name) if entry is None else file.get_slice(name)[entry.index]
        )
        return found

    def _map_tensors_to_files(self) -> dict[str, str]:
        """Return the file name of each tensor, from the index or from the only file. Raise
        ValueError for a broken or missing index, for a directory without safetensors, and for one
        with two sets of weights that differ.
        """
        index = self.directory / INDEX
        if index.is_file():
            weight_map = read_json_object(index).get("weight_map")
            if not isinstance(weight_map, dict) or not weight_map:
                raise ValueError(f"{index} has no weight_map; fetch it again.")
            for file in weight_map.values():
                if not isinstance(file, str) or PurePosixPath(file).name != file or file == "..":
                    raise ValueError(
                        f"{index} names the file {file!r}; it must be a plain name in the"
                        " same directory."
                    )
            check_weight_sets(self.directory, weight_map)
            return weight_map
        files = sorted(path.name for path in self.directory.glob("*.safetensors"))
        if not files:
            raise ValueError(
                f"{self.directory} has no *.safetensors; other weight formats are not read. Save"
                " the model with transformers' save_pretrained(safe_serialization=True)."
            )
        if len(files) > 1 and SINGLE_FILE not in files:
            raise ValueError(
                f"{self.directory} has {len(files)} safetensors files but no {INDEX};"
                " fetch the index."
            )
        check_weight_sets(self.directory, None)
        file = SINGLE_FILE if SINGLE_FILE in files else files[0]
        return dict.fromkeys(self._open_file(file).keys(), file)

    def _open_file(self, file_name: str) -> Any:
        """Return the mapped file, opened at its first use. Raise ValueError where it is missing or
        broken.
        """
        if file_name not in self._open_files:
            path = self.directory / file_name
            if not path.is_file():
                raise ValueError(
                    f"{path} is missing, though {INDEX} names it; fetch the directory again."
                )
            try:
                self._open_files[file_name] = safe_open(str(path), framework="pt")
            except (SafetensorError, OSError) as error:
                raise ValueError(
                    f"{path} ({path.stat().st_size} bytes) is truncated or corrupt: {error}."
                    " Fetch it again."
                ) from error
        return self._open_files[file_name]

    def _read_dequantised_header(self, name: str) -> tuple[tuple[int, ...], str]:
        """Return the shape and the safetensors type name ("BF16") that a tensor has after
        dequantising, from the header. Raise ValueError where the scales of an FP8 tensor are
        missing.
        """
        if self._fp8_block is not None and f"{name}{BLOCKS}" in self._file_by_tensor:
            shape, dtype = self._read_stored_header(f"{name}{BLOCKS}")
            if dtype == _BYTES and len(shape) > 2 and f"{name}{SCALES}" in self._file_by_tensor:
                return (*shape[:-3], shape[-2] * shape[-1] * 2, shape[-3]), "BF16"
            return shape, dtype
        shape, dtype = self._read_stored_header(name)
        if self._fp8_block is not None and dtype == FP8 and len(shape) == 2:
            if f"{name}{SCALE}" not in self._file_by_tensor:
                raise ValueError(f"tensor {name}{SCALE} is missing, the scales of {name} in FP8")
            return shape, "BF16"
        return shape, dtype

    def _read_stored_header(self, name: str) -> tuple[tuple[int, ...], str]:
        """Return the shape and the safetensors type name that a tensor has in its file. Raise
        ValueError where the file does not have the tensor.
        """
        file = self._file_by_tensor[name]
        try:
            view = self._open_file(file).get_slice(name)
        except SafetensorError as error:
            raise ValueError(f"{name} is not in {file}, though {INDEX} says so") from error
        return tuple(view.get_shape()), view.get_dtype()

    def _raise_if_unfit(self, hf_tensor: HFTensor) -> None:
        """Raise ValueError if the tensor is missing, broken, or of another shape or type than
        expected.
        """
        problem = self._find_problem(hf_tensor)
        if problem is not None:
            raise ValueError(
                f"{self.directory}: {problem}. Fetch the directory again, or correct config.json."
            )

    def _find_problem(self, hf_tensor: HFTensor) -> str | None:
        """Return a message if the tensor is missing, broken, or of another shape or an unsupported
        type; else None.
        """
        name = hf_tensor.stored_name
        expected = hf_tensor.stored_shape
        file = self._file_by_tensor.get(name) or (
            self._file_by_tensor.get(f"{name}{BLOCKS}") if self._fp8_block else None
        )
        if file is None:
            return f"tensor {name} {expected} is missing"
        try:
            shape, dtype = self._read_dequantised_header(name)
        except ValueError as error:
            return str(error).rstrip(".")
        if shape != expected:
            return f"tensor {name} in {file} has shape {shape}, expected {expected}"
        if dtype not in DTYPES:
            return (
                f"tensor {name} in {file} has type {dtype}, supported are {', '.join(DTYPES)}"
                " (not quantised)"
            )
        return None


def _describe_difference(first: Any, second: Any) -> str | None:
    """Return in what two stored matrices differ; None where all values are equal."""
    shapes = [tuple(view.get_shape()) for view in (first, second)]
    types = [view.get_dtype() for view in (first, second)]
    if shapes[0] != shapes[1]:
        return f"{list(shapes[0])} and {list(shapes[1])}"
    if not set(types) <= set(DTYPES):
        return f"types {types[0]} and {types[1]}"
    row = find_different_row(first, second, shapes[0])
    return None if row is None else f"first in row {row}"


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the JSON object that a file holds. Raise ValueError that names the file if its content
    is anything else.
    """
    try:
        value = json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}. Fetch it again.") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object.")
    return value
