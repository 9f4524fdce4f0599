"""The tensors of a bucket as views of where it lies: of a mapped file, or of device memory.

A rank that takes a slice of a tensor reads that slice and nothing else.
"""

from __future__ import annotations

import mmap
import os
import stat
from pathlib import Path

import torch
from torch import Tensor

from rlhf_megatron.resharding.manifest import BucketManifest, TensorEntry


def place_words(manifest: BucketManifest) -> str:
    """For messages and receipts."""
    return f"bucket {manifest.bucket} of {manifest.sender}"


def views_of_file(path: Path, manifest: BucketManifest) -> dict[str, Tensor]:
    """By name. They keep the file mapped and are valid while it stays as it is. Raises ValueError for what is no plain
    file of the directory's owner or too short, OSError where there is none."""
    what = place_words(manifest)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if path.is_symlink():
            raise ValueError(f"{what}: {path.name} is a link; {_RULE}") from error
        raise
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1 or found.st_uid != path.parent.stat().st_uid:
            raise ValueError(f"{what}: {path.name} is a link, of another user or no plain file; {_RULE}")
        if found.st_size < manifest.file_offset + manifest.num_bytes:
            before = f" after the first {manifest.file_offset}" if manifest.file_offset else ""
            raise ValueError(
                f"{what}: {path.name} has {found.st_size} bytes, the manifest says {manifest.num_bytes}{before}."
            )
        if not manifest.num_bytes:
            return {entry.name: _empty(entry) for entry in manifest.tensors}
        # A private mapping: what a model's loader did to a tensor in place would not reach the file.
        mapped = mmap.mmap(descriptor, manifest.file_offset + manifest.num_bytes, access=mmap.ACCESS_COPY)
    finally:
        os.close(descriptor)
    return {entry.name: _of_mapping(mapped, entry, manifest.file_offset) for entry in manifest.tensors}


def views_of_tensor(bucket: Tensor, manifest: BucketManifest) -> dict[str, Tensor]:
    """`bucket`: [bytes] uint8 in device memory. Raises ValueError where it is too short."""
    if bucket.numel() < manifest.num_bytes:
        raise ValueError(
            f"{place_words(manifest)}: the memory given has {bucket.numel()} bytes, the manifest says"
            f" {manifest.num_bytes}."
        )
    views = {}
    for entry in manifest.tensors:
        raw = bucket[entry.offset : entry.offset + entry.num_bytes]
        dtype = getattr(torch, entry.dtype)
        if (raw.storage_offset() * raw.element_size()) % dtype.itemsize:
            raw = raw.clone()  # an odd place; senders do not choose such
        views[entry.name] = raw.view(dtype).view(entry.shape)
    return views


def _of_mapping(mapped: mmap.mmap, entry: TensorEntry, file_offset: int) -> Tensor:
    if not entry.num_bytes:
        return _empty(entry)
    dtype = getattr(torch, entry.dtype)
    count = entry.num_bytes // dtype.itemsize
    return torch.frombuffer(mapped, dtype=dtype, count=count, offset=file_offset + entry.offset).view(entry.shape)


def _empty(entry: TensorEntry) -> Tensor:
    return torch.empty(entry.shape, dtype=getattr(torch, entry.dtype))


_RULE = "only plain files of the transfer directory are read."
