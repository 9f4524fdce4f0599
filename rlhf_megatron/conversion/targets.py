"""What a conversion writes: files whose size, begin and places are known before the first tensor is read.

So units can be written in any order by any process, and a conversion that was killed goes on where it was.
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
from rlhf_megatron.checkpoint.hf_writer import (
    MAX_SHARD_BYTES,
    TensorSpec,
    plan_files,
    safetensors_header,
    write_companions,
    write_index,
)
from rlhf_megatron.checkpoint.kept import KEPT_FILE
from rlhf_megatron.checkpoint.megatron_dir import FORMAT, FORMAT_VERSION, MANIFEST, MegatronManifest, RankFiles
from rlhf_megatron.checkpoint.quantised import SCALE, is_in_fp8, to_fp8
from rlhf_megatron.checkpoint.stored_names import Naming
from rlhf_megatron.checkpoint.torch_dist import ALIGNMENT, Part, frame_of, publish
from rlhf_megatron.conversion.model import DIGESTS, LATEST, QUANTISATION, Item, Model, Reading, pieces_of
from rlhf_megatron.models.families.base import HFConfig
from rlhf_megatron.models.table import HFTensor, Impl, concatenate, shard_shape, split
from rlhf_megatron.parallel.layout import Layout
from rlhf_megatron.resharding.manifest import DTYPE_BYTES

Put = Callable[[str, int, Tensor | bytes], None]
"""Write at a byte of a file."""
MAX_PART_BYTES = 1 << 30  # of a tensor in torch_dist: a larger one is cut into several


class Target(Protocol):
    """A layout of files."""

    sizes: dict[str, int]  # bytes of each file, by path inside the directory
    begins: dict[str, bytes]  # what stands at the start of a file
    contents: str  # digest of what else decides the bytes of files; "" where nothing does

    def write(self, item: Item, read: Reading, put: Put) -> None:
        """Put the tensors of one item into their places."""

    def finish(self, directory: Path, digests: Mapping[str, str]) -> None:
        """Write what says which tensor is where, and what goes with the weights."""


class _Safetensors:
    """Places in files of that format."""

    def __init__(self, files: Mapping[str, Sequence[TensorSpec]]) -> None:
        self.files = files
        self.sizes, self.begins = dict[str, int](), dict[str, bytes]()
        self._offsets = dict[str, dict[str, int]]()
        for file, specs in files.items():
            self.begins[file], self._offsets[file] = safetensors_header(specs)
            self.sizes[file] = len(self.begins[file]) + sum(spec.num_bytes for spec in specs)

    def offset(self, file: str, name: str) -> int:
        return self._offsets[file][name]


class HFTarget:
    """A Hugging Face directory. `hf_config`: written in place of the model's own; `has_digests`: beside the weights.

    Items with a block are written in FP8: each matrix as float8_e4m3fn with its scales.
    """

    contents = ""

    def __init__(
        self,
        model: Model,
        items: Sequence[Item],
        max_shard_bytes: int = MAX_SHARD_BYTES,
        hf_config: HFConfig | None = None,
        has_digests: bool = True,
    ) -> None:
        specs = list(_unique(spec for item in items for hf in item.rule.hf for spec in _specs(item, hf)))
        self._places = _Safetensors(plan_files(specs, max_shard_bytes))
        self._file_of = {spec.name: file for file, members in self._places.files.items() for spec in members}
        self.sizes, self.begins = self._places.sizes, self._places.begins
        self._hf_config, self._companions = hf_config or model.hf_config, model.companions_from
        block = next((item.block for item in items if item.block is not None), None)
        if block is not None:
            is_linear = (spec for spec in specs if len(spec.shape) == 2 and spec.name.endswith(".weight"))
            plain = [spec.name.removesuffix(".weight") for spec in is_linear if not is_in_fp8(spec.name)]
            fp8: dict[str, Any] = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
            fp8 |= {"weight_block_size": list(block), "modules_to_not_convert": plain}
            self._hf_config = {**self._hf_config, QUANTISATION: fp8}
        self._dtypes = {item.dtype for item in items}
        self._has_digests = has_digests

    def write(self, item: Item, read: Reading, put: Put) -> None:
        for number, (hf, tensor) in enumerate(zip(item.rule.hf, read.tensors, strict=True)):
            if item.block is not None and is_in_fp8(hf.name):
                for name, part in zip((hf.name, f"{hf.name}{SCALE}"), to_fp8(tensor, item.block), strict=True):
                    put(self._file_of[name], self._places.offset(self._file_of[name], name), part)
                continue
            file, start = self._file_of[hf.stored_name], 0 if hf.entry is None else hf.entry.index * tensor.nbytes
            at = self._places.offset(file, hf.stored_name) + start
            for piece in read.pieces(number):
                put(file, at, piece)
                at += piece.nbytes

    def finish(self, directory: Path, digests: Mapping[str, str]) -> None:
        files = self._places.files
        if len(files) > 1:
            write_index(directory, files)
        write_companions(directory, self._hf_config, self._dtypes, self._companions)
        if self._has_digests:
            _write_digests(directory, digests)


def _specs(item: Item, hf: HFTensor) -> Iterator[TensorSpec]:
    if item.block is None or not is_in_fp8(hf.name):
        yield TensorSpec(hf.stored_name, item.dtype, hf.stored_shape)
        return
    yield TensorSpec(hf.name, "float8_e4m3fn", hf.shape)
    blocks = tuple(-(-size // step) for size, step in zip(hf.shape, item.block, strict=True))
    yield TensorSpec(f"{hf.name}{SCALE}", "float32", blocks)


def _unique(specs: Iterable[TensorSpec]) -> Iterator[TensorSpec]:
    """Yield each tensor once, though it comes with every one of its entries. Raises ValueError where its entries have
    several types.
    """
    seen: dict[str, TensorSpec] = {}
    for spec in specs:
        if (before := seen.setdefault(spec.name, spec)) is spec:
            yield spec
        elif before != spec:
            raise ValueError(
                f"entries of {spec.name} are {before.dtype} and {spec.dtype}; give one type for all weights (--dtype)."
            )


class RanksTarget:
    """One file a rank (checkpoint.megatron_dir). `items`: with the vocabulary padded for the layout."""

    contents = ""

    def __init__(self, model: Model, items: Sequence[Item], layout: Layout) -> None:
        """Raises ValueError where the model does not divide."""
        self._of_rank = RankFiles([item.rule for item in items if not item.is_kept], layout)
        files: dict[str, list[TensorSpec]] = {}
        for item in items:
            rule, names = item.rule, [KEPT_FILE] if item.is_kept else self._of_rank.files(item.rule)
            for name in names:
                shape = rule.megatron_shape if item.is_kept else shard_shape(rule, len(names))
                files.setdefault(name, []).append(TensorSpec(rule.megatron_name, item.dtype, shape))
        self._places = _Safetensors(files)
        self.sizes, self.begins = self._places.sizes, self._places.begins
        self._hf_config, self._companions, self._layout = model.hf_config, model.companions_from, layout

    def write(self, item: Item, read: Reading, put: Put) -> None:
        name = item.rule.megatron_name
        if item.is_kept:
            put(KEPT_FILE, self._places.offset(KEPT_FILE, name), read.tensors[0])
            return
        files = self._of_rank.files(item.rule)
        shards = split(item.rule.split, item.rule.to_megatron(*read.tensors), len(files))
        for file, shard in zip(files, shards, strict=True):
            put(file, self._places.offset(file, name), shard)

    def finish(self, directory: Path, digests: Mapping[str, str]) -> None:
        dtypes = {spec.dtype for specs in self._places.files.values() for spec in specs}
        write_companions(directory, self._hf_config, dtypes, self._companions)
        own = self._layout
        axes = {"tp": own.tp, "pp": own.pp, "vpp": own.vpp, "ep": own.ep, "etp": own.etp}
        depths = {"first_layers": own.first_layers, "last_layers": own.last_layers}
        manifest = MegatronManifest(
            FORMAT, FORMAT_VERSION, __version__, {**axes, **depths}, dict(self._hf_config), dict(digests)
        )
        (directory / MANIFEST).write_text(json.dumps(asdict(manifest), indent=1) + "\n")


class TorchDistTarget:
    """megatron-core's torch_dist, which loads under any layout: as `release/`, from which Megatron-LM starts at
    iteration 0. `impl`, `is_stacked`: how the model that will load it spells its keys (`Naming.of`)."""

    def __init__(
        self,
        model: Model,
        items: Sequence[Item],
        impl: Impl = "transformer_engine",
        is_stacked: bool | None = None,
        max_file_bytes: int = MAX_SHARD_BYTES,
    ) -> None:
        naming = Naming.of(tuple(item.rule for item in items if not item.is_kept), impl, is_stacked)
        self._parts: dict[str, list[Part]] = {}
        number, end = 0, 0
        for item in items:
            parts = [] if item.is_kept else list(_parts(item, naming))
            for key, shape, offsets, sizes in parts:
                length = frame_of(sizes, item.dtype).length
                if end and end + length > max_file_bytes:
                    number, end = number + 1, 0
                part = Part(key, shape, offsets, sizes, item.dtype, f"__{number}_0.distcp", end, length)
                self._parts.setdefault(item.rule.megatron_name, []).append(part)
                end = -(-(end + length) // ALIGNMENT) * ALIGNMENT
        kept = [TensorSpec(i.rule.megatron_name, i.dtype, i.rule.megatron_shape) for i in items if i.is_kept]
        self._kept = _Safetensors({KEPT_FILE: kept} if kept else {})
        self.begins = self._kept.begins
        self.sizes = dict(self._kept.sizes)
        for part in self._all():
            file = f"release/{part.file}"
            self.sizes[file] = max(self.sizes.get(file, 0), part.start + part.length)
        # Archives hold their shapes, which padding hides from the sizes of files.
        boxes = [(part.sizes, part.dtype, part.file, part.start) for part in self._all()]
        self.contents = hashlib.sha256(json.dumps(boxes).encode()).hexdigest()
        self._hf_config, self._companions = model.hf_config, model.companions_from
        self._dtypes = {item.dtype for item in items}

    def write(self, item: Item, read: Reading, put: Put) -> None:
        rule = item.rule
        if item.is_kept:
            put(KEPT_FILE, self._kept.offset(KEPT_FILE, rule.megatron_name), read.tensors[0])
            return
        parts = self._parts[rule.megatron_name]
        if rule.to_megatron is concatenate and len(parts) == 1:  # one behind the other: no copy is made
            _put_part(parts[0], chain.from_iterable(map(read.pieces, range(len(rule.hf)))), put)
            return
        full, depth = rule.to_megatron(*read.tensors), len(parts[0].shape) - len(rule.megatron_shape)
        for part in parts:
            _put_part(part, pieces_of(full[part.offsets[depth] :][: part.sizes[depth]]), put)

    def finish(self, directory: Path, digests: Mapping[str, str]) -> None:
        publish(directory / "release", self._all())
        (directory / LATEST).write_text("release")
        write_companions(directory, self._hf_config, self._dtypes, self._companions)
        _write_digests(directory, digests)

    def _all(self) -> Iterator[Part]:
        for parts in self._parts.values():
            yield from parts


def _parts(item: Item, naming: Naming) -> Iterator[tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, ...]]]:
    """(key, shape of the whole tensor, offsets, sizes): the rows of a large one apart."""
    key, index = naming.key(item.rule)
    shape, own = naming.shape(item.rule), item.rule.megatron_shape
    row_bytes = prod(own[1:]) * DTYPE_BYTES[item.dtype]
    rows = max(1, MAX_PART_BYTES // row_bytes)
    for first, end in pairwise([*range(0, own[0], rows), own[0]]):
        yield key, shape, (*index, first, *[0] * len(own[1:])), (*[1] * len(index), end - first, *own[1:])


def _put_part(part: Part, pieces: Iterable[Tensor], put: Put) -> None:
    frame, crc = frame_of(part.sizes, part.dtype), 0
    file, at = f"release/{part.file}", part.start + len(frame.before(0))
    for piece in pieces:
        crc = zlib.crc32(piece.numpy().data, crc)
        put(file, at, piece)
        at += piece.nbytes
    put(file, part.start, frame.before(crc))
    put(file, at, frame.after(crc))


def _write_digests(directory: Path, digests: Mapping[str, str]) -> None:
    content: dict[str, Any] = {"tool_version": __version__, "digests": dict(digests)}
    (directory / DIGESTS).write_text(json.dumps(content, indent=1) + "\n")
