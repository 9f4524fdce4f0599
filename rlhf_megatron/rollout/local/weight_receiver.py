"""The receiving side of a weight sync: a transaction over the parameters of the served model.

A bucket is checked as a whole (file, names, shapes, dtypes) before a single byte is written, and
then its digests are compared with digests of the values in the parameters. Under FP8 these values
are blocks and scales; `commit_sync` computes from them the numbers that the model uses. From
`begin_sync` until a `commit_sync` that saw all of every parameter the engine is STALE, and it stays
STALE after any failure.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlhf_megatron.device import synchronize_device
from rlhf_megatron.rollout.local.local_model import count_storage_bytes
from rlhf_megatron.weights.bucket_buffers import (
    LentSegment,
    map_bucket_file,
    open_lent_segments,
    view_bucket_tensors,
)
from rlhf_megatron.weights.bucket_manifest import DTYPE_BYTES, BucketManifest, TensorEntry
from rlhf_megatron.weights.bucket_messages import (
    BUCKET_TIMEOUT_S,
    BucketExchange,
    EngineRankLinks,
    receive_bucket,
)
from rlhf_megatron.weights.engine_links import LinkInvitation
from rlhf_megatron.weights.quantised_weights import (
    FP8_BLOCK,
    SCALE,
    dequantise_fp8,
    is_stored_in_fp8,
    quantise_to_fp8,
)
from rlhf_megatron.weights.shard_plan import spans_cover_tensor
from rlhf_megatron.weights.tensor_digest import digest_tensor, digest_tensor_part, format_digest
from rlhf_megatron.weights.weight_table import TensorSpan

WEIGHT_BUFFER = ".e_score_correction_bias"
_FUSED_EXPERTS_PATTERN = re.compile(r"(.*\.)mlp\.experts\.(gate_up_proj|down_proj)")
_EXPERT_ENTRY_PATTERN = re.compile(r"(.*\.mlp\.experts\.)((?:gate_up|down)_proj(?:_bias)?)")
_DEFAULT_EXPERT_NAMES = ("mlp", "gate_proj", "up_proj", "down_proj")
_EXPERT_NAMES_ON_DISK = {"mixtral": ("block_sparse_moe", "w1", "w3", "w2")}


@dataclass(frozen=True)
class ParameterSlice:
    """A parameter of the transformers model, or one expert's part of a parameter."""

    parameter: Tensor
    expert: int | None = None
    start: int = 0  # rows of the expert's matrix
    stop: int = 0

    @property
    def tensor(self) -> Tensor:
        """Return a view of the parameter, or of the expert's rows in it."""
        return (
            self.parameter.data
            if self.expert is None
            else self.parameter.data[self.expert, self.start : self.stop]
        )


def iterate_parameter_slices(module: Any) -> Iterator[tuple[str, ParameterSlice]]:
    """Yield (name on disk, slice) of every tensor of the model. transformers fuses all experts of a
    layer in two parameters; on disk each expert has three tensors.

    GPT-OSS, whose files also fuse the experts, gets one entry for each expert and parameter, biases
    too.
    """
    kind = getattr(getattr(module, "config", None), "model_type", "")
    block, gate, up, down = _EXPERT_NAMES_ON_DISK.get(kind, _DEFAULT_EXPERT_NAMES)
    buffers = [
        (name, buffer) for name, buffer in module.named_buffers() if name.endswith(WEIGHT_BUFFER)
    ]
    for name, parameter in [*module.named_parameters(), *buffers]:
        if kind == "gpt_oss" and (found := _EXPERT_ENTRY_PATTERN.fullmatch(name)):
            for expert, entry in enumerate(parameter):
                yield (
                    f"{found[1]}{expert}.{found[2]}",
                    ParameterSlice(parameter, expert, 0, len(entry)),
                )
            continue
        found = _FUSED_EXPERTS_PATTERN.fullmatch(name)
        if found is None:
            yield name.replace(".mlp.gate.", f".{block}.gate."), ParameterSlice(parameter)
            continue
        rows = parameter.shape[1]
        half = parameter.shape[1] // 2
        matrices = (
            {gate: (0, half), up: (half, rows)} if found[2] == "gate_up_proj" else {down: (0, rows)}
        )
        for expert in range(parameter.shape[0]):
            for matrix, (start, stop) in matrices.items():
                yield (
                    f"{found[1]}{block}.experts.{expert}.{matrix}.weight",
                    ParameterSlice(parameter, expert, start, stop),
                )


class WeightReceiver:
    """Receives weight syncs into the parameters of the served model, by Hugging Face tensor name (a
    tied head is the embedding's, once), and knows their version.

    The weights are fit to serve when `stale_reason` is None.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        transfer_dir: Path | None,
        is_loaded: bool,
        is_fp8: bool = False,
    ) -> None:
        """Prepare the parameters of `module` for syncs. `is_loaded`: they hold weights that may be
        served already. `is_fp8`: matrices are sent in FP8 with scales
        (`weights.quantised_weights`). Without `transfer_dir` no bucket files are taken.
        """
        self.transfer_dir = transfer_dir
        self.version: int | None = None
        self.stale_reason = (
            None if is_loaded else "it was started without weights and waits for the first sync"
        )
        self._slice_by_name = dict(iterate_parameter_slices(module))
        self._dequantised_by_name = {
            name: part
            for name, part in self._slice_by_name.items()
            if is_fp8 and is_stored_in_fp8(name)
        }
        for name, part in self._dequantised_by_name.items():
            blocks, scales = quantise_to_fp8(torch.zeros_like(part.tensor))
            self._slice_by_name |= {
                name: ParameterSlice(blocks),
                name + SCALE: ParameterSlice(scales),
            }
        self._shape_by_name = {
            name: tuple(part.tensor.shape) for name, part in self._slice_by_name.items()
        }
        of_blocks = [
            self._slice_by_name[name + end].parameter
            for name in self._dequantised_by_name
            for end in ("", SCALE)
        ]
        self._parameters = [
            (parameter, parameter.shape) for parameter in (*module.parameters(), *of_blocks)
        ]
        self._open_version: int | None = None  # of the transaction
        # name -> digests of its parts, taken when they were written
        self._digest_by_span: dict[str, dict[TensorSpan, int]] = {}
        self.is_released = False
        self.links = EngineRankLinks()

    def begin_sync(self, version: int, is_full_resync: bool) -> None:
        """Open a sync to `version`, after which the weights are STALE until its commit; a sync that
        was open is dropped. Raise ValueError when `version` is not above the current one (with
        `is_full_resync` it may be equal), or the memory is released.
        """
        lowest = -1 if self.version is None else self.version - int(is_full_resync)
        if version <= lowest or version < 0:
            raise ValueError(
                f"version {version} must be above {lowest} (versions only rise); full_resync"
                " allows the same version again."
            )
        if self.is_released:
            raise ValueError(
                "the weights' memory is released; resume_memory must come before a weight sync."
            )
        self._open_version = version
        self._digest_by_span = {}
        self.stale_reason = f"a weight sync to version {version} is under way"

    def join_link(self, invitation: LinkInvitation, sender: str, num_senders: int) -> None:
        """Join a link with one copy of the trainer's model. Raise RuntimeError where a rank does
        not join in time.
        """
        self.links.join_link(invitation, sender, num_senders, 0, self._device)

    @property
    def _device(self) -> torch.device:
        """Return the device of the parameters."""
        return self._parameters[0][0].device

    def load_bucket(
        self,
        manifest: BucketManifest,
        segments: Sequence[LentSegment] | None = None,
        exchange: BucketExchange | None = None,
    ) -> None:
        """Check a bucket and copy it into the parameters. The bucket lies in its file, in
        `segments`, or comes by the `exchange`; its memory may be overwritten after the return.

        Raise ValueError. The sync has failed then, except for a bucket of another version, which
        changes nothing.
        """
        if manifest.version != self._open_version:
            raise ValueError(
                f"bucket of version {manifest.version}, but the open sync is {self._open_version}."
            )
        try:
            pieces: list[tuple[int, Tensor]] = []
            if exchange is not None:
                given = self._receive_exchange(manifest, exchange)
            else:
                pieces = (
                    [(0, self._map_bucket_file(manifest))]
                    if segments is None
                    else open_lent_segments(segments)
                )
                given = view_bucket_tensors(manifest, pieces)
            targets = [self._find_target_tensor(manifest, entry) for entry in manifest.tensors]
            with torch.no_grad():
                for entry, target in zip(manifest.tensors, targets, strict=True):
                    target.copy_(given[entry.key])
                    self._require_sent_digest(manifest, entry, target)
            for _, piece in pieces:
                synchronize_device(piece.device)  # the copies are under way
        except Exception as error:
            self._fail_sync(str(error))
            raise

    def _receive_exchange(
        self, manifest: BucketManifest, exchange: BucketExchange
    ) -> dict[str, Tensor]:
        """Receive the messages of the exchange and return the tensor of each entry, by key. Raise
        ValueError where one did not come whole.
        """
        came = receive_bucket(
            exchange,
            manifest,
            self.links.find_link(exchange.link),
            0,
            self._device,
            BUCKET_TIMEOUT_S,
        )
        for entry in manifest.tensors:
            if entry.key not in came or came[entry.key][0].shape_within(
                entry.shape
            ) != entry.span.shape_within(entry.shape):
                raise ValueError(f"{manifest.label}: tensor {entry.key!r} did not come whole.")
        return {key: values for key, (_, values) in came.items()}

    def _map_bucket_file(self, manifest: BucketManifest) -> Tensor:
        """Return the bytes of the bucket's file as a mapped tensor. Raise ValueError where there is
        no such file or no transfer directory.
        """
        if self.transfer_dir is None:
            raise ValueError("the engine was started without --transfer-dir and takes no buckets.")
        try:
            return map_bucket_file(self.transfer_dir / manifest.file, manifest)
        except OSError as error:
            words = f"{error.strerror}; the sender must write a plain file there first."
            raise ValueError(f"{manifest.label}, file {manifest.file!r}: {words}") from error

    def _find_target_tensor(self, manifest: BucketManifest, entry: TensorEntry) -> Tensor:
        """Return the view of the model's tensor that an entry of the manifest goes to. Raise
        ValueError for an entry that does not fit.
        """
        where = f"{manifest.label}, tensor {entry.name!r}"
        if entry.name not in self._slice_by_name:
            raise ValueError(
                f"{where}: the engine's model has no parameter of that name (a tied head"
                " is not sent)."
            )
        part = self._slice_by_name[entry.name]
        if (
            entry.shape != self._shape_by_name[entry.name]
            or getattr(torch, entry.dtype) != part.parameter.dtype
        ):
            raise ValueError(
                f"{where}: sent as {entry.dtype} {entry.shape}, but the engine holds"
                f" {str(part.parameter.dtype).removeprefix('torch.')}"
                f" {self._shape_by_name[entry.name]}."
            )
        if entry.offset % DTYPE_BYTES[entry.dtype]:
            raise ValueError(
                f"{where}: offset {entry.offset} is not a multiple of"
                f" {DTYPE_BYTES[entry.dtype]} bytes."
            )
        return part.tensor.narrow(*astuple(entry.span))

    def _require_sent_digest(
        self, manifest: BucketManifest, entry: TensorEntry, target: Tensor
    ) -> None:
        """Digest the values that were loaded and note the digest. Raise ValueError where it differs
        from the manifest's, or the part was sent before with another digest.
        """
        where = f"{manifest.label}, tensor {entry.name!r}"
        span = entry.span
        found = digest_tensor_part(target, entry.shape, span.dim, span.start)
        if format_digest(found) != entry.digest:
            raise ValueError(
                f"{where}: digest {format_digest(found)} of what stands after loading,"
                f" {entry.digest} in the manifest."
            )
        before = self._digest_by_span.setdefault(entry.name, {}).setdefault(span, found)
        if before != found:
            raise ValueError(
                f"{where}: sent twice in this sync, the first time with"
                f" digest {format_digest(before)}."
            )

    def commit_sync(self, version: int) -> None:
        """Close the sync: compute the parameters from FP8 blocks where they come so, and mark the
        weights as fit to serve, with `version`. Do nothing where that version is committed already.
        Raise ValueError when `version` is not the open one, or a tensor never came whole (the sync
        has failed then).
        """
        if self._open_version is None and self.stale_reason is None and version == self.version:
            return  # the answer to the first call was lost
        if version != self._open_version:
            raise ValueError(
                f"commit of version {version}, but the open sync is {self._open_version}."
            )
        missing = sorted(name for name in self._slice_by_name if not self._has_arrived_whole(name))
        if missing:
            names = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
            problem = (
                f"{len(missing)} of {len(self._slice_by_name)} tensors never came whole: {names}."
            )
            self._fail_sync(problem)
            raise ValueError(f"commit of version {version}: {problem}")
        for name, part in self._dequantised_by_name.items():
            blocks = self._slice_by_name[name].tensor
            scales = self._slice_by_name[name + SCALE].tensor
            part.tensor.copy_(dequantise_fp8(blocks, scales, FP8_BLOCK, part.tensor.dtype))
        self.version = version
        self._open_version = None
        self.stale_reason = None

    def _has_arrived_whole(self, name: str) -> bool:
        """Return whether all parts of this tensor came in the current sync."""
        spans = self._digest_by_span.get(name, {})
        return bool(spans) and spans_cover_tensor(spans, self._shape_by_name[name])

    def _fail_sync(self, reason: str) -> None:
        """End the open sync as failed; the weights stay STALE for this reason."""
        self.stale_reason = (
            f"the weight sync to version {self._open_version} failed ({reason.rstrip('.')})"
        )
        self._open_version = None
        self._digest_by_span = {}

    def compute_digests(self) -> dict[str, str]:
        """Return the digest of each tensor of the model, by name: the one taken when the last sync
        wrote it, else computed now. Raise ValueError while the memory is released.
        """
        if self.is_released:
            raise ValueError("the weights' memory is released; there is nothing to digest.")
        return {
            name: format_digest(
                sum(self._digest_by_span[name].values())
                if self._has_arrived_whole(name)
                else digest_tensor(part.tensor)
            )
            for name, part in self._slice_by_name.items()
        }

    @property
    def is_sync_open(self) -> bool:
        """Return whether a sync is open: begun, and neither committed nor failed."""
        return self._open_version is not None

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the parameters."""
        return count_storage_bytes(parameter for parameter, _ in self._parameters)

    def release_memory(self) -> None:
        """Free the memory of the parameters and drop an open sync; the weights are STALE."""
        for parameter, _ in self._parameters:
            parameter.data = parameter.data.new_empty(0)
        self._open_version = None
        self._digest_by_span = {}
        self.is_released = True
        self.stale_reason = (
            "its memory is released (weights); resume_memory and a full weight sync must come first"
        )

    def restore_memory(self) -> None:
        """Allocate the parameters again, as zeros; the weights stay STALE until the next sync. Do
        nothing where the memory was not released.
        """
        if not self.is_released:
            return
        for parameter, shape in self._parameters:
            parameter.data = parameter.data.new_zeros(shape)
        self.is_released = False
        self.stale_reason = "its weights were released and have not been sent again"
