"""Buckets of weights, damaged on their way to one engine. For tests and soaks; see `fault_proxy`.

The damage is done to a copy in the transfer directory: other engines that are given the same
bucket get it whole.
"""

from __future__ import annotations

import base64
import json
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any, Literal, get_args

import torch

from rlhf_megatron.weights.bucket_manifest import BucketManifest, TensorEntry
from rlhf_megatron.weights.tensor_digest import digest_tensor, format_digest

BucketKind = Literal[
    "drop_bucket", "half_bucket", "swap_names", "swap_rows", "flip_byte", "old_bucket"
]
BUCKET_KINDS: tuple[str, ...] = get_args(BucketKind)
# by kind of engine
UPDATE_PATHS = {"local": "/update_weights", "sglang": "/update_weights_from_tensor"}


def read_manifest(kind: str, body: bytes) -> BucketManifest | None:
    """The manifest in the body of an update request; None: the request is about something
    else (a commit).
    """
    if kind == "local":
        return BucketManifest.parse_json(body.decode())
    order = _read_order(body)
    return BucketManifest.parse_json(order["manifest"]) if "manifest" in order else None


def write_manifest(kind: str, body: bytes, manifest: BucketManifest) -> bytes:
    """The same request with another manifest."""
    if kind == "local":
        return manifest.encode_json().encode()
    request = json.loads(body)
    text = json.dumps({**_read_order(body), "manifest": manifest.encode_json()}).encode()
    # SGLang's wire format is a pickle
    pairs = [("order", torch.frombuffer(bytearray(text), dtype=torch.uint8))]
    payload = base64.b64encode(pickle.dumps(pairs)).decode()
    request["serialized_named_tensors"] = [payload] * len(request["serialized_named_tensors"])
    return json.dumps(request).encode()


def _read_order(body: bytes) -> dict[str, Any]:
    """The order in a request to SGLang: its JSON stands in the pickle as it is, so nothing has
    to be unpickled.
    """
    raw = base64.b64decode(json.loads(body)["serialized_named_tensors"][0])
    order, _ = json.JSONDecoder().raw_decode(raw[raw.index(b'{"') :].decode("latin-1"))
    return order


@dataclass(frozen=True)
class KeptBucket:
    """A bucket as it was sent, for `old_bucket`."""

    manifest: BucketManifest
    data: bytes


def keep(directory: Path, manifest: BucketManifest) -> KeptBucket:
    return KeptBucket(manifest, (directory / manifest.file).read_bytes()[: manifest.num_bytes])


@contextmanager
def damaged(
    kind: str,
    is_hidden: bool,
    directory: Path,
    manifest: BucketManifest,
    old: KeptBucket | None,
    random: Random,
) -> Iterator[tuple[BucketManifest, list[str]]]:
    """The manifest of the damaged bucket, which lies in the directory while the block runs, and the
    tensors that are wrong or missing in it: none where a bucket cannot be damaged this way.

    `is_hidden`: digests and version in the manifest are made to agree, so that the engine cannot
    see it on arrival. `old`: a bucket of an earlier sync.
    """
    data = bytearray((directory / manifest.file).read_bytes()[: manifest.num_bytes])
    changed = manifest
    names = [entry.name for entry in manifest.tensors]
    if kind == "drop_bucket":  # it is loaded as an empty one: the engine answers success
        changed = replace(manifest, tensors=())
    elif kind == "half_bucket":
        half = len(names) // 2
        changed = replace(manifest, tensors=manifest.tensors[:half])
        names = names[half:]
    elif kind == "swap_names":
        changed, names = _with_swapped_names(manifest)
    elif kind == "old_bucket" and old is not None:
        version = manifest.version if is_hidden else old.manifest.version
        changed = replace(old.manifest, version=version)
        data = bytearray(old.data)
    elif entries := [
        e for e in manifest.tensors if kind == "flip_byte" or len(e.shape) > 1 < e.shape[0]
    ]:
        entry = random.choice(entries)
        (_flip_byte if kind == "flip_byte" else _swap_rows)(data, entry, random)
        changed = _with_digest(manifest, entry, data) if is_hidden else manifest
        names = [entry.name]
    else:
        names = []
    path = directory / f"damaged-{manifest.file}"
    path.write_bytes(data)
    try:
        yield replace(changed, file=path.name), names
    finally:
        path.unlink(missing_ok=True)


def _with_swapped_names(manifest: BucketManifest) -> tuple[BucketManifest, list[str]]:
    by_shape: dict[tuple[object, ...], int] = {}
    for index, entry in enumerate(manifest.tensors):
        first = by_shape.setdefault((entry.dtype, entry.shape), index)
        if first != index and manifest.tensors[first].digest != entry.digest:
            tensors = list(manifest.tensors)
            names = [tensors[first].name, entry.name]
            tensors[first] = replace(tensors[first], name=names[1])
            tensors[index] = replace(entry, name=names[0])
            return replace(manifest, tensors=tuple(tensors)), names
    return manifest, []


def _flip_byte(data: bytearray, entry: TensorEntry, random: Random) -> None:
    data[entry.offset + random.randrange(entry.num_bytes)] ^= 1 << random.randrange(8)


def _swap_rows(data: bytearray, entry: TensorEntry, random: Random) -> None:
    size = entry.num_bytes // entry.shape[0]
    places = [entry.offset + row * size for row in random.sample(range(entry.shape[0]), 2)]
    first, second = (bytes(data[place : place + size]) for place in places)
    data[places[0] : places[0] + size] = second
    data[places[1] : places[1] + size] = first


def _with_digest(manifest: BucketManifest, entry: TensorEntry, data: bytearray) -> BucketManifest:
    raw = torch.frombuffer(
        bytearray(data[entry.offset : entry.offset + entry.num_bytes]), dtype=torch.uint8
    )
    found = format_digest(digest_tensor(raw.view(getattr(torch, entry.dtype))))
    tensors = tuple(replace(e, digest=found) if e is entry else e for e in manifest.tensors)
    return replace(manifest, tensors=tensors)
