"""What a conversion writes: files whose size, begin and places are known before the first
tensor is read.

So units can be written in any order by any process, and a conversion that was killed goes
on where it was.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import chain, pairwise
from math import prod
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from rlhf_megatron import __version__
from rlhf_megatron.weights.bucket_manifest import DTYPE_BYTES
from rlhf_megatron.weights.conversion.stored_model import (
    DIGESTS,
    LATEST,
    QUANTISATION,
    ConversionItem,
    ItemTensors,
    StoredModel,
    split_into_byte_pieces,
)
from rlhf_megatron.weights.families.model_family import HFConfig
from rlhf_megatron.weights.hf_writer import (
    MAX_SHARD_BYTES,
    TensorSpec,
    build_safetensors_header,
    plan_weight_files,
    write_config_and_tokenizer,
    write_weight_index,
)
from rlhf_megatron.weights.megatron_dir import (
    FORMAT,
    FORMAT_VERSION,
    MANIFEST,
    MegatronManifest,
    RankFileNames,
)
from rlhf_megatron.weights.megatron_keys import KeyNaming
from rlhf_megatron.weights.mtp_tensors import MTP_FILE
from rlhf_megatron.weights.parallel_layout import ParallelLayout
from rlhf_megatron.weights.quantised_weights import SCALE, is_stored_in_fp8, quantise_to_fp8
from rlhf_megatron.weights.torch_dist_archive import (
    ALIGNMENT,
    ArchivedChunk,
    make_archive_frame,
    write_torch_dist_metadata,
)
from rlhf_megatron.weights.weight_table import (
    HFTensor,
    LayerImpl,
    compute_shard_shape,
    concatenate_tensors,
    split_tensor,
)
from rlhf_megatron.write_errors import write_text_file

WriteAtOffset = Callable[[str, int, Tensor | bytes], None]
"""Write at a byte of a file."""
MAX_PART_BYTES = 1 << 30  # of a tensor in torch_dist: a larger one is cut into several


class ConversionTarget(Protocol):
    """A layout of files."""

    wire_name: str  # in the journal of a conversion: it outlives the name of the class
    file_bytes: dict[str, int]  # bytes of each file, by path inside the directory
    file_headers: dict[str, bytes]  # what stands at the start of a file
    contents_digest: str  # digest of what else decides the bytes of files; "" where nothing does

    def write_item(
        self, item: ConversionItem, item_tensors: ItemTensors, write_at_offset: WriteAtOffset
    ) -> None:
        """Convert the tensors of one item and write them into their places, by
        `write_at_offset`.
        """

    def write_companion_files(self, directory: Path, digests: Mapping[str, str]) -> None:
        """Write the files beside the weights into `directory`: index or metadata, config.json,
        tokenizer files, and the tensors' `digests`.
        """


class _SafetensorsLayout:
    """The sizes, headers and tensor offsets of safetensors files."""

    def __init__(self, specs_by_file: Mapping[str, Sequence[TensorSpec]]) -> None:
        """Compute the header, the size and the tensors' offsets of each file."""
        self.specs_by_file = specs_by_file
        self.file_bytes = dict[str, int]()
        self.file_headers = dict[str, bytes]()
        self._offsets = dict[str, dict[str, int]]()
        for file, specs in specs_by_file.items():
            self.file_headers[file], self._offsets[file] = build_safetensors_header(specs)
            self.file_bytes[file] = len(self.file_headers[file]) + sum(
                spec.num_bytes for spec in specs
            )

    def get_offset(self, file: str, tensor_name: str) -> int:
        """Return the byte of the file at which a tensor begins."""
        return self._offsets[file][tensor_name]


class HFTarget:
    """A Hugging Face directory.

    Items with an FP8 block are written in FP8: each matrix as float8_e4m3fn with its scales.
    """

    wire_name = "HFTarget"
    contents_digest = ""

    def __init__(
        self,
        model: StoredModel,
        items: Sequence[ConversionItem],
        max_shard_bytes: int = MAX_SHARD_BYTES,
        hf_config: HFConfig | None = None,
        has_digests: bool = True,
    ) -> None:
        """Plan the files. `hf_config`: written as config.json in place of the model's own; None:
        the model's. `has_digests`: whether a file with the tensors' digests is written beside the
        weights. Items with an FP8 block add a quantization_config to config.json.
        """
        specs = list(
            _drop_repeated_specs(
                spec
                for item in items
                for hf in item.rule.hf_tensors
                for spec in _make_tensor_specs(item, hf)
            )
        )
        self._safetensors_layout = _SafetensorsLayout(plan_weight_files(specs, max_shard_bytes))
        self._file_by_tensor = {
            spec.name: file
            for file, members in self._safetensors_layout.specs_by_file.items()
            for spec in members
        }
        self.file_bytes = self._safetensors_layout.file_bytes
        self.file_headers = self._safetensors_layout.file_headers
        self._hf_config = hf_config or model.hf_config
        self._companions_directory = model.companions_directory
        self._tokenizer_directory = model.tokenizer_directory
        block = next((item.fp8_block for item in items if item.fp8_block is not None), None)
        if block is not None:
            is_linear = (
                spec for spec in specs if len(spec.shape) == 2 and spec.name.endswith(".weight")
            )
            plain = [
                spec.name.removesuffix(".weight")
                for spec in is_linear
                if not is_stored_in_fp8(spec.name)
            ]
            fp8: dict[str, Any] = {
                "quant_method": "fp8",
                "fmt": "e4m3",
                "activation_scheme": "dynamic",
            }
            fp8 |= {"weight_block_size": list(block), "modules_to_not_convert": plain}
            self._hf_config = {**self._hf_config, QUANTISATION: fp8}
        self._dtypes = {item.dtype for item in items}
        self._has_digests = has_digests

    def write_item(
        self, item: ConversionItem, item_tensors: ItemTensors, write_at_offset: WriteAtOffset
    ) -> None:
        """Write the item's Hugging Face tensors, each quantised to FP8 with its scales where the
        item says so.
        """
        for number, (hf, tensor) in enumerate(
            zip(item.rule.hf_tensors, item_tensors.tensors, strict=True)
        ):
            if item.fp8_block is not None and is_stored_in_fp8(hf.name):
                for name, part in zip(
                    (hf.name, f"{hf.name}{SCALE}"),
                    quantise_to_fp8(tensor, item.fp8_block),
                    strict=True,
                ):
                    write_at_offset(
                        self._file_by_tensor[name],
                        self._safetensors_layout.get_offset(self._file_by_tensor[name], name),
                        part,
                    )
                continue
            file = self._file_by_tensor[hf.stored_name]
            start = 0 if hf.entry is None else hf.entry.index * tensor.nbytes
            at = self._safetensors_layout.get_offset(file, hf.stored_name) + start
            for piece in item_tensors.digest_and_yield_pieces(number):
                write_at_offset(file, at, piece)
                at += piece.nbytes

    def write_companion_files(self, directory: Path, digests: Mapping[str, str]) -> None:
        """Write the index where there are several files, config.json, the tokenizer files and, if
        wanted, the digests.
        """
        files = self._safetensors_layout.specs_by_file
        if len(files) > 1:
            write_weight_index(directory, files)
        write_config_and_tokenizer(
            directory,
            self._hf_config,
            self._dtypes,
            self._companions_directory,
            self._tokenizer_directory,
        )
        if self._has_digests:
            _write_digest_file(directory, digests)


def _make_tensor_specs(item: ConversionItem, hf_tensor: HFTensor) -> Iterator[TensorSpec]:
    """Yield the tensors that a file holds for one Hugging Face tensor: itself or, in FP8, the
    quantised matrix and its scales.
    """
    if item.fp8_block is None or not is_stored_in_fp8(hf_tensor.name):
        yield TensorSpec(hf_tensor.stored_name, item.dtype, hf_tensor.stored_shape)
        return
    yield TensorSpec(hf_tensor.name, "float8_e4m3fn", hf_tensor.shape)
    blocks = tuple(
        -(-size // step) for size, step in zip(hf_tensor.shape, item.fp8_block, strict=True)
    )
    yield TensorSpec(f"{hf_tensor.name}{SCALE}", "float32", blocks)


def _drop_repeated_specs(specs: Iterable[TensorSpec]) -> Iterator[TensorSpec]:
    """Yield each stored tensor once, though it comes with every one of its entries. Raise
    ValueError where the entries of a tensor have several types.
    """
    seen: dict[str, TensorSpec] = {}
    for spec in specs:
        if (before := seen.setdefault(spec.name, spec)) is spec:
            yield spec
        elif before != spec:
            raise ValueError(
                f"entries of {spec.name} are {before.dtype} and {spec.dtype}; give one type for"
                " all weights (--dtype)."
            )


class RankFilesTarget:
    """A directory with one file for each rank (weights.megatron_dir). `items` must have the
    vocabulary padded for the layout.
    """

    wire_name = "RanksTarget"
    contents_digest = ""

    def __init__(
        self, model: StoredModel, items: Sequence[ConversionItem], layout: ParallelLayout
    ) -> None:
        """Plan one file for each rank of `layout`, and one for the multi-token prediction tensors.
        Raise ValueError where the layout does not divide the model.
        """
        self._rank_file_names = RankFileNames(
            [item.rule for item in items if not item.is_mtp], layout
        )
        files: dict[str, list[TensorSpec]] = {}
        for item in items:
            rule = item.rule
            names = [MTP_FILE] if item.is_mtp else self._rank_file_names.list_files(item.rule)
            for name in names:
                shape = (
                    rule.megatron_shape if item.is_mtp else compute_shard_shape(rule, len(names))
                )
                files.setdefault(name, []).append(TensorSpec(rule.megatron_name, item.dtype, shape))
        self._safetensors_layout = _SafetensorsLayout(files)
        self.file_bytes = self._safetensors_layout.file_bytes
        self.file_headers = self._safetensors_layout.file_headers
        self._hf_config = model.hf_config
        self._companions_directory = model.companions_directory
        self._layout = layout

    def write_item(
        self, item: ConversionItem, item_tensors: ItemTensors, write_at_offset: WriteAtOffset
    ) -> None:
        """Write the Megatron tensor of an item: each shard into the file of its rank."""
        name = item.rule.megatron_name
        if item.is_mtp:
            write_at_offset(
                MTP_FILE,
                self._safetensors_layout.get_offset(MTP_FILE, name),
                item_tensors.tensors[0],
            )
            return
        files = self._rank_file_names.list_files(item.rule)
        shards = split_tensor(
            item.rule.split, item.rule.to_megatron(*item_tensors.tensors), len(files)
        )
        for file, shard in zip(files, shards, strict=True):
            write_at_offset(file, self._safetensors_layout.get_offset(file, name), shard)

    def write_companion_files(self, directory: Path, digests: Mapping[str, str]) -> None:
        """Write config.json, the tokenizer files, and the manifest with layout, config and
        digests.
        """
        dtypes = {
            spec.dtype
            for specs in self._safetensors_layout.specs_by_file.values()
            for spec in specs
        }
        write_config_and_tokenizer(directory, self._hf_config, dtypes, self._companions_directory)
        own = self._layout
        axes = {"tp": own.tp, "pp": own.pp, "vpp": own.vpp, "ep": own.ep, "etp": own.etp}
        depths = {
            "first_layers": own.num_first_stage_layers,
            "last_layers": own.num_last_stage_layers,
        }
        manifest = MegatronManifest(
            FORMAT,
            FORMAT_VERSION,
            __version__,
            {**axes, **depths},
            dict(self._hf_config),
            dict(digests),
        )
        write_text_file(directory / MANIFEST, json.dumps(asdict(manifest), indent=1) + "\n")


class TorchDistTarget:
    """megatron-core's torch_dist, which loads under any layout: as `release/`, from which
    Megatron-LM starts at iteration 0. `impl` and `use_stacked_layers` say how the model that will
    load the checkpoint spells its keys (`KeyNaming.from_table`).
    """

    wire_name = "TorchDistTarget"

    def __init__(
        self,
        model: StoredModel,
        items: Sequence[ConversionItem],
        impl: LayerImpl = "transformer_engine",
        use_stacked_layers: bool | None = None,
        max_file_bytes: int = MAX_SHARD_BYTES,
    ) -> None:
        """Plan the archives and the files. `use_stacked_layers`: whether alike layers share one
        tensor; None: as Megatron-LM's defaults have it. A file is filled up to about
        `max_file_bytes`.
        """
        naming = KeyNaming.from_table(
            tuple(item.rule for item in items if not item.is_mtp), impl, use_stacked_layers
        )
        self._chunks_by_rule: dict[str, list[ArchivedChunk]] = {}
        number = 0
        end = 0
        for item in items:
            parts = [] if item.is_mtp else list(_split_into_chunks(item, naming))
            for key, shape, offsets, sizes in parts:
                length = make_archive_frame(sizes, item.dtype).num_archive_bytes
                if end and end + length > max_file_bytes:
                    number = number + 1
                    end = 0
                part = ArchivedChunk(
                    key, shape, offsets, sizes, item.dtype, f"__{number}_0.distcp", end, length
                )
                self._chunks_by_rule.setdefault(item.rule.megatron_name, []).append(part)
                end = -(-(end + length) // ALIGNMENT) * ALIGNMENT
        kept = [
            TensorSpec(i.rule.megatron_name, i.dtype, i.rule.megatron_shape)
            for i in items
            if i.is_mtp
        ]
        self._mtp_layout = _SafetensorsLayout({MTP_FILE: kept} if kept else {})
        self.file_headers = self._mtp_layout.file_headers
        self.file_bytes = dict(self._mtp_layout.file_bytes)
        for part in self._iterate_chunks():
            file = f"release/{part.file}"
            self.file_bytes[file] = max(
                self.file_bytes.get(file, 0), part.start_byte + part.num_archive_bytes
            )
        # Archives hold their shapes, which padding hides from the sizes of files.
        boxes = [
            (part.sizes, part.dtype, part.file, part.start_byte) for part in self._iterate_chunks()
        ]
        self.contents_digest = hashlib.sha256(json.dumps(boxes).encode()).hexdigest()
        self._hf_config = model.hf_config
        self._companions_directory = model.companions_directory
        self._dtypes = {item.dtype for item in items}

    def write_item(
        self, item: ConversionItem, item_tensors: ItemTensors, write_at_offset: WriteAtOffset
    ) -> None:
        """Write the Megatron tensor of an item as one archive for each of its chunks; a multi-token
        prediction tensor goes into its own file.
        """
        rule = item.rule
        if item.is_mtp:
            write_at_offset(
                MTP_FILE,
                self._mtp_layout.get_offset(MTP_FILE, rule.megatron_name),
                item_tensors.tensors[0],
            )
            return
        parts = self._chunks_by_rule[rule.megatron_name]
        # one behind the other: no copy is made
        if rule.to_megatron is concatenate_tensors and len(parts) == 1:
            _write_chunk_archive(
                parts[0],
                chain.from_iterable(
                    map(item_tensors.digest_and_yield_pieces, range(len(rule.hf_tensors)))
                ),
                write_at_offset,
            )
            return
        full = rule.to_megatron(*item_tensors.tensors)
        depth = len(parts[0].shape) - len(rule.megatron_shape)
        for part in parts:
            _write_chunk_archive(
                part,
                split_into_byte_pieces(full[part.offsets[depth] :][: part.sizes[depth]]),
                write_at_offset,
            )

    def write_companion_files(self, directory: Path, digests: Mapping[str, str]) -> None:
        """Write `.metadata` and the other files of the checkpoint,
        `latest_checkpointed_iteration.txt`, config.json, the tokenizer files and the digests.
        """
        write_torch_dist_metadata(directory / "release", self._iterate_chunks())
        write_text_file(directory / LATEST, "release")
        write_config_and_tokenizer(
            directory, self._hf_config, self._dtypes, self._companions_directory
        )
        _write_digest_file(directory, digests)

    def _iterate_chunks(self) -> Iterator[ArchivedChunk]:
        """Yield all chunks of the checkpoint, in the order of their items."""
        for parts in self._chunks_by_rule.values():
            yield from parts


def _split_into_chunks(
    item: ConversionItem, key_naming: KeyNaming
) -> Iterator[tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, ...]]]:
    """Yield (key, shape of the whole stored tensor, offsets, sizes) of each chunk of an item: a
    tensor over MAX_PART_BYTES is cut by rows, all others are one chunk.
    """
    key, index = key_naming.make_key_and_index(item.rule)
    shape = key_naming.get_stored_shape(item.rule)
    own = item.rule.megatron_shape
    row_bytes = prod(own[1:]) * DTYPE_BYTES[item.dtype]
    rows = max(1, MAX_PART_BYTES // row_bytes)
    for first, end in pairwise([*range(0, own[0], rows), own[0]]):
        yield (
            key,
            shape,
            (*index, first, *[0] * len(own[1:])),
            (*[1] * len(index), end - first, *own[1:]),
        )


def _write_chunk_archive(
    chunk: ArchivedChunk, pieces: Iterable[Tensor], write_at_offset: WriteAtOffset
) -> None:
    """Write the archive of one chunk: the data `pieces` in order, then the header and the directory
    with their checksum.
    """
    frame = make_archive_frame(chunk.sizes, chunk.dtype)
    crc = 0
    file = f"release/{chunk.file}"
    at = chunk.start_byte + len(frame.encode_header(0))
    for piece in pieces:
        crc = zlib.crc32(piece.numpy().data, crc)
        write_at_offset(file, at, piece)
        at += piece.nbytes
    write_at_offset(file, chunk.start_byte, frame.encode_header(crc))
    write_at_offset(file, at, frame.encode_directory(crc))


def _write_digest_file(directory: Path, digests: Mapping[str, str]) -> None:
    """Write the digests of all tensors, and this version, to conversion.json in `directory`."""
    content: dict[str, Any] = {"tool_version": __version__, "digests": dict(digests)}
    write_text_file(directory / DIGESTS, json.dumps(content, indent=1) + "\n")
