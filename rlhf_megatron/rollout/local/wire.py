"""Requests and samples as JSON, on both ends of the local engine's HTTP interface. The docstring of a body is its form
in words, for messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, fields, replace
from typing import Annotated, Any, TypeVar, cast, get_type_hints

import msgspec
import numpy as np

from rlhf_megatron.parallel.links import Invitation
from rlhf_megatron.resharding.buffers import Segment
from rlhf_megatron.resharding.manifest import BucketManifest
from rlhf_megatron.resharding.messages import Exchange
from rlhf_megatron.rollout.engine import (
    MEMORY_PARTS,
    Column,
    GeneratedSample,
    GenerateRequest,
    MemoryPart,
    PauseMode,
    SamplingParams,
)

STALE = " answered 503: STALE"  # part of what a client says where the server refuses for its weights
T = TypeVar("T")


def _strict(kind: type, **types: Any) -> Any:
    """A dataclass as a form that refuses unknown fields. `types`: of fields that have such a form themselves."""
    hints = get_type_hints(kind) | types
    members = [(f.name, hints[f.name], *(() if f.default is MISSING else (f.default,))) for f in fields(kind)]
    return msgspec.defstruct(kind.__name__, members, forbid_unknown_fields=True)


_Request = _strict(GenerateRequest, params=_strict(SamplingParams))


class Body(msgspec.Struct, forbid_unknown_fields=True):
    """{}"""


class Generate(Body):
    """{"requests": [{"prompt_ids": [...], "seeds": [...], "params": {"max_new_tokens": N, ...}}], "name": "..."}"""

    requests: list[_Request]  # type: ignore[valid-type]
    name: str = ""

    def read(self) -> list[GenerateRequest]:
        """The requests as what they are."""
        as_dict, given = msgspec.structs.asdict, cast("list[Any]", self.requests)
        return [GenerateRequest(**as_dict(r) | {"params": SamplingParams(**as_dict(r.params))}) for r in given]


class Abort(Body):
    """{"names": ["..."]}, without names of all calls"""

    names: tuple[Annotated[str, msgspec.Meta(min_length=1)], ...] = ()


class Commit(Body):
    """{"version": N}"""

    version: int


class Begin(Commit):
    """{"version": N, "full_resync": true or false}"""

    full_resync: bool = False


class Bucket(Body):
    """{"manifest": {...}, "memory": [{"start": N, "memory": {"device": "...", "handle": "...", ...}}]}"""

    manifest: msgspec.Raw
    memory: tuple[Segment, ...]

    def read(self) -> BucketManifest:
        """Raises ValueError as `BucketManifest.from_json` does."""
        return BucketManifest.from_json(bytes(self.manifest).decode())


class Exchanged(Body):
    """{"manifest": {...}, "exchange": {"link": "...", "num_senders": N, "messages": [[{"source": N, ...}]]}}"""

    manifest: msgspec.Raw
    exchange: Exchange

    def read(self) -> BucketManifest:
        """Raises ValueError as `BucketManifest.from_json` does."""
        return BucketManifest.from_json(bytes(self.manifest).decode())


class Join(Body):
    """{"invitation": {"name": "...", "address": "...", ...}, "sender": "...", "num_senders": N}"""

    invitation: Invitation
    sender: str
    num_senders: int


class Leave(Body):
    """{"name": "..."}"""

    name: str


class Pause(Body):
    """{"mode": "abort", "retract" or "in_place"}"""

    mode: PauseMode = "retract"


class Memory(Body):
    """{"parts": ["weights", "kv_cache"]}, one or more of these"""

    parts: Annotated[tuple[MemoryPart, ...], msgspec.Meta(min_length=1)] = MEMORY_PARTS


def read(data: bytes, kind: type[T]) -> T:
    """Raises ValueError naming the field, what stands there, and the form."""
    try:
        return msgspec.json.decode(data or b"{}", type=kind)
    except msgspec.MsgspecError as error:
        raise ValueError(f"the body must be {kind.__doc__}: {error}.") from None
    except RecursionError:
        raise ValueError("the body is nested too deep.") from None


def requests_to_json(requests: Sequence[GenerateRequest], name: str = "") -> bytes:
    """`name`: of the call, for an abort."""
    return msgspec.json.encode({"requests": requests} | ({"name": name} if name else {}))


def samples_to_json(groups: Sequence[Sequence[GeneratedSample]]) -> bytes:
    return msgspec.json.encode({"groups": groups}, enc_hook=list)


def samples_from_json(data: bytes) -> list[list[GeneratedSample]]:
    """Raises ValueError or KeyError when it is not what `samples_to_json` makes."""
    groups = msgspec.json.decode(data, type=dict[str, list[list[GeneratedSample]]])["groups"]
    return [[_as_columns(sample) for sample in group] for group in groups]


def _as_columns(sample: GeneratedSample) -> GeneratedSample:
    ids, log_probs = np.array(sample.token_ids, np.int32), np.array(sample.log_probs, np.float64)
    return replace(sample, token_ids=Column(ids), log_probs=Column(log_probs))
