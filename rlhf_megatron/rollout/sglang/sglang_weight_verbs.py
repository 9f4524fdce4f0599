"""A weight sync as said to an SGLang server: the verbs, and the receipts by which its ranks tell
what stands in them.

Each rank tells of the parts that it holds (`server.loader`); a receipt is the JSON of one rank.
Ranks that hold the same part must agree, parts must cover the tensor once, and their digests add up
to the digest of what stands.
"""

from __future__ import annotations

import base64
import json
import pickle
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from rlhf_megatron.rollout.engine_interface import EngineAddress, EngineError
from rlhf_megatron.rollout.fleet.engine_calls import list_sample_names
from rlhf_megatron.rollout.http_client import HttpClient
from rlhf_megatron.rollout.sglang.server.loader import LOAD_FORMAT
from rlhf_megatron.weights.bucket_buffers import LentSegments
from rlhf_megatron.weights.bucket_manifest import BucketManifest
from rlhf_megatron.weights.bucket_messages import BucketExchange, HeldSpansByRank
from rlhf_megatron.weights.engine_links import LinkInvitation
from rlhf_megatron.weights.tensor_digest import format_digest
from rlhf_megatron.weights.weight_table import HFTensor, TensorSpan

Receipt = Mapping[str, Any]
_TENSORS_SHOWN = 3

WEIGHT_VERB_TIMEOUT_S = 600.0
_UPDATE_FROM_TENSOR_PATH = "/update_weights_from_tensor"


@dataclass(frozen=True)
class PartDigest:
    """The digest of entries start .. start + num_entries - 1 along `axis`, as one rank holds
    them.
    """

    rank: int
    axis: int
    start: int
    num_entries: int
    digest: str

    @property
    def span_key(self) -> tuple[int, int, int]:
        """Return (axis, start, number of entries)."""
        return self.axis, self.start, self.num_entries


@dataclass(frozen=True)
class LoadedWeights:
    """The state of some tensors in an engine, by `TensorEntry.key`: of each, or of each part
    that was sent.
    """

    digest_by_key: dict[str, str] = field(default_factory=dict)  # of those that stand
    # of those that do not: why, in words
    fault_by_key: dict[str, str] = field(default_factory=dict)
    # of those that cannot be compared (quantised): why
    incomparable_by_key: dict[str, str] = field(default_factory=dict)

    def __or__(self, other: LoadedWeights) -> LoadedWeights:
        """Return the states of both, the other's where both have a key."""
        return LoadedWeights(
            self.digest_by_key | other.digest_by_key,
            self.fault_by_key | other.fault_by_key,
            self.incomparable_by_key | other.incomparable_by_key,
        )

    def merge_by_tensor_name(self) -> dict[str, str]:
        """Return the digest of each tensor, summed over its parts, or a message where the tensor
        does not stand as it was sent.
        """
        found: dict[str, int] = {}
        for key, digest in self.digest_by_key.items():
            found[_get_tensor_name(key)] = found.get(_get_tensor_name(key), 0) + int(digest, 16)
        return {name: format_digest(value) for name, value in found.items()} | {
            _get_tensor_name(key): words for key, words in self.fault_by_key.items()
        }


def _get_tensor_name(key: str) -> str:
    """Return the tensor name in a `TensorEntry.key`, without the span."""
    return key.partition("[")[0]


def combine_bucket_receipts(receipts: Sequence[Receipt]) -> LoadedWeights:
    """Join the receipts that all ranks of the server wrote for one bucket."""
    found = LoadedWeights()
    for key, (shape, span, _) in receipts[0]["tensors"].items():
        unlike, misfits = (
            [r[kind][key] for r in receipts if key in r[kind]] for kind in ("unlike", "misfits")
        )
        parts = [
            PartDigest(r["rank"], axis, start, num_entries, digest)
            for r in receipts
            for axis, start, num_entries, digest in r["parts"].get(key, ())
        ]
        if unlike:
            found.incomparable_by_key[key] = unlike[0]
            continue
        if misfits:
            fault = misfits[0]
        else:
            dim, first, count = span
            fault = _describe_fault(parts, tuple(shape), TensorSpan(dim, first, count))
        if fault:
            found.fault_by_key[key] = f"{fault} ({receipts[0]['bucket']})"
        else:
            found.digest_by_key[key] = format_digest(
                sum(int(d, 16) for d in {part.span_key: part.digest for part in parts}.values())
            )
    return found


def check_loaded_bucket(
    engine_name: str,
    manifest: BucketManifest,
    receipts: Sequence[Receipt],
    compare_with_bucket: Callable[[], Sequence[Receipt]] | None = None,
) -> LoadedWeights:
    """Check that an engine holds a bucket as it was sent, by its receipts, and return the state of
    the tensors. Raise EngineError naming the tensors that differ from the manifest.

    `compare_with_bucket` sends the bucket's order "compare", while its bytes still lie there, and
    returns the receipts, which show which ranks hold other values than the bytes.
    """
    found = combine_bucket_receipts(receipts)
    wrong: dict[str, str] = {}
    for entry in manifest.tensors:
        key = entry.key
        digest = found.digest_by_key.get(key)
        if digest == entry.digest or key in found.incomparable_by_key:
            continue
        fault = found.fault_by_key.get(
            key, "nothing of it came" if digest is None else f"digest {digest} of what stands"
        )
        wrong[key] = (
            f"{fault}, {entry.digest} in the manifest{_describe_other_dtype(receipts, key)}"
        )
    if not wrong:
        return found
    for key, ranks in _find_differing_ranks(compare_with_bucket).items():
        if key in wrong:
            wrong[key] += (
                f"; {_format_ranks(ranks)} hold{'s' * (len(ranks) == 1)} other values"
                " than the bucket"
            )
    shown = "; ".join(
        f"tensor {key!r}: {words}" for key, words in list(wrong.items())[:_TENSORS_SHOWN]
    )
    more = f"; and {len(wrong) - _TENSORS_SHOWN} more" if len(wrong) > _TENSORS_SHOWN else ""
    raise EngineError(
        f"{engine_name}, {manifest.label}: {len(wrong)} of {len(manifest.tensors)} tensors do"
        f" not stand in it as they were sent: {shown}{more}. The engine is STALE."
    )


def read_all_receipts(directory: Path, receipt_prefix: str) -> list[list[Receipt]]:
    """Return the receipts of all buckets with this prefix in the directory, one list for each
    bucket. Raise EngineError where a rank's receipt is missing.
    """
    by_name: dict[str, list[Receipt]] = {}
    for path in sorted(directory.glob(f"{receipt_prefix}*")):
        name, _, rank = path.name.rpartition(".")
        if rank.isdigit() and "names" in (receipt := json.loads(path.read_text())):
            by_name.setdefault(name, []).append(receipt)
    for receipts in by_name.values():
        absent = set(range(receipts[0]["size"])) - {receipt["rank"] for receipt in receipts}
        if absent:
            raise EngineError(f"{receipts[0]['bucket']}: {_format_ranks(absent)} wrote no receipt.")
    return list(by_name.values())


def combine_all_receipts(receipts_by_bucket: Iterable[Sequence[Receipt]]) -> LoadedWeights:
    """Join the receipts of all buckets of a sync."""
    found = LoadedWeights()
    for receipts in receipts_by_bucket:
        found |= combine_bucket_receipts(receipts)
    return found


def _describe_fault(
    part_digests: Sequence[PartDigest], shape: tuple[int, ...], sent_span: TensorSpan
) -> str | None:
    """Return why these parts do not cover `sent_span` with each entry once and alike on all ranks;
    None where they do.
    """
    if not part_digests:
        return "not found in the engine"
    by_place: dict[tuple[int, int, int], list[PartDigest]] = {}
    for part in part_digests:
        if part.num_entries or not prod(shape):
            by_place.setdefault(part.span_key, []).append(part)
    for place, same in by_place.items():
        if fault := _describe_disagreement(same, place, shape):
            return fault
    return _describe_gap(sorted(by_place), shape, sent_span)


def _describe_disagreement(
    part_digests: Sequence[PartDigest], span_key: tuple[int, int, int], shape: tuple[int, ...]
) -> str | None:
    """Return which ranks hold another digest for the same part; None where all agree."""
    values = Counter(part.digest for part in part_digests)
    if len(values) == 1:
        return None
    (most, votes), (_, others) = values.most_common(2)
    where = _describe_part(span_key, shape)
    if votes == others:
        # one rank alone: what it has made of a matrix is not of that matrix
        ranks = {part.rank for part in part_digests}
        return f"{_format_ranks(ranks)} hold{'s' * (len(ranks) == 1)} different values for {where}"
    odd = {part.rank for part in part_digests if part.digest != most}
    return (
        f"{_format_ranks(odd)} hold{'s' * (len(odd) == 1)} other values for {where} than the ranks"
        " that hold it as well"
    )


def _describe_gap(
    span_keys: Sequence[tuple[int, int, int]], shape: tuple[int, ...], sent_span: TensorSpan
) -> str | None:
    """Return which part of the sent span no rank holds, or ranks hold in overlapping parts; None
    where the sorted parts cover the span exactly.
    """
    if not span_keys:
        return "not found in the engine"
    axes = {axis for axis, _, _ in span_keys}
    if len(axes) > 1:
        return f"its ranks hold parts of it along several axes, {sorted(axes)}"
    (axis,) = axes
    reached, end = (
        (sent_span.start, sent_span.start + sent_span.num_entries)
        if axis == sent_span.dim
        else (0, shape[axis])
    )
    for _, start, count in span_keys:
        if start > reached:
            break
        if start < reached:
            twice = (axis, start, min(count, reached - start))
            return f"{_describe_part(twice, shape)} stands in it twice, in different parts"
        reached = start + count
    else:
        if reached == end:
            return None
        start = end
    return f"{_describe_part((axis, reached, start - reached), shape)} stands in none of its ranks"


def _describe_part(span_key: tuple[int, int, int], shape: tuple[int, ...]) -> str:
    """Return the part in words: all of it, a row or column, or a range of them."""
    axis, start, count = span_key
    if count == shape[axis]:
        return "all of it"
    kind = ("row", "column")[axis] if axis < 2 else f"axis {axis} entry"
    return (
        f"{kind} {start}" if count == 1 else f"the part from {kind} {start} to {start + count - 1}"
    )


def _format_ranks(ranks: Iterable[int]) -> str:
    """Return the rank numbers in words, "tp rank 1" or "tp ranks 0, 1 and 2"."""
    numbers = [str(rank) for rank in sorted(set(ranks))]
    if len(numbers) == 1:
        return f"tp rank {numbers[0]}"
    return f"tp ranks {', '.join(numbers[:-1])} and {numbers[-1]}"


def _describe_other_dtype(receipts: Sequence[Receipt], key: str) -> str:
    """Return a remark where a rank holds the tensor in another type than it was sent; "" else."""
    found = {receipt["stands_as"][key] for receipt in receipts if key in receipt["stands_as"]}
    if not found:
        return ""
    *_, sent = receipts[0]["tensors"][key]
    return (
        f" (it stands as {found.pop()} and was sent as {sent}: rollout.dtype must be the"
        " engine's dtype)"
    )


def _find_differing_ranks(
    compare_with_bucket: Callable[[], Sequence[Receipt]] | None,
) -> dict[str, list[int]]:
    """Return by key the ranks that hold other values than the bucket; {} where the comparison is
    missing or fails.
    """
    if compare_with_bucket is None:
        return {}
    try:
        receipts = compare_with_bucket()
    except EngineError:  # it only would have told more
        return {}
    differ: dict[str, list[int]] = {}
    for receipt in receipts:
        for name, is_equal in receipt["compared"].items():
            if not is_equal:
                differ.setdefault(name, []).append(receipt["rank"])
    return differ


class SGLangWeightVerbs:
    """The weight verbs of one SGLang server. Thread-safe. All verbs raise EngineError, also where
    the server answers 200 without success.
    """

    def __init__(
        self, address: EngineAddress, transfer_dir: Path, timeout_s: float = WEIGHT_VERB_TIMEOUT_S
    ) -> None:
        """Make the verbs of this server. `timeout_s` is the deadline of each HTTP call."""
        self.address = address
        self.timeout_s = timeout_s
        self.receipt_prefix = f"receipt-{address.name}-"
        self._transfer_dir = transfer_dir
        self._http = HttpClient(address)

    def load_bucket(
        self,
        manifest: BucketManifest,
        lend_segments: Callable[[], LentSegments] = lambda: (),
        is_lent_once: bool = False,
    ) -> list[Receipt]:
        """Make every rank load a bucket, and return the checked receipts: from its file, or from
        the device memory that `lend_segments` lends, called anew for a comparison unless
        `is_lent_once`. Raise EngineError also where the engine does not hold the bucket as it was
        sent.
        """
        order = manifest.encode_json()
        what = manifest.label
        receipts = self.send_order({"manifest": order}, what, lend_segments())
        compare = (
            None
            if is_lent_once
            else lambda: self.send_order({"compare": order}, what, lend_segments())
        )
        check_loaded_bucket(self.address.name, manifest, receipts, compare)
        return receipts

    def digest_bucket(self, manifest: BucketManifest) -> list[Receipt]:
        """Make every rank digest a bucket that it has loaded another way, and return the checked
        receipts, as `load_bucket` does.
        """
        receipts = self.send_order({"digest": manifest.encode_json()}, manifest.label)
        check_loaded_bucket(self.address.name, manifest, receipts)
        return receipts

    def receive_exchange(self, manifest: BucketManifest, exchange: BucketExchange) -> list[Receipt]:
        """Make every rank receive and load the messages that the senders send of a bucket
        meanwhile, and return the checked receipts, as `load_bucket` does.
        """
        receipts = self.send_order(
            {"manifest": manifest.encode_json(), "exchange": exchange}, manifest.label
        )
        check_loaded_bucket(self.address.name, manifest, receipts)
        return receipts

    def join_link(self, invitation: LinkInvitation, sender: str, num_senders: int) -> None:
        """Make the engine's ranks join a link, as the ranks after the senders. Return when they
        have joined, so the senders must be joining at the same time.
        """
        order = {"join": invitation, "sender": sender, "num_senders": num_senders}
        self.send_order(order, f"process group {invitation.name}")

    def list_held_parts(self, tensors: Sequence[HFTensor]) -> HeldSpansByRank:
        """Return for each rank of the engine, by tensor name, the spans of these tensors that it
        holds.
        """
        shapes = {hf.name: hf.shape for hf in tensors}
        receipts = self.send_order({"holds": shapes}, "question for what its ranks hold")
        return [
            {
                name: [TensorSpan(dim, start, num_entries) for dim, start, num_entries in spans]
                for name, spans in receipt["holds"].items()
            }
            for receipt in receipts
        ]

    def leave_link(self, link_name: str, timeout_s: float) -> None:
        """Make the engine's ranks leave the link of this name."""
        self.send_order({"leave": link_name}, f"process group {link_name}", timeout_s=timeout_s)

    def send_order(
        self,
        order: dict[str, Any],
        operation: str,
        lent_segments: LentSegments = (),
        timeout_s: float | None = None,
    ) -> list[Receipt]:
        """Make the run's loader carry out an order in every rank, and return the ranks' receipts.
        `operation` names the order in messages. `lent_segments` is the device memory that goes with
        it, by rank. Raise EngineError with the error of a receipt, or where one is missing.
        """
        name = self.receipt_prefix + uuid.uuid4().hex
        own = {"receipt": name, "directory": self._transfer_dir.name} | (
            {"memory": lent_segments} if lent_segments else {}
        )
        text = torch.frombuffer(bytearray(msgspec.json.encode({**order, **own})), dtype=torch.uint8)
        # The server's own wire format is a pickle of (name, tensor) pairs.
        payload = base64.b64encode(pickle.dumps([("order", text)])).decode()
        payloads = [payload] * self.address.tp_size
        body = {
            "serialized_named_tensors": payloads,
            "load_format": LOAD_FORMAT,
            "flush_cache": False,
        }
        self._post_or_raise(_UPDATE_FROM_TENSOR_PATH, body, operation, timeout_s)
        return [self._read_receipt(name, rank, operation) for rank in range(self.address.tp_size)]

    def abort_calls(self, call_names: Collection[str]) -> None:
        """Abort the running samples of the generate calls with these names. The server ignores
        samples that have ended.
        """
        for sample in (sample for name in call_names for sample in list_sample_names(name)):
            self._http.post("/abort_request", {"rid": sample}, self.timeout_s)

    def load_bucket_by_value(self, manifest: BucketManifest, bucket: Tensor) -> None:
        """Send a bucket inside the request, for servers without the run's loader."""
        pairs = [
            (entry.name, entry.view_in_bucket(bucket).cpu().clone()) for entry in manifest.tensors
        ]
        payload = base64.b64encode(pickle.dumps(pairs)).decode()
        body = {"serialized_named_tensors": [payload] * self.address.tp_size, "flush_cache": False}
        self._post_or_raise(_UPDATE_FROM_TENSOR_PATH, body, manifest.label)

    def load_directory(self, directory: Path) -> None:
        """Make the server load a whole model directory, which it must be able to read, also where
        it was started with load-format dummy.
        """
        body = {"model_path": str(directory), "load_format": "auto", "flush_cache": False}
        self._post_or_raise("/update_weights_from_disk", body, f"weights of {directory.name}")

    def join_process_group(self, invitation: LinkInvitation) -> None:
        """Make the engine's ranks join the group, as the ranks after rank 0. Return when they have
        joined, so this process must be joining at the same time.
        """
        body = {
            "master_address": invitation.address,
            "master_port": invitation.port,
            "rank_offset": 1,
            "world_size": invitation.size,
            "group_name": invitation.name,
            "backend": invitation.backend,
        }
        self._post_or_raise("/init_weights_update_group", body, f"process group {invitation.name}")

    def leave_process_group(self, group_name: str, timeout_s: float) -> None:
        """Make the engine leave the group of this name."""
        self._post_or_raise(
            "/destroy_weights_update_group",
            {"group_name": group_name},
            f"process group {group_name}",
            timeout_s,
        )

    def receive_broadcast(self, manifest: BucketManifest, group_name: str) -> None:
        """Make the engine take the broadcast of a bucket, which must be under way, and load it."""
        body = {
            "names": [entry.name for entry in manifest.tensors],
            "dtypes": [entry.dtype for entry in manifest.tensors],
            "shapes": [list(entry.shape) for entry in manifest.tensors],
            "group_name": group_name,
            "load_format": "flattened_bucket",
            "flush_cache": False,
        }
        self._post_or_raise("/update_weights_from_distributed", body, manifest.label)

    def _post_or_raise(
        self, path: str, body: dict[str, Any], operation: str, timeout_s: float | None = None
    ) -> None:
        """Post the verb; raise EngineError unless the answer reports success."""
        answer = self._http.post(path, body, self.timeout_s if timeout_s is None else timeout_s)
        if not isinstance(answer, dict) or not answer.get("success", False):
            said = answer.get("message", answer) if isinstance(answer, dict) else answer
            raise EngineError(f"{self.address.name}, {operation}: {said}")

    def _read_receipt(self, receipt_name: str, rank: int, operation: str) -> Receipt:
        """Read the receipt of one rank. Raise EngineError where it is missing or reports an
        error.
        """
        path = self._transfer_dir / f"{receipt_name}.{rank}"
        if not path.exists():
            raise EngineError(f"{self.address.name}, {operation}: tp rank {rank} wrote no receipt.")
        receipt: Receipt = json.loads(path.read_text())
        if receipt["error"]:
            raise EngineError(
                f"{self.address.name} tp rank {rank}, {operation}: {receipt['error']} The"
                " engine is STALE."
            )
        return receipt
