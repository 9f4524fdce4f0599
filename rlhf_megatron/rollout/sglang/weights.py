"""A weight sync as said to an SGLang server: the verbs, and the receipts by which its ranks tell what stands in them.

Each rank tells of the parts that it holds (`server.loader`); a receipt is the JSON of one rank. Ranks that hold the
same part must agree, parts must cover the tensor once, and their digests add up to the digest of what stands.
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

from rlhf_megatron.models.table import HFTensor, Span
from rlhf_megatron.parallel.links import Invitation
from rlhf_megatron.resharding.buffers import Lent
from rlhf_megatron.resharding.digest import as_hex
from rlhf_megatron.resharding.manifest import BucketManifest
from rlhf_megatron.resharding.messages import Exchange, Roster
from rlhf_megatron.rollout.engine import EngineAddress, EngineError
from rlhf_megatron.rollout.fleet.calls import sample_names
from rlhf_megatron.rollout.http import HttpClient
from rlhf_megatron.rollout.sglang.server.loader import LOAD_FORMAT

Receipt = Mapping[str, Any]
_TENSORS_SHOWN = 3


@dataclass(frozen=True)
class Part:
    """Entries start .. start + count - 1 along `axis`, as one rank holds them."""

    rank: int
    axis: int
    start: int
    count: int
    digest: str

    @property
    def place(self) -> tuple[int, int, int]:
        return self.axis, self.start, self.count


@dataclass(frozen=True)
class Standing:
    """The state of some tensors in an engine, by `TensorEntry.key`: of each, or of each part that was sent."""

    digests: dict[str, str] = field(default_factory=dict)  # of those that stand
    faults: dict[str, str] = field(default_factory=dict)  # of those that do not: why, in words
    unlike: dict[str, str] = field(default_factory=dict)  # of those that cannot be compared (quantised): why

    def __or__(self, other: Standing) -> Standing:
        return Standing(self.digests | other.digests, self.faults | other.faults, self.unlike | other.unlike)

    def by_name(self) -> dict[str, str]:
        """Return each tensor's digest, or words where it does not stand as it was sent."""
        found: dict[str, int] = {}
        for key, digest in self.digests.items():
            found[_name(key)] = found.get(_name(key), 0) + int(digest, 16)
        return {name: as_hex(value) for name, value in found.items()} | {
            _name(key): words for key, words in self.faults.items()
        }


def _name(key: str) -> str:
    return key.partition("[")[0]


def put_together(receipts: Sequence[Receipt]) -> Standing:
    """Joins the receipts that all ranks of the server wrote of one bucket."""
    found = Standing()
    for key, (shape, span, _) in receipts[0]["tensors"].items():
        unlike, misfits = ([r[kind][key] for r in receipts if key in r[kind]] for kind in ("unlike", "misfits"))
        parts = [Part(r["rank"], *part) for r in receipts for part in r["parts"].get(key, ())]
        if unlike:
            found.unlike[key] = unlike[0]
        elif fault := misfits[0] if misfits else _fault(parts, tuple(shape), Span(*span)):
            found.faults[key] = f"{fault} ({receipts[0]['bucket']})"
        else:
            found.digests[key] = as_hex(sum(int(d, 16) for d in {part.place: part.digest for part in parts}.values()))
    return found


def check(
    engine: str,
    manifest: BucketManifest,
    receipts: Sequence[Receipt],
    compare: Callable[[], Sequence[Receipt]] | None = None,
) -> Standing:
    """Checks what stands of a bucket that was just delivered. Raises EngineError naming the tensors that are not as
    sent.

    `compare` sends the bucket's order "compare", while its bytes still lie there, and returns the receipts: they tell
    which ranks hold something else than the bytes.
    """
    found = put_together(receipts)
    wrong: dict[str, str] = {}
    for entry in manifest.tensors:
        key = entry.key
        digest = found.digests.get(key)
        if digest == entry.digest or key in found.unlike:
            continue
        fault = found.faults.get(key, "nothing of it came" if digest is None else f"digest {digest} of what stands")
        wrong[key] = f"{fault}, {entry.digest} in the manifest{_other_type(receipts, key)}"
    if not wrong:
        return found
    for key, ranks in _ranks_that_differ(compare).items():
        if key in wrong:
            wrong[key] += f"; {_ranks(ranks)} hold{'s' * (len(ranks) == 1)} other values than the bucket"
    shown = "; ".join(f"tensor {key!r}: {words}" for key, words in list(wrong.items())[:_TENSORS_SHOWN])
    more = f"; and {len(wrong) - _TENSORS_SHOWN} more" if len(wrong) > _TENSORS_SHOWN else ""
    raise EngineError(
        f"{engine}, {manifest.place}: {len(wrong)} of {len(manifest.tensors)} tensors do"
        f" not stand in it as they were sent: {shown}{more}. The engine is STALE."
    )


def read_all(directory: Path, prefix: str) -> list[list[Receipt]]:
    """The receipts of all buckets, by bucket. Raises EngineError where a rank's is missing."""
    by_name: dict[str, list[Receipt]] = {}
    for path in sorted(directory.glob(f"{prefix}*")):
        name, _, rank = path.name.rpartition(".")
        if rank.isdigit() and "names" in (receipt := json.loads(path.read_text())):
            by_name.setdefault(name, []).append(receipt)
    for receipts in by_name.values():
        absent = set(range(receipts[0]["size"])) - {receipt["rank"] for receipt in receipts}
        if absent:
            raise EngineError(f"{receipts[0]['bucket']}: {_ranks(absent)} wrote no receipt.")
    return list(by_name.values())


def standing_of(buckets: Iterable[Sequence[Receipt]]) -> Standing:
    """Joins the receipts of all buckets of a sync."""
    found = Standing()
    for receipts in buckets:
        found |= put_together(receipts)
    return found


def _fault(parts: Sequence[Part], shape: tuple[int, ...], sent: Span) -> str | None:
    """Says why these parts are not `sent`, each entry once; None: they are."""
    if not parts:
        return "not found in the engine"
    by_place: dict[tuple[int, int, int], list[Part]] = {}
    for part in parts:
        if part.count or not prod(shape):
            by_place.setdefault(part.place, []).append(part)
    for place, same in by_place.items():
        if fault := _disagreement(same, place, shape):
            return fault
    return _gap(sorted(by_place), shape, sent)


def _disagreement(parts: Sequence[Part], place: tuple[int, int, int], shape: tuple[int, ...]) -> str | None:
    values = Counter(part.digest for part in parts)
    if len(values) == 1:
        return None
    (most, votes), (_, others) = values.most_common(2)
    where = _part_words(place, shape)
    if votes == others:
        ranks = {part.rank for part in parts}  # one rank alone: what it has made of a matrix is not of that matrix
        return f"{_ranks(ranks)} hold{'s' * (len(ranks) == 1)} different values for {where}"
    odd = {part.rank for part in parts if part.digest != most}
    return f"{_ranks(odd)} hold{'s' * (len(odd) == 1)} other values for {where} than the ranks that hold it as well"


def _gap(places: Sequence[tuple[int, int, int]], shape: tuple[int, ...], sent: Span) -> str | None:
    if not places:
        return "not found in the engine"
    axes = {axis for axis, _, _ in places}
    if len(axes) > 1:
        return f"its ranks hold parts of it along several axes, {sorted(axes)}"
    (axis,) = axes
    reached, end = (sent.start, sent.start + sent.count) if axis == sent.axis else (0, shape[axis])
    for _, start, count in places:
        if start > reached:
            break
        if start < reached:
            twice = (axis, start, min(count, reached - start))
            return f"{_part_words(twice, shape)} stands in it twice, in different parts"
        reached = start + count
    else:
        if reached == end:
            return None
        start = end
    return f"{_part_words((axis, reached, start - reached), shape)} stands in none of its ranks"


def _part_words(place: tuple[int, int, int], shape: tuple[int, ...]) -> str:
    axis, start, count = place
    if count == shape[axis]:
        return "all of it"
    kind = ("row", "column")[axis] if axis < 2 else f"axis {axis} entry"
    return f"{kind} {start}" if count == 1 else f"the part from {kind} {start} to {start + count - 1}"


def _ranks(ranks: Iterable[int]) -> str:
    numbers = [str(rank) for rank in sorted(set(ranks))]
    if len(numbers) == 1:
        return f"tp rank {numbers[0]}"
    return f"tp ranks {', '.join(numbers[:-1])} and {numbers[-1]}"


def _other_type(receipts: Sequence[Receipt], key: str) -> str:
    found = {receipt["stands_as"][key] for receipt in receipts if key in receipt["stands_as"]}
    if not found:
        return ""
    *_, sent = receipts[0]["tensors"][key]
    return f" (it stands as {found.pop()} and was sent as {sent}: rollout.dtype must be the engine's dtype)"


def _ranks_that_differ(compare: Callable[[], Sequence[Receipt]] | None) -> dict[str, list[int]]:
    if compare is None:
        return {}
    try:
        receipts = compare()
    except EngineError:  # it only would have told more
        return {}
    differ: dict[str, list[int]] = {}
    for receipt in receipts:
        for name, is_equal in receipt["compared"].items():
            if not is_equal:
                differ.setdefault(name, []).append(receipt["rank"])
    return differ


TIMEOUT_S = 600.0
_TENSOR = "/update_weights_from_tensor"


class SGLangVerbs:
    """Thread-safe. All raise EngineError, also where the server answers 200 and no success."""

    def __init__(self, address: EngineAddress, transfer_dir: Path, timeout_s: float = TIMEOUT_S) -> None:
        """`timeout_s`: deadline of each call."""
        self.address = address
        self.timeout_s = timeout_s
        self.receipt_prefix = f"receipt-{address.name}-"
        self._transfer_dir = transfer_dir
        self._http = HttpClient(address)

    def load(
        self, manifest: BucketManifest, lend: Callable[[], Lent] = lambda: (), is_lent_once: bool = False
    ) -> list[Receipt]:
        """Have every rank read a bucket and load it: from its file, or from the device memory that `lend` tells, each
        time anew unless it `is_lent_once`. Raises EngineError too where it does not stand as it was sent."""
        order, what = manifest.to_json(), manifest.place
        receipts = self.order({"manifest": order}, what, lend())
        compare = None if is_lent_once else lambda: self.order({"compare": order}, what, lend())
        check(self.address.name, manifest, receipts, compare)
        return receipts

    def digest(self, manifest: BucketManifest) -> list[Receipt]:
        """Has every rank digest a bucket that it has loaded from somewhere else, and checks it as `load` does."""
        receipts = self.order({"digest": manifest.to_json()}, manifest.place)
        check(self.address.name, manifest, receipts)
        return receipts

    def take(self, manifest: BucketManifest, exchange: Exchange) -> list[Receipt]:
        """Have every rank take what the senders, which must be at it, send it of a bucket, and load it; checked as
        `load` does."""
        receipts = self.order({"manifest": manifest.to_json(), "exchange": exchange}, manifest.place)
        check(self.address.name, manifest, receipts)
        return receipts

    def join_link(self, invitation: Invitation, sender: str, num_senders: int) -> None:
        """Make the engine's ranks those after the senders. Returns when they have joined, so the senders must be
        joining, too.
        """
        order = {"join": invitation, "sender": sender, "num_senders": num_senders}
        self.order(order, f"process group {invitation.name}")

    def holds(self, tensors: Sequence[HFTensor]) -> Roster:
        """Which parts of them stand in its ranks."""
        shapes = {hf.name: hf.shape for hf in tensors}
        receipts = self.order({"holds": shapes}, "question for what its ranks hold")
        return [{name: [Span(*span) for span in spans] for name, spans in one["holds"].items()} for one in receipts]

    def leave_link(self, name: str, timeout_s: float) -> None:
        """End the engine's part of a link."""
        self.order({"leave": name}, f"process group {name}", timeout_s=timeout_s)

    def order(self, order: dict[str, Any], what: str, lent: Lent = (), timeout_s: float | None = None) -> list[Receipt]:
        """Have the run's loader carry out an order in every rank; returns the ranks' receipts.

        `lent`: by rank, the device memory that goes with it.
        """
        name = self.receipt_prefix + uuid.uuid4().hex
        own = {"receipt": name, "directory": self._transfer_dir.name} | ({"memory": lent} if lent else {})
        text = torch.frombuffer(bytearray(msgspec.json.encode({**order, **own})), dtype=torch.uint8)
        # The server's own wire format is a pickle of (name, tensor) pairs.
        payload = base64.b64encode(pickle.dumps([("order", text)])).decode()
        payloads = [payload] * self.address.tp_size
        body = {"serialized_named_tensors": payloads, "load_format": LOAD_FORMAT, "flush_cache": False}
        self._post(_TENSOR, body, what, timeout_s)
        return [self._receipt(name, rank, what) for rank in range(self.address.tp_size)]

    def abort_calls(self, names: Collection[str]) -> None:
        """End what runs of generate calls of these names. A server forgets a sample as it ends."""
        for sample in (sample for name in names for sample in sample_names(name)):
            self._http.post("/abort_request", {"rid": sample}, self.timeout_s)

    def load_by_value(self, manifest: BucketManifest, bucket: Tensor) -> None:
        """A bucket inside the request, for servers without the run's loader."""
        pairs = [(entry.name, entry.view(bucket).cpu().clone()) for entry in manifest.tensors]
        payload = base64.b64encode(pickle.dumps(pairs)).decode()
        body = {"serialized_named_tensors": [payload] * self.address.tp_size, "flush_cache": False}
        self._post(_TENSOR, body, manifest.place)

    def load_directory(self, directory: Path) -> None:
        """A whole model directory, which the server can read, also where it was started with load-format dummy."""
        body = {"model_path": str(directory), "load_format": "auto", "flush_cache": False}
        self._post("/update_weights_from_disk", body, f"weights of {directory.name}")

    def join(self, group: Invitation) -> None:
        """Make the engine's ranks the ranks after 0 of that group. Returns when they have joined, so this side must
        be joining, too.
        """
        body = {
            "master_address": group.address,
            "master_port": group.port,
            "rank_offset": 1,
            "world_size": group.size,
            "group_name": group.name,
            "backend": group.backend,
        }
        self._post("/init_weights_update_group", body, f"process group {group.name}")

    def leave(self, name: str, timeout_s: float) -> None:
        """End the engine's part of the group."""
        self._post("/destroy_weights_update_group", {"group_name": name}, f"process group {name}", timeout_s)

    def receive(self, manifest: BucketManifest, group_name: str) -> None:
        """Take the broadcast of a bucket, which must be under way, and load it."""
        body = {
            "names": [entry.name for entry in manifest.tensors],
            "dtypes": [entry.dtype for entry in manifest.tensors],
            "shapes": [list(entry.shape) for entry in manifest.tensors],
            "group_name": group_name,
            "load_format": "flattened_bucket",
            "flush_cache": False,
        }
        self._post("/update_weights_from_distributed", body, manifest.place)

    def _post(self, path: str, body: dict[str, Any], what: str, timeout_s: float | None = None) -> None:
        answer = self._http.post(path, body, self.timeout_s if timeout_s is None else timeout_s)
        if not isinstance(answer, dict) or not answer.get("success", False):
            said = answer.get("message", answer) if isinstance(answer, dict) else answer
            raise EngineError(f"{self.address.name}, {what}: {said}")

    def _receipt(self, name: str, rank: int, what: str) -> Receipt:
        path = self._transfer_dir / f"{name}.{rank}"
        if not path.exists():
            raise EngineError(f"{self.address.name}, {what}: tp rank {rank} wrote no receipt.")
        receipt: Receipt = json.loads(path.read_text())
        if receipt["error"]:
            raise EngineError(f"{self.address.name} tp rank {rank}, {what}: {receipt['error']} The engine is STALE.")
        return receipt
