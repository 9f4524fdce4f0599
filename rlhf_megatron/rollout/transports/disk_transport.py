"""rollout.weight_transport disk: buckets as safetensors files, and the checkpoint directory that
they make together.

While a sync runs, the files lie in the transfer directory itself, where engines read each as it
appears. When all senders have ended, `assemble_weight_checkpoint` moves them into a directory of
that version and writes index and configuration: transformers, and engines without the run's loader,
load it as any model directory.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlhf_megatron.rollout.engine_interface import EngineAddress, EngineError
from rlhf_megatron.rollout.sglang.sglang_weight_verbs import SGLangWeightVerbs
from rlhf_megatron.rollout.transports.bucket_transport import (
    BucketMemory,
    BucketTransport,
    DeliveryTraffic,
    estimate_traffic_without_receipts,
    sum_receipt_traffic,
)
from rlhf_megatron.rollout.transports.tensor_transport import DISK_FULL_ERRNOS
from rlhf_megatron.weights.bucket_buffers import BucketBuffers, DeliverBucket, choose_num_buffers
from rlhf_megatron.weights.bucket_manifest import BucketManifest, TensorEntry
from rlhf_megatron.weights.hf_reader import DTYPES
from rlhf_megatron.weights.hf_writer import (
    TensorSpec,
    write_config_and_tokenizer,
    write_weight_index,
)

_FORMAT_NAMES = {name: code for code, name in DTYPES.items()}
_HEADER_ALIGNMENT = 64  # bytes; the bucket begins at a multiple of it
_PREFIX = "weights-"
_VERSION = re.compile(r"version-(\d+)")


class SafetensorsFileBuffers(BucketBuffers):
    """Buffers whose buckets are each written to a safetensors file before they are delivered. The
    buckets must have no gaps between their tensors (`plan_buckets`). The files stay for
    `assemble_weight_checkpoint`.
    """

    def __init__(
        self,
        directory: Path,
        sender: str,
        buffer_bytes: int,
        num_buckets: int,
        deliver_bucket: DeliverBucket,
    ) -> None:
        """Allocate the buffers, and remove the sender's files of a failed sync. `sender` names the
        files; `buffer_bytes` is the size of the largest bucket. Where a file cannot be written, for
        example because the disk is full, the delivery raises ValueError.
        """
        self._directory = directory
        self._file_stem = f"{_PREFIX}{sender.replace(' ', '-')}"
        for path in directory.glob(f"{self._file_stem}-*"):
            path.unlink(missing_ok=True)  # of a sync that failed

        def write_and_deliver_bucket(manifest: BucketManifest, raw: Tensor) -> None:
            """Write the bucket to its file, and deliver its manifest with the offset of the first
            tensor.
            """
            header = encode_gapless_header(manifest.tensors)
            _write_bucket_file(directory / manifest.file, header, raw)
            deliver_bucket(replace(manifest, file_offset=len(header)), raw)

        count = choose_num_buffers(num_buckets)
        super().__init__(
            [torch.empty(max(buffer_bytes, 1), dtype=torch.uint8) for _ in range(count)],
            write_and_deliver_bucket,
        )

    def get_file_name(self, bucket_index: int) -> str:
        """Return the name of the file for the bucket of this index."""
        return f"{self._file_stem}-{bucket_index:05d}.safetensors"


class SGLangDiskTransport(BucketTransport):
    """Makes stock SGLang read each file. An engine without the run's loader loads everything at the
    end (`load_checkpoint_into_engines`).
    """

    bucket_memory: BucketMemory = "files"

    def __init__(self, address: EngineAddress, transfer_dir: Path) -> None:
        self.engine_name = address.name
        self._address = address
        self._weight_verbs = SGLangWeightVerbs(address, transfer_dir)

    def deliver_bucket(self, manifest: BucketManifest, bucket: Tensor) -> DeliveryTraffic:
        """Make every rank load the bucket from its file; without the run's loader only estimate the
        traffic.
        """
        if not self._address.has_loader:
            return estimate_traffic_without_receipts(manifest, self._address.tp_size)
        return sum_receipt_traffic(self._weight_verbs.load_bucket(manifest))


def load_checkpoint_into_engines(
    addresses: Sequence[EngineAddress], directory: Path
) -> dict[str, str]:
    """Make the engines without the run's loader, which could not read the buckets one by one, load
    the complete model directory.

    Return the errors of the engines that failed, by name.
    """
    failures = {}
    for address in addresses:
        if address.has_loader:
            continue
        try:
            SGLangWeightVerbs(address, directory.parent).load_directory(directory)
        except EngineError as error:
            failures[address.name] = str(error)
    return failures


def encode_gapless_header(entries: Collection[TensorEntry]) -> bytes:
    """Return the header of a safetensors file whose tensors lie without gaps in this order, padded
    to 64 bytes.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for entry in entries:
        assert entry.offset == end, (
            f"{entry.name} begins at byte {entry.offset}, not at {end}: the format has no gaps"
        )
        end = entry.offset + entry.num_bytes
        header[entry.name] = {
            "dtype": _FORMAT_NAMES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [entry.offset, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % _HEADER_ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def assemble_weight_checkpoint(
    directory: Path,
    version: int,
    tensor_names: Collection[str],
    hf_config: Mapping[str, Any],
    companions_dir: Path | None,
) -> Path:
    """Move the files of all senders into a new model directory `version-N` inside `directory`, with
    index, configuration and tokenizer, and return its path. Call it when all senders have ended.

    `tensor_names`: the Hugging Face tensors that were sent. Raise ValueError where the files do not
    hold exactly these, or the disk is full.
    """
    target = directory / f"version-{version}"
    aside = directory / f".version-{version}"
    files = {
        path.name: _read_tensor_specs(path)
        for path in sorted(directory.glob(f"{_PREFIX}*.safetensors"))
    }
    found = sorted(spec.name for specs in files.values() for spec in specs)
    if found != sorted(tensor_names):
        wrong = sorted(set(found) ^ set(tensor_names)) or [
            name for name in found if found.count(name) > 1
        ]
        raise ValueError(
            f"the weight files in {directory} are not those of the {len(tensor_names)} tensors"
            f" that were sent: {wrong[:5]}. Do other runs, or machines without a common file"
            " system, use rollout.transfer_dir?"
        )
    shutil.rmtree(aside, ignore_errors=True)

    def move_files_into_checkpoint() -> None:
        """Fill a hidden directory and rename it into place."""
        aside.mkdir()
        write_weight_index(aside, files)
        write_config_and_tokenizer(
            aside,
            hf_config,
            {spec.dtype for specs in files.values() for spec in specs},
            companions_dir,
        )
        for name in files:
            os.rename(directory / name, aside / name)
        shutil.rmtree(target, ignore_errors=True)
        os.rename(aside, target)

    _explain_full_disk(target, move_files_into_checkpoint)
    return target


def remove_other_versions(directory: Path, version_to_keep: int) -> None:
    """Remove the model directories of versions other than `version_to_keep`."""
    for path in directory.iterdir():
        match = _VERSION.fullmatch(path.name)
        if match is not None and int(match[1]) != version_to_keep:
            shutil.rmtree(path, ignore_errors=True)


def _read_tensor_specs(path: Path) -> list[TensorSpec]:
    """Return name, type and shape of each tensor in the header of a safetensors file."""
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    header.pop("__metadata__")
    return [
        TensorSpec(name, DTYPES[entry["dtype"]], tuple(entry["shape"]))
        for name, entry in header.items()
    ]


def _write_bucket_file(path: Path, header: bytes, bucket_bytes: Tensor) -> None:
    """Write the file under another name, and rename it when it is whole. Raise ValueError where
    there is no room.
    """
    aside = path.with_suffix(".partial")

    def write_and_rename() -> None:
        """Write the header and the bucket, and rename the file."""
        with aside.open("wb") as file:
            os.chmod(aside, 0o600)
            os.posix_fallocate(file.fileno(), 0, len(header) + bucket_bytes.numel())
            file.write(header)
            file.write(bucket_bytes.numpy().data)
        os.rename(aside, path)

    try:
        _explain_full_disk(path, write_and_rename)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


def _explain_full_disk(target_path: Path, write_files: Callable[[], None]) -> None:
    """Call `write_files`, and turn its OSError for a full disk into a ValueError with the fix."""
    try:
        write_files()
    except OSError as error:
        if error.errno not in DISK_FULL_ERRNOS:
            raise
        free = shutil.disk_usage(target_path.parent).free
        raise ValueError(
            f"no room for weights at {target_path}: {error.strerror}, {free} bytes are free. Free"
            " some (two versions of the weights are kept during a sync), or set"
            " rollout.transfer_dir to a larger file system."
        ) from error
