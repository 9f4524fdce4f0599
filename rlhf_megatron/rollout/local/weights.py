"""The receiving side of a weight sync: a transaction over the parameters of the served model.

A bucket is checked as a whole (file, names, shapes, dtypes) before a single byte is written, and after that its digests
are compared with those of what stands in the parameters. Under FP8 that is blocks and scales; a `commit` makes of
them the numbers that they stand for, with which the model computes. From `begin` until a `commit` that saw all of every
parameter the engine is STALE, and it stays so after any failure.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlhf_megatron.checkpoint.quantised import FP8_BLOCK, SCALE, from_fp8, is_in_fp8, to_fp8
from rlhf_megatron.models.table import Span
from rlhf_megatron.parallel.device import synchronize
from rlhf_megatron.parallel.links import Invitation
from rlhf_megatron.resharding.buffers import Segment, map_bucket, open_segments, views
from rlhf_megatron.resharding.digest import as_hex, digest, digest_part
from rlhf_megatron.resharding.manifest import DTYPE_BYTES, BucketManifest, TensorEntry
from rlhf_megatron.resharding.messages import BUCKET_TIMEOUT_S, Exchange, OpenLinks, take
from rlhf_megatron.resharding.shards import is_whole
from rlhf_megatron.rollout.local.model import storage_bytes


@dataclass(frozen=True)
class Part:
    """A parameter of transformers' model, or what one expert has of it."""

    parameter: Tensor
    expert: int | None = None
    start: int = 0  # rows of the expert's matrix
    stop: int = 0

    @property
    def tensor(self) -> Tensor:
        return self.parameter.data if self.expert is None else self.parameter.data[self.expert, self.start : self.stop]


WEIGHT_BUFFER = ".e_score_correction_bias"
_FUSED = re.compile(r"(.*\.)mlp\.experts\.(gate_up_proj|down_proj)")
_ENTRIES = re.compile(r"(.*\.mlp\.experts\.)((?:gate_up|down)_proj(?:_bias)?)")
_MATRICES = ("mlp", "gate_proj", "up_proj", "down_proj")
_ON_DISK = {"mixtral": ("block_sparse_moe", "w1", "w3", "w2")}


def named_parts(module: Any) -> Iterator[tuple[str, Part]]:
    """(name on disk, part) of every tensor. transformers keeps a layer's experts in two, on disk each has three.

    Of GPT-OSS, whose files do not tell experts apart either, an expert has an entry of each tensor, biases too.
    """
    kind = getattr(getattr(module, "config", None), "model_type", "")
    block, gate, up, down = _ON_DISK.get(kind, _MATRICES)
    buffers = [(name, buffer) for name, buffer in module.named_buffers() if name.endswith(WEIGHT_BUFFER)]
    for name, parameter in [*module.named_parameters(), *buffers]:
        if kind == "gpt_oss" and (found := _ENTRIES.fullmatch(name)):
            for expert, entry in enumerate(parameter):
                yield f"{found[1]}{expert}.{found[2]}", Part(parameter, expert, 0, len(entry))
            continue
        found = _FUSED.fullmatch(name)
        if found is None:
            yield name.replace(".mlp.gate.", f".{block}.gate."), Part(parameter)
            continue
        rows, half = parameter.shape[1], parameter.shape[1] // 2
        matrices = {gate: (0, half), up: (half, rows)} if found[2] == "gate_up_proj" else {down: (0, rows)}
        for expert in range(parameter.shape[0]):
            for matrix, (start, stop) in matrices.items():
                yield f"{found[1]}{block}.experts.{expert}.{matrix}.weight", Part(parameter, expert, start, stop)


class WeightReceiver:
    """Parameters by Hugging Face tensor name (a tied head is the embedding's, once) and their version.

    They are fit to serve when `stale_reason` is None.
    """

    def __init__(
        self, module: torch.nn.Module, transfer_dir: Path | None, is_loaded: bool, is_fp8: bool = False
    ) -> None:
        """`is_fp8`: matrices come in FP8 (`resharding.quantised`)."""
        self.transfer_dir = transfer_dir
        self.version: int | None = None
        self.stale_reason = None if is_loaded else "it was started without weights and waits for the first sync"
        self._parts = dict(named_parts(module))
        self._computed = {name: part for name, part in self._parts.items() if is_fp8 and is_in_fp8(name)}
        for name, part in self._computed.items():
            blocks, scales = to_fp8(torch.zeros_like(part.tensor))
            self._parts |= {name: Part(blocks), name + SCALE: Part(scales)}
        self._shapes = {name: tuple(part.tensor.shape) for name, part in self._parts.items()}
        of_blocks = [self._parts[name + end].parameter for name in self._computed for end in ("", SCALE)]
        self._parameters = [(parameter, parameter.shape) for parameter in (*module.parameters(), *of_blocks)]
        self._open_version: int | None = None  # of the transaction
        self._standing: dict[str, dict[Span, int]] = {}  # name -> digests of its parts, taken when they were written
        self.is_released = False
        self.links = OpenLinks()

    def begin(self, version: int, full_resync: bool) -> None:
        """Raises ValueError when `version` is not above the one that stands, or memory is released."""
        lowest = -1 if self.version is None else self.version - int(full_resync)
        if version <= lowest or version < 0:
            raise ValueError(
                f"version {version} must be above {lowest} (versions only rise); full_resync allows the same version"
                " again."
            )
        if self.is_released:
            raise ValueError("the weights' memory is released; resume_memory must come before a weight sync.")
        self._open_version = version
        self._standing = {}
        self.stale_reason = f"a weight sync to version {version} is under way"

    def join(self, invitation: Invitation, sender: str, num_senders: int) -> None:
        """Joins a link with a copy of the trainer. Raises RuntimeError where one does not come in time."""
        self.links.join(invitation, sender, num_senders, 0, self._device)

    @property
    def _device(self) -> torch.device:
        return self._parameters[0][0].device

    def load(
        self, manifest: BucketManifest, memory: Sequence[Segment] | None = None, exchange: Exchange | None = None
    ) -> None:
        """Check a bucket, in its file, in `memory` or as it comes by the `exchange`, and copy it into the parameters.
        It may be overwritten then.

        Raises ValueError. The sync has failed then, but for a bucket of another sync, which changes nothing.
        """
        if manifest.version != self._open_version:
            raise ValueError(f"bucket of version {manifest.version}, but the open sync is {self._open_version}.")
        try:
            pieces: list[tuple[int, Tensor]] = []
            if exchange is not None:
                given = self._taken(manifest, exchange)
            else:
                pieces = [(0, self._mapped(manifest))] if memory is None else open_segments(memory)
                given = views(manifest, *pieces)
            targets = [self._checked(manifest, entry) for entry in manifest.tensors]
            with torch.no_grad():
                for entry, target in zip(manifest.tensors, targets, strict=True):
                    target.copy_(given[entry.key])
                    self._require_as_sent(manifest, entry, target)
            for _, piece in pieces:
                synchronize(piece.device)  # the copies are under way
        except Exception as error:
            self._fail(str(error))
            raise

    def _taken(self, manifest: BucketManifest, exchange: Exchange) -> dict[str, Tensor]:
        came = take(exchange, manifest, self.links.find(exchange.link), 0, self._device, BUCKET_TIMEOUT_S)
        for entry in manifest.tensors:
            if entry.key not in came or came[entry.key][0].shape_in(entry.shape) != entry.span.shape_in(entry.shape):
                raise ValueError(f"{manifest.place}: tensor {entry.key!r} did not come whole.")
        return {key: values for key, (_, values) in came.items()}

    def _mapped(self, manifest: BucketManifest) -> Tensor:
        if self.transfer_dir is None:
            raise ValueError("the engine was started without --transfer-dir and takes no buckets.")
        try:
            return map_bucket(self.transfer_dir / manifest.file, manifest)
        except OSError as error:
            words = f"{error.strerror}; the sender must write a plain file there first."
            raise ValueError(f"{manifest.place}, file {manifest.file!r}: {words}") from error

    def _checked(self, manifest: BucketManifest, entry: TensorEntry) -> Tensor:
        """Return an entry's place in the model. Raises ValueError for an entry that does not fit."""
        where = f"{manifest.place}, tensor {entry.name!r}"
        if entry.name not in self._parts:
            raise ValueError(f"{where}: the engine's model has no parameter of that name (a tied head is not sent).")
        part = self._parts[entry.name]
        if entry.shape != self._shapes[entry.name] or getattr(torch, entry.dtype) != part.parameter.dtype:
            raise ValueError(
                f"{where}: sent as {entry.dtype} {entry.shape}, but the engine holds"
                f" {str(part.parameter.dtype).removeprefix('torch.')} {self._shapes[entry.name]}."
            )
        if entry.offset % DTYPE_BYTES[entry.dtype]:
            raise ValueError(f"{where}: offset {entry.offset} is not a multiple of {DTYPE_BYTES[entry.dtype]} bytes.")
        return part.tensor.narrow(*astuple(entry.span))

    def _require_as_sent(self, manifest: BucketManifest, entry: TensorEntry, target: Tensor) -> None:
        where, span = f"{manifest.place}, tensor {entry.name!r}", entry.span
        found = digest_part(target, entry.shape, span.axis, span.start)
        if as_hex(found) != entry.digest:
            raise ValueError(
                f"{where}: digest {as_hex(found)} of what stands after loading, {entry.digest} in the manifest."
            )
        before = self._standing.setdefault(entry.name, {}).setdefault(span, found)
        if before != found:
            raise ValueError(f"{where}: sent twice in this sync, the first time with digest {as_hex(before)}.")

    def commit(self, version: int) -> None:
        """Raises ValueError when `version` is not the open one, or a parameter never came (the sync failed)."""
        if self._open_version is None and self.stale_reason is None and version == self.version:
            return  # the answer to the first call was lost
        if version != self._open_version:
            raise ValueError(f"commit of version {version}, but the open sync is {self._open_version}.")
        missing = sorted(name for name in self._parts if not self._has_come(name))
        if missing:
            names = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
            problem = f"{len(missing)} of {len(self._parts)} tensors never came whole: {names}."
            self._fail(problem)
            raise ValueError(f"commit of version {version}: {problem}")
        for name, part in self._computed.items():
            blocks, scales = self._parts[name].tensor, self._parts[name + SCALE].tensor
            part.tensor.copy_(from_fp8(blocks, scales, FP8_BLOCK, part.tensor.dtype))
        self.version, self._open_version, self.stale_reason = version, None, None

    def _has_come(self, name: str) -> bool:
        spans = self._standing.get(name, {})
        return bool(spans) and is_whole(spans, self._shapes[name])

    def _fail(self, reason: str) -> None:
        self.stale_reason = f"the weight sync to version {self._open_version} failed ({reason.rstrip('.')})"
        self._open_version, self._standing = None, {}

    def digests(self) -> dict[str, str]:
        """Digests of what stands in the model: those that were taken in the last sync, when it was written; else they
        are taken now. Raises ValueError while memory is released."""
        if self.is_released:
            raise ValueError("the weights' memory is released; there is nothing to digest.")
        return {
            name: as_hex(sum(self._standing[name].values()) if self._has_come(name) else digest(part.tensor))
            for name, part in self._parts.items()
        }

    @property
    def is_open(self) -> bool:
        """Whether a sync is under way: `begin` was called, and neither a commit nor a failure came since."""
        return self._open_version is not None

    @property
    def num_bytes(self) -> int:
        """Memory of the parameters."""
        return storage_bytes(parameter for parameter, _ in self._parameters)

    def release(self) -> None:
        """Free the parameters' memory."""
        for parameter, _ in self._parameters:
            parameter.data = parameter.data.new_empty(0)
        self._open_version, self._standing = None, {}
        self.is_released = True
        self.stale_reason = "its memory is released (weights); resume_memory and a full weight sync must come first"

    def resume(self) -> None:
        """Allocate the parameters again; they are zero until the next sync."""
        if not self.is_released:
            return
        for parameter, shape in self._parameters:
            parameter.data = parameter.data.new_zeros(shape)
        self.is_released = False
        self.stale_reason = "its weights were released and have not been sent again"
