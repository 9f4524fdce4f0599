"""Runs inside each rank of a stock SGLang server, through its `--custom-weight-loader` hook.

The update call carries one tiny tensor: a JSON order that names a bucket of the transfer directory. The bucket is read
from there, loaded with the model's own `load_weights`, and a receipt is written: digests of what stands in the model
afterwards, in Hugging Face names. Imports nothing of this package but the manifest and the digest.
"""

from __future__ import annotations

import json
import mmap
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlhf_megatron.resharding.digest import as_hex, digest
from rlhf_megatron.resharding.manifest import BucketManifest

TRANSFER_DIR = "RLHF_MEGATRON_TRANSFER_DIR"  # environment variable of the server
LOAD_FORMAT = "rlhf_megatron.rollout.sglang_server.loader.load"
STACKED = {  # Hugging Face part -> (SGLang's fused part, the members in order)
    "q_proj": ("qkv_proj", ("q_proj", "k_proj", "v_proj")),
    "k_proj": ("qkv_proj", ("q_proj", "k_proj", "v_proj")),
    "v_proj": ("qkv_proj", ("q_proj", "k_proj", "v_proj")),
    "gate_proj": ("gate_up_proj", ("gate_proj", "up_proj")),
    "up_proj": ("gate_up_proj", ("gate_proj", "up_proj")),
}


def load(model: Any, named_tensors: list[tuple[str, Tensor]]) -> None:
    """Called by SGLang with the model of this rank. What goes wrong stands in the receipt: an exception here would end
    the server, where the client can say what happened and leave the engine STALE."""
    order = json.loads(bytes(named_tensors[0][1].cpu().tolist()).decode())
    directory = Path(os.environ[TRANSFER_DIR])
    rank, size = _tensor_parallel()
    receipt: dict[str, Any] = {"error": None, "digests": None}
    try:
        manifest = BucketManifest.from_json(order["manifest"])
        model.load_weights(list(read_bucket(directory / manifest.file, manifest).items()))
        if size == 1:
            receipt["digests"] = standing_digests(model, manifest)
    except Exception as error:  # told by the client
        receipt["error"] = f"{type(error).__name__}: {error}"
    path = directory / f"{order['receipt']}.{rank}"
    aside = path.with_suffix(".tmp")
    aside.write_text(json.dumps(receipt))
    aside.rename(path)


def read_bucket(path: Path, manifest: BucketManifest) -> dict[str, Tensor]:
    """Copies of the bucket's tensors. Raises ValueError naming the tensor whose digest is wrong."""
    if path.is_symlink():
        raise ValueError(f"bucket {path.name} is a link; only plain files of the transfer directory are read.")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
        if len(view) < manifest.num_bytes:
            raise ValueError(f"bucket {path.name} has {len(view)} bytes, the manifest says {manifest.num_bytes}.")
        tensors = {}
        for entry in manifest.tensors:
            raw = bytearray(view[entry.offset : entry.offset + entry.num_bytes])
            tensor = torch.frombuffer(raw, dtype=getattr(torch, entry.dtype)).view(entry.shape)
            if as_hex(digest(tensor)) != entry.digest:
                raise ValueError(f"tensor {entry.name} of bucket {manifest.bucket} from {manifest.sender} is corrupt.")
            tensors[entry.name] = tensor
    return tensors


def standing_digests(model: Any, manifest: BucketManifest) -> dict[str, str | None]:
    """Digests of what stands in the model for the tensors of a bucket, by Hugging Face name; None: not found there."""
    parameters = dict(model.named_parameters())
    rows = {entry.name: entry.shape[0] for entry in manifest.tensors}
    found: dict[str, str | None] = {}
    for entry in manifest.tensors:
        standing = _standing(parameters, rows, entry.name)
        found[entry.name] = None if standing is None else as_hex(digest(standing[: entry.shape[0]]))
    return found


def _standing(parameters: dict[str, Tensor], rows: dict[str, int], name: str) -> Tensor | None:
    """The rows of the model's own, possibly fused, parameter that `name` was loaded into."""
    if name in parameters:
        return parameters[name]
    for part, (fused, members) in STACKED.items():
        if f".{part}." not in name:
            continue
        parameter = parameters.get(name.replace(f".{part}.", f".{fused}."))
        if parameter is None:
            return None
        before = members[: members.index(part)]
        start = sum(rows[name.replace(f".{part}.", f".{member}.")] for member in before)
        return parameter[start : start + rows[name]]
    return None


def _tensor_parallel() -> tuple[int, int]:
    """(rank, size) of this process inside its server."""
    from sglang.srt.distributed.parallel_state import (
        get_tensor_model_parallel_rank,
        get_tensor_model_parallel_world_size,
    )

    return get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
