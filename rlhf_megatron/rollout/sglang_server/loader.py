"""Runs inside each rank of a stock SGLang server, through its `--custom-weight-loader` hook.

The update call carries one tiny tensor: a JSON order. It names a bucket of the transfer directory, which is read from
there and loaded with the model's own `load_weights`; or it asks whether all that the model holds has come. The answer
is a receipt, a file beside the bucket: the error if there was one, the names that were loaded, digests of what stands
in the model afterwards. Imports nothing of this package but the manifest and the digest.
"""

from __future__ import annotations

import json
import logging
import mmap
import os
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlhf_megatron.resharding.digest import as_hex, digest
from rlhf_megatron.resharding.manifest import BucketManifest

logger = logging.getLogger(__name__)

TRANSFER_DIR = "RLHF_MEGATRON_TRANSFER_DIR"  # environment variable of the server
LOAD_FORMAT = "rlhf_megatron.rollout.sglang_server.loader.load"
FUSED = {  # SGLang's fused part -> its Hugging Face members in order
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
EXPERTS = {"w13_weight": ("gate_proj", "up_proj"), "w2_weight": ("down_proj",)}  # SGLang's [expert, rows, columns]
DESCRIBED = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "tie_word_embeddings",
    "num_experts",
    "moe_intermediate_size",
)
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(\w+)\.weight")
_NAMES_SHOWN = 3


def load(model: Any, named_tensors: list[tuple[str, Tensor]]) -> None:
    """Called by SGLang with the model of this rank. What goes wrong stands in the receipt: an exception here would end
    the server, where the client can say what happened and leave the engine STALE."""
    order = json.loads(bytes(named_tensors[0][1].cpu().tolist()).decode())
    try:
        directory = transfer_dir(order.get("directory"))
    except (KeyError, ValueError) as error:
        logger.error("an order cannot be carried out: %s %s", TRANSFER_DIR, error)
        return
    rank, size = _tensor_parallel()
    try:
        if "describe" in order:
            receipt = {"error": None, "model": describe(model)}
        elif "manifest" in order:
            receipt = _load_bucket(model, directory, BucketManifest.from_json(order["manifest"]), size)
        else:
            receipt = {"error": incomplete(model, _received(directory, order["receipts"], rank))}
    except Exception as error:  # told by the client
        receipt = {"error": f"{type(error).__name__}: {error}"}
    path = directory / f"{order['receipt']}.{rank}"
    aside = path.with_suffix(f".{rank}.tmp")
    try:
        aside.write_text(json.dumps(receipt))
        aside.rename(path)
    except OSError as error:  # the client sees that there is no receipt
        logger.error("a receipt cannot be written: %s", error)


def transfer_dir(name: str | None) -> Path:
    """The run's directory: the one that this server was started with, or one in it where the server is older than the
    run. Raises ValueError for what is no plain name."""
    base = Path(os.environ[TRANSFER_DIR])
    if name is None:
        return base
    if name in ("", ".", "..") or "/" in name:
        raise ValueError(f"{name!r} is not the plain name of a directory.")
    return base if base.name == name else base / name


def describe(model: Any) -> dict[str, Any]:
    """What this model is, by the names of config.json; the type of its weights."""
    config = getattr(model, "config", None)
    facts = {name: value for name in DESCRIBED if (value := getattr(config, name, None)) is not None}
    return {**facts, "dtype": str(next(model.parameters()).dtype).removeprefix("torch.")}


def _load_bucket(model: Any, directory: Path, manifest: BucketManifest, tp_size: int) -> dict[str, Any]:
    tensors = read_bucket(directory / manifest.file, manifest)
    model.load_weights(list(tensors.items()))
    digests = standing_digests(model, manifest) if tp_size == 1 else None
    return {"error": None, "names": list(tensors), "digests": digests}


def read_bucket(path: Path, manifest: BucketManifest) -> dict[str, Tensor]:
    """Copies of the bucket's tensors. Raises ValueError naming the tensor whose digest is wrong."""
    place = f"bucket {manifest.bucket} of {manifest.sender}"
    if path.is_symlink():
        raise ValueError(f"{place}: {path.name} is a link; only plain files of the transfer directory are read.")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
        if len(view) < manifest.num_bytes:
            raise ValueError(f"{place}: {path.name} has {len(view)} bytes, the manifest says {manifest.num_bytes}.")
        tensors = {}
        for entry in manifest.tensors:
            raw = bytearray(view[entry.offset : entry.offset + entry.num_bytes])
            tensor = torch.frombuffer(raw, dtype=getattr(torch, entry.dtype)).view(entry.shape)
            found = as_hex(digest(tensor))
            if found != entry.digest:
                raise ValueError(
                    f"{place}, tensor {entry.name!r}: digest {found} of the bytes received, {entry.digest} in the"
                    " manifest."
                )
            tensors[entry.name] = tensor
    return tensors


def standing_digests(model: Any, manifest: BucketManifest) -> dict[str, str | None]:
    """Digests of what stands in the model for the tensors of a bucket, by Hugging Face name; None: not found there."""
    parameters = dict(model.named_parameters())
    found: dict[str, str | None] = {}
    for entry in manifest.tensors:
        standing = _standing(parameters, entry.name, entry.shape[0])
        found[entry.name] = None if standing is None else as_hex(digest(standing[: entry.shape[0]]))
    return found


def _standing(parameters: dict[str, Tensor], name: str, num_rows: int) -> Tensor | None:
    """The rows of the model's own, possibly fused, parameter that `name` was loaded into."""
    if name in parameters:
        return parameters[name]
    if expert := _EXPERT.fullmatch(name):
        return _standing_expert(parameters, num_rows, expert)
    for fused, members in FUSED.items():
        for index, part in enumerate(members):
            parameter = parameters.get(name.replace(f".{part}.", f".{fused}."))
            if f".{part}." in name and parameter is not None:
                # Of q, k, v the last two are of one size, as are gate and up: so places count from the end.
                start = parameter.shape[0] - (len(members) - index) * num_rows if index else 0
                return parameter[start : start + num_rows]
    return None


def _standing_expert(parameters: dict[str, Tensor], num_rows: int, expert: re.Match[str]) -> Tensor | None:
    prefix, index, part = expert[1], int(expert[2]), expert[3]
    for fused, members in EXPERTS.items():
        parameter = parameters.get(f"{prefix}.{fused}")
        if part in members and parameter is not None:
            start = members.index(part) * num_rows
            return parameter[index, start : start + num_rows]
    return None


def incomplete(model: Any, received: set[str]) -> str | None:
    """What the model holds and did not get, in words; None: it got everything. `received`: Hugging Face names."""
    parameters = dict(model.named_parameters())
    missing = sorted(name for name, parameter in parameters.items() if not _has_come(name, parameter, received))
    if not missing:
        return None
    names = ", ".join(missing[:_NAMES_SHOWN]) + (" and others" if len(missing) > _NAMES_SHOWN else "")
    return f"{len(missing)} of {len(parameters)} parameters never came whole: {names}."


def _has_come(name: str, parameter: Tensor, received: set[str]) -> bool:
    if name in received:
        return True
    prefix, _, last = name.rpartition(".")
    if last in EXPERTS:  # under expert parallelism a rank holds some of them: their number is what can be compared
        pattern = re.compile(rf"{re.escape(prefix)}\.\d+\.({'|'.join(EXPERTS[last])})\.weight")
        return sum(bool(pattern.fullmatch(other)) for other in received) >= parameter.shape[0] * len(EXPERTS[last])
    for fused, members in FUSED.items():
        if f".{fused}." in name:
            return all(name.replace(f".{fused}.", f".{member}.") in received for member in members)
    return False


def _received(directory: Path, prefix: str, rank: int) -> set[str]:
    """Names that this rank's receipts of the running sync list. Raises ValueError with the error of a failed bucket."""
    names: set[str] = set()
    for path in directory.glob(f"{prefix}*.{rank}"):
        receipt = json.loads(path.read_text())
        if receipt["error"]:
            raise ValueError(receipt["error"])
        names.update(receipt["names"])
    return names


def _tensor_parallel() -> tuple[int, int]:
    """(rank, size) of this process inside its server."""
    from sglang.srt.distributed.parallel_state import (
        get_tensor_model_parallel_rank,
        get_tensor_model_parallel_world_size,
    )

    return get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
