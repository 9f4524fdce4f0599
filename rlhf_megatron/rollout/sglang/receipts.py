"""What the ranks of an SGLang server wrote about a bucket, put together: what stands in the engine, tensor by tensor.

Each rank tells of the parts that it holds (`sglang_server.loader`); a receipt is the JSON of one rank. Ranks that hold
the same part must agree, parts must cover the tensor once, and their digests add up to the digest of what stands.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from rlhf_megatron.resharding.digest import as_hex
from rlhf_megatron.resharding.manifest import BucketManifest
from rlhf_megatron.rollout.engine import EngineError

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
    """Of some tensors, by Hugging Face name."""

    digests: dict[str, str] = field(default_factory=dict)  # of those that stand whole
    faults: dict[str, str] = field(default_factory=dict)  # of those that do not: why, in words
    unlike: dict[str, str] = field(default_factory=dict)  # of those that cannot be compared (quantised): why

    def __or__(self, other: Standing) -> Standing:
        return Standing(self.digests | other.digests, self.faults | other.faults, self.unlike | other.unlike)


def put_together(receipts: Sequence[Receipt]) -> Standing:
    """Of one bucket: the receipts of all ranks of the server."""
    found = Standing()
    for name, (shape, _, _) in receipts[0]["tensors"].items():
        unlike, misfits = ([r[kind][name] for r in receipts if name in r[kind]] for kind in ("unlike", "misfits"))
        parts = [Part(r["rank"], *part) for r in receipts for part in r["parts"].get(name, ())]
        if unlike:
            found.unlike[name] = unlike[0]
        elif fault := misfits[0] if misfits else _fault(parts, tuple(shape)):
            found.faults[name] = f"{fault} ({receipts[0]['bucket']})"
        else:
            found.digests[name] = as_hex(sum(int(d, 16) for d in {part.place: part.digest for part in parts}.values()))
    return found


def check(
    engine: str,
    manifest: BucketManifest,
    receipts: Sequence[Receipt],
    compare: Callable[[], Sequence[Receipt]] | None = None,
) -> Standing:
    """What stands of a bucket that was just delivered. Raises EngineError naming the tensors that are not as sent.

    `compare` sends the bucket's order "compare", while its bytes still lie there, and returns the receipts: they tell
    which ranks hold something else than the bytes.
    """
    found = put_together(receipts)
    wrong: dict[str, str] = {}
    for entry in manifest.tensors:
        digest = found.digests.get(entry.name)
        if digest == entry.digest or entry.name in found.unlike:
            continue
        fault = found.faults.get(
            entry.name, "nothing of it came" if digest is None else f"digest {digest} of what stands"
        )
        wrong[entry.name] = f"{fault}, {entry.digest} in the manifest{_other_type(receipts, entry.name)}"
    if not wrong:
        return found
    for name, ranks in _ranks_that_differ(compare).items():
        if name in wrong:
            wrong[name] += f"; {_ranks(ranks)} hold{'s' * (len(ranks) == 1)} other values than the bucket"
    shown = "; ".join(f"tensor {name!r}: {words}" for name, words in list(wrong.items())[:_TENSORS_SHOWN])
    more = f"; and {len(wrong) - _TENSORS_SHOWN} more" if len(wrong) > _TENSORS_SHOWN else ""
    raise EngineError(
        f"{engine}, bucket {manifest.bucket} of {manifest.sender}: {len(wrong)} of {len(manifest.tensors)} tensors do"
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
    """Of all buckets of a sync."""
    found = Standing()
    for receipts in buckets:
        found |= put_together(receipts)
    return found


def _fault(parts: Sequence[Part], shape: tuple[int, ...]) -> str | None:
    """What speaks against these parts being one whole tensor; None: nothing does."""
    if not parts:
        return "not found in the engine"
    by_place: dict[tuple[int, int, int], list[Part]] = {}
    for part in parts:
        if part.count or not prod(shape):
            by_place.setdefault(part.place, []).append(part)
    for place, same in by_place.items():
        if fault := _disagreement(same, place, shape):
            return fault
    return _gap(sorted(by_place), shape)


def _disagreement(parts: Sequence[Part], place: tuple[int, int, int], shape: tuple[int, ...]) -> str | None:
    values = Counter(part.digest for part in parts)
    if len(values) == 1:
        return None
    (most, votes), (_, others) = values.most_common(2)
    where = _words(place, shape)
    if votes == others:
        return f"{_ranks(part.rank for part in parts)} hold different values for {where}"
    odd = {part.rank for part in parts if part.digest != most}
    return f"{_ranks(odd)} hold{'s' * (len(odd) == 1)} other values for {where} than the ranks that hold it as well"


def _gap(places: Sequence[tuple[int, int, int]], shape: tuple[int, ...]) -> str | None:
    if not places:
        return "not found in the engine"
    axes = {axis for axis, _, _ in places}
    if len(axes) > 1:
        return f"its ranks hold parts of it along several axes, {sorted(axes)}"
    (axis,), reached = axes, 0
    for _, start, count in places:
        if start > reached:
            break
        if start < reached:
            return f"{_words((axis, start, min(count, reached - start)), shape)} stands in it twice, in different parts"
        reached = start + count
    else:
        if reached == shape[axis]:
            return None
        start = shape[axis]
    return f"{_words((axis, reached, start - reached), shape)} stands in none of its ranks"


def _words(place: tuple[int, int, int], shape: tuple[int, ...]) -> str:
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


def _other_type(receipts: Sequence[Receipt], name: str) -> str:
    found = {receipt["stands_as"][name] for receipt in receipts if name in receipt["stands_as"]}
    if not found:
        return ""
    sent = receipts[0]["tensors"][name][1]
    return f" (it stands as {found.pop()} and was sent as {sent}: rollout.dtype must be the engine's dtype)"


def _ranks_that_differ(compare: Callable[[], Sequence[Receipt]] | None) -> dict[str, list[int]]:
    """By tensor the ranks whose part is not what the bucket has."""
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
